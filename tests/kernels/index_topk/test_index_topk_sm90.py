"""The Hopper kernels against the reference: computed in lock step here, and on the GPU where there is one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lockstep
import numpy as np
import pytest
from golden_model import REAL, TINY
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import Array
from mosaic_operands import misaligned
from paged import Piece, rows_of

from di_jax.model.cache import CacheLayout
from di_jax.model.quantization import CacheFormats, fake_quantize
from kernels_pallas.hopper import UnsupportedShape, unavailable
from kernels_pallas.index_topk import api, launch, reference, selection
from kernels_pallas.index_topk import mosaic_gpu_sm90 as kernel
from kernels_pallas.index_topk.config import Tuning, tuned

QUANTIZED = CacheFormats.quantized()
ON_HOPPER = unavailable() is None
POOL = 24
LAUNCH = launch.run
RESULTS = Path(__file__).parents[3] / "scripts" / "results" / "kernel-index-topk-nvidia-h200.json"


@pytest.fixture(autouse=True)
def machine() -> Iterator[None]:
    """Launches run in lock step where no Hopper GPU is."""
    with pytest.MonkeyPatch.context() as patch:
        if not ON_HOPPER:
            patch.setattr(launch, "run", lockstep.launch)
        yield


def blocks_of(seed: int, count: int = 16) -> list[int]:
    return np.random.default_rng(seed).permutation(POOL)[:count].tolist()


# Blocks of 32 positions. Rows at the start, at block and unit borders, and at the end of what the table holds.
DECODE = [Piece(p, 1, 0, blocks_of(p)) for p in (0, 30, 255, 256, 500, 511)]
PREFILL = [Piece(0, 11, 1, blocks_of(1)), Piece(380, 20, 0, blocks_of(2))]
MANY = [Piece(p, 1, 0, blocks_of(p, 4)) for p in range(30, 30 + 70)]
STEPS = {"decode": (DECODE, 1), "prefill": (PREFILL, 8), "many": (MANY, 1)}


class Case:
    """Quantized keys and queries of a step; integers make scores exact and ties frequent."""

    def __init__(self, step: str, source: int, *, heads: int = 8, k: int = 40, integers: bool = True) -> None:
        config = dataclasses.replace(
            TINY, index_topk=k, candidate_topk_blocks=6, candidate_block_size=8, index_head_dim=128,
            index_n_heads=heads,
        )  # fmt: skip
        self.source = source
        self.layout = CacheLayout(config, QUANTIZED, num_blocks=POOL, num_slots=4, block_size=32)
        pieces, tile = STEPS[step]
        self.rows, _ = rows_of(pieces, tile=tile)
        generator = np.random.default_rng(heads)

        def numbers(*shape: int) -> Array:
            drawn = generator.integers(-3, 4, shape) if integers else generator.normal(size=shape)
            return jnp.asarray(drawn, jnp.float32)

        total = self.rows.num_rows
        self.query = fake_quantize(QUANTIZED.index, numbers(total, heads, 128))
        self.other_query = fake_quantize(QUANTIZED.index, numbers(total, heads, 128))
        self.weights = numbers(total, heads)
        self.pool = QUANTIZED.index.encode(numbers(POOL, self.layout.rows_per_block, 128))

    def run(self, function: Any, *, other: bool = False, **options: Any) -> tuple[Array, Array | None]:
        options = {"candidates": None, "make_candidates": False, **options}
        query = self.other_query if other else self.query
        return function(query, self.weights, self.pool, self.rows, self.layout, source=self.source, **options)


def check(case: Case, tuning: Tuning) -> None:
    run = partial(kernel.index_topk, tuning=tuning)
    chosen, blocks = case.run(run, make_candidates=True)
    expected, expected_blocks = case.run(reference.index_topk, make_candidates=True)
    np.testing.assert_array_equal(chosen, expected)
    assert blocks is not None and expected_blocks is not None
    np.testing.assert_array_equal(blocks, expected_blocks)
    inside, none = case.run(run, other=True, candidates=blocks)
    expected, _ = case.run(reference.index_topk, other=True, candidates=blocks)
    np.testing.assert_array_equal(inside, expected)
    assert none is None
    free, _ = case.run(run, other=True)
    assert (np.asarray(free) != np.asarray(inside)).any(), "the candidates change something"


@pytest.mark.slow
@pytest.mark.parametrize("source", [0, 2])
def test_decode_equals_the_reference(source: int) -> None:
    """Ratios 2 and 1: 8 and 4 pool blocks in a unit of keys. Two units a block of threads, so that splits meet."""
    check(Case("decode", source), Tuning(stages=2, units=2))


@pytest.mark.parametrize(
    "together", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_prefill_equals_the_reference(together: int) -> None:
    check(Case("prefill", 2), Tuning(rows=together, units=1))


@pytest.mark.slow
@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_arbitrary_values(step: str) -> None:
    """32 heads; scales of all groups differ. The choice is the same unless two scores are within rounding."""
    check(Case(step, 2, heads=32, integers=False), Tuning())


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_others() -> None:
    case = Case("decode", 2, integers=False)
    together, _ = case.run(partial(kernel.index_topk, tuning=Tuning()))
    alone = dataclasses.replace(
        case.rows,
        **{name: getattr(case.rows, name)[4:5] for name in ("token", "image", "valid", "position", "sequence")},
    )
    case.query, case.weights, case.rows = case.query[4:5], case.weights[4:5], alone
    own, _ = case.run(partial(kernel.index_topk, tuning=Tuning(units=1, stages=3)))
    np.testing.assert_array_equal(own, together[4:5])


@pytest.mark.slow
def test_more_rows_than_scores_fit_go_in_turns() -> None:
    """64 rows at least, and the 6 that are left."""
    case = Case("many", 2)
    whole, blocks = case.run(partial(kernel.index_topk, tuning=Tuning()), make_candidates=True)
    turns, by_turns = case.run(partial(kernel.index_topk, tuning=Tuning(score_bytes=1)), make_candidates=True)
    np.testing.assert_array_equal(turns, whole)
    assert blocks is not None and by_turns is not None
    np.testing.assert_array_equal(by_turns, blocks)


@pytest.mark.parametrize("score_bytes", [pytest.param(1, marks=pytest.mark.slow), 2**29])
def test_operands_begin_where_a_kernel_takes_them(monkeypatch: pytest.MonkeyPatch, score_bytes: int) -> None:
    """The arrays of the rows are slices of one that the host sends, turns are slices of all rows."""
    monkeypatch.setattr(launch, "run", LAUNCH)
    case = Case("many", 2)
    total, pages = case.rows.block_table.shape
    shape: Any = jax.ShapeDtypeStruct

    def step(plan: Array, query: Array, weights: Array, pool: Array, candidates: Array, guarded: bool = True) -> Any:
        sequence, position, table = plan[3 : 3 + total], plan[3 + total : 3 + 2 * total], plan[3 + 2 * total :]
        rows = dataclasses.replace(
            case.rows, sequence=sequence, position=position, block_table=table.reshape(total, pages)
        )
        if not guarded:
            return LAUNCH(lambda *_: None, "plain", [shape((total,), jnp.int32)], {}, 1, 128, rows.block_table)
        run = partial(kernel.index_topk, query, weights, pool, rows, case.layout, source=2)
        tuning = Tuning(score_bytes=score_bytes)
        first = run(candidates=None, make_candidates=True, tuning=tuning)
        return first, run(candidates=candidates, make_candidates=False, tuning=tuning)

    arguments = (
        shape((3 + total * (2 + pages),), jnp.int32),
        shape((total, 8, 128), jnp.bfloat16),
        shape((total, 8), jnp.float32),
        shape(case.pool.shape, jnp.uint8),
        shape((total, 6), jnp.int32),
    )
    kernels, found = misaligned(step, *arguments)
    assert kernels == (4 if score_bytes > 1 else 8) and not found
    assert misaligned(partial(step, guarded=False), *arguments)[1], "a table that is handed on as it is would be found"


def test_nothing_to_choose_is_not_scored() -> None:
    case = Case("decode", 2, k=512)
    case.query = case.query * jnp.nan
    chosen, blocks = case.run(partial(kernel.index_topk, tuning=Tuning()))
    assert blocks is None
    for row, position in zip(chosen, np.asarray(case.rows.position).tolist()):
        assert row.tolist() == [*range(position + 1), *[-1] * (511 - position)]


def test_pages_that_hold_nothing_reachable_are_not_touched() -> None:
    """Their table entries are far outside of the pool: the lock step machine raises if one is read."""
    case = Case("decode", 2)
    before, _ = case.run(partial(kernel.index_topk, tuning=Tuning()))
    last = case.rows.position[case.rows.sequence] // 32
    wild = jnp.arange(case.rows.block_table.shape[1]) > jnp.zeros((last.shape[0], 1), jnp.int32).at[
        case.rows.sequence, 0
    ].max(last[:, None][:, 0])
    case.rows = dataclasses.replace(case.rows, block_table=jnp.where(wild, 1_000_000, case.rows.block_table))
    after, _ = case.run(partial(kernel.index_topk, tuning=Tuning()))
    np.testing.assert_array_equal(after, before)


SCORES = st.lists(st.sampled_from([-np.inf, -2.0, -0.5, 0.0, 1.0, 1.5, 3e38]) | st.floats(-4, 4, width=32), min_size=1)


@settings(max_examples=25, deadline=None)
@given(SCORES, st.integers(0, 600), st.integers(1, 512), st.integers(1, 40), st.integers(0, 2**16))
@example([-0.0, 0.0], 10, 1, 1, 0)
@example([0.0, -0.0], 4, 1, 1, 0)
def test_selection_is_exact(values: list[float], reach: int, k: int, blocks: int, seed: int) -> None:
    """Any scores, ties among them, fewer than k, nothing reachable."""
    generator = np.random.default_rng(seed)
    entries = 640
    score = generator.choice(np.array(values, np.float32), (1, entries))
    score[:, reach:] = -np.inf
    groups = np.full((1, selection.best_columns(entries)), np.nan, np.float32)
    groups[:, : entries // 8] = score.reshape(1, -1, 8).max(-1)
    s = selection.Select(k, entries, 0, blocks)
    chosen, made = selection.chosen_entries(s, jnp.asarray(groups), jnp.asarray(score), jnp.asarray([reach]), None)
    np.testing.assert_array_equal(chosen, reference.best_entries(jnp.asarray(score), k))
    expected = reference.candidate_blocks(jnp.asarray(score), jnp.asarray([reach]), 8, blocks)
    np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize("order", [1, -1])
def test_selection_of_sorted_scores(order: int) -> None:
    """All of the best in neighbouring groups, in one thread or the last."""
    entries = 4096
    score = np.arange(entries, dtype=np.float32)[None, ::order].copy()
    best = np.full((1, selection.best_columns(entries)), np.nan, np.float32)
    best[:, : entries // 8] = score.reshape(1, -1, 8).max(-1)
    s = selection.Select(512, entries, 0, 0)
    chosen, _ = selection.chosen_entries(s, jnp.asarray(best), jnp.asarray(score), jnp.asarray([entries]), None)
    np.testing.assert_array_equal(chosen, reference.best_entries(jnp.asarray(score), 512))


@pytest.mark.skipif(ON_HOPPER, reason="decodes on the host")
def test_every_code_decodes_exactly() -> None:
    """All nibbles in all places of a word, bf16 with every scale from 2^-63 to 2^63."""
    machine = lockstep.Machine(256, 0, 1024)
    byte = np.arange(256, dtype=np.uint32)
    word = byte | (byte[::-1] << 8) | (byte << 16) | (byte[::-1] << 24)
    record = np.concatenate([np.tile(word.view(np.uint8).reshape(256, 4), 16), np.zeros((256, 4), np.uint8)], axis=1)
    scalar = lockstep.Scalar(word.view(np.int32))
    for scale in (64, 100, 127, 128, 190):
        record[:, 64:] = scale
        expected = np.asarray(QUANTIZED.index.decode(jnp.asarray(record)))[:, :8]
        [pairs] = kernel.decode_bf16(machine, [scalar], machine.integer(scale))
        values = np.stack([lockstep.halves(p.value.view(np.uint32), jnp.bfloat16) for p in pairs], axis=1)
        decoded = values.astype(np.float32).transpose(0, 2, 1).reshape(256, 8) * np.float32(2.0) ** 62
        np.testing.assert_array_equal(decoded, expected)
    record[:, 64:] = 127
    expected = np.asarray(QUANTIZED.index.decode(jnp.asarray(record)))[:, :8]
    for odd, part in enumerate(kernel.decode_e4m3(scalar)):
        values = part.value.view(np.uint32)[:, None].view(jnp.float8_e4m3fn).astype(np.float32)
        np.testing.assert_array_equal(values * 64, expected[:, odd::2])


@pytest.mark.slow
def test_released_shapes_lower_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode of 64 rows with 65,536 keys each, candidates made and used, without a GPU."""
    monkeypatch.setattr(launch, "run", LAUNCH)
    layout = CacheLayout(REAL, QUANTIZED, num_blocks=8, num_slots=4)
    rows, _ = rows_of([Piece(65_535, 1, 0, range(512))], tile=1, padding_tiles=1)
    abstract: Any = jax.ShapeDtypeStruct
    shapes = (
        abstract((2, 32, 128), jnp.bfloat16),
        abstract((2, 32), jnp.float32),
        abstract((8, layout.rows_per_block, 68), jnp.uint8),
    )

    def step(query: Array, weights: Array, pool: Array) -> Array:
        run = partial(kernel.index_topk, query, weights, pool, rows, layout, source=3, tuning=Tuning())
        _, blocks = run(candidates=None, make_candidates=True)
        return run(candidates=blocks, make_candidates=False)[0]

    lowered = jax.jit(step).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 4


def test_what_does_not_fit_is_named() -> None:
    case = Case("decode", 2)
    assert kernel.unsupported(case.query, case.rows, case.layout, 2) is None
    plain = dataclasses.replace(case.layout, formats=CacheFormats.plain(jnp.dtype(jnp.float32)))
    assert "68-byte" in str(kernel.unsupported(case.query, case.rows, plain, 2))
    assert "index_n_heads" in str(kernel.unsupported(case.query[:, :4], case.rows, case.layout, 2))
    changed = {"candidate_block_size": 4, "index_topk": 1024}
    for name, value in changed.items():
        layout = dataclasses.replace(case.layout, config=dataclasses.replace(case.layout.config, **{name: value}))
        assert name in str(kernel.unsupported(case.query, case.rows, layout, 2))
    wide = dataclasses.replace(case.rows, block_table=jnp.zeros((1, 2**14), jnp.int32))
    assert "entries" in str(kernel.unsupported(case.query, wide, case.layout, 2))


@pytest.mark.skipif(ON_HOPPER, reason="it runs here")
def test_a_named_kernel_raises_where_it_cannot_run() -> None:
    case = Case("decode", 2)
    with pytest.raises(UnsupportedShape, match="needs a GPU"):
        case.run(partial(api.index_topk, implementation="mosaic_gpu_sm90"))
    np.testing.assert_array_equal(case.run(api.index_topk)[0], case.run(reference.index_topk)[0])


def test_tuning() -> None:
    assert tuned("a device that nobody measured") == Tuning()
    assert tuned("NVIDIA H200") == Tuning(stages=3, units=16, rows=4)
    for changed in ({"stages": 1}, {"units": 0}, {"rows": 3}):
        with pytest.raises(ValueError, match=next(iter(changed))):
            Tuning(**changed)


def test_measurements_meet_the_first_target() -> None:
    """64 rows, each with 65,536 keys of its own: 250 us. Nothing is faster than its floor."""
    rows = {row["workload"]: row for row in json.loads(RESULTS.read_text())["rows"]}
    decode = rows["decode, 64 rows x 65,536"]
    assert decode["mosaic_gpu_sm90"]["us"] <= 250
    for row in rows.values():
        if "reference" in row:
            assert row["floor_us"] < row["mosaic_gpu_sm90"]["us"] < row["reference"]["us"]
