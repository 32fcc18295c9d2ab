"""The second launch on Hopper: the k best entries of each row, and its candidate blocks, exact for any scores.

One row per block of threads. The k best entries lie in the k best groups of 8, ties to the lower in both, so it
chooses groups, then among their 8 k entries, each time by bisection on the bits of the scores.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.index_topk import lanes, launch

GROUP = 8  # entries of a group, and of a candidate block
SELECT_THREADS = 512
WARPS = SELECT_THREADS // lanes.WARP
NOTHING = -(2**31)  # ordered key of a masked entry
LOWEST = 0x807FFFFF - 2**32 + 1  # ordered key right above -inf
BIN_BITS = 9  # bins of the selection: one of each thread


def ordered(m: Any, real: Any) -> Any:
    """An fp32 -> i32 of the same order; -0, which heads that see nothing sum up to, is 0."""
    bits = m.as_bits(real + 0.0)
    return bits ^ (bits.sign_fill() & 0x7FFFFFFF)


def best_columns(entries: int) -> int:
    """Columns of the array of group maxima: `select` loads four of each thread at once."""
    return -(-entries // GROUP // (4 * SELECT_THREADS)) * 4 * SELECT_THREADS


@dataclasses.dataclass(frozen=True)
class Select:
    """Shapes of a selection. k: entries to choose; blocks: candidate blocks to make, or 0; candidates as in `Scan`."""

    k: int
    entries: int
    candidates: int
    blocks: int

    @property
    def per_thread(self) -> int:
        return best_columns(self.entries) // SELECT_THREADS


def select(m: Any, s: Select, memory: Sequence[Any], shared: dict[str, Any]) -> None:
    """One block: one row of `best` [T, groups] and `score` [T, entries] -> chosen [T, k], blocks [T, s.blocks]."""
    best, score, reachable, candidates, chosen, *blocks = memory
    thread, row = m.thread(), m.block()
    own = s.per_thread
    reach = reachable.load(row)
    groups = best.row(row, best_columns(s.entries))
    start = thread * own
    maxima = [x for i in range(own // 4) for x in groups.load4(start + 4 * i)]
    if s.candidates:
        own_candidates = candidates.row(row, s.candidates)
        last = s.candidates - 1
        usable = [
            ((start + i) < s.candidates) & (own_candidates.load((start + i).at_most(last)) > -1) for i in range(own)
        ]
    else:
        usable = [((start + i) * GROUP) < reach.at_most(s.entries) for i in range(own)]
    keys = [m.select(u, ordered(m, x), m.integer(NOTHING)) for u, x in zip(usable, maxima)]

    picked = shared["picked"]
    m.store_shared(picked + thread * 4, m.integer(-1))
    m.sync()
    for i, take, place in _choose(m, keys, s.k, shared):
        with m.when(take):
            m.store_shared(picked + place * 4, start + i)
    m.sync()
    group = m.load_shared(picked + thread * 4)
    safe = group.at_least(0)
    values = score.row(row, s.entries)
    entries = [x for i in range(2) for x in values.load4(safe * GROUP + 4 * i)]
    found = [m.select(group > -1, ordered(m, x), m.integer(NOTHING)) for x in entries]
    first = (own_candidates.load(safe) if s.candidates else safe) * GROUP
    out = chosen.row(row, s.k)
    _fill(m, out, s.k, thread)
    for i, take, place in _choose(m, found, s.k, shared):
        with m.when(take):
            out.store(place, first + i)
    if s.blocks:
        # The block of the last reachable entry is always kept (numerics 8.7).
        pinned = (reach - 1).sign_fill() | ((reach - 1).at_least(0) >> 3)
        keys = [m.select(pinned.equals(start + i), m.integer(2**31 - 1), key) for i, key in enumerate(keys)]
        out = blocks[0].row(row, s.blocks)
        _fill(m, out, s.blocks, thread)
        for i, take, place in _choose(m, keys, s.blocks, shared):
            with m.when(take):
                out.store(place, start + i)


def _fill(m: Any, out: Any, size: int, thread: Any) -> None:
    for turn in range(-(-size // SELECT_THREADS)):
        at = thread + turn * SELECT_THREADS
        with m.when(at < size):
            out.store(at, m.integer(-1))
    # The barriers of `_choose` order this before the entries.


def _choose(m: Any, keys: list[Any], k: int, shared: Any) -> list[tuple[int, Any, Any]]:
    """(i, taken, place among the taken) of each of the thread's keys; thread after thread is ascending.

    The k largest above -inf, the earlier of equal ones; places ascend with the index.
    """
    thread = m.thread()
    zero, one = m.integer(0), m.integer(1)
    # Of each thread the largest of every `width`: k or more, of which the least is a floor of the k-th largest.
    width = len(keys) // -(-k // SELECT_THREADS)
    heads = [functools.reduce(lambda a, b: a.at_least(b), keys[i : i + width]) for i in range(0, len(keys), width)]
    smallest, largest = (functools.reduce(f, heads) for f in (lambda a, b: a.at_most(b), lambda a, b: a.at_least(b)))
    floor, top = _block_bounds(m, smallest, largest, shared["scratch"])
    floor, top = floor.at_least(LOWEST), top.at_least(LOWEST)
    counts, result = shared["counts"], shared["result"]

    def narrow(carry: list[Any]) -> list[Any]:
        """From the keys in [low, low + span) the bin of the `left`-th largest, one of at most 512."""
        low, span, left, _ = carry
        shift = (m.integer(32 - BIN_BITS) - m.leading_zeros(span - 1)).at_least(0)
        m.store_shared(counts + thread * 4, zero)
        m.sync()
        for key in keys:
            distance = key - low
            m.count_shared(counts + ((distance >> shift) << 2), distance.below(span))
        m.sync()
        number = m.integer(SELECT_THREADS - 1) - thread
        own = m.load_shared(counts + number * 4)
        before, total = _block_scan(m, own, shared["scratch"])
        with m.when((before < left) & ((before + own) >= left)):
            m.store_shared(result, low + (number << shift))
            m.store_shared(result, left - before, 4)
            m.store_shared(result, m.flag(shift.equals(0) | own.equals(left - before)), 8)
        m.sync()
        found, rest, done, _ = m.load_shared4(result)
        # Fewer keys than k, only in the first round: all are taken.
        few = total < left
        return [
            m.select(few, m.integer(LOWEST), found), one << shift, rest, m.select(few | done.equals(1), zero, one),
        ]  # fmt: skip

    low, span = floor, top - floor + 1
    bound, *_ = m.repeat([low, span, m.integer(k), one], lambda c: c[3].equals(1), narrow)
    above = [m.flag(key > bound) for key in keys]
    equal = [m.flag(key.equals(bound)) for key in keys]
    packed = functools.reduce(lambda a, b: a + b, [a + (e << 16) for a, e in zip(above, equal)])
    before, total = _block_scan(m, packed, shared["scratch"])
    need = m.integer(k) - (total & 0xFFFF)
    above_before, equal_before = before & 0xFFFF, before >> 16
    out = []
    for i, key in enumerate(keys):
        take = (key > bound) | (key.equals(bound) & (equal_before < need))
        out.append((i, take, above_before + equal_before.at_most(need)))
        above_before, equal_before = above_before + above[i], equal_before + equal[i]
    return out


def _gather_warps(m: Any, value: Any, address: Any, last_lane: int) -> list[Any]:
    """The value of every warp's lane `last_lane`, in all threads."""
    thread = m.thread()
    with m.when((thread & 31).equals(last_lane)):
        m.store_shared(address + (thread >> 5) * 4, value)
    m.sync()
    return [x for i in range(WARPS // 4) for x in m.load_shared4(address, 16 * i)]


def _block_bounds(m: Any, smallest: Any, largest: Any, address: Any) -> tuple[Any, Any]:
    """Least of `smallest` and largest of `largest` over the block's threads."""
    thread = m.thread()
    smallest, largest = m.warp_min(smallest), m.warp_max(largest)
    m.sync()  # of what was in `address` before
    with m.when((thread & 31).equals(0)):
        m.store_shared(address + (thread >> 5) * 4, smallest)
        m.store_shared(address + (thread >> 5) * 4, largest, 4 * WARPS)
    m.sync()
    read = [m.load_shared4(address, 16 * i) for i in range(WARPS // 2)]
    half = WARPS // 4
    low = functools.reduce(lambda a, b: a.at_most(b), [x for part in read[:half] for x in part])
    high = functools.reduce(lambda a, b: a.at_least(b), [x for part in read[half:] for x in part])
    return low, high


def _block_scan(m: Any, value: Any, address: Any) -> tuple[Any, Any]:
    """(sum over the threads before this one, sum over all)."""
    thread = m.thread()
    lane, warp = thread & 31, thread >> 5
    running = value
    for distance in (1, 2, 4, 8, 16):
        below = m.from_below(running, distance)
        running = running + m.select(lane >= distance, below, m.integer(0))
    zero = m.integer(0)
    sums = _gather_warps(m, running, address, 31)
    before = functools.reduce(lambda a, b: a + b, [m.select(warp > i, x, zero) for i, x in enumerate(sums)])
    return before + running - value, functools.reduce(lambda a, b: a + b, sums)


def chosen_entries(
    s: Select, best: Array, score: Array, reachable: Array, candidates: Array | None
) -> tuple[Array, Array | None]:
    """best [T, `best_columns`] group maxima, score [T, s.entries], reachable [T], candidates [T, s.candidates] or None
    -> chosen int32 [T, s.k], blocks int32 [T, s.blocks] or None; both ascending, -1 padded."""
    total = score.shape[0]
    scratch = {"picked": 4 * SELECT_THREADS, "counts": 4 * SELECT_THREADS, "scratch": 8 * WARPS, "result": 16}

    def body(m: Any, memory: list[Any], shared: dict[str, Any]) -> None:
        select(m, s, memory, shared)

    out = [jax.ShapeDtypeStruct((total, size), jnp.int32) for size in (s.k, s.blocks) if size]
    arguments = (best, score, reachable, reachable if candidates is None else candidates)
    chosen, *blocks = launch.run(body, "index_select", out, scratch, total, SELECT_THREADS, *arguments)
    return chosen, blocks[0] if blocks else None
