"""Pooling across any seams, and the places where rings and pages are written."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array
from paged import Piece, page_of, rows_of, small_layout

from di_jax.model.rows import Rows
from kernels_pallas.compress_store import api, reference

DIM, TILE, DRAFT = 6, 8, 5
BLOCKS = ((7, 2, 9, 4), (3, 11, 0, 8))


@partial(jax.jit, static_argnames="ratio")
def pool_step(pair: Array, ring: Array, rows: Rows, ratio: int) -> tuple[tuple[Array, ...], Array]:
    """One step of a pooled source: the groups that it completes, and the ring after it."""
    return reference.pool_groups(pair, ring[0], rows, ratio), reference.store_pairs(ring, 0, pair, rows)


def whole(pairs: np.ndarray, ratio: int) -> np.ndarray:
    """[groups, DIM] softmax pooling of complete groups in float64. pairs [T, 2, DIM] (gate, latent)."""
    groups = pairs[: len(pairs) // ratio * ratio].reshape(-1, ratio, 2, DIM).astype(np.float64)
    gate = np.exp(groups[:, :, 0] - groups[:, :, 0].max(axis=1, keepdims=True))
    return (gate / gate.sum(axis=1, keepdims=True) * groups[:, :, 1]).sum(axis=1)


class Pooler:
    """Two sequences that run side by side, each at its own cuts."""

    def __init__(self, ratio: int, lengths: tuple[int, int], seed: int = 0) -> None:
        self.ratio = ratio
        generator = np.random.default_rng(seed)
        self.pairs = [generator.normal(size=(n, 2, DIM)).astype(np.float32) * 2 for n in lengths]
        self.ring = jnp.asarray(generator.normal(size=(1, 4, ratio + DRAFT, 2, DIM)), jnp.float32)  # not empty
        self.made: list[dict[int, np.ndarray]] = [{}, {}]
        self.at = [0, 0]

    def step(self, counts: tuple[int, int], tile: int) -> None:
        counts = tuple(min(n, len(p) - a) for n, p, a in zip(counts, self.pairs, self.at))  # type: ignore[assignment]
        live = [i for i in (0, 1) if counts[i]]
        if not live:
            return
        # A step always has the same shape: a sequence that is done contributes a piece of no rows.
        pieces = [Piece(self.at[i], counts[i], 3 - i, BLOCKS[i]) for i in live]
        used = sum(-(-counts[i] // tile) for i in live)
        rows, first = rows_of(pieces, tile=tile, padding_tiles=(6 if tile > 1 else 3) - used)
        pair = np.full((rows.num_rows, 2, DIM), 50, np.float32)
        for i, row in zip(live, first):
            pair[row : row + counts[i]] = self.pairs[i][self.at[i] : self.at[i] + counts[i]]
        (pooled, last, entry, emits), self.ring = pool_step(pair, self.ring, rows, self.ratio)
        owner = {row: i for i, f in zip(live, first) for row in range(f, f + counts[i])}
        for value, row, number in zip(*(np.asarray(a)[np.asarray(emits)] for a in (pooled, last, entry)), strict=True):
            made = self.made[owner[int(row)]]
            assert int(number) not in made, "a group completes once"
            made[int(number)] = value
        self.at = [a + n for a, n in zip(self.at, counts)]

    def check(self) -> None:
        for made, pairs in zip(self.made, self.pairs):
            expected = whole(pairs, self.ratio)
            assert sorted(made) == list(range(len(expected)))
            for number, value in made.items():
                np.testing.assert_allclose(value, expected[number], rtol=0, atol=1e-5)


@pytest.mark.parametrize("ratio", [2, 3, 4])
@settings(max_examples=25)
@given(
    lengths=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    cuts=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 24)), min_size=1, max_size=8),
    seed=st.integers(0, 99),
)
def test_groups_across_any_seams(ratio: int, lengths: tuple[int, int], cuts: list[tuple[int, int]], seed: int) -> None:
    """An open group waits in the ring for its last token, whatever else ran in the slot before."""
    pooler = Pooler(ratio, lengths, seed)
    for counts in cuts:
        pooler.step(counts, 1 if max(counts) == 1 else TILE)
    while pooler.at != list(lengths):
        pooler.step((24, 24), TILE)
    pooler.check()


@pytest.mark.parametrize("ratio", [2, 4])
def test_groups_token_by_token(ratio: int) -> None:
    pooler = Pooler(ratio, (19, 13))
    for _ in range(19):
        pooler.step((1, 1), 1)
    pooler.check()


@pytest.mark.parametrize("ratio", [2, 3, 4])
@pytest.mark.parametrize("start", range(5))
def test_a_tile_does_its_share_of_the_work(ratio: int, start: int) -> None:
    """ceil(tile / ratio) rows a tile, each emitting exactly at the last token of a group."""
    rows, _ = rows_of([Piece(start, 13, 0, BLOCKS[0])], tile=TILE)
    row, position, emits = (np.asarray(a) for a in reference.group_ends(rows, ratio))
    assert len(row) == rows.num_tiles * -(-TILE // ratio)
    ends = [t for t in range(start, start + 13) if t % ratio == ratio - 1]
    assert position[emits].tolist() == ends
    assert row[emits].tolist() == [t - start for t in ends]


@pytest.mark.parametrize("window_start", [0, 11, 35, 60])
@pytest.mark.parametrize("count", [3, 22, 40])
def test_window_rows_land_at_position_mod_ring(count: int, window_start: int) -> None:
    """A chunk longer than the ring stores its tail, from the first row on that a window may hold; other slots, layers
    and older rows stay as they are."""
    layout = small_layout()
    ring_rows, start = layout.config.window_ring, 9
    before = np.random.default_rng(0).normal(size=(2, 4, ring_rows, DIM)).astype(np.float32)
    rows, _ = rows_of([Piece(start, count, 2, BLOCKS[0], window_start)], tile=TILE)
    kv = np.random.default_rng(1).normal(size=(rows.num_rows, DIM)).astype(np.float32)
    after = np.asarray(api.store_window(jnp.asarray(before), 1, jnp.asarray(kv), rows, layout))
    expected = before.copy()
    for row, position in enumerate(range(start, start + count)):
        if position >= window_start:
            expected[1, 2, position % ring_rows] = kv[row]
    np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("cached", [0, 16])
@pytest.mark.parametrize("source", [0, 1, 2])
def test_entries_land_in_their_pages(source: int, cached: int) -> None:
    """Those that were there before a prefix hit stay as they are."""
    layout = small_layout()
    ratio = layout.config.kv_source_ratios[source]
    pieces = [Piece(5, 30, 0, BLOCKS[0], cached=cached), Piece(0, 17, 1, BLOCKS[1])]
    rows, first = rows_of(pieces, tile=TILE)
    before = np.random.default_rng(0).normal(size=(layout.num_blocks, layout.rows_per_block, DIM)).astype(np.float32)
    row, position, emits = reference.group_ends(rows, ratio)
    record = np.random.default_rng(1).normal(size=(len(row), DIM)).astype(np.float32)
    after = reference.write_entries(
        jnp.asarray(before), source, jnp.asarray(record), row, position // ratio, emits, rows, layout
    )
    expected, where = before.copy(), {int(r): i for i, r in enumerate(row) if emits[i]}
    for piece, start in zip(pieces, first):
        for offset, t in enumerate(piece.positions):
            if t % ratio == ratio - 1 and t >= piece.cached:
                expected[page_of(layout, source, piece.blocks, t // ratio)] = record[where[start + offset]]
    np.testing.assert_array_equal(after, expected)


def test_padding_stores_nothing() -> None:
    layout = small_layout()
    rows, _ = rows_of([Piece(4, 0, 0, BLOCKS[0])], tile=TILE, padding_tiles=2)
    ring = jnp.ones((1, 4, layout.config.window_ring, DIM))
    np.testing.assert_array_equal(api.store_window(ring, 0, jnp.zeros((rows.num_rows, DIM)), rows, layout), ring)
    pairs = jnp.ones((1, 4, 7, 2, DIM))
    np.testing.assert_array_equal(reference.store_pairs(pairs, 0, jnp.zeros((rows.num_rows, 2, DIM)), rows), pairs)
    assert not np.asarray(reference.group_ends(rows, 2)[2]).any()
