"""Cache writes over every implementation that this machine can run: the reference, and the Hopper kernels in lock step
here, on the GPU where there is one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import store_lockstep
from golden_model import REAL
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array, lax
from lockstep import Scalar
from mosaic_operands import misaligned
from paged import Piece, page_of, rows_of, small_layout

from di_jax.model.cache import CacheLayout
from di_jax.model.quantization import CacheFormats, e2m1_code
from di_jax.model.rope import inverse_frequencies, rotation
from di_jax.model.rows import Rows
from kernels_pallas.compress_store import api, lanes, reference
from kernels_pallas.compress_store import mosaic_gpu_sm90 as kernel
from kernels_pallas.compress_store.bench import WORKLOADS
from kernels_pallas.compress_store.config import Tuning, tuned
from kernels_pallas.hopper import KERNEL, UnsupportedShape, unavailable

QUANTIZED = CacheFormats.quantized()
ON_HOPPER = unavailable() is None
LAUNCH = lanes.run
BF16 = jnp.dtype(jnp.bfloat16)
CANARY = 0xA5
LAYERS, LAYER = 3, 1
BLOCKS = ((7, 2, 9, 4, 5, 1), (3, 11, 0, 8, 6, 10))
TILE = 8
LAYOUT = small_layout(QUANTIZED, head_dim=512, index_head_dim=128, qk_rope_head_dim=64)
RING, PAIRS = LAYOUT.config.window_ring, LAYOUT.config.compressor_ring
POOLED = 0
PLAIN = LAYOUT.config.kv_source_ratios.index(1)


@pytest.fixture(autouse=True)
def machine() -> Iterator[None]:
    """Launches run in lock step where no Hopper GPU is."""
    with pytest.MonkeyPatch.context() as patch:
        if not ON_HOPPER:
            patch.setattr(lanes, "run", store_lockstep.run)
        yield


class Operations:
    """name: "reference", or "mosaic-" and the warpgroups of a block."""

    def __init__(self, name: str) -> None:
        self.is_reference = name == "reference"
        self.options = {} if self.is_reference else {"tuning": Tuning(int(name[-1]))}
        # XLA divides by way of a reciprocal, and the quotient of a bf16 by an e4m3 often lies just between two codes.
        self.flips = 0.1 if self.is_reference else 5e-3

    def __call__(self, operation: str) -> Any:
        return partial(getattr(reference if self.is_reference else kernel, operation), **self.options)


@pytest.fixture(params=["reference", "mosaic-1", pytest.param("mosaic-2", marks=pytest.mark.slow)])
def implementation(request: pytest.FixtureRequest) -> Operations:
    return Operations(request.param)


# Rows of one token at odd and even places, the first of all, and steps of several tokens (drafts that are verified).
DECODE = [Piece(p, 1, i, BLOCKS[i % 2]) for i, p in enumerate((0, 33, 62))] + [Piece(41, 4, 3, BLOCKS[1])]
# A chunk of odd start that overwrites the pair that it reads, longer than both rings; one that is cut; one of one row.
PREFILL = [
    Piece(9, 45, 2, BLOCKS[0], window_start=20, cached=16),
    Piece(0, 7, 1, BLOCKS[1]),
    Piece(63, 9, 0, BLOCKS[1]),
    Piece(5, 1, 3, BLOCKS[0]),
]
STEPS = {"decode": (DECODE, 1), "prefill": (PREFILL, TILE)}


def step_of(name: str) -> tuple[Rows, list[tuple[int, Piece, int]]]:
    """The rows of a step, and (row, piece, position) of all that are valid. Rows of the first piece of decode that
    belong to one sequence are tiles of their own."""
    pieces, tile = STEPS[name]
    rows, first = rows_of(pieces, tile=tile)
    return rows, [(f + i, p, t) for p, f in zip(pieces, first, strict=True) for i, t in enumerate(p.positions)]


def canaried(*shape: int) -> np.ndarray:
    return np.full(shape, CANARY, np.uint8)


def numbers(seed: int, *shape: int, dtype: Any = ml_dtypes.bfloat16) -> np.ndarray:
    generator = np.random.default_rng(seed)
    size = np.exp(generator.normal(size=(*shape[:-1], 1)))
    return (generator.normal(size=shape) * size).astype(dtype)


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    y = weight * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + LAYOUT.config.rms_norm_eps)
    return y.astype(np.float32).astype(ml_dtypes.bfloat16)


def rotated(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    angle = positions.astype(np.float32)[:, None] * inverse_frequencies(LAYOUT.config, True)
    pairs = x[:, -64:].astype(np.float64).reshape(-1, 32, 2)
    value = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle.astype(np.float64))
    tail = np.stack([value.real, value.imag], axis=-1).reshape(-1, 64)
    return np.concatenate([x[:, :-64], tail.astype(np.float32).astype(ml_dtypes.bfloat16)], axis=1)


def exactly(codec: Any, vectors: np.ndarray) -> np.ndarray:
    """Records of bf16 vectors [n, d] with true division."""
    if codec != QUANTIZED.compressed:  # scales are powers of two
        return np.asarray(codec.encode(jnp.asarray(vectors)))
    g = vectors.astype(np.float32).reshape(len(vectors), -1, 16)
    amax = np.maximum(np.abs(g).max(axis=-1, keepdims=True), np.float32(6 * 2.0**-9))
    scale = np.minimum(amax / np.float32(6), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    code = np.asarray(e2m1_code(jnp.asarray(g / scale.astype(np.float32)))).reshape(len(vectors), -1)
    return np.concatenate([code[:, ::2] | code[:, 1::2] << 4, scale[..., 0].view(np.uint8)], axis=1).astype(np.uint8)


def agree(codec: Any, mine: np.ndarray, vectors: np.ndarray, flips: float) -> None:
    """Records [n, record] hold bf16 vectors [n, d], but for a few codes next to a rounding boundary."""
    expected = exactly(codec, vectors)
    assert mine.shape == expected.shape
    assert (mine != expected).mean() <= flips
    decoded, right = (np.asarray(codec.decode(jnp.asarray(r))) for r in (mine, expected))
    scale = np.abs(right).reshape(*right.shape[:-1], -1, codec.group).max(axis=-1).repeat(codec.group, axis=-1)
    assert (np.abs(decoded - right) <= 0.34 * scale + 1e-6).all()


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_window_rows_are_stored_bit_by_bit(implementation: Operations, step: str) -> None:
    """At their places of their rings, with everything else as it was."""
    rows, valid = step_of(step)
    kv = numbers(0, rows.num_rows, 512)
    before = canaried(LAYERS, 4, RING, 528)
    store = implementation("store_window")
    after = np.asarray(store(jnp.asarray(before), jnp.int32(LAYER), jnp.asarray(kv), rows, LAYOUT))
    expected, record = before.copy(), np.asarray(QUANTIZED.window.encode(jnp.asarray(kv)))
    for row, piece, t in valid:
        if t >= piece.window_start:
            expected[LAYER, piece.slot, t % RING] = record[row]
    np.testing.assert_array_equal(after, expected)
    assert (after != before).any()


def test_layers_behind_each_other_at_once(implementation: Operations) -> None:
    rows, _ = step_of("decode")
    kv, before = numbers(1, 2, rows.num_rows, 512), canaried(LAYERS, 4, RING, 528)
    store = implementation("store_window")
    both = store(jnp.asarray(before), 1, jnp.asarray(kv), rows, LAYOUT)
    single = jnp.asarray(before)
    for i in range(2):
        single = store(single, 1 + i, jnp.asarray(kv[i]), rows, LAYOUT)
    np.testing.assert_array_equal(both, single)


def test_a_projection_is_normed_and_rotated_first(implementation: Operations) -> None:
    rows, valid = step_of("decode")
    x, weight = numbers(2, rows.num_rows, 512), numbers(3, LAYERS, 512)
    cos_sin = rotation(LAYOUT.config, True, rows.position)
    before = canaried(LAYERS, 4, RING, 528)
    store = implementation("store_projected")
    after = np.asarray(store(jnp.asarray(before), LAYER, jnp.asarray(x), jnp.asarray(weight), cos_sin, rows, LAYOUT))
    vectors = rotated(norm(x, weight[LAYER]), np.asarray(rows.position))
    stored = [after[LAYER, piece.slot, t % RING] for _, piece, t in valid]
    agree(QUANTIZED.window, np.stack(stored), vectors[[row for row, *_ in valid]], implementation.flips)
    rest = after.copy()
    for _, piece, t in valid:
        rest[LAYER, piece.slot, t % RING] = CANARY
    np.testing.assert_array_equal(rest, before)


# --- entries and keys -------------------------------------------------------------------------------------------------


def pool_pair(gate: np.ndarray, latent: np.ndarray) -> np.ndarray:
    weight = np.exp(gate.astype(np.float64) - gate.max(axis=0))
    return ((weight * latent).sum(axis=0) / weight.sum(axis=0)).astype(np.float32).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("source", [POOLED, PLAIN], ids=["pooled", "plain"])
@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_entries_and_keys(implementation: Operations, step: str, source: int) -> None:
    """Each group becomes a record, a latent and a key; what was cached before, other entries and other pairs stay."""
    rows, valid = step_of(step)
    ratio, pooled = LAYOUT.config.kv_source_ratios[source], source == POOLED
    total, number_of_sources = rows.num_rows, len(LAYOUT.config.kv_source_ratios)
    gate = numbers(4, total, 512, dtype=np.float32) if pooled else None
    latent = numbers(5, total, 512, dtype=np.float32 if pooled else ml_dtypes.bfloat16)
    weight, key_weight = numbers(6, number_of_sources, 512), numbers(7, number_of_sources, 128)
    ring = numbers(8, len(LAYOUT.config.pooled_sources), 4, PAIRS, 2, 512, dtype=np.float32)
    page = (LAYOUT.num_blocks, LAYOUT.rows_per_block)
    pool, keys = canaried(*page, 288), canaried(*page, 68)

    arrays = [None if a is None else jnp.asarray(a) for a in (pool, ring, gate, latent, weight)]
    stored, ring_after, normed = (
        np.asarray(a) for a in implementation("store_entries")(*arrays[:2], source, *arrays[2:], rows, LAYOUT, BF16)
    )
    per_tile = -(-rows.tile // ratio)
    assert normed.shape == (rows.num_tiles * per_tile, 512) and normed.dtype == ml_dtypes.bfloat16

    # Every group that ends here, token by token.
    own = {(piece.slot, t): row for row, piece, t in valid}
    groups = []  # (row of the latents, page, position, normed latent)
    for row, piece, t in valid:
        if t % ratio != ratio - 1:
            continue
        if pooled:
            before = own.get((piece.slot, t - 1)) if t - 1 >= piece.start else None
            pairs = [
                (gate[before], latent[before]) if before is not None else ring[0, piece.slot, (t - 1) % PAIRS],
                (gate[row], latent[row]),
            ]
            x = pool_pair(*(np.stack(p) for p in zip(*pairs, strict=True)))
        else:
            x = latent[row]
        place = page_of(LAYOUT, source, piece.blocks, t // ratio) if t >= piece.cached else None
        made = row // rows.tile * per_tile + row % rows.tile // ratio
        groups.append((made, place, t // ratio * ratio, norm(x, weight[source])))
    made, places, positions, expected = (list(part) for part in zip(*groups, strict=True))
    assert len(set(made)) == len(made) > 2
    np.testing.assert_allclose(
        normed[made].astype(np.float32), np.stack(expected).astype(np.float32), rtol=2.0**-7, atol=1e-5
    )

    def check(codec: Any, after: np.ndarray, before: np.ndarray, vectors: np.ndarray) -> None:
        stored = [i for i, place in enumerate(places) if place is not None]
        mine = np.stack([after[places[i]] for i in stored])
        agree(codec, mine, rotated(vectors, np.asarray(positions))[stored], implementation.flips)
        rest = after.copy()
        for i in stored:
            rest[places[i]] = CANARY
        np.testing.assert_array_equal(rest, before)

    check(QUANTIZED.compressed, stored, pool, normed[made])

    # Pairs bit by bit: the last of every sequence.
    pairs_expected = ring.copy()
    if pooled:
        for row, piece, t in valid:
            pairs_expected[0, piece.slot, t % PAIRS] = gate[row], latent[row]
    np.testing.assert_array_equal(ring_after, pairs_expected)

    key = numbers(9, len(normed), 128)
    key_arrays = [jnp.asarray(a) for a in (keys, key, key_weight)]
    stored = np.asarray(implementation("store_keys")(key_arrays[0], source, *key_arrays[1:], rows, LAYOUT))
    check(QUANTIZED.index, stored, keys, norm(key[made], key_weight[source]))


def test_nothing_valid_stores_nothing(implementation: Operations) -> None:
    rows, _ = rows_of([Piece(4, 0, 0, BLOCKS[0])], tile=TILE)
    ring = jnp.asarray(canaried(LAYERS, 4, RING, 528))
    kv = jnp.asarray(numbers(0, rows.num_rows, 512))
    np.testing.assert_array_equal(implementation("store_window")(ring, 0, kv, rows, LAYOUT), ring)
    pairs = jnp.ones((len(LAYOUT.config.pooled_sources), 4, PAIRS, 2, 512))
    pool = jnp.asarray(canaried(LAYOUT.num_blocks, LAYOUT.rows_per_block, 288))
    x, weight = jnp.ones((rows.num_rows, 512)), jnp.ones((3, 512), BF16)
    after, kept, _ = implementation("store_entries")(pool, pairs, POOLED, x, x, weight, rows, LAYOUT, BF16)
    np.testing.assert_array_equal(after, pool)
    np.testing.assert_array_equal(kept, pairs)


def test_an_overwritten_pair_is_read_first() -> None:
    """The chunk of the prefill step whose start is odd: one of its rows takes the place of the pair that it reads."""
    rows, valid = step_of("prefill")
    plan = np.asarray(kernel.entry_plan(rows, LAYOUT, POOLED))
    late = {int(row): plan[row] for row in np.flatnonzero(plan[:, kernel.LATE] >= 0)}
    for piece in (PREFILL[0], PREFILL[2]):
        row = next(r for r, p, t in valid if p is piece and t == piece.start)
        other = int(late[row][kernel.LATE])
        assert plan[other, kernel.OWN] == -1, "one warp stores it"
        position = next(t for r, _, t in valid if r == other)
        assert position % PAIRS == (piece.start - 1) % PAIRS
    assert len(late) == 2
    stored = plan[:, kernel.OWN][plan[:, kernel.OWN] >= 0]
    assert len(set(stored.tolist())) == len(stored), "no record is stored twice"


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(ON_HOPPER, reason="computes on the host")
@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-8, 8, width=32) | st.sampled_from([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.0])))
def test_codes_are_those_of_the_reference(values: list[float]) -> None:
    """Ties between codes among them."""
    x = np.zeros(128, np.float32)
    x[: len(values)] = values[:128]
    m = store_lockstep.StoreMachine(128, 0, 0)
    np.testing.assert_array_equal(kernel.e2m1(m, Scalar(x)).value, e2m1_code(jnp.asarray(x)))


@pytest.mark.parametrize("size", [1e-12, pytest.param(1e-4, marks=pytest.mark.slow), 1.0, 3e3, 1e30])
def test_records_of_any_size(implementation: Operations, size: float) -> None:
    """Scales at their floors and beyond their largest value."""
    rows, _ = rows_of([Piece(0, TILE, 0, BLOCKS[0])], tile=TILE, padding_tiles=0)
    x = (numbers(0, TILE, 512).astype(np.float32) * size).astype(ml_dtypes.bfloat16)
    ring = jnp.asarray(canaried(LAYERS, 4, RING, 528))
    after = np.asarray(implementation("store_window")(ring, 0, jnp.asarray(x), rows, LAYOUT))[0, 0, :TILE]
    np.testing.assert_array_equal(after, QUANTIZED.window.encode(jnp.asarray(x)))
    pool = jnp.asarray(canaried(LAYOUT.num_blocks, LAYOUT.rows_per_block, 288))
    pairs = jnp.zeros((len(LAYOUT.config.pooled_sources), 4, PAIRS, 2, 512))
    weight = jnp.full((3, 512), size, BF16)
    run = implementation("store_entries")
    after, _, normed = run(pool, pairs, PLAIN, None, jnp.asarray(numbers(1, TILE, 512)), weight, rows, LAYOUT, BF16)
    mine = np.stack([np.asarray(after)[page_of(LAYOUT, PLAIN, BLOCKS[0], t)] for t in range(TILE)])
    expected, unrotated = exactly(QUANTIZED.compressed, np.asarray(normed)), [*range(224), *range(256, 284)]
    differ = (mine[:, unrotated] != expected[:, unrotated]).mean()
    assert differ <= implementation.flips if implementation.is_reference else differ == 0


# --- what the machinery around it needs -------------------------------------------------------------------------------


def released(rows: int) -> tuple[CacheLayout, Any, Any]:
    """Layout, abstract state and rows of a decode step in the released shapes."""
    layout = CacheLayout(REAL, QUANTIZED, num_blocks=8, num_slots=4, draft_stages=3)
    made = partial(rows_of, [Piece(7, 1, 0, range(4))], tile=1, padding_tiles=rows - 1)
    return layout, layout.abstract(), jax.eval_shape(lambda: made()[0])


def whole_layer(layout: CacheLayout, state: Any, rows: Rows, a: dict[str, Array], numbers: Array) -> Any:
    """Stores of a source and of scanned layers."""
    tuning = Tuning()
    pool, ring, latent = kernel.store_entries(
        state.compressed, state.compressor, 1, a["gate"], a["latent"], a["norm"], rows, layout, BF16, tuning=tuning
    )
    index = kernel.store_keys(state.index, 1, a["key"], a["key_norm"], rows, layout, tuning=tuning)
    cos_sin = rotation(layout.config, True, rows.position)

    def layer(window: Array, number: Array) -> Any:
        rest = (a["projected"], a["kv_norm"], cos_sin, rows, layout)
        return kernel.store_projected(window, number, *rest, tuning=tuning), None

    window, _ = lax.scan(layer, state.window, numbers)
    window = kernel.store_window(window, 40, a["draft"], rows, layout, tuning=tuning)
    return dataclasses.replace(state, compressed=pool, compressor=ring, index=index, window=window), latent


def abstract_inputs(rows: int) -> dict[str, Any]:
    shape: Any = jax.ShapeDtypeStruct
    return {
        "gate": shape((rows, 512), jnp.float32),
        "latent": shape((rows, 512), jnp.float32),
        "norm": shape((4, 512), BF16),
        "key": shape((rows, 128), BF16),
        "key_norm": shape((4, 128), BF16),
        "projected": shape((rows, 512), BF16),
        "kv_norm": shape((40, 512), BF16),
        "draft": shape((3, rows, 512), BF16),
    }


def test_released_shapes_lower_for_cuda_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "run", LAUNCH)
    layout, state, rows = released(8)
    numbers_of = jax.ShapeDtypeStruct((40,), jnp.int32)
    run = partial(whole_layer, layout)
    traced = jax.jit(run).trace(state, rows, abstract_inputs(8), numbers_of)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = [line for line in text.splitlines() if "@mosaic_gpu_v2" in line]
    assert len(kernels) == 4
    assert sorted(line.count("output_operand_alias<") for line in kernels) == [1, 1, 1, 2]


def test_operands_begin_where_a_kernel_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays of the rows are slices of one that the host sends, the number of a layer is a slice of all numbers."""
    monkeypatch.setattr(lanes, "run", LAUNCH)
    layout, state, rows = released(8)
    fields = ("position", "sequence", "start", "count", "slot", "first_row", "window_start", "cached")

    def step(plan: Array, state: Any, rows: Rows, a: Any, guarded: bool = True) -> Any:
        at, cut = 3, {}
        for name in fields:
            size = getattr(rows, name).shape[0]
            cut[name], at = plan[at : at + size], at + size
        rows = dataclasses.replace(rows, **cut)
        if not guarded:
            return LAUNCH(lambda *_: None, "plain", 1, 1, (rows.position,), (state.index,))
        return whole_layer(layout, state, rows, a, plan[1:41])

    arguments = (jax.ShapeDtypeStruct((3 + 8 * 64,), jnp.int32), state, rows, abstract_inputs(8))
    kernels, found = misaligned(step, *arguments)
    assert kernels == 4 and not found
    assert misaligned(partial(step, guarded=False), *arguments)[1], "a field handed on as it is would be found"


def test_what_does_not_fit_is_named() -> None:
    layout = LAYOUT
    rows, _ = step_of("decode")
    shape: Any = jax.ShapeDtypeStruct
    x, weight = shape((8, 512), BF16), shape((3, 512), BF16)
    assert api.unsupported(x, 512, layout, "window", weight) is None
    assert "bfloat16" in str(api.unsupported(shape((8, 512), jnp.float32), 512, layout, "window"))
    assert "512 channels" in str(api.unsupported(shape((8, 256), BF16), 512, layout, "window"))
    assert "norm weights" in str(api.unsupported(x, 512, layout, "window", shape((3, 512), jnp.float32)))
    assert "no rows" in str(api.unsupported(shape((0, 512), BF16), 512, layout, "window"))
    plain = dataclasses.replace(layout, formats=CacheFormats.plain(BF16))
    assert "quantize_caches" in str(api.unsupported(x, 512, plain, "window"))
    turned = dataclasses.replace(layout, config=dataclasses.replace(layout.config, qk_rope_head_dim=32))
    assert "64 of them rotated" in str(api.unsupported(x, 512, turned, "window"))
    state = layout.abstract()
    entries = partial(api.unsupported_entries, rows=rows, layout=layout, norm_weight=weight, ring=state.compressor)
    pairs = shape((8, 512), jnp.float32)
    assert entries(pairs, POOLED, dtype=BF16, pool=state.compressed) is None
    assert "float32" in str(entries(x, POOLED, dtype=BF16, pool=state.compressed))
    assert "bfloat16" in str(entries(x, PLAIN, dtype=jnp.dtype(jnp.float32), pool=state.compressed))
    assert "2^31" in str(entries(pairs, POOLED, dtype=BF16, pool=shape((2**31, 1, 288), jnp.uint8)))
    odd, _ = rows_of([Piece(0, 6, 0, BLOCKS[0])], tile=3)
    assert "even" in str(api.unsupported_entries(pairs, POOLED, odd, layout, weight, BF16, state.compressed, pairs))


@pytest.mark.skipif(ON_HOPPER, reason="it runs here")
def test_a_named_kernel_raises_where_it_cannot_run() -> None:
    rows, _ = step_of("decode")
    ring, kv = jnp.asarray(canaried(LAYERS, 4, RING, 528)), jnp.asarray(numbers(0, rows.num_rows, 512))
    with pytest.raises(UnsupportedShape, match="needs a GPU"):
        api.store_window(ring, LAYER, kv, rows, LAYOUT, implementation=KERNEL)
    mine, expected = (api.store_window(ring, LAYER, kv, rows, LAYOUT, implementation=i) for i in ("auto", "reference"))
    np.testing.assert_array_equal(mine, expected)


def test_tuning() -> None:
    assert tuned("a device that nobody measured") == Tuning()
    assert tuned("NVIDIA H200") == Tuning(warpgroups=1)
    with pytest.raises(ValueError, match="warpgroups"):
        Tuning(3)


def test_measured_times_meet_the_target() -> None:
    """All cache writes of a layer at 256 rows: 20 us, of either source; all workloads of the bench are there."""
    file = Path(__file__).parents[3] / "scripts/results/kernel-compress-store-nvidia-h200.json"
    rows = {row["workload"]: row for row in json.loads(file.read_text(encoding="utf-8"))["rows"]}
    assert set(rows) == {work.name for work in WORKLOADS}
    for ratio in (1, 2):
        row = rows[f"source of ratio {ratio}, 256 rows"]
        assert row["floor_us"] < row[KERNEL]["kernel_us"] < row[KERNEL]["us"] <= 20 < row["reference"]["us"]
