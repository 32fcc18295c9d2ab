"""The choice of the real kernels on a Hopper GPU against the reference and against plain sorting, in the released
shapes: contexts of up to 20,480 entries, of which 16,384 are candidates."""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from on_hopper import (
    CONFIG,
    NEEDS_HOPPER,
    POISON,
    QUANTIZED,
    assert_same_bits,
    host_rows,
    on_host,
    poison_outputs,
    released_layout,
)
from paged import Piece, page_of

from di_jax.model.cache import CacheLayout
from di_jax.model.quantization import fake_quantize
from di_jax.model.rows import Rows
from kernels_pallas.hopper import KERNEL
from kernels_pallas.index_topk import api

pytestmark = NEEDS_HOPPER

PAGES = 160
TOP_K, SIZE, TOP_BLOCKS = CONFIG.index_topk, CONFIG.candidate_block_size, CONFIG.candidate_topk_blocks
PLAIN = CONFIG.kv_source_ratios.index(1)
POOLED = 1
HEADS = CONFIG.index_n_heads
LARGE = 0x7F  # a poison of finite values: 6 and -6, larger than those of all keys


@partial(jax.jit, static_argnames=("layout", "source", "make_candidates", "implementation"))
def choose(
    query: Array,
    weights: Array,
    pool: Array,
    rows: Rows,
    candidates: Array | None,
    layout: CacheLayout,
    source: int,
    make_candidates: bool,
    implementation: str,
) -> tuple[Array, Array | None]:
    return api.index_topk(
        query,
        weights,
        pool,
        rows,
        layout,
        source=source,
        candidates=candidates,
        make_candidates=make_candidates,
        implementation=implementation,
    )


# Entries of ratio 1: one key; around a group of 8 and a unit of 128 keys; less than, as many as and more than are
# chosen; around the number of candidates; and a full table.
CONTEXTS = (1, 2, 8, 127, 128, 301, 511, 512, 513, 1001, 6000, 12_346, 16_384, 16_385, 16_391, 20_001, 20_480)
DECODE = ([c - 1 for c in CONTEXTS], [1] * len(CONTEXTS), 1)
# Chunks of odd lengths, the first of a sequence, one across the number of candidates, one at the end of the table.
PREFILL = ([0, 505, 16_370, 20_419], [7, 33, 40, 61], 16)


@dataclasses.dataclass
class Case:
    """A step of sequences that share no page. What lies behind their contexts, and other sources' keys, is `poison`.

    exact: scores are small multiples of 1/4, exact in any order of additions, and often equal; some rows have a query
    of zeros, whose scores are 0 and -0. Else any values.
    """

    starts: list[int]
    counts: list[int]
    tile: int
    source: int = PLAIN
    exact: bool = True
    poison: int = POISON

    def __post_init__(self) -> None:
        generator = np.random.default_rng(len(self.starts))
        self.ratio = CONFIG.kv_source_ratios[self.source]
        pages = [-(-(start + count) // 128) for start, count in zip(self.starts, self.counts, strict=True)]
        own = iter((1 + generator.permutation(sum(pages))).tolist())  # of block 0 nothing is used
        self.layout = released_layout(num_blocks=1 + sum(pages), num_slots=len(pages))
        tables = [[next(own) for _ in range(n)] + [0] * (PAGES - n) for n in pages]
        each = zip(self.starts, self.counts, tables, strict=True)
        self.pieces = [Piece(start, count, slot, table) for slot, (start, count, table) in enumerate(each)]
        self.rows, self.first = host_rows(self.pieces, tile=self.tile)
        self.valid = np.asarray(self.rows.valid)
        total = self.rows.num_rows

        def numbers(*shape: int, largest: int) -> np.ndarray:
            drawn = generator.integers(-largest, largest + 1, shape) if self.exact else generator.normal(size=shape)
            return drawn.astype(np.float32)

        self.queries = numbers(2, total, HEADS, 128, largest=3)
        if self.exact:
            self.queries[0, [3, total // 2]] = 0
        self.weights = numbers(total, HEADS, largest=2)
        self.weights[3] = -np.abs(self.weights[3]) - 1
        reachable = [(piece.start + piece.count) // self.ratio for piece in self.pieces]
        if self.exact:  # e2m1 codes of -1, 0 and 1, times 1/2, 1 or 2
            code = generator.choice(np.array([0, 2, 10], np.uint8), (sum(reachable), 128))
            scale = generator.integers(126, 129, (sum(reachable), 4), np.uint8)
            keys = np.concatenate([code[:, ::2] | code[:, 1::2] << 4, scale], axis=1)
        else:
            keys = generator.normal(size=(sum(reachable), 128)).astype(np.float32)
        with on_host():
            self.query = np.asarray(fake_quantize(QUANTIZED.index, jnp.asarray(self.queries, jnp.bfloat16)))
            keys = keys if self.exact else np.asarray(QUANTIZED.index.encode(jnp.asarray(keys)))
            values = np.asarray(QUANTIZED.index.decode(jnp.asarray(keys)))
        # Of each sequence: records [reachable, 68], and what they hold.
        self.keys, self.values = (np.split(x, np.cumsum(reachable)[:-1]) for x in (keys, values))

    def pool(self) -> np.ndarray:
        pool = np.full((self.layout.num_blocks, self.layout.rows_per_block, 68), self.poison, np.uint8)
        per_block = self.layout.entries_per_block[self.source]
        for piece, keys in zip(self.pieces, self.keys, strict=True):
            for entry in range(0, len(keys), per_block):
                block, row = page_of(self.layout, self.source, piece.blocks, entry)
                part = keys[entry : entry + per_block]
                pool[block, row : row + len(part)] = part
        return pool

    def run(
        self,
        implementation: str,
        *,
        query: int = 0,
        candidates: np.ndarray | None = None,
        make_candidates: bool = False,
        pool: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Choice and candidates of all rows; those that are not valid have no meaning, here -1."""
        arguments = (
            jnp.asarray(self.query[query]),
            jnp.asarray(self.weights),
            jnp.asarray(self.pool() if pool is None else pool),
            self.rows,
            None if candidates is None else jnp.asarray(candidates),
        )
        results = [jax.ShapeDtypeStruct((self.rows.num_rows, n), jnp.dtype(jnp.int32)) for n in (TOP_K, TOP_BLOCKS)]
        poison_outputs(results)
        options = {"layout": self.layout, "source": self.source, "make_candidates": make_candidates}
        chosen, made = choose(*arguments, **options, implementation=implementation)  # type: ignore[arg-type]
        assert chosen.shape == results[0].shape and chosen.dtype == jnp.int32
        assert made is None or (made.shape == results[1].shape and made.dtype == jnp.int32)
        valid = self.valid[:, None]
        return np.where(valid, chosen, -1), None if made is None else np.where(valid, made, -1)

    def scores(self, number: int = 0) -> dict[int, np.ndarray]:
        """float64 scores of what each valid row reaches."""
        found, query = {}, self.query[number].astype(np.float64)
        for piece, first, values in zip(self.pieces, self.first, self.values, strict=True):
            for row, position in enumerate(piece.positions, first):
                reached = values[: (position + 1) // self.ratio].astype(np.float64)
                found[row] = self.weights[row].astype(np.float64) @ np.maximum(query[row] @ reached.T, 0)
        return found


def best(score: np.ndarray, k: int) -> list[int]:
    """The k best, the lower of equal ones first, ascending, -1 padded."""
    chosen = sorted(np.argsort(-score, kind="stable")[:k].tolist())
    return chosen + [-1] * (k - len(chosen))


def best_blocks(score: np.ndarray) -> list[int]:
    """Blocks of 8 by their best entry; that of the last entry always among them."""
    block = np.array([score[at : at + SIZE].max() for at in range(0, len(score), SIZE)])
    block[len(block) - 1 :] = np.inf
    return best(block, TOP_BLOCKS)


def inside(score: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Scores of what is in `blocks`, -inf elsewhere."""
    kept = np.isin(np.arange(len(score)) // SIZE, blocks[blocks >= 0])
    return np.where(kept, score, -np.inf)


@cache
def case(step: str, source: int = PLAIN, exact: bool = True) -> Case:
    return Case(*{"decode": DECODE, "prefill": PREFILL}[step], source=source, exact=exact)


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_candidates_are_made_and_chosen_from(step: str) -> None:
    """Ties and all: the source of candidates, and a layer that chooses inside them with another query."""
    c = case(step)
    chosen, blocks = c.run(KERNEL, make_candidates=True)
    expected, expected_blocks = c.run("reference", make_candidates=True)
    assert blocks is not None and expected_blocks is not None
    np.testing.assert_array_equal(chosen[c.valid], expected[c.valid])
    np.testing.assert_array_equal(blocks[c.valid], expected_blocks[c.valid])
    for row, score in c.scores().items():
        assert chosen[row].tolist() == best(score, TOP_K)
        assert blocks[row].tolist() == best_blocks(score)

    again, none = c.run(KERNEL, query=1, candidates=blocks)
    expected, _ = c.run("reference", query=1, candidates=blocks)
    assert none is None
    np.testing.assert_array_equal(again[c.valid], expected[c.valid])
    free = 0
    for row, score in c.scores(1).items():
        kept = inside(score, blocks[row])
        assert again[row].tolist() == best(kept, TOP_K)
        free += again[row].tolist() != best(score, TOP_K)
    assert free, "the candidates change something"

    assert_same_bits(c.run(KERNEL, make_candidates=True), (chosen, blocks))
    assert_same_bits(c.run(KERNEL, query=1, candidates=blocks), (again, None))


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_a_pooled_source(step: str) -> None:
    """Ratio 2: half as many entries, none at the first position; fewer than the candidates, which filter nothing."""
    c = case(step, POOLED)
    chosen, _ = c.run(KERNEL)
    expected, _ = c.run("reference")
    np.testing.assert_array_equal(chosen[c.valid], expected[c.valid])
    assert_same_bits(dataclasses.replace(c, poison=LARGE).run(KERNEL), (chosen, None))
    scores = c.scores()
    assert not len(scores[0]) and (chosen[0] == -1).all()
    for row, score in scores.items():
        assert chosen[row].tolist() == best(score, TOP_K)


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_any_values(step: str) -> None:
    """Nothing that is left out scores higher than what is chosen, but for the rounding of sums of 32 heads."""
    c = case(step, exact=False)
    chosen, blocks = c.run(KERNEL, make_candidates=True)
    expected, _ = c.run("reference", make_candidates=True)
    differing = 0
    for row, score in c.scores().items():
        mine = chosen[row][chosen[row] >= 0]
        assert len(mine) == min(TOP_K, len(score)) and (np.diff(mine) > 0).all() and mine[-1] < len(score)
        left = np.delete(score, mine)
        if len(left):
            assert score[mine].min() >= left.max() - 2e-6 * np.abs(score).max()
        differing += len(np.setdiff1d(mine, expected[row]))
    assert differing <= 1e-3 * chosen[c.valid].size
    assert blocks is not None and blocks[c.valid].max() < PAGES * 128 // SIZE


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_keys_behind_the_context_count_nowhere(step: str) -> None:
    """Records of NaN and of the largest values, in the same units of keys and in blocks of which nothing is reached.
    Control: one key that is."""
    c = case(step)
    chosen, blocks = c.run(KERNEL, make_candidates=True)
    other = dataclasses.replace(c, poison=LARGE)
    assert_same_bits(other.run(KERNEL, make_candidates=True), (chosen, blocks))
    assert_same_bits(other.run(KERNEL, query=1, candidates=blocks), c.run(KERNEL, query=1, candidates=blocks))

    row, last, pool = int(np.flatnonzero(c.valid)[-1]), c.pieces[-1], c.pool()
    missing = next(entry for entry in range(TOP_K) if entry not in chosen[row])
    code = np.where(c.queries[0, row, np.argmax(c.weights[row])] < 0, 15, 7)  # -6 or 6, along the head that counts most
    key = np.concatenate([code[::2] | code[1::2] << 4, [132] * 4])
    pool[page_of(c.layout, c.source, last.blocks, missing)] = key
    moved, _ = c.run(KERNEL, make_candidates=True, pool=pool)
    assert missing in moved[row]
    assert_same_bits(moved[: c.first[-1]], chosen[: c.first[-1]])
