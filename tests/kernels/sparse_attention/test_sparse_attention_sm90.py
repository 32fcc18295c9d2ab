"""The Hopper kernel against the reference: interpreted here, on the GPU where there is one."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_model import TINY
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_operands import misaligned
from paged import Piece, rows_of

from di_jax.model.attention import Attention
from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.config import ModelConfig
from di_jax.model.linear import Numerics
from di_jax.model.quantization import CacheFormats
from di_jax.model.rope import rotation
from kernels_pallas.choice import KernelChoice
from kernels_pallas.hopper import KERNEL, UnsupportedShape, unavailable
from kernels_pallas.sparse_attention import api, output, reference
from kernels_pallas.sparse_attention import mosaic_gpu_sm90 as kernel
from kernels_pallas.sparse_attention.bench import WORKLOADS
from kernels_pallas.sparse_attention.config import SparseAttentionConfig, tuned

ON_HOPPER = unavailable() is None
QUANTIZED = CacheFormats.quantized()
SCALE = 512**-0.5
LAYERS, LAYER = 3, 1
# bfloat16 of the probabilities and of the result, of values up to 4.
TOLERANCE = 0.03
RESULTS = Path(__file__).parents[3] / "scripts" / "results" / "kernel-sparse-attention-nvidia-h200.json"


def config(window: int) -> ModelConfig:
    changes: dict[str, int] = {"num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64}
    return dataclasses.replace(TINY, sliding_window=window, **changes)  # type: ignore[arg-type]


class Case:
    """Random caches and queries of a step. What no row may read is poison: other records hold the largest values."""

    def __init__(
        self, pieces: list[Piece], tile: int, *, top_k: int, source: int = 2, window: int = 16, slots: int = 5
    ) -> None:
        self.layout = CacheLayout(config(window), QUANTIZED, num_blocks=24, num_slots=slots, block_size=128)
        self.source = source
        self.rows, self.first = rows_of(pieces, tile=tile)
        generator = np.random.default_rng(tile + top_k)
        total, ring_rows = self.rows.num_rows, self.layout.config.window_ring
        ratio = self.layout.config.kv_source_ratios[source]

        def stored(codec: Any, *shape: int) -> np.ndarray:
            return np.array(codec.encode(jnp.asarray(generator.normal(size=shape), jnp.float32)))

        self.query = jnp.asarray(generator.normal(size=(total, 64, 512)), jnp.bfloat16)
        self.sink = jnp.asarray(generator.normal(size=(LAYERS, 64)), jnp.float32)
        fresh = stored(QUANTIZED.window, total, 512)
        self.kv = QUANTIZED.window.decode(jnp.asarray(fresh)).astype(jnp.bfloat16)
        self.window = np.full((LAYERS, slots, ring_rows, 528), 0x7E, np.uint8)
        pool = np.full((24 * self.layout.rows_per_block, 288), 0x7E, np.uint8)
        self.selected = np.full((total, top_k), -1, np.int32)
        for piece, first in zip(pieces, self.first):
            last = piece.start + (piece.count if tile == 1 else 0)
            for position in range(max(0, last - ring_rows), last):
                self.window[LAYER, piece.slot, position % ring_rows] = stored(QUANTIZED.window, 512)
            for row, position in enumerate(piece.positions, first):
                reachable = (position + 1) // ratio
                chosen = np.sort(generator.permutation(reachable)[: generator.integers(0, top_k + 1)])
                self.selected[row, : len(chosen)] = chosen
                table = np.asarray(piece.blocks, np.int32)
                at = np.asarray(self.layout.entry_row(source, jnp.asarray(table), jnp.asarray(chosen, jnp.int32)))
                pool[at] = stored(QUANTIZED.compressed, len(chosen), 512) if len(chosen) else pool[at]
        self.pool = pool.reshape(24, self.layout.rows_per_block, 288)

    def run(self, *, window_only: bool = False, **options: Any) -> np.ndarray:
        """The kernel's result; options are those of the tuning."""
        tuning = dataclasses.replace(SparseAttentionConfig(), **options)
        interpret = None if ON_HOPPER else plgpu.InterpretGPUParams()
        function = jax.jit(lambda *a: kernel.sparse_attention(*a, config=tuning, interpret=interpret, **self._static()))
        return self._valid(function(*self._arrays(window_only, jnp.bfloat16)))

    def expected(self, *, window_only: bool = False) -> np.ndarray:
        function = jax.jit(lambda *a: reference.sparse_attention(*a, **self._static()))
        return self._valid(function(*self._arrays(window_only, jnp.float32)))

    def _static(self) -> dict[str, Any]:
        return {"rows": self.rows, "layout": self.layout, "source": self.source, "scale": SCALE}

    def _arrays(self, window_only: bool, dtype: Any) -> tuple[Any, ...]:
        caches = (None, None) if window_only else (jnp.asarray(self.pool), jnp.asarray(self.selected))
        cos_sin = rotation(self.layout.config, True, self.rows.position)
        query, kv = self.query.astype(dtype), self.kv.astype(dtype)
        return jnp.int32(LAYER), query, kv, jnp.asarray(self.window), *caches, self.sink, cos_sin

    def _valid(self, out: Array) -> np.ndarray:
        return np.asarray(out, np.float32)[np.asarray(self.rows.valid)]

    def error(self, *, window_only: bool = False, **options: Any) -> float:
        difference = self.run(window_only=window_only, **options) - self.expected(window_only=window_only)
        assert np.isfinite(difference).all()
        return float(np.abs(difference).max())


BLOCKS = ((7, 2, 9, 4), (3, 11, 0, 8), (5, 6, 1, 10))


@cache
def decode() -> Case:
    """The first positions, a row without entries, and one whose window and entries are full; an odd number of rows."""
    positions = (0, 1, 15, 300)
    pieces = [Piece(p, 1, slot, BLOCKS[slot % 3]) for slot, p in enumerate(positions)]
    return Case(pieces, 1, top_k=70)


@cache
def prefill() -> Case:
    """Seams inside the window, chunks that begin a sequence, a window that starts inside the chunk."""
    pieces = [Piece(0, 3, 2, BLOCKS[0]), Piece(21, 4, 0, BLOCKS[1], window_start=19), Piece(200, 2, 1, BLOCKS[2])]
    return Case(pieces, 4, top_k=70)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [3, 1])
def test_decode(blocks: int) -> None:
    """All rows in one block of threads, and spread over several of which some take a second row."""
    assert decode().error(blocks=blocks) < TOLERANCE


@pytest.mark.slow
def test_prefill() -> None:
    assert prefill().error(blocks=2) < TOLERANCE


@pytest.mark.slow
def test_window_only() -> None:
    assert prefill().error(blocks=2, window_only=True) < TOLERANCE


@cache
def sparse() -> Case:
    """Rows of up to 2 tiles of window and 3 of entries, which lie between -1: at the first position, in the middle of
    the first window, anywhere, without a window, and with nothing at all."""
    positions, window_starts = (0, 40, 301, 300, 200), (0, 0, 0, 301, 201)
    pieces = [
        Piece(position, 1, slot, BLOCKS[slot % 3], window_start=start)
        for slot, (position, start) in enumerate(zip(positions, window_starts, strict=True))
    ]
    case = Case(pieces, 1, top_k=160, window=100)
    case.selected[2:] = np.random.default_rng(0).permuted(case.selected[2:], axis=1)
    case.selected[[0, 4]] = -1
    return case


def split_into(tiles: int) -> tuple[tuple[int, int], ...]:
    """`split_tiles` by which every step is split, into parts of so many tiles."""
    return ((10**6, tiles),)


@pytest.mark.slow
@pytest.mark.parametrize(("tiles", "splits"), [(1, 5), (2, 3), (3, 2)])
def test_splits_of_a_row_join_into_it(tiles: int, splits: int) -> None:
    """Rows with fewer tiles than splits leave some with nothing; what a split does not write is NaN."""
    case, tuning = sparse(), split_into(tiles)
    _, held = kernel.plan(case.rows, case.layout, jnp.asarray(case.selected), case.source, ring_slots=5)
    assert SparseAttentionConfig(split_tiles=tuning).splits(case.rows.num_rows, 5) == splits
    assert np.asarray(held).tolist() == [2, 3, 4, 5, 0, 0]
    mine, right = case.run(split_tiles=tuning), case.expected()
    assert np.isfinite(mine).all() and np.abs(mine - right).max() < TOLERANCE
    np.testing.assert_array_equal(mine[4], 0)  # the sink alone


@pytest.mark.slow
def test_splits_of_the_window_alone() -> None:
    assert sparse().error(split_tiles=split_into(1), window_only=True) < TOLERANCE


@pytest.mark.slow
def test_splits_of_prefill() -> None:
    """Window keys of the step itself. No tuning splits a prefill; one that did would be right."""
    assert prefill().error(split_tiles=split_into(1)) < TOLERANCE


@pytest.mark.slow
def test_a_lost_split_would_show() -> None:
    """Control: rows without the entries of their last two tiles are beyond the tolerance."""
    case = sparse()
    lost = Case.__new__(Case)
    lost.__dict__.update(case.__dict__, selected=np.where(np.arange(160) < 64, case.selected, -1))
    assert (lost.selected >= 0).sum() < (case.selected >= 0).sum()
    assert np.abs(lost.expected() - case.expected()).max() > 2 * TOLERANCE


def columns_of(channels: np.ndarray) -> np.ndarray:
    """[..., 512] in the order of expanded keys, from that of channels: chunk 4 j + c of 8 is number j % 8 of tile
    4 (j / 8) + c of 64, and in a chunk they lie as 0 4 1 5 2 6 3 7."""
    half, j, c, i = np.meshgrid(np.arange(2), np.arange(8), np.arange(4), np.arange(8), indexing="ij")
    source = 8 * (4 * (8 * half + j) + c) + np.array([0, 4, 1, 5, 2, 6, 3, 7])[i]
    result = np.empty_like(channels)
    result[..., (64 * (4 * half + c) + 8 * j + i).ravel()] = channels[..., source.ravel()]
    return result


@pytest.mark.parametrize("splits", [2, 3])
def test_join(splits: int) -> None:
    """Against float64. Peaks 40 powers of two apart, a split of the second row with nothing in it, and all but one."""
    generator = np.random.default_rng(splits)
    rows = 2
    values = generator.normal(size=(rows, splits, 64, 512))
    peaks = generator.uniform(-40, 40, size=(rows, splits, 64))
    totals = generator.uniform(1, 100, size=(rows, splits, 64))
    values[1, 1:], totals[1, 1:], peaks[1, 1:] = 0, 0, peaks[1, :1] - 1
    angle = generator.uniform(0, 7, size=(rows, 32)).astype(np.float32)
    cos_sin = np.cos(angle), np.sin(angle)

    weight = np.exp2(peaks - peaks.max(axis=1, keepdims=True))
    right = (weight[..., None] * values).sum(axis=1) / (weight * totals).sum(axis=1)[..., None]
    even, odd = right[..., 448::2].copy(), right[..., 449::2].copy()
    right[..., 448::2] = even * cos_sin[0][:, None] + odd * cos_sin[1][:, None]
    right[..., 449::2] = odd * cos_sin[0][:, None] - even * cos_sin[1][:, None]

    sums = (columns_of(values) * 2.0**-output.SHRINK).reshape(rows * splits, 64, 512).astype(np.float32)
    pairs = np.stack([peaks, totals], axis=2).reshape(rows * splits, 2, 64).astype(np.float32)
    interpret = None if ON_HOPPER else plgpu.InterpretGPUParams()
    mine = np.asarray(jax.jit(partial(output.join, interpret=interpret))(sums, pairs, *cos_sin), np.float64)
    # A rotated channel is rounded before the rotation, both of its pair, and after it: by 2^-9 of each.
    size = np.abs(right)
    size[..., 448:] += np.repeat(np.hypot(even, odd), 2, axis=-1)
    assert (np.abs(mine - right) <= 2.0**-8 * size + 1e-6).all()
    assert (np.abs(mine - right[:, :, ::-1]) > 2.0**-8 * size + 1e-6).any()


def attention_layers(case: Case, window_only: bool, implementation: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The model's attention in a loop over its layers, of (x, state), and abstract arguments."""
    c, layout, rows = case.layout.config, case.layout, case.rows
    cos_sin = rotation(c, True, rows.position)
    plan = c.layers[0 if window_only else -1]
    numerics, kernels = Numerics.create("bfloat16"), KernelChoice("reference", (("sparse_attention", implementation),))
    graph, weights = nnx.split(nnx.eval_shape(lambda: Attention(c, numerics, kernels, c.num_hidden_layers)))

    def layers(weights: Any, x: Array, latent: Array, selected: Array | None, state: EngineState) -> Any:
        attention = nnx.merge(graph, weights)

        def layer(carry: Any, number: Array) -> Any:
            x, state = carry
            return attention(plan, number, x, latent, selected, cos_sin, rows, state, layout), None

        return jax.lax.scan(layer, (x, state), jnp.arange(c.num_hidden_layers, dtype=jnp.int32))[0]

    x, latent = (jax.ShapeDtypeStruct((rows.num_rows, n), jnp.bfloat16) for n in (c.hidden_size, c.q_lora_rank))
    return layers, (weights, x, latent, None if window_only else jnp.asarray(case.selected), layout.abstract())


@pytest.mark.parametrize("window_only", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", [decode, pytest.param(prefill, marks=pytest.mark.slow)])
def test_layers_in_a_loop_give_aligned_operands(
    case: Callable[[], Case], window_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel as the model calls it, with rings of which a layer's is no multiple of 256 bytes."""
    monkeypatch.setattr(api, "unavailable", lambda: None)
    assert np.prod(case().layout.abstract().window.shape[1:]) % 256
    layers, arguments = attention_layers(case(), window_only, KERNEL)
    assert misaligned(layers, *arguments) == (1, [])


@pytest.mark.parametrize("window_only", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_split_layers_in_a_loop_give_aligned_operands(window_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches, for decode with and without entries; the parts of a row are operands of the second."""
    monkeypatch.setattr(api, "unavailable", lambda: None)
    monkeypatch.setattr(api, "tuned", lambda _: SparseAttentionConfig(split_tiles=split_into(1)))
    layers, arguments = attention_layers(sparse() if window_only else decode(), window_only, KERNEL)
    assert misaligned(layers, *arguments) == (2, [])


def computed_in_loops(program: str, shape: str) -> list[str]:
    """The instructions of a compiled program that compute an array of this shape in the body of a loop."""
    computations = {m[1]: m[2] for m in re.finditer(r"^(?:ENTRY )?%?([\w.\-]+) .*\{\n((?:  .*\n)+)\}", program, re.M)}
    pending = re.findall(r"body=%([\w.\-]+)", program)
    assert pending and set(pending) <= set(computations)
    seen: set[str] = set()
    found = []
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        pending += re.findall(r"(?:calls|to_apply|body|condition)=%([\w.\-]+)", computations[name])
        pattern = rf"^  .*= {re.escape(shape)}\S* (?!parameter|get-tuple-element)[\w\-]+\(.*$"
        found += re.findall(pattern, computations[name], re.M)
    return found


def test_layers_in_a_loop_share_their_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on the step's rows and the selection: XLA computes it once, ahead of the loop over layers. Into how
    many splits a row goes depends on shapes alone, and is part of the program."""

    def stand_in(query: Array, index: Array, tiles: Array, layer: Array, *_: Any, **__: Any) -> Array:
        used = (index + layer[:1] if of_layer else index).sum(axis=1) + tiles + layer[0]
        return query * used[:, None, None].astype(query.dtype)

    monkeypatch.setattr(api, "unavailable", lambda: None)
    monkeypatch.setattr(kernel, "attend", stand_in)
    plan = f"s32[{decode().rows.num_rows},{64 + 128}]"
    for of_layer in (False, True):  # the latter is the control
        layers, arguments = attention_layers(decode(), False, KERNEL)
        program = jax.jit(layers).lower(*arguments).compile().as_text()
        assert plan in program
        assert bool(computed_in_loops(program, plan)) == of_layer


@pytest.mark.parametrize("case", [pytest.param(decode, marks=pytest.mark.slow), prefill])
def test_rings_are_not_copied(case: Callable[[], Case]) -> None:
    """Prefill reads what it then overwrites: in another order the program would hold two versions of all rings."""
    layers, arguments = attention_layers(case(), False, "reference")
    program = jax.jit(layers, donate_argnums=4).lower(*arguments).compile().as_text()
    rings = ",".join(map(str, case().layout.abstract().window.shape))
    assert f"u8[{rings}]" in program
    assert not re.findall(rf"= u8\[{rings}\]\S* copy.*", program)


def test_slices_of_a_stack_are_found() -> None:
    """Control: one layer's rings, handed over alone."""
    case = decode()
    layer, query, kv, window, *rest = case._arrays(False, jnp.bfloat16)

    def sliced(layer: Array, window: Array) -> Array:
        rings = window[layer][None]
        arguments = (0, query, kv, rings, *rest)
        return kernel.sparse_attention(*arguments, config=SparseAttentionConfig(), **case._static())

    kernels, found = misaligned(sliced, layer, window)
    assert kernels == 1 and len(found) == 1 and f"multiple of {5 * 22 * 528} bytes" in found[0]


def test_measured_times_meet_the_targets() -> None:
    """Of decode with 256 rows and prefill with 8,192; and they are of the tuning that is in use."""
    measured = json.loads(RESULTS.read_text())
    rows = {row["workload"]: row[KERNEL] for row in measured["rows"]}
    assert rows["decode, 256 rows"]["us"] <= 120
    assert rows["prefill, 8,192 rows"]["tflop_per_s"] >= 250
    assert {row["workload"] for row in measured["rows"]} == {work.name for work in WORKLOADS}
    used = dataclasses.asdict(tuned(measured["device"]))
    assert measured["tuning"] == json.loads(json.dumps(used))


def test_padding_rows_have_no_keys() -> None:
    case = decode()
    index, tiles = kernel.plan(case.rows, case.layout, jnp.asarray(case.selected), case.source, ring_slots=5)
    padding = ~np.asarray(case.rows.valid)
    assert padding.any() and (np.asarray(index)[padding] == -1).all() and (np.asarray(tiles)[padding] == 0).all()


def test_a_named_kernel_says_what_does_not_fit() -> None:
    case = decode()
    cos, _ = rotation(case.layout.config, True, case.rows.position)
    assert api.unsupported(case.query, cos, case.layout) is None
    for query, word in ((case.query.astype(jnp.float32), "bfloat16"), (case.query[:, :32], "heads")):
        assert word in str(api.unsupported(query, cos, case.layout))
    plain = dataclasses.replace(case.layout, formats=CacheFormats.plain(jnp.dtype(jnp.bfloat16)))
    assert "records" in str(api.unsupported(case.query, cos, plain))
    for field, fits in (("num_blocks", 2**31 // case.layout.rows_per_block), ("num_slots", 2**31 // (22 * 10))):
        for number, taken in ((fits // 2, True), (2 * fits, False)):
            layout = dataclasses.replace(case.layout, **{field: number})
            assert ("2^31" not in str(api.unsupported(case.query, cos, layout))) == taken
    if not ON_HOPPER:
        with pytest.raises(UnsupportedShape, match="needs a GPU"):
            api.sparse_attention(*case._arrays(False, jnp.bfloat16), **case._static(), implementation=KERNEL)


def test_splits_are_chosen_by_rows() -> None:
    """Of 10 tiles: as was measured, which is for as many blocks of threads as fit a wave."""
    choice = tuned("NVIDIA H200")
    rows = (1, 8, 13, 14, 26, 27, 32, 33, 34, 44, 45, 64, 66, 67, 128, 256, 8192)
    assert [choice.splits(n, 10) for n in rows] == [10, 10, 10, 4, 4, 4, 4, 4, 2, 2, 2, 2, 2, 1, 1, 1, 1]
    assert all(n * choice.splits(n, 10) <= choice.blocks for n in range(1, 133))
    assert [choice.splits(n, 2) for n in rows[:6]] == [2, 2, 2, 1, 1, 1], "the window alone, in parts as long"
    for tiles in range(1, 12):
        for each in range(1, 13):
            splits = SparseAttentionConfig(split_tiles=((1, each),)).splits(1, tiles)
            taken = np.diff(np.arange(splits + 1) * tiles // splits)
            assert taken.min() >= 1 and taken.max() <= each, "each split has tiles of a full row, none too many"
    assert SparseAttentionConfig().splits(1, 10) == 1


@pytest.mark.parametrize("pairs", [((8, 0),), ((0, 2),), ((8, 2), (8, 3)), ((16, 2), (8, 3))])
def test_splits_that_do_not_fit(pairs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="split_tiles"):
        SparseAttentionConfig(split_tiles=pairs)


@pytest.mark.parametrize("registers", [(128, 160, 112), (84, 160, 104)])
def test_registers_that_do_not_fit(registers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="registers"):
        SparseAttentionConfig(registers=registers)
