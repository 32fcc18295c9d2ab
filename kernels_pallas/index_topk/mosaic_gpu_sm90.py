"""Index scores and the choice of entries on Hopper: two launches, exact for any scores.

`scan` scores 128 keys at a time. Packed keys come by bulk copies, are decoded in registers into the left operand of
WGMMA (64 keys x 128 channels; the scales are powers of two, so products and their fp32 sums of 128 stay exact) and
meet the queries of up to 8 rows in shared memory. It writes the scores and the best score of every 8 entries.
`select` takes one row per block: the k best entries lie in the k best groups of 8, ties to the lower in both, so it
chooses groups, then among their 8 k entries, each time by bisection on the bits of the scores.

Per row and layer at n entries: 68 n bytes of keys and 8,192 n operations; scores are 4 n bytes that stay in L2.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from di_jax.model.cache import CacheLayout
from di_jax.model.quantization import CacheFormats
from di_jax.model.rows import Rows
from kernels_pallas.index_topk import lanes, reference
from kernels_pallas.index_topk.config import Tuning

DIM = 128  # channels of an index key: 4 scale groups, 64 bytes of values
RECORD = 68
UNIT = 128  # keys that a warpgroup scores at a time
UNIT_BYTES = UNIT * RECORD
GROUP = 8  # entries of a group, and of a candidate block
SELECT_THREADS = 512
GROUPS_AT_ONCE = 2  # scale groups of e4m3 products under way
NOTHING = -(2**31)  # ordered key of a masked entry
LOWEST = 0x807FFFFF - 2**32 + 1  # ordered key right above -inf
OUT_OF_REACH = 2**30
BIN_BITS = 9  # bins of the selection: one of each thread
MOST_ENTRIES = 262_144  # 64 group maxima in the registers of a thread of `select`


def ordered(m: Any, bits: Any) -> Any:
    """Bits of an fp32 -> i32 of the same order."""
    return bits ^ (bits.sign_fill() & 0x7FFFFFFF)


@dataclasses.dataclass(frozen=True)
class Scan:
    """Shapes of a scan. rows: rows of a block, all of one sequence; units: most units of a block, which its
    warpgroups take in turn; stages: units that each of them has under way.

    entries: columns of the score matrix, a multiple of 128. candidates: blocks of 8 that a row chooses from, 0 for
    all entries. first, per_block, rows_per_block, pages: where the pool keeps the source's keys.
    """

    rows: int
    heads: int
    kind: str
    stages: int
    units: int
    entries: int
    candidates: int
    pages: int
    per_block: int
    rows_per_block: int
    first: int
    warpgroups: int = 1

    @property
    def piece(self) -> int:
        """Entries that lie side by side in the pool."""
        return GROUP if self.candidates else self.per_block

    @property
    def pieces(self) -> int:
        return UNIT // self.piece

    @property
    def columns(self) -> int:
        return self.rows * self.heads

    @property
    def query_bytes(self) -> int:
        return self.columns * DIM * {"bf16": 2, "e4m3": 1}[self.kind]

    @property
    def shared_bytes(self) -> dict[str, int]:
        """Sizes of what a block keeps in shared memory; the first needs 1,024-byte alignment."""
        pieces = 4 * self.units * self.pieces
        return {
            "query": self.query_bytes,
            "stages": self.warpgroups * self.stages * UNIT_BYTES,
            "weights": 4 * self.columns,
            "barriers": 8 * self.warpgroups * self.stages,
            "origin": pieces,
            "entry": pieces if self.candidates else 0,
        }


class ScanBlock:
    """One thread of a block that scores `rows` rows against `units` units of keys.

    Keys of a unit: the warp and the quad of lanes give bits of the key's number, the lane of the quad which part of
    the records it decodes. Sums over the heads end in one of the quad's lanes for each of its four keys.
    """

    def __init__(self, m: Any, s: Scan, memory: Sequence[Any], shared: dict[str, Any], groups: int) -> None:
        self.m, self.s, self.shared = m, s, shared
        query, weights, self.pool, table, sequence, reachable, candidates, self.score, self.best = memory
        thread, block = m.thread(), m.block()
        self.thread, self.warpgroup = thread & 127, thread >> 7
        self.lane, self.warp = thread & 31, (thread >> 5) & 3
        self.block_thread = thread
        split = block.divided(groups)
        self.row = (block - split * groups) * s.rows
        self.first_unit = split * s.units
        self.reach = [reachable.load(self.row + i) for i in range(s.rows)]
        self.table = table.row(sequence.load(self.row), s.pages)
        self.query, self.weights = query.row(self.row, s.heads * DIM // 2), weights.row(self.row, s.heads)
        self.candidates = candidates.row(self.row, s.candidates)

        self.corner, quad = self.lane & 3, self.lane >> 2
        if s.kind == "bf16":
            own = (self.warp << 5) + ((quad >> 2) << 4) + (quad & 3)
            self.offsets = [[0, 4], [8, 12]]
            self.key = own + ((self.corner & 1) << 3) + ((self.corner >> 1) << 2)
            self.distances, self.leads = (4, 8, 2), (self.lane & 14).equals(0)
        else:
            own = (self.warp << 5) + (quad << 2)
            self.offsets = [[0, 2], [1, 3]]
            self.key = (self.warp << 5) + self.lane
            self.distances, self.leads = (1, 2, 4), (self.lane & 7).equals(0)
        ring = self.warpgroup * s.stages
        self.stages = shared["stages"] + ring * UNIT_BYTES
        self.barriers = shared["barriers"] + ring * 8
        self.records = own * RECORD

    def run(self) -> None:
        m, s = self.m, self.s
        live = self.live_units()
        with m.when(live > 0):
            self.find_pieces(live)
            self.stage_query()
            with m.when(self.thread.equals(0)):
                for stage in range(s.stages):
                    m.init_barrier(self.barriers + 8 * stage)
            m.publish()
            m.sync()
            own = (live - self.warpgroup + (s.warpgroups - 1)).divided(s.warpgroups)
            with m.when(own > 0):
                self.score_units(own)

    def live_units(self) -> Any:
        """Units of this block that a row can reach."""
        m, s = self.m, self.s
        if not s.candidates:
            most = functools.reduce(lambda a, b: a.at_least(b), self.reach).at_most(s.entries)
            return (((most + (UNIT - 1)) >> 7) - self.first_unit).at_most(s.units)
        # Candidates are ascending and -1 padded: the units in use are those that begin with one.
        live = m.integer(0)
        for turn in range(-(-s.units // 32)):
            unit = self.lane + 32 * turn
            at = (self.first_unit + unit) * s.pieces
            inside = (unit < s.units) & (at < s.candidates)
            begins = self.candidates.load(m.select(inside, at, m.integer(0))) > -1
            live = live + m.warp_sum(m.flag(inside & begins))
        return live

    def _turns(self, count: int) -> Iterator[tuple[Any, Any]]:
        """(index, whether it is below `count`) of the block's threads, again and again."""
        threads = 128 * self.s.warpgroups
        for turn in range(-(-count // threads)):
            at = self.block_thread + turn * threads
            yield at, at < count

    def find_pieces(self, live: Any) -> None:
        """Pool row of each piece of this block's keys; and its first entry, where pieces are candidates."""
        m, s = self.m, self.s
        # Keys of the last unit beyond the reachable ones are of a page that surely exists.
        most = functools.reduce(lambda a, b: a.at_least(b), self.reach)
        last_page = (most - 1).at_least(0).divided(s.per_block).at_most(s.pages - 1)
        for piece, _ in self._turns(s.units * s.pieces):
            with m.when(piece < live * s.pieces):
                at = self.first_unit * s.pieces + piece
                page, inner = at, m.integer(0)
                if s.candidates:
                    number = self.candidates.load(at.at_most(s.candidates - 1))
                    number = m.select(at < s.candidates, number, m.integer(-1))
                    entry = m.select(number > -1, number * GROUP, m.integer(OUT_OF_REACH))
                    m.store_shared(self.shared["entry"] + piece * 4, entry)
                    start = number.at_least(0) * GROUP
                    page = start.divided(s.per_block)
                    inner = start - page * s.per_block
                block = self.table.load(page.at_most(last_page))
                m.store_shared(self.shared["origin"] + piece * 4, block * s.rows_per_block + (inner + s.first))

    def stage_query(self) -> None:
        """Queries to rows of 128 bytes, K-major, in 128-byte swizzle; and the weights."""
        m, s = self.m, self.s
        if s.kind == "e4m3":
            with m.when(self.block_thread < 4 * s.heads):
                self.stage_query_e4m3()
            return
        for at, inside in self._turns(s.columns * 16):
            head, chunk = at >> 4, at & 15
            with m.when(inside):
                m.store_shared4(self.query_chunk(head, chunk), self.query.load4(at * 4))
        for at, inside in self._turns(s.columns):
            with m.when(inside):
                m.store_shared(self.shared["weights"] + at * 4, m.as_bits(self.weights.load(at)))

    def query_chunk(self, head: Any, chunk: Any) -> Any:
        """Address of the 16 bytes `chunk` of a head: 8 of them in a row, K of 128 bytes after K of 128 bytes."""
        half = (chunk >> 3) * (self.s.columns * 128)
        return self.shared["query"] + (half + head * 128 + (((chunk & 7) ^ (head & 7)) << 4))

    def stage_query_e4m3(self) -> None:
        """A thread takes a scale group of a head: K = 32 b + 16 o + 4 c + i holds channel 32 b + 8 c + 2 i + o.

        Each head's largest value comes to 2^8..2^9, so that groups down to 2^-14 of it stay exact; its weight takes
        the factor back, and that of the keys' 2^-6.
        """
        m = self.m
        head, group = self.block_thread >> 2, self.block_thread & 3
        words = [x for i in range(4) for x in self.query.load4(head * 64 + group * 16 + 4 * i)]
        sizes = [x for word in words for x in (word & 0x7FFF, (word >> 16) & 0x7FFF)]
        top = functools.reduce(lambda a, b: a.at_least(b), sizes)
        for distance in (1, 2):
            top = top.at_least(m.swap(top, distance))
        exponent = ((top >> 7) - 127).at_least(-100)
        factor = m.as_real((m.integer(8 + 127) - exponent) << 23)
        for odd in range(2):
            values = [m.as_real(word & 0xFFFF0000 if odd else word << 16) * factor for word in words]
            packed = [
                m.e4m3_pair(values[i], values[i + 1]) | (m.e4m3_pair(values[i + 2], values[i + 3]) << 16)
                for i in range(0, 16, 4)
            ]
            m.store_shared4(self.query_chunk(head, group * 2 + odd), packed)
        with m.when(group.equals(0)):
            weight = self.weights.load(head) * m.as_real((exponent + (127 - 3)) << 23)
            m.store_shared(self.shared["weights"] + head * 4, m.as_bits(weight))

    def issue(self, turn: Any, stage: Any, wanted: Any) -> None:
        """Starts the copies of the warpgroup's unit number `turn` if `wanted`; four warps share many pieces."""
        m, s = self.m, self.s
        barrier, size = self.barriers + stage * 8, s.piece * RECORD
        unit = turn * s.warpgroups + self.warpgroup
        first = self.warp.equals(0)
        share = s.pieces // 4 if s.pieces % 4 == 0 else s.pieces
        with m.when(wanted if share < s.pieces else wanted & first):
            with m.when(first & self.lane.equals(0)):
                m.expect(barrier, UNIT_BYTES)
            with m.when(self.lane < share):
                piece = self.warp * share + self.lane if share < s.pieces else self.lane
                source = m.load_shared(self.shared["origin"] + (unit * s.pieces + piece) * 4)
                target = self.stages + (stage * UNIT_BYTES + piece * size)
                m.copy(target, self.pool, source, RECORD, size, barrier, s.rows == 1)

    def score_units(self, own: Any) -> None:
        """The warpgroup's `own` units."""
        m, s = self.m, self.s
        for stage in range(s.stages):
            self.issue(m.integer(stage), m.integer(stage), own > stage)
        kept = self.row_weights(0) if s.rows == 1 else None
        late = s.rows <= 2  # sums are stored while the next products are under way: registers for two sets

        def body(turn: Any, carry: list[Any]) -> list[Any]:
            stage, parity, *before = carry
            m.wait(self.barriers + stage * 8, parity)
            base = self.stages + (stage * UNIT_BYTES + self.records)
            loads = [self.load_keys(base, half) for half in self.offsets]

            def refill() -> None:
                m.sync_group(self.warpgroup)
                self.issue(turn + s.stages, stage, (turn + s.stages) < own)

            def between() -> None:
                # What does not depend on the products that are under way.
                refill()
                self.settle(turn - 1, before, turn > 0)

            if not late:
                refill()
            sums = self.scores(loads, kept, between if late else None)
            following = stage + 1
            wraps = following.equals(s.stages)
            out = [m.select(wraps, m.integer(0), following), m.select(wraps, parity ^ 1, parity)]
            if late:
                return out + sums
            self.settle(turn, sums, turn > -1)
            return out

        zeros = [m.real(0.0)] * (4 * s.rows if late else 0)
        _, _, *last = m.loop(own, [m.integer(0), m.integer(0), *zeros], body)
        if late:
            self.settle(own - 1, last, own > 0)

    def settle(self, turn: Any, sums: list[Any], ready: Any) -> None:
        """Adds up over the lanes of a quad and stores scores and group maxima of the warpgroup's unit `turn`."""
        m, s = self.m, self.s
        unit = turn * s.warpgroups + self.warpgroup
        index = ((self.first_unit + unit) << 7) + self.key
        position = index
        if s.candidates:
            piece = (unit.at_least(0) * UNIT + self.key) >> 3
            position = m.load_shared(self.shared["entry"] + piece * 4) + (self.key & 7)
        low, high = (self.corner & 1) > 0, (self.corner >> 1) > 0
        for i in range(s.rows):
            first, second = sums[4 * i : 4 * i + 2], sums[4 * i + 2 : 4 * i + 4]
            parts = [m.select(low, b, a) + m.swap(m.select(low, a, b), 1) for a, b in zip(first, second)]
            total = m.select(high, parts[1], parts[0]) + m.swap(m.select(high, parts[0], parts[1]), 2)
            total = m.select(position < self.reach[i], total, m.real(float("-inf")))
            group = total
            for distance in self.distances:
                group = m.larger(group, m.swap(group, distance))
            with m.when(ready):
                self.score.row(self.row + i, s.entries).store(index, total)
            with m.when(ready & self.leads):
                self.best.row(self.row + i, best_columns(s.entries)).store(index >> 3, group)

    def row_weights(self, i: int) -> list[list[Any]]:
        """The thread's weights of row i, by 8 columns of the fragment and column of a pair."""
        m, heads = self.m, self.s.heads
        base = self.shared["weights"] + self.corner * 8
        return [[m.as_real(w) for w in m.load_shared2(base, 4 * (i * heads + 8 * j))] for j in range(heads // 8)]

    def load_keys(self, base: Any, offsets: list[int]) -> list[tuple[list[Any], Any]]:
        """(four words of values, scales) of two records: the parts that this lane of a quad decodes.

        bf16: words of scale group `corner`, and its scale byte. e4m3: word `corner` of every group, and all scales.
        """
        m = self.m
        if self.s.kind == "bf16":
            values, scale = base + self.corner * 16, base + self.corner
            return [
                (
                    [m.load_shared(values, o * RECORD + 4 * i) for i in range(4)],
                    m.load_shared_byte(scale, o * RECORD + 64),
                )
                for o in offsets
            ]
        values = base + self.corner * 4
        return [
            ([m.load_shared(values, o * RECORD + 16 * i) for i in range(4)], m.load_shared(base, o * RECORD + 64))
            for o in offsets
        ]

    def scores(self, loads: list[Any], kept: Any, between: Any) -> list[Any]:
        """The thread's share of the scores, for each row the two keys of the first half of the unit, then the second.

        between: what to do while products are under way.
        """
        m, s = self.m, self.s
        halves: list[list[Any]] = []

        def finish(fragment: list[Any]) -> None:
            per_row = s.heads // 8
            weights = [kept or self.row_weights(i) for i in range(s.rows)] if s.rows <= 2 else None
            rows = [
                relu_sum(m, fragment, weights[i] if weights else self.row_weights(i), i * per_row)
                for i in range(s.rows)
            ]
            halves.append([x for pair in rows for x in pair])

        if s.kind == "bf16":
            pending: list[Any] = []
            for load in loads:
                pending.append(self.product_bf16(load))
                if s.rows > 2:  # no registers for two sets of sums
                    finish(m.products_done(pending.pop(), 0))
            if between:
                between()
            while pending:
                finish(m.products_done(pending.pop(0), len(pending)))
        else:
            for number, load in enumerate(loads):
                finish(self.sums_e4m3(load, between if number else None))
        first, second = halves
        return [x for i in range(0, 2 * s.rows, 2) for x in (*first[i : i + 2], *second[i : i + 2])]

    def product_bf16(self, half: Any) -> list[Any]:
        """Issues the products of 64 keys; K is the order of `arranged`."""
        low, high = (decode_bf16(self.m, words, scale) for words, scale in half)
        steps = [
            [low[i][2 * u], high[i][2 * u], low[i][2 * u + 1], high[i][2 * u + 1]] for i in range(4) for u in range(2)
        ]
        return self.m.product(steps, self.shared["query"], self.s.columns, "bf16")

    def sums_e4m3(self, half: Any, between: Any) -> list[Any]:
        """Dot products of 64 keys. A product per scale group: sums of multiples of 1/4 below 2^11, exact in fp8."""
        m, s = self.m, self.s
        (low, low_scale), (high, high_scale) = half
        pairs = [(decode_e4m3(a), decode_e4m3(b)) for a, b in zip(low, high)]
        steps = [[a[0], b[0], a[1], b[1]] for a, b in pairs]
        total: list[Any] = []
        for first in range(0, 4, GROUPS_AT_ONCE):
            query = self.shared["query"] + first * 32
            parts = m.product(steps[first : first + GROUPS_AT_ONCE], query, s.columns, "e4m3", separate=True)
            if between and not first:
                between()
            parts = m.products_done(parts, 0)
            for i in range(GROUPS_AT_ONCE):
                scales = [scale_e4m3(m, word, first + i) for word in (low_scale, high_scale)]
                part = parts[i * s.columns // 2 : (i + 1) * s.columns // 2]
                factors = [scales[h] for _ in range(s.columns // 8) for h in (0, 0, 1, 1)]
                total = [x * f if not total else m.fma(x, f, old) for x, f, old in zip(part, factors, total or part)]
        return total


def best_columns(entries: int) -> int:
    """Columns of the array of group maxima: `select` loads four of each thread at once."""
    return -(-entries // GROUP // (4 * SELECT_THREADS)) * 4 * SELECT_THREADS


def decode_bf16(m: Any, words: list[Any], scale: Any) -> list[list[Any]]:
    """Eight values of each word as four bf16 pairs (nibbles p and p + 4), times the scale 2^(s - 127) and 2^-62.

    A nibble s e e m times 2^6 + 2^12 has s in bit 15 of its half and e e m in bits 8..6: a bf16 that is the value times
    2^-126. One product brings it to scale. The factor 2^-62 keeps that product's other operand in range for scales from
    2^-63 to 2^63.
    """
    factor = (scale.at_most(190) + 64) * 0x00800080
    pairs = []
    for word in words:
        own = []
        for part in (word, word >> 8):
            for mask, spread in ((0x000F000F, 0x1040), (0x00F000F0, 0x0104)):
                own.append(m.product_bf16x2(((part & mask) * spread) & 0x81C081C0, factor))
        pairs.append(own)
    return pairs


def decode_e4m3(word: Any) -> tuple[Any, Any]:
    """The even and the odd nibbles of a word as four e4m3 each: the values times 2^-6."""
    even = ((word << 4) & 0x80808080) | ((word << 2) & 0x1C1C1C1C)
    odd = (word & 0x80808080) | ((word >> 2) & 0x1C1C1C1C)
    return even, odd


def scale_e4m3(m: Any, word: Any, i: int) -> Any:
    """Scale byte i of a word -> 2^(byte - 127)."""
    shifted = word << (23 - 8 * i) if i < 3 else word >> 1
    return m.as_real(shifted & 0x7F800000)


def relu_sum(m: Any, fragment: list[Any], weight: list[list[Any]], first: int) -> list[Any]:
    """Sums over the thread's columns of one row's heads, for its two keys: sum of w (x + |x|), w being halved."""
    sums = []
    for h in range(2):
        total = m.real(0.0)
        for j, pair in enumerate(weight):
            for t, w in enumerate(pair):
                x = fragment[4 * (first + j) + 2 * h + t]
                total = m.fma(x + m.magnitude(x), w, total)
        sums.append(total)
    return sums


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
    keys = [m.select(u, ordered(m, m.as_bits(x)), m.integer(NOTHING)) for u, x in zip(usable, maxima)]

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
    found = [m.select(group > -1, ordered(m, m.as_bits(x)), m.integer(NOTHING)) for x in entries]
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


WARPS = SELECT_THREADS // lanes.WARP


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


def _call(
    body: Any, name: str, out_type: Any, scratch: dict[str, int], blocks: int, threads: int, *arguments: Array
) -> Any:
    """Launches body(machine, addresses of arguments and outputs, addresses in shared memory) on a grid of blocks.

    scratch: bytes by name, laid out one after the other at multiples of 16.
    """
    arrays = (*arguments, *out_type)
    places = placed(scratch)

    def kernel_body(*references: Any) -> None:
        def emit(_: Any, *refs: Any) -> None:
            memory = [lanes.global_memory(r, real=a.dtype == jnp.float32) for r, a in zip(refs, arrays)]
            start = lanes.shared_address(refs[-1])
            body(lanes.Lanes(threads), memory, {key: start + at for key, at in places.items()})

        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(references))(emit)(*references)

    kernel_body.__name__ = name
    kernel = plgpu.kernel(
        kernel_body,
        out_type=out_type,
        scratch_types=[plgpu.SMEM((places["end"],), jnp.uint8)],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=threads // 128,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(*arguments)


def placed(sizes: dict[str, int]) -> dict[str, int]:
    """Offsets of blocks of these sizes, and "end"."""
    places, at = {}, 0
    for key, size in (*sizes.items(), ("end", 0)):
        places[key] = at
        at += -(-size // 16) * 16
    return places


def _scan_call(
    s: Scan, query: Array, weights: Array, pool: Array, table: Array, sequence: Array, reachable: Array,
    candidates: Array | None,
) -> tuple[Array, Array]:  # fmt: skip
    """query [T, heads, 128] permuted for `s.kind`; weights fp32 [T, heads]; pool u8 [blocks, rows_per_block, 68];
    table [S, pages]; sequence, reachable [T]; candidates [T, s.candidates] -> score [T, s.entries], best [T, groups].
    """
    total = query.shape[0]
    groups = total // s.rows
    splits = -(-s.entries // (UNIT * s.units))

    def body(m: Any, memory: list[Any], shared: dict[str, Any]) -> None:
        ScanBlock(m, s, memory, shared, groups).run()

    out = [
        jax.ShapeDtypeStruct((total, s.entries), jnp.float32),
        jax.ShapeDtypeStruct((total, best_columns(s.entries)), jnp.float32),
    ]
    arguments = (query, weights, pool, table, sequence, reachable, reachable if candidates is None else candidates)
    blocks = groups * splits
    score, best = _call(body, "index_scan", out, s.shared_bytes, blocks, 128 * s.warpgroups, *arguments)
    return score, best


def _select_call(
    s: Select, best: Array, score: Array, reachable: Array, candidates: Array | None
) -> tuple[Array, Array | None]:
    total = score.shape[0]
    scratch = {"picked": 4 * SELECT_THREADS, "counts": 4 * SELECT_THREADS, "scratch": 8 * WARPS, "result": 16}

    def body(m: Any, memory: list[Any], shared: dict[str, Any]) -> None:
        select(m, s, memory, shared)

    out = [jax.ShapeDtypeStruct((total, size), jnp.int32) for size in (s.k, s.blocks) if size]
    arguments = (best, score, reachable, reachable if candidates is None else candidates)
    chosen, *blocks = _call(body, "index_select", out, scratch, total, SELECT_THREADS, *arguments)
    return chosen, blocks[0] if blocks else None


def arranged(query: Array, weights: Array, kind: str) -> tuple[Array, Array]:
    """Query [T, heads, 128] and weights [T, heads] as `ScanBlock` takes them: bf16 and fp32.

    For bf16 products the channels come in the order of the decoded keys; e4m3 ones are made in the kernel.
    """
    query, weights = query.astype(jnp.bfloat16), weights.astype(jnp.float32)
    if kind == "e4m3":
        return query, weights
    # K = 16 (2 i + u) + 8 v + 2 c + t holds channel 32 c + 8 i + 4 t + 2 u + v.
    split = query.reshape(*query.shape[:2], 4, 4, 2, 2, 2).transpose(0, 1, 3, 5, 6, 2, 4)
    return split.reshape(query.shape), weights * 2.0**61  # see `decode_bf16`; and half, see `relu_sum`


def index_topk(
    query: Array,
    weights: Array,
    pool: Array,
    rows: Rows,
    layout: CacheLayout,
    *,
    source: int,
    candidates: Array | None,
    make_candidates: bool,
    tuning: Tuning,
) -> tuple[Array, Array | None]:
    """See `api.index_topk`; `unsupported` says what runs."""
    config = layout.config
    ratio, per_block = config.kv_source_ratios[source], layout.entries_per_block[source]
    pages, heads = rows.block_table.shape[-1], query.shape[1]
    capacity, size, k = pages * per_block, config.candidate_block_size, config.index_topk
    top_blocks = config.candidate_topk_blocks
    if candidates is not None and top_blocks * size >= capacity:
        candidates = None  # every reachable block is a candidate: the filter is the identity
    reachable = (rows.position + 1) // ratio
    if capacity <= k and not (make_candidates and top_blocks * size < capacity):
        return reference.all_entries(reachable, k), None

    together = 1 if candidates is not None else max(r for r in range(1, tuning.rows + 1) if rows.tile % r == 0)
    kind = tuning.kind if together == 1 else "bf16"
    columns = 0 if candidates is None else candidates.shape[-1]
    entries = -(-(columns * GROUP or capacity) // UNIT) * UNIT
    s = Scan(
        rows=together,
        heads=heads,
        kind=kind,
        stages=tuning.stages,
        units=tuning.units,
        entries=entries,
        candidates=columns,
        pages=pages,
        per_block=per_block,
        rows_per_block=layout.rows_per_block,
        first=layout.source_offset[source],
        warpgroups=tuning.warpgroups,
    )
    chosen_by = Select(k, entries, columns, top_blocks if make_candidates else 0)
    q, w = arranged(query, weights, kind)

    def some(x: tuple[Array, ...]) -> tuple[Array, Array | None]:
        q, w, sequence, reach, *cand = x
        own = cand[0] if cand else None
        score, best = _scan_call(s, q, w, pool, rows.block_table, sequence, reach, own)
        return _select_call(chosen_by, best, score, reach, own)

    xs = (q, w, rows.sequence, reachable, *(() if candidates is None else (candidates,)))
    tiles = rows.num_rows // together
    fitting = max(1, tuning.score_bytes // (4 * entries * together))
    turns = next(t for t in range(1, tiles + 1) if tiles % t == 0 and tiles // t <= fitting)
    if turns == 1:
        return some(xs)
    parts = jax.tree.map(lambda x: x.reshape(turns, -1, *x.shape[1:]), xs)
    out = lax.map(some, parts)
    return jax.tree.map(lambda x: x.reshape(rows.num_rows, -1), out)


def unsupported(query: Array, rows: Rows, layout: CacheLayout, source: int) -> str | None:
    """What of these arguments the kernel does not take, or None."""
    config, per_block = layout.config, layout.entries_per_block[source]
    total, heads, channels = query.shape
    columns = rows.block_table.shape[-1] * per_block
    if layout.formats.index != CacheFormats.quantized().index or channels != DIM:
        return f"index keys must be {RECORD}-byte records of {DIM} channels (model.quantize_caches)"
    if heads not in (8, 16, 32):
        return f"index_n_heads must be 8, 16 or 32, it is {heads}"
    if config.candidate_block_size != GROUP:
        return f"candidate_block_size must be {GROUP}, it is {config.candidate_block_size}"
    if config.index_topk > SELECT_THREADS:
        return f"index_topk must be at most {SELECT_THREADS}, it is {config.index_topk}"
    if config.candidate_topk_blocks > 4 * SELECT_THREADS:
        return f"candidate_topk_blocks must be at most {4 * SELECT_THREADS}, it is {config.candidate_topk_blocks}"
    if UNIT % per_block or per_block % GROUP or layout.rows_per_block % 4 or layout.source_offset[source] % 4:
        return f"blocks must hold {GROUP} to {UNIT} entries of the source, a power of two, they hold {per_block}"
    if columns > MOST_ENTRIES:
        return f"contexts must have at most {MOST_ENTRIES} entries, the block table holds {columns}"
    return None if total else "there are no rows"
