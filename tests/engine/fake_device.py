"""A device that is none: the caches of `ModelRunner` in NumPy, around a model whose arithmetic is hashing.

Every number that the real model would read goes into a row's hash, so a wrong block, a stale ring row, a length off by
one or a copy that was forgotten changes the tokens from there on. What can be told at once raises AssertionError: a row
of a ring that belongs to another position, a write to a block that can be found by its key or that nobody holds, a step
of a shape that was not warmed up. `FakeModel.hidden` computes the same rows from all tokens at once, without caches.

Steps change the caches when they are launched, in that order, as on a device; their tokens can be read after `host`.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from fake_model import FakeModel, U

from di_jax.engine.block_manager import BlockManager
from di_jax.engine.runner import StepOutput
from di_jax.engine.state_programs import NOTHING, StateCopies
from di_jax.engine.step_plan import Bucket, StepPlan
from di_jax.model.cache import CacheLayout
from di_jax.model.config import ModelConfig
from di_jax.parallel.mesh import DeviceMesh, Parallel


class Caches:
    """Of one rank. `*_at`: the position that a row of a ring holds, -1 for none."""

    def __init__(self, config: ModelConfig, layout: CacheLayout) -> None:
        slots = layout.num_slots
        self.pages = [np.zeros((layout.num_blocks, n), U) for n in layout.entries_per_block]
        self.window = np.zeros((slots, config.num_hidden_layers, config.window_ring), U)
        self.window_at = np.full(self.window.shape, -1)
        self.pairs = np.zeros((slots, config.compressor_ring), U)
        self.pairs_at = np.full(self.pairs.shape, -1)
        self.history = np.full((slots, config.engram_history), -1)
        self.history_at = np.full(self.history.shape, -1)
        self.length = np.zeros(slots, np.int64)
        self.last_token = np.zeros(slots, np.int64)

    @property
    def of_slots(self) -> list[np.ndarray]:
        """All arrays by slot but `last_token`."""
        rings = [self.window, self.window_at, self.pairs, self.pairs_at, self.history, self.history_at]
        return [*rings, self.length]

    def scribble(self, blocks: Iterable[int], slots: Iterable[int], rng: np.random.Generator) -> None:
        """Leaves rubbish in blocks and slots that are free."""
        for block in blocks:
            for page in self.pages:
                page[block] = rng.integers(0, 2**63, page.shape[1], dtype=U)
        for slot in slots:
            for array in [*self.of_slots, self.last_token]:
                array[slot] = rng.integers(0, 200, array[slot].shape).astype(array.dtype)


@dataclasses.dataclass
class Flight:
    """A step whose results were not asked for yet. touched: (rank, block), slots: (rank, slot) that it works on."""

    touched: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    slots: set[tuple[int, int]] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class FakeOutput:
    """Results that come when they are asked for, once and in order."""

    device: FakeDevice
    flight: Flight
    outputs: list[StepOutput]
    seconds: float

    def host(self) -> list[StepOutput]:
        assert self.device.flights.popleft() is self.flight, "results are asked for out of order"
        self.device.clock.advance(self.seconds)
        if self.device.fail_host is not None:
            error, self.device.fail_host = self.device.fail_host, None
            raise error
        return self.outputs


@dataclasses.dataclass(frozen=True)
class FakeSnapshot:
    rings: list[np.ndarray | None]

    def host(self) -> list[np.ndarray | None]:
        return self.rings


class Clock:
    """Seconds that pass only here: a little at every look, and as long as steps are said to take."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        self.now += 1e-5
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class DeviceError(Exception):
    """A step failed."""


class FakeDevice:
    """What `Engine` uses of a `ModelRunner`.

    local_ranks: of a process that hosts a part of the mesh. ledgers: of these, in their order; with them, steps are
    checked against who holds what. fail_launch, fail_host: an error that the next launch, or the next wait, ends with.
    spoil: the next step's first log-probability is none. calls: what was launched, the same in every process.

    Below, and in `flights`, a rank is its place among the local ones.
    """

    def __init__(
        self, config: ModelConfig, layout: CacheLayout, plan: DeviceMesh, local_ranks: Sequence[int] | None = None
    ) -> None:
        self.model, self.layout, self.plan = FakeModel(config), layout, plan
        self.parallel, self.mesh = Parallel(plan), plan.build()
        self.local_ranks = list(range(plan.world) if local_ranks is None else local_ranks)
        self.clock = Clock()
        self.resets = 0
        self.calls: list[Any] = []
        self.warm: set[Any] = set()
        self.ledgers: Sequence[BlockManager] = ()
        self.flights: deque[Flight] = deque()
        self.fail_launch: Exception | None = None
        self.fail_host: Exception | None = None
        self.spoil = False
        self._due = Flight()  # what was touched before the next step
        self._dirty: list[tuple[set[int], set[int]]] = []
        self._empty()

    def _empty(self) -> None:
        self.state = [Caches(self.model.config, self.layout) for _ in self.local_ranks]
        self._dirty = [(set(), set()) for _ in self.local_ranks]  # blocks and slots used since they were scribbled on

    # -- as the engine sees it

    def warm_up(self, buckets: Iterable[Bucket]) -> None:
        self.warm.update(buckets)

    def warm_up_programs(self, snapshot_layers: int | None) -> None:
        self.warm.add(("copy", None))
        if snapshot_layers is not None:
            self.warm.add(("snapshot", snapshot_layers))

    def repair(self) -> None:
        pass

    def reset(self) -> None:
        self._empty()
        self.flights.clear()
        self._due = Flight()
        self.resets += 1

    def execute(self, plans: Sequence[StepPlan]) -> FakeOutput:
        bucket = plans[0].bucket
        assert len(plans) == len(self.local_ranks) and all(plan.bucket == bucket for plan in plans)
        assert bucket in self.warm, f"{bucket} is compiled while requests run"
        if self.fail_launch is not None:
            error, self.fail_launch = self.fail_launch, None
            raise error
        self.calls.append(bucket)
        flight, self._due = self._due, Flight()
        self.flights.append(flight)
        views = [bucket.unpack(plan.buffer.copy()) for plan in plans]
        self._check_shares(bucket, views)
        run = self._decode if bucket.decode else self._prefill
        outputs = []
        for rank, view in enumerate(views):
            token, logprob = run(rank, bucket, view)
            if self.spoil and (view["sample"] > 0).any():
                self.spoil, logprob[0] = False, np.nan
            outputs.append(StepOutput(token, logprob, None, None, None))
        seconds = 2e-3 if bucket.decode else 1e-3 + 2e-5 * bucket.rows
        return FakeOutput(self, flight, outputs, seconds)

    def copy(self, copies: Sequence[StateCopies], launches: int | None = None) -> None:
        assert ("copy", None) in self.warm, "the copies are compiled while requests run"
        assert launches is None or max(own.launches for own in copies) <= launches
        self.calls += ["copy"] * (launches or 1)
        for rank, own in enumerate(copies):
            own.check(self.layout)
            caches = self.state[rank]
            for source, target in own.blocks:
                self._touch(rank, [source], writes=False)
                self._touch(rank, [target])
                for page in caches.pages:
                    page[target] = page[source]
            for source, target in own.slots:
                self._touch_slots(rank, [source, target])
                for array in caches.of_slots:
                    array[target] = array[source]

    def snapshot(self, slots: Sequence[int], layers: int) -> FakeSnapshot:
        assert ("snapshot", layers) in self.warm, "the snapshots are compiled while requests run"
        self.calls.append("snapshot")
        rings: list[np.ndarray | None] = []
        for rank, slot in enumerate(slots):
            if slot == NOTHING:
                rings.append(None)
                continue
            caches = self.state[rank]
            self._touch_slots(rank, [slot])
            last = caches.length[slot] - 1
            assert (caches.window_at[slot, :layers, last % caches.window_at.shape[2]] == last).all(), "not its rings"
            rings.append(np.stack([caches.window[slot, :layers], caches.window_at[slot, :layers].astype(U)]))
        return FakeSnapshot(rings)

    def restore(self, slots: Sequence[int], rings: Sequence[np.ndarray | None], layers: int) -> None:
        assert ("snapshot", layers) in self.warm, "the snapshots are compiled while requests run"
        self.calls.append("restore")
        for rank, (slot, ring) in enumerate(zip(slots, rings, strict=True)):
            assert (slot == NOTHING) == (ring is None)
            if ring is None:
                continue
            self._due.slots.add((rank, slot))
            self._dirty[rank][1].add(slot)
            caches = self.state[rank]
            caches.window[slot, :layers], caches.window_at[slot, :layers] = ring[0], ring[1].astype(np.int64)

    # -- for tests

    def scribble(self, rng: np.random.Generator) -> None:
        """Leaves rubbish in what the ledgers say is free, once after each use."""
        for ledger, caches, (blocks, slots) in zip(self.ledgers, self.state, self._dirty, strict=True):
            idle, left = blocks.intersection(ledger._free_blocks), slots.intersection(ledger._free_slots)
            caches.scribble(idle, left, rng)
            blocks -= idle
            slots -= left

    def check_flights(self) -> None:
        """What steps in flight work on is held."""
        for flight in self.flights:
            for rank, block in flight.touched:
                assert block in self.ledgers[rank]._references, f"block {block} is given up while a step works on it"
            for rank, slot in flight.slots:
                assert slot in self.ledgers[rank]._held_slots, f"slot {slot} is given up while a step works on it"

    def entries(self, rank: int, blocks: Sequence[int]) -> tuple[np.ndarray, ...]:
        """What blocks of a rank, by its number in the mesh, hold now, of each source."""
        return tuple(page[list(blocks)].reshape(-1) for page in self.state[self.local_ranks.index(rank)].pages)

    # -- one step of one rank

    def _touch(self, rank: int, blocks: Iterable[int], *, writes: bool = True) -> None:
        blocks = set(map(int, blocks))
        self.flights[-1].touched.update((rank, block) for block in blocks)
        if writes:
            self._dirty[rank][0].update(blocks)
        if self.ledgers:
            ledger = self.ledgers[rank]
            loose = blocks - ledger._references.keys()
            assert not loose, f"rank {rank}: blocks {loose} are used and nobody holds them"
            if writes:
                known = blocks & ledger._key_of.keys()
                assert not known, f"rank {rank}: blocks {known} can be found by their keys and are written"

    def _touch_slots(self, rank: int, slots: Iterable[int]) -> None:
        slots = set(map(int, slots))
        self.flights[-1].slots.update((rank, slot) for slot in slots)
        self._dirty[rank][1].update(slots)
        if self.ledgers:
            loose = slots - self.ledgers[rank]._held_slots
            assert not loose, f"rank {rank}: slots {loose} are used and nobody holds them"

    def _check_shares(self, bucket: Bucket, views: Sequence[dict[str, np.ndarray]]) -> None:
        """Context ranks run the same rows, and have each tile once."""
        if bucket.cp == 1:
            return
        for first in range(0, len(views), bucket.cp):
            group = views[first : first + bucket.cp]
            for prefix in ("", "kept_") if bucket.drops_rows else ("",):
                tiles = np.concatenate([view[prefix + "own_tiles"] for view in group])
                assert sorted(tiles.tolist()) == list(range(len(tiles)))
                for view in group:
                    assert (tiles[view[prefix + "home"]] == np.arange(len(tiles))).all()
            rows = []
            for view in group:
                assert (view["token"] == group[0]["token"]).all()
                live = view["count"] > 0
                rows.append(list(zip(*(view[name][live].tolist() for name in ("first_row", "start", "count")))))
            assert all(one == rows[0] for one in rows)

    def _prefill(self, rank: int, bucket: Bucket, view: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        live = np.flatnonzero((view["count"] > 0) | (view["sample"] > 0)).tolist()
        slots = view["slot"][live].tolist()
        assert len(set(slots)) == len(slots), "two chunks of a step have one slot"
        self._touch_slots(rank, slots)
        places = _rows_of(view["tile_sequence"], view["first_row"], view["count"], bucket.tile)
        kept = view["count"]
        if bucket.drops_rows:
            end = view["start"] + view["count"]
            kept = np.maximum(end - np.maximum(view["start"], view["decoder_start"]), 0)
            assert (kept[view["sample"] > 0] | (view["count"][view["sample"] > 0] == 0)).all()
            _rows_of(view["kept_tile_sequence"], view["kept_first_row"], kept, bucket.kept.tile)
        first_kept = view["kept_first_row"] if bucket.drops_rows else view["first_row"]
        last: dict[int, np.uint64] = {}  # hidden state by the row that may be sampled
        for s in live:
            if view["count"][s]:
                h = self._chunk(rank, view, s, places[s])
                if h is not None:
                    last[int(first_kept[s] + kept[s] - 1)] = h
        chosen = [s for s in live if view["sample"][s]]
        return self._sample(rank, view, chosen, [last[int(view["sample_row"][s])] for s in chosen])

    def _chunk(self, rank: int, view: dict[str, np.ndarray], s: int, rows: np.ndarray) -> np.uint64 | None:
        """Runs sequence s of a prefill step. The hidden state of its last row; None when it is dropped."""
        model, caches = self.model, self.state[rank]
        slot, start, n = int(view["slot"][s]), int(view["start"][s]), len(rows)
        window_start, decoder_start, cached = (int(view[f][s]) for f in ("window_start", "decoder_start", "cached"))
        end, tokens = start + n, view["token"][rows].astype(np.int64)
        assert 0 <= window_start <= start and (tokens >= 0).all()
        caches.length[slot] = end
        position = np.arange(start, end)
        ids = np.concatenate([view["history"][s][view["history"].shape[1] - model.look_back :], tokens])
        _store(caches.history[slot], caches.history_at[slot], tokens, position)
        h = model.embed([ids[model.look_back - back : len(ids) - back] for back in range(model.look_back + 1)])
        size = self.layout.block_size
        blocks = view["block_table"][s][: -(-end // size)].astype(np.int64)
        assert len(blocks) * size >= end, "the block table is too narrow"
        self._touch(rank, blocks, writes=False)
        fresh = max(start, cached)
        if fresh < end:
            self._touch(rank, blocks[fresh // size :])
        for layer, plan in enumerate(model.config.layers):
            if plan.owns_kv:
                self._store_entries(rank, plan.kv_source, slot, h, position, blocks, fresh)
            low = window_start
            if layer >= model.boundary:
                low = decoder_start
                if layer == model.boundary:
                    h, position = h[position >= low], position[position >= low]
                if not len(h):
                    return None
            first = int(position[0])
            before = np.arange(max(first - model.window + 1, low, 0), first)
            ring, at = caches.window[slot, layer], caches.window_at[slot, layer]
            key = np.concatenate([_read(ring, at, before, f"window of layer {layer}"), model.key(layer, h, position)])
            _store(ring, at, key[len(before) :], position)
            total = np.concatenate([np.zeros(1, U), np.cumsum(key, dtype=U)])
            origin = first - len(before)
            near = total[position + 1 - origin] - total[np.maximum(position - model.window + 1, max(low, 0)) - origin]
            far = np.zeros(len(h), U)
            if plan.kv_source >= 0:
                ratio = model.ratios[plan.kv_source]
                entries = caches.pages[plan.kv_source][blocks].reshape(-1)[: end // ratio]
                far = np.concatenate([np.zeros(1, U), np.cumsum(entries, dtype=U)])[(position + 1) // ratio]
            h = model.layer(layer, h, near, far)
        return h[-1]

    def _store_entries(
        self, rank: int, source: int, slot: int, h: np.ndarray, position: np.ndarray, blocks: np.ndarray, fresh: int
    ) -> None:
        """Entries of the groups that these rows complete, from position `fresh` on."""
        model, caches, ratio = self.model, self.state[rank], self.model.ratios[source]
        if ratio == 1:
            members, ends = [h], position
        else:
            pair = model.pair(h, position)
            ends = position[(position + 1) % ratio == 0]
            members = []
            for back in reversed(range(ratio)):
                at = ends - back
                inside = at >= position[0]
                old = at[~inside & (ends >= fresh)]
                member = np.zeros(len(ends), U)
                member[inside] = pair[at[inside] - position[0]]
                member[~inside & (ends >= fresh)] = _read(caches.pairs[slot], caches.pairs_at[slot], old, "pairs")
                members.append(member)
            _store(caches.pairs[slot], caches.pairs_at[slot], pair, position)
        if not len(ends):
            return
        number = ends // ratio
        entry = model.entry(source, [member + (number * ratio).astype(U) for member in members])
        wanted = number * ratio >= fresh // ratio * ratio
        number, entry = number[wanted], entry[wanted]
        per_block = caches.pages[source].shape[1]
        caches.pages[source][blocks[number // per_block], number % per_block] = entry

    def _decode(self, rank: int, bucket: Bucket, view: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        model, caches, size = self.model, self.state[rank], self.layout.block_size
        assert ((view["count"] == 0) | (view["count"] == 1)).all()
        live = np.flatnonzero(view["count"])
        rows = view["first_row"][live]
        assert (view["tile_sequence"][rows] == live).all() and len(set(rows.tolist())) == len(rows)
        idle = np.setdiff1d(np.arange(bucket.rows), rows)
        assert (view["count"][view["tile_sequence"][idle]] == 0).all(), "a row that nobody uses is somebody's"
        slot = view["slot"][live].astype(np.int64)
        assert len(set(slot.tolist())) == len(slot)
        self._touch_slots(rank, slot)
        token = view["token"][rows].astype(np.int64)
        token = np.where(token < 0, caches.last_token[slot], token)
        t = view["start"][live].astype(np.int64)
        t = np.where(t < 0, caches.length[slot], t)
        caches.length[slot] = t + 1
        each = range(len(slot))
        for i in each:
            table = view["block_table"][live[i]]
            assert t[i] // size < len(table), "the block table is too narrow"
            self._touch(rank, table[: t[i] // size + 1], writes=False)
            self._touch(rank, [table[t[i] // size]])
        _store_one(caches.history, caches.history_at, slot, token, t)
        looks = [
            _read_one(caches.history, caches.history_at, slot, t - back, -1) for back in range(model.look_back + 1)
        ]
        h = model.embed(looks)
        width = int(t.max(initial=0)) // size + 1
        table = view["block_table"][live][:, :width].astype(np.int64)
        for layer, plan in enumerate(model.config.layers):
            source = plan.kv_source
            if plan.owns_kv:
                ratio, members = model.ratios[source], [h]
                if ratio > 1:
                    _store_one(caches.pairs, caches.pairs_at, slot, model.pair(h, t), t)
                ends = np.flatnonzero((t + 1) % ratio == 0)
                if ratio > 1:
                    members = [
                        _read_one(caches.pairs, caches.pairs_at, slot[ends], t[ends] - back, 0)
                        for back in reversed(range(ratio))
                    ]
                number = t[ends] // ratio
                per_block = caches.pages[source].shape[1]
                entry = model.entry(source, [member + (number * ratio).astype(U) for member in members])
                if len(ends):
                    caches.pages[source][table[ends, number // per_block], number % per_block] = entry
            ring, at = caches.window[:, layer], caches.window_at[:, layer]
            _store_one(ring, at, slot, model.key(layer, h, t), t)
            span = t[:, None] - np.arange(model.window)
            near = _read_one(ring, at, slot[:, None], span, 0).sum(axis=1, dtype=U)
            far = np.zeros(len(h), U)
            if source >= 0:
                entries = caches.pages[source][table].reshape(len(h), width * caches.pages[source].shape[1])
                seen = np.arange(entries.shape[1]) < ((t + 1) // model.ratios[source])[:, None]
                far = np.where(seen, entries, U(0)).sum(axis=1, dtype=U)
            h = model.layer(layer, h, near, far)
        return self._sample(rank, view, live.tolist(), h)

    def _sample(
        self, rank: int, view: dict[str, np.ndarray], chosen: Sequence[int], h: Sequence[np.uint64] | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens, logprobs = np.full(len(view["slot"]), -7, np.int32), np.full(len(view["slot"]), -7, np.float32)
        if not len(chosen):
            return tokens, logprobs
        words = [view[name].view(np.uint32)[chosen].astype(U) for name in ("seed_low", "seed_high")]
        drawn, logprob = self.model.draw(
            np.array(h, U),
            view["temperature"].view(np.float32)[chosen].astype(np.float64),
            words[0] | words[1] << U(32),
            view["output_index"][chosen],
        )
        forced = view["forced"][chosen]
        tokens[chosen], logprobs[chosen] = np.where(forced >= 0, forced, drawn), logprob
        self.state[rank].last_token[view["slot"][chosen]] = tokens[chosen]
        return tokens, logprobs


def _rows_of(tile_sequence: np.ndarray, first_row: np.ndarray, count: np.ndarray, tile: int) -> dict[int, np.ndarray]:
    """The rows of each sequence that has some, which own the tiles that they lie in; the others are nobody's."""
    owner = np.full(len(tile_sequence), -1)
    rows: dict[int, np.ndarray] = {}
    for s in np.flatnonzero(count).tolist():
        rows[s] = np.arange(first_row[s], first_row[s] + count[s])
        tiles = np.unique(rows[s] // tile)
        assert tiles[-1] < len(owner) and (owner[tiles] == -1).all() and first_row[s] % tile == 0
        owner[tiles] = s
    mapped = tile_sequence[owner >= 0]
    assert (mapped == owner[owner >= 0]).all(), "a tile belongs to another sequence than its rows"
    for index in np.flatnonzero(owner < 0):
        s = int(tile_sequence[index])
        first = index * tile - int(first_row[s])
        assert first >= count[s] or first + tile <= 0, "padding counts as a sequence's row"
    return rows


def _store(ring: np.ndarray, at: np.ndarray, values: np.ndarray, position: np.ndarray) -> None:
    """The last rows of a chunk into a ring [rows]."""
    last = slice(max(0, len(position) - len(ring)), None)
    ring[position[last] % len(ring)], at[position[last] % len(ring)] = values[last], position[last]


def _read(ring: np.ndarray, at: np.ndarray, position: np.ndarray, what: str) -> np.ndarray:
    stale = position[at[position % len(ring)] != position]
    assert not len(stale), f"{what}: positions {stale.tolist()} are read and not there"
    return ring[position % len(ring)]


def _store_one(ring: np.ndarray, at: np.ndarray, slot: np.ndarray, values: np.ndarray, position: np.ndarray) -> None:
    """One row of each slot into rings [slots, rows]."""
    ring[slot, position % ring.shape[1]], at[slot, position % ring.shape[1]] = values, position


def _read_one(ring: np.ndarray, at: np.ndarray, slot: np.ndarray, position: np.ndarray, none: int) -> np.ndarray:
    """Rows of slots; `none` before a sequence's first."""
    slot = np.broadcast_to(slot, position.shape)
    found = at[slot, position % ring.shape[1]]
    stale = (position >= 0) & (found != position)
    assert not stale.any(), f"positions {position[stale].tolist()} are read, the rings hold {found[stale].tolist()}"
    return np.where(position >= 0, ring[slot, position % ring.shape[1]], np.array(none, ring.dtype))
