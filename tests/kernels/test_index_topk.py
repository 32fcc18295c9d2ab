"""Choice of entries against brute force. Small integers make every score exact, and ties frequent."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax import Array
from paged import Piece, page_of, rows_of, small_layout

from di_jax.model.cache import CacheLayout
from di_jax.model.rows import Rows
from kernels_pallas import tiling
from kernels_pallas.index_topk import api, reference

HEADS, DIM = 4, 8
SCORES = arrays(np.float32, (3, 13), elements=st.integers(-2, 2) | st.just(-np.inf))


def best(score: np.ndarray, k: int) -> list[int]:
    """The k best entries that are not -inf, lower first on ties, ascending, -1 padded."""
    order = sorted(np.flatnonzero(score > -np.inf).tolist(), key=lambda e: (-score[e], e))
    chosen = sorted(order[:k])
    return chosen + [-1] * (k - len(chosen))


def best_blocks(score: np.ndarray, reachable: int, size: int, k: int) -> list[int]:
    """Blocks by their best entry; that of the last reachable entry always among them."""
    block = np.array([score[at : at + size].max() for at in range(0, len(score), size)])
    if reachable:
        block[(reachable - 1) // size] = np.inf
    return best(block, k)


@given(SCORES, st.integers(1, 20))
def test_best_entries(score: np.ndarray, k: int) -> None:
    """n <= k included: then every entry that is not -inf is taken."""
    assert np.asarray(reference.best_entries(jnp.asarray(score), k)).tolist() == [best(row, k) for row in score]


@given(arrays(np.int32, (2, 6), elements=st.integers(0, 50), unique=True), arrays(bool, (2, 6)))
def test_ascending(entry: np.ndarray, found: np.ndarray) -> None:
    expected = [sorted(e[f].tolist()) + [-1] * int((~f).sum()) for e, f in zip(entry, found)]
    assert np.asarray(reference.ascending(jnp.asarray(entry), jnp.asarray(found))).tolist() == expected


@given(SCORES, st.integers(0, 13), st.integers(1, 5), st.integers(1, 6))
def test_candidate_blocks(score: np.ndarray, reachable: int, size: int, k: int) -> None:
    """The last block may be cut, blocks without a reachable entry never count, the pinned one always does."""
    score[:, reachable:] = -np.inf
    mine = reference.candidate_blocks(jnp.asarray(score), jnp.full(3, reachable), size, k)
    assert np.asarray(mine).tolist() == [best_blocks(row, reachable, size, k) for row in score]


def test_the_last_block_is_pinned() -> None:
    score = jnp.asarray([5, 4, 3, 2, 1, 0, -1, -np.inf], jnp.float32)
    assert reference.candidate_blocks(score, jnp.asarray(7), 2, 2).tolist() == [0, 3]


@partial(jax.jit, static_argnames=("layout", "source", "make_candidates"))
def run(
    query: Array,
    weights: Array,
    pool: Array,
    rows: Rows,
    layout: CacheLayout,
    source: int,
    candidates: Array | None = None,
    make_candidates: bool = False,
) -> tuple[Array, Array | None]:
    return api.index_topk(
        query, weights, pool, rows, layout, source=source, candidates=candidates, make_candidates=make_candidates
    )


class Case:
    """Random integer queries and keys for a step of several sequences."""

    def __init__(self, layout: CacheLayout, source: int, pieces: list[Piece], tile: int, seed: int = 0) -> None:
        self.layout, self.source, self.pieces = layout, source, pieces
        self.rows, self.first = rows_of(pieces, tile=tile)
        generator = np.random.default_rng(seed)
        total = self.rows.num_rows
        self.query = generator.integers(-2, 3, (total, HEADS, DIM)).astype(np.float32)
        self.weights = generator.integers(-2, 3, (total, HEADS)).astype(np.float32)
        self.pool = generator.integers(-2, 3, (layout.num_blocks, layout.rows_per_block, DIM)).astype(np.float32)
        self.ratio = layout.config.kv_source_ratios[source]

    def run(self, **options: object) -> tuple[np.ndarray, np.ndarray | None]:
        chosen, blocks = run(
            self.query,
            self.weights,
            self.pool,
            self.rows,
            self.layout,
            self.source,
            **options,  # type: ignore[arg-type]
        )
        return np.asarray(chosen), None if blocks is None else np.asarray(blocks)

    def scores(self) -> dict[int, tuple[np.ndarray, int]]:
        """row -> (score of every entry that the block table holds, -inf where unreachable; reachable entries)."""
        out = {}
        for piece, first in zip(self.pieces, self.first):
            capacity = len(piece.blocks) * self.layout.block_size // self.ratio
            keys = np.stack([self.pool[page_of(self.layout, self.source, piece.blocks, e)] for e in range(capacity)])
            for offset, position in enumerate(piece.positions):
                row, reachable = first + offset, (position + 1) // self.ratio
                score = (self.weights[row][:, None] * np.maximum(self.query[row] @ keys.T, 0)).sum(0)
                out[row] = np.where(np.arange(capacity) < reachable, score, -np.inf), reachable
        return out


PREFILL = [Piece(0, 11, 1, (7, 2, 9, 4)), Piece(37, 20, 0, (3, 11, 0, 8))]
DECODE = [Piece(61, 1, 1, (7, 2, 9, 4)), Piece(0, 1, 2, (5, 6, 1, 10)), Piece(30, 1, 0, (3, 11, 0, 8))]
STEPS = {"prefill": (PREFILL, 8), "decode": (DECODE, 1)}


@pytest.mark.parametrize("source", [0, 2])
@pytest.mark.parametrize("step", STEPS)
def test_selection_equals_brute_force(step: str, source: int) -> None:
    """Ratios 2 and 1, several sequences, blocks in no order, queries at which nothing or little is reachable."""
    case = Case(small_layout(index_topk=6), source, *STEPS[step])
    chosen, blocks = case.run()
    assert blocks is None
    for row, (score, _) in case.scores().items():
        assert chosen[row].tolist() == best(score, 6), row


@pytest.mark.parametrize("step", STEPS)
def test_candidates_equal_brute_force(step: str) -> None:
    """The source's own choice is not masked by the candidates that it makes (numerics 8.7)."""
    case = Case(small_layout(index_topk=6, candidate_topk_blocks=5, candidate_block_size=4), 2, *STEPS[step])
    chosen, blocks = case.run(make_candidates=True)
    assert blocks is not None
    for row, (score, reachable) in case.scores().items():
        assert chosen[row].tolist() == best(score, 6)
        assert blocks[row].tolist() == best_blocks(score, reachable, 4, 5)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("top_k", [6, 30])
def test_choosing_inside_candidates_equals_a_masked_scan(step: str, top_k: int) -> None:
    """Candidates of another layer's scores. top_k 30 > 5 * 4: the pool is under-filled and the rest is -1."""
    case = Case(small_layout(index_topk=top_k, candidate_topk_blocks=5, candidate_block_size=4), 2, *STEPS[step])
    other = Case(case.layout, 2, case.pieces, STEPS[step][1], seed=1)
    _, blocks = other.run(make_candidates=True)
    chosen, made = case.run(candidates=jnp.asarray(blocks))
    assert made is None and blocks is not None
    differ = 0
    for row, (score, _) in case.scores().items():
        inside = np.isin(np.arange(len(score)) // 4, blocks[row])
        assert chosen[row].tolist() == best(np.where(inside, score, -np.inf), top_k), row
        differ += best(score, top_k) != best(np.where(inside, score, -np.inf), top_k)
    assert differ, "the filter changes something"


def test_candidates_that_cover_everything_are_the_identity() -> None:
    layout = small_layout(index_topk=6, candidate_topk_blocks=16, candidate_block_size=4)
    case = Case(layout, 2, PREFILL, 8)
    nothing = jnp.full((case.rows.num_rows, 16), -1, jnp.int32)
    np.testing.assert_array_equal(case.run(candidates=nothing)[0], case.run()[0])


def test_nothing_to_choose_takes_all_that_is_reachable() -> None:
    """When the table holds no more than top-k entries they are taken unscored (numerics 8.6)."""
    case = Case(small_layout(index_topk=70, candidate_topk_blocks=16, candidate_block_size=4), 2, PREFILL, 8)
    case.query[:] = np.nan
    chosen, _ = case.run(make_candidates=True)
    for row, (_, reachable) in case.scores().items():
        assert chosen[row].tolist() == [*range(reachable), *[-1] * (70 - reachable)]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("budget", [1, 40_000])
def test_batches_of_tiles_equal_one_batch(step: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of one byte runs tile after tile, another a few at a time."""
    layout = small_layout(index_topk=6, candidate_topk_blocks=5, candidate_block_size=4)
    case = Case(layout, 2, *STEPS[step], seed=budget)
    chosen, blocks = case.run(make_candidates=True)
    inside, _ = case.run(candidates=jnp.asarray(blocks))
    monkeypatch.setattr(tiling, "TEMPORARY_BYTES", budget)
    jax.clear_caches()
    again, blocks_again = case.run(make_candidates=True)
    np.testing.assert_array_equal(again, chosen)
    np.testing.assert_array_equal(blocks_again, blocks)
    np.testing.assert_array_equal(case.run(candidates=jnp.asarray(blocks))[0], inside)
    jax.clear_caches()


def test_map_tiles_keeps_to_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven tiles of 10 bytes: at once under 100 bytes, in batches of two under 20."""
    seen = []

    def fn(x: Array) -> Array:
        return x * 2

    for budget, loops in ((100, 0), (20, 1), (1, 1)):
        monkeypatch.setattr(tiling, "TEMPORARY_BYTES", budget)
        jaxpr = str(jax.make_jaxpr(lambda x: tiling.map_tiles(fn, x, 10))(jnp.arange(7)))
        assert jaxpr.count("scan[") == loops
        seen.append(tiling.map_tiles(fn, jnp.arange(7), 10).tolist())
    assert seen == [[0, 2, 4, 6, 8, 10, 12]] * 3
