"""Index scores and the choice of entries on Hopper: two launches, exact for any scores.

`scan` scores 128 keys at a time. Packed keys come by bulk copies, are decoded in registers into the left operand of
WGMMA (64 keys x 128 channels; the scales are powers of two, so products and their fp32 sums of 128 stay exact) and
meet the queries of up to 8 rows in shared memory. It writes the scores and the best score of every 8 entries.
`selection` chooses among them.

Per row and layer at n entries: 68 n bytes of keys and 8,192 n operations; scores are 4 n bytes that stay in L2.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from di_jax.model.cache import CacheLayout
from di_jax.model.quantization import CacheFormats
from di_jax.model.rows import Rows
from kernels_pallas.index_topk import launch, reference
from kernels_pallas.index_topk.config import Tuning
from kernels_pallas.index_topk.selection import GROUP, SELECT_THREADS, Select, best_columns, chosen_entries

DIM = 128  # channels of an index key: 4 scale groups, 64 bytes of values
RECORD = 68
THREADS = 128  # of a block: one warpgroup
UNIT = 128  # keys that it scores at a time
UNIT_BYTES = UNIT * RECORD
GROUPS_AT_ONCE = 2  # scale groups of e4m3 products under way
OUT_OF_REACH = 2**30
MOST_ENTRIES = 262_144  # 64 group maxima in the registers of a thread of `select`
TURN = 64  # rows of a turn are a multiple: what has 4 bytes a row is then cut at multiples of 256


@dataclasses.dataclass(frozen=True)
class Scan:
    """Shapes of a scan. rows: rows of a block, all of one sequence; units: most units of a block, which its warpgroup
    takes one after another; stages: units under way.

    entries: columns of the score matrix, a multiple of 128. candidates: blocks of 8 that a row chooses from, 0 for
    all entries. first, per_block, rows_per_block, pages: where the pool keeps the source's keys.
    """

    rows: int
    heads: int
    stages: int
    units: int
    entries: int
    candidates: int
    pages: int
    per_block: int
    rows_per_block: int
    first: int

    @property
    def kind(self) -> str:
        """Operands of the products. e4m3 takes fewer instructions to decode, which several rows share; but a sum for
        each scale group, for which they have no registers."""
        return "e4m3" if self.rows == 1 else "bf16"

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
            "stages": self.stages * UNIT_BYTES,
            "weights": 4 * self.columns,
            "barriers": 8 * self.stages,
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
        self.thread, block = m.thread(), m.block()
        self.lane, self.warp = self.thread & 31, self.thread >> 5
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
        self.stages, self.barriers = shared["stages"], shared["barriers"]
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
            self.score_units(live)

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
        for turn in range(-(-count // THREADS)):
            at = self.thread + turn * THREADS
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
            with m.when(self.thread < 4 * s.heads):
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
        head, group = self.thread >> 2, self.thread & 3
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

    def issue(self, unit: Any, stage: Any, wanted: Any) -> None:
        """Starts the copies of the block's unit number `unit` if `wanted`; four warps share many pieces."""
        m, s = self.m, self.s
        barrier, size = self.barriers + stage * 8, s.piece * RECORD
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

    def score_units(self, live: Any) -> None:
        """The first `live` units of the block."""
        m, s = self.m, self.s
        for stage in range(s.stages):
            self.issue(m.integer(stage), m.integer(stage), live > stage)
        # One row: its sums are stored while the next products are under way. More have no registers for two sets.
        late = s.rows == 1
        kept = self.row_weights(0) if late else None

        def body(unit: Any, carry: list[Any]) -> list[Any]:
            stage, parity, *before = carry
            m.wait(self.barriers + stage * 8, parity)
            base = self.stages + (stage * UNIT_BYTES + self.records)
            loads = [self.load_keys(base, half) for half in self.offsets]

            def refill() -> None:
                m.sync()
                self.issue(unit + s.stages, stage, (unit + s.stages) < live)

            def between() -> None:
                # What does not depend on the products that are under way.
                refill()
                self.settle(unit - 1, before, unit > 0)

            if not late:
                refill()
            sums = self.scores(loads, kept, between)
            following = stage + 1
            wraps = following.equals(s.stages)
            out = [m.select(wraps, m.integer(0), following), m.select(wraps, parity ^ 1, parity)]
            if late:
                return out + sums
            self.settle(unit, sums, unit > -1)
            return out

        zeros = [m.real(0.0)] * (4 if late else 0)
        _, _, *last = m.loop(live, [m.integer(0), m.integer(0), *zeros], body)
        if late:
            self.settle(live - 1, last, live > 0)

    def settle(self, unit: Any, sums: list[Any], ready: Any) -> None:
        """Adds up over the lanes of a quad and stores scores and group maxima of the block's unit `unit`."""
        m, s = self.m, self.s
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

        kept: the weights of an only row. between: what to do while the last products of one are under way.
        """
        m, s = self.m, self.s
        halves: list[list[Any]] = []

        def finish(fragment: list[Any]) -> None:
            per_row = s.heads // 8
            rows = [relu_sum(m, fragment, kept or self.row_weights(i), i * per_row) for i in range(s.rows)]
            halves.append([x for pair in rows for x in pair])

        for number, load in enumerate(loads):
            if s.kind == "e4m3":
                finish(self.sums_e4m3(load, between if number else None))
            else:
                finish(m.products_done(self.product_bf16(load), 0))
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
    score, best = launch.run(body, "index_scan", out, s.shared_bytes, blocks, THREADS, *arguments)
    return score, best


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

    together = 1 if candidates is not None else math.gcd(rows.tile, tuning.rows)
    columns = 0 if candidates is None else candidates.shape[-1]
    entries = -(-(columns * GROUP or capacity) // UNIT) * UNIT
    s = Scan(
        rows=together,
        heads=heads,
        stages=tuning.stages,
        units=tuning.units,
        entries=entries,
        candidates=columns,
        pages=pages,
        per_block=per_block,
        rows_per_block=layout.rows_per_block,
        first=layout.source_offset[source],
    )
    chosen_by = Select(k, entries, columns, top_blocks if make_candidates else 0)
    q, w = arranged(query, weights, s.kind)

    # Mosaic GPU refuses operands that do not begin at a multiple of 256 bytes, and XLA gives it slices in place. These
    # two are slices of the plan of a step; what is computed has a buffer of its own.
    table, sequence = jnp.maximum(rows.block_table, 0), jnp.maximum(rows.sequence, 0)

    def some(x: tuple[Array, ...]) -> tuple[Array, Array | None]:
        q, w, sequence, reach, *cand = x
        own = cand[0] if cand else None
        score, best = _scan_call(s, q, w, pool, table, sequence, reach, own)
        return chosen_entries(chosen_by, best, score, reach, own)

    xs = (q, w, sequence, reachable, *(() if candidates is None else (candidates,)))
    total = rows.num_rows
    fitting = max(TURN, tuning.score_bytes // (4 * entries * TURN) * TURN)
    turns = -(-total // fitting)
    if turns == 1:
        return some(xs)
    each = -(-total // (turns * TURN)) * TURN
    even = total // each * each  # rows of whole turns
    out = lax.map(some, jax.tree.map(lambda x: x[:even].reshape(-1, each, *x.shape[1:]), xs))
    parts = [jax.tree.map(lambda x: x.reshape(even, -1), out)]
    if even < total:
        parts.append(some(jax.tree.map(lambda x: x[even:], xs)))
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


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
