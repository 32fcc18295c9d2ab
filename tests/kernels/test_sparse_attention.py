"""Window and selected entries, sink and inverse rope against dense float64 attention over the same keys."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array
from paged import PLAIN, Piece, page_of, rows_of, small_layout

from di_jax.model.cache import CacheLayout
from di_jax.model.quantization import CacheFormats
from di_jax.model.rope import inverse_frequencies, rotation
from di_jax.model.rows import Rows
from kernels_pallas import tiling
from kernels_pallas.sparse_attention import api

HEADS, DIM, TOP_K, SCALE = 4, 64, 6, 0.3
LAYOUT = small_layout()
CONFIG = LAYOUT.config
WINDOW, RING, ROPE = CONFIG.sliding_window, CONFIG.window_ring, CONFIG.qk_rope_head_dim


@partial(jax.jit, static_argnames=("layout", "source", "implementation"))
def run(
    query: Array,
    kv: Array,
    ring: Array,
    pool: Array | None,
    selected: Array | None,
    sink: Array,
    rows: Rows,
    layout: CacheLayout,
    source: int,
    implementation: str = "reference",
) -> Array:
    cos_sin = rotation(layout.config, True, rows.position)
    options = {"source": source, "scale": SCALE}
    # The middle one of three layers; what others store is poison.
    stacks = [
        jnp.stack([jnp.full_like(x, jnp.nan if x.dtype == jnp.float32 else 255), x, x[::-1]]) for x in (ring, sink)
    ]
    return api.sparse_attention(
        jnp.int32(1),
        query,
        kv,
        stacks[0],
        pool,
        selected,
        stacks[1],
        cos_sin,
        rows,
        layout,
        **options,
        implementation=implementation,
    )


class Case:
    """Random keys: histories in the rings, this step's rows, and pages of entries; some of them selected."""

    def __init__(self, pieces: list[Piece], tile: int, *, source: int = 2, formats: CacheFormats = PLAIN) -> None:
        self.layout, self.source, self.pieces = small_layout(formats), source, pieces
        self.rows, self.first = rows_of(pieces, tile=tile)
        generator = np.random.default_rng(len(pieces) * 100 + tile + pieces[0].start)
        total, ratio = self.rows.num_rows, CONFIG.kv_source_ratios[source]

        def stored(codec: object, *shape: int) -> tuple[np.ndarray, np.ndarray]:
            record = codec.encode(jnp.asarray(generator.normal(size=shape), jnp.float32))  # type: ignore[attr-defined]
            return np.array(record), np.array(codec.decode(record), np.float64)  # type: ignore[attr-defined]

        self.query = generator.normal(size=(total, HEADS, DIM)).astype(np.float32)
        self.sink = generator.normal(size=HEADS).astype(np.float32)
        self.pool, self.entries = stored(formats.compressed, self.layout.num_blocks, self.layout.rows_per_block, DIM)
        self.ring, _ = stored(formats.window, self.layout.num_slots, RING, DIM)  # left by other sequences
        self.kv = np.zeros((total, DIM), np.float32)
        self.selected = np.full((total, TOP_K), -1, np.int32)
        self.history: list[np.ndarray] = []  # [positions, DIM] of each piece, this step's rows included
        for piece, first in zip(pieces, self.first):
            record, values = stored(formats.window, piece.start + piece.count, DIM)
            self.history.append(values)
            self.kv[first : first + piece.count] = values[piece.start :]
            # Decode stores before it reads; prefill keeps its own rows out of the ring until it has read.
            last = piece.start + piece.count if tile == 1 else piece.start
            for position in range(max(0, last - RING), last):
                self.ring[piece.slot, position % RING] = record[position]
            for row, position in enumerate(piece.positions, first):
                reachable = (position + 1) // ratio
                chosen = np.sort(generator.permutation(reachable)[: generator.integers(0, TOP_K + 1)])
                self.selected[row, : len(chosen)] = chosen

    def run(self, *, window_only: bool = False, implementation: str = "reference") -> np.ndarray:
        pool, selected = (None, None) if window_only else (self.pool, self.selected)
        source = -1 if window_only else self.source
        return np.asarray(
            run(
                self.query,
                self.kv,
                self.ring,
                pool,
                selected,
                self.sink,
                self.rows,
                self.layout,
                source,
                implementation,
            )
        )

    def expected(self, *, window_only: bool = False, window: int = WINDOW) -> dict[int, np.ndarray]:
        """Row -> [H, DIM]."""
        out = {}
        frequency = inverse_frequencies(CONFIG, True).astype(np.float64)
        for piece, first, history in zip(self.pieces, self.first, self.history):
            for row, position in enumerate(piece.positions, first):
                keys = list(history[max(piece.window_start, position - window + 1) : position + 1])
                if not window_only:
                    for entry in self.selected[row][self.selected[row] >= 0].tolist():
                        keys.append(self.entries[page_of(self.layout, self.source, piece.blocks, entry)])
                k = np.stack(keys) if keys else np.zeros((0, DIM))
                logit = self.query[row].astype(np.float64) @ k.T * SCALE
                weight = np.exp(logit)
                value = weight @ k / (weight.sum(-1, keepdims=True) + np.exp(self.sink.astype(np.float64))[:, None])
                pair = value[:, -ROPE:].reshape(HEADS, -1, 2)
                turned = (pair[..., 0] + 1j * pair[..., 1]) * np.exp(-1j * position * frequency)
                value[:, -ROPE:] = np.stack([turned.real, turned.imag], -1).reshape(HEADS, ROPE)
                out[row] = value
        return out

    def error(self, **options: bool | int) -> float:
        mine = self.run(window_only=bool(options.get("window_only")))
        return max(np.abs(mine[row] - value).max() for row, value in self.expected(**options).items())  # type: ignore[arg-type]


BLOCKS = ((7, 2, 9, 4), (3, 11, 0, 8), (5, 6, 1, 10))
QUANTIZED = CacheFormats.quantized()


def prefill(*starts: int, counts: tuple[int, ...] = (13, 8, 21)) -> list[Piece]:
    return [Piece(s, n, slot, b) for s, n, slot, b in zip(starts, counts, (2, 0, 1), BLOCKS)]


@pytest.mark.parametrize("formats", [PLAIN, QUANTIZED], ids=["plain", "quantized"])
@pytest.mark.parametrize("window_only", [False, True])
@pytest.mark.parametrize("starts", [(0, 0, 0), (5, 15, 16), (17, 22, 43), (1, 40, 23)])
def test_prefill(starts: tuple[int, ...], window_only: bool, formats: CacheFormats) -> None:
    """Seams at any place of the window and the ring; chunks of several tiles with a part of one at the end."""
    assert Case(prefill(*starts), 8, formats=formats).error(window_only=window_only) < 1e-5


@pytest.mark.parametrize("formats", [PLAIN, QUANTIZED], ids=["plain", "quantized"])
@pytest.mark.parametrize("window_only", [False, True])
@pytest.mark.parametrize("starts", [(0, 1, 15), (16, 21, 22), (44, 45, 63)])
def test_decode(starts: tuple[int, ...], window_only: bool, formats: CacheFormats) -> None:
    case = Case(prefill(*starts, counts=(1, 1, 1)), 1, formats=formats)
    assert case.error(window_only=window_only) < 1e-5


@pytest.mark.parametrize("source", [0, 1])
def test_entries_come_from_the_source(source: int) -> None:
    """Ratio 2: the first and the second source of a block lie side by side."""
    case = Case(prefill(30, 31, 0), 8, source=source)
    assert case.error() < 1e-5
    case.source = 1 - source
    assert np.abs(case.run() - Case(prefill(30, 31, 0), 8, source=source).run()).max() > 0.01


@settings(max_examples=15)
@given(st.tuples(*[st.integers(0, 40)] * 3), st.tuples(*[st.integers(1, 8)] * 3))
def test_any_seams(starts: tuple[int, ...], counts: tuple[int, ...]) -> None:
    assert Case(prefill(*starts, counts=counts), 8).error() < 1e-5


@pytest.mark.parametrize("window_only", [False, True])
@pytest.mark.parametrize("bounds", [(0, 33, 30), (17, 40, 51), (30, 48, 64)])
def test_windows_end_at_their_start(bounds: tuple[int, ...], window_only: bool) -> None:
    """In the history, at the first row or inside the chunk. Rows below it see the selected entries and the sink alone,
    and no row reads what the ring holds there. Control: a bound that is one row off."""
    pieces = [dataclasses.replace(p, window_start=b) for p, b in zip(prefill(17, 40, 43), bounds)]
    case = Case(pieces, 8)
    for piece in pieces:
        for position in range(max(0, piece.start - RING), min(piece.start, piece.window_start)):
            case.ring[piece.slot, position % RING] = np.nan
    assert case.error(window_only=window_only) < 1e-5
    case.pieces = [dataclasses.replace(p, window_start=max(0, p.window_start - 1)) for p in pieces]
    assert case.error(window_only=window_only) > 1e-3


@pytest.mark.parametrize("formats", [PLAIN, QUANTIZED], ids=["plain", "quantized"])
@pytest.mark.parametrize("tile", [8, 1])
def test_what_blocks_hold_beside_the_selected_entries_counts_nowhere(tile: int, formats: CacheFormats) -> None:
    """A block that is given anew holds what its last owner left. For rows that select less than top-k entries the first
    entry is read in their place, which may not exist yet: 0 * NaN would be NaN. Control: a selected one."""
    counts = (13, 8, 21) if tile > 1 else (1, 1, 1)
    case = Case(prefill(0, 1, 40, counts=counts), tile, formats=formats)
    first = case.first[2]
    case.selected[case.selected[:, 0] == 0, 0] = -1  # nobody chose the first entry
    case.selected[first] = [20, 21, 22, *[-1] * (TOP_K - 3)]
    want = case.expected()
    used = {
        page_of(case.layout, case.source, piece.blocks, entry)
        for piece, first in zip(case.pieces, case.first)
        for row in range(first, first + piece.count)
        for entry in case.selected[row][case.selected[row] >= 0].tolist()
    }
    keep = np.zeros(case.pool.shape[:2], bool)
    keep[tuple(np.array(sorted(used)).T)] = True
    poison = np.nan if np.issubdtype(case.pool.dtype, np.floating) else np.iinfo(case.pool.dtype).max
    case.pool[~keep] = poison
    assert np.isnan(np.asarray(formats.compressed.decode(jnp.asarray(case.pool[~keep][:1])))).any()
    got = case.run()
    assert max(np.abs(got[row] - value).max() for row, value in want.items()) < 1e-5
    page = page_of(case.layout, case.source, case.pieces[2].blocks, 21)
    case.pool[page] = poison
    assert np.isnan(case.run()[first]).any()


def test_a_window_that_is_one_row_off_is_seen() -> None:
    """Control: the oracle with the window one row shorter or longer."""
    case = Case(prefill(20, 33, 40), 8)
    assert case.error(window=WINDOW - 1) > 1e-3 and case.error(window=WINDOW + 1) > 1e-3


def test_entries_inside_the_window_count_twice() -> None:
    """There is no de-duplication (numerics 6.3): with equal keys the two sets only add weight against the sink."""
    case = Case([Piece(7, 1, 0, BLOCKS[0])], 1)
    case.ring[0, :8] = 1.0
    case.pool[:], case.entries[:], case.history[0][:] = 1.0, 1.0, 1.0
    case.kv[:] = 1.0
    case.selected[0] = np.arange(TOP_K)
    twice, once = case.expected()[0], case.expected(window_only=True)[0]
    np.testing.assert_allclose(case.run()[0], twice, rtol=0, atol=1e-5)
    assert (np.abs(twice[:, :-ROPE]) > np.abs(once[:, :-ROPE])).all()


def test_the_sink_only_enlarges_the_denominator() -> None:
    """A huge sink empties the output, a tiny one leaves a plain softmax; neither overflows."""
    case = Case(prefill(20, 33, 40), 8)
    rows = list(case.expected())
    case.sink[:] = 200
    assert np.abs(case.run()[rows]).max() < 1e-30
    case.sink[:] = -200
    assert np.isfinite(case.run()[rows]).all() and case.error() < 1e-5


def test_large_logits_do_not_overflow() -> None:
    case = Case(prefill(20, 33, 40), 8)
    case.query *= 1e3
    assert np.isfinite(case.run()).all()


@pytest.mark.parametrize("budget", [1, 60_000])
def test_batches_of_tiles_equal_one_batch(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in (Case(prefill(17, 22, 43), 8), Case(prefill(17, 22, 43, counts=(1, 1, 1)), 1)):
        whole = case.run()
        with monkeypatch.context() as patch:
            patch.setattr(tiling, "TEMPORARY_BYTES", budget)
            jax.clear_caches()
            np.testing.assert_allclose(case.run(), whole, rtol=0, atol=1e-5)
        jax.clear_caches()


def test_bfloat16_keeps_the_queries_dtype() -> None:
    case = Case(prefill(20, 33, 40), 8, formats=QUANTIZED)
    out = run(
        jnp.asarray(case.query, jnp.bfloat16),
        jnp.asarray(case.kv, jnp.bfloat16),
        case.ring,
        case.pool,
        case.selected,
        case.sink,
        case.rows,
        case.layout,
        case.source,
    )
    assert out.dtype == jnp.bfloat16
    mine = np.asarray(out, np.float32)
    assert max(np.abs(mine[row] - value).max() for row, value in case.expected().items()) < 0.05
