"""A device that is none: the caches of `ModelRunner` in NumPy, around a model whose arithmetic is hashing.

Every number that the real model would read goes into a row's hash, so a wrong block, a stale ring row, a length off by
one or a copy that was forgotten changes the tokens from there on. What can be told at once raises AssertionError: a row
of a ring that belongs to another position, a write to a block that can be found by its key or that nobody holds, a step
of a shape that was not warmed up, a draft of a sequence in whose window a step left no context. `FakeModel.hidden`
computes the same rows from all tokens at once, without caches.

Steps change the caches when they are launched, in that order, as on a device; their tokens can be read after `host`.

A decode step with drafts is three programs as in `speculative_programs`. Tokens follow from a row, the seed and the
output index alone (coupled draft and target), so that answers are those without drafts, whatever was drafted. What
rejected drafts left behind is overwritten with rubbish at once: nobody may read it.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from fake_model import FakeModel, U

from di_jax.engine.allocation import allocate_reference, pack_reference
from di_jax.engine.block_manager import BlockManager
from di_jax.engine.extra_sampling import COLUMNS, NEUTRAL, OF_REQUEST
from di_jax.engine.matching import MASK_BITS
from di_jax.engine.sampling_programs import NO_SLOT, TopTokens
from di_jax.engine.slot_table import SlotTable
from di_jax.engine.speculative_programs import DRAFT_COLUMNS, Verification
from di_jax.engine.state_programs import NOTHING, StateCopies
from di_jax.engine.step_output import DraftOutput, StepOutput
from di_jax.engine.step_plan import Bucket, StepPlan
from di_jax.engine.step_profile import StepProfile
from di_jax.model.cache import CacheLayout
from di_jax.model.config import ModelConfig
from di_jax.parallel.mesh import DeviceMesh, Parallel

TOPS = 4  # likeliest ids that are told


def packed_draft(token: np.ndarray, confidence: np.ndarray) -> DraftOutput:
    """Of int [R, k] and float32 [R, k], as `DraftOutput.of` on a device."""
    return DraftOutput(np.concatenate([token.astype(np.int32), confidence.view(np.int32)], axis=1))  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Drafting:
    """How the device drafts. right: the chance that a draft is what will be drawn, given that all before it are. ids:
    that the others come from; None: all. confidence: `random`, some of them 0 and 1, or one number for all."""

    num_drafts: int
    right: float = 0.7
    ids: tuple[int, ...] | None = None
    confidence: str | float = "random"


class Caches:
    """Of one rank. `*_at`: the position that a row of a ring holds, -1 for none.

    table: blocks of each slot as its last step had them. drawn_by: (origin, bits of temperature, words of the seed) of
    each slot. draft_at: the position that the first draft would stand behind, -1 for no drafts.
    """

    def __init__(self, config: ModelConfig, layout: CacheLayout, num_drafts: int = 0) -> None:
        slots = layout.num_slots
        self.pages = [np.zeros((layout.num_blocks, n), U) for n in layout.entries_per_block]
        self.ratios = config.kv_source_ratios
        self.window = np.zeros((slots, config.num_hidden_layers, config.window_ring), U)
        self.window_at = np.full(self.window.shape, -1)
        self.pairs = np.zeros((slots, config.compressor_ring), U)
        self.pairs_at = np.full(self.pairs.shape, -1)
        self.history = np.full((slots, config.engram_history), -1)
        self.history_at = np.full(self.history.shape, -1)
        self.context_at = np.full((slots, config.window_ring), -1)  # of the draft
        self.length = np.zeros(slots, np.int64)
        self.last_token = np.zeros(slots, np.int64)
        self.draft_token = np.full((slots, num_drafts), -1)
        self.draft_confidence = np.zeros((slots, num_drafts), np.float32)
        self.draft_at = np.full(slots, -1)
        self.drawn_by = np.zeros((slots, 4), np.int64)
        self.table = np.zeros((slots, 0), np.int64)

    @property
    def of_slots(self) -> list[np.ndarray]:
        """All arrays by slot but `last_token`."""
        rings = [self.window, self.window_at, self.pairs, self.pairs_at, self.history, self.history_at]
        return [*rings, self.context_at, self.length]

    def scribble(self, blocks: Iterable[int], slots: Iterable[int], rng: np.random.Generator) -> None:
        """Leaves rubbish in blocks and slots that are free."""
        for block in blocks:
            for page in self.pages:
                page[block] = rng.integers(0, 2**63, page.shape[1], dtype=U)
        for slot in slots:
            for array in [*self.of_slots, self.last_token, self.draft_token]:
                array[slot] = rng.integers(0, 200, array[slot].shape).astype(array.dtype)

    def forget(self, slots: np.ndarray, position: np.ndarray, table: np.ndarray, rng: np.random.Generator) -> None:
        """Leaves rubbish where rows of rejected drafts were. slots, position: int [n]; table: int [n, blocks]."""
        for ring, at in ((self.window, self.window_at), (self.pairs, self.pairs_at), (self.history, self.history_at)):
            row = position % at.shape[-1]
            assert (at[slots, ..., row] == position.reshape(-1, *[1] * (at.ndim - 2))).all()
            ring[slots, ..., row] = rng.integers(0, 200, ring[slots, ..., row].shape).astype(ring.dtype)
            at[slots, ..., row] = -1
        self.context_at[slots, position % self.context_at.shape[1]] = -1
        for page, ratio in zip(self.pages, self.ratios, strict=True):
            ends = (position + 1) % ratio == 0
            number, per_block = position[ends] // ratio, page.shape[1]
            rubbish = rng.integers(0, 2**63, len(number), dtype=U)
            page[table[ends, number // per_block], number % per_block] = rubbish

    def keep_table(self, slots: Any, table: np.ndarray) -> None:
        """Blocks of the sequences in some slots, int [n, blocks]."""
        if table.shape[1] > self.table.shape[1]:
            self.table = np.pad(self.table, ((0, 0), (0, table.shape[1] - self.table.shape[1])))
        self.table[slots, : table.shape[1]] = table


class Entries(Protocol):
    """Compressed entries of n rows' sequences."""

    def store(self, source: int, rows: np.ndarray, number: np.ndarray, entry: np.ndarray) -> None:
        """Entries of some of the rows, by their number in the sequence."""

    def read(self, source: int) -> np.ndarray:
        """uint64 [n, entries]."""


@dataclasses.dataclass(frozen=True)
class Paged:
    """Those in the pool. table: blocks of each row's sequence, int [n, blocks]."""

    pages: list[np.ndarray]
    table: np.ndarray

    def store(self, source: int, rows: np.ndarray, number: np.ndarray, entry: np.ndarray) -> None:
        per_block = self.pages[source].shape[1]
        self.pages[source][self.table[rows, number // per_block], number % per_block] = entry

    def read(self, source: int) -> np.ndarray:
        rows, blocks = self.table.shape
        return self.pages[source][self.table].reshape(rows, blocks * self.pages[source].shape[1])


@dataclasses.dataclass(frozen=True)
class Copied:
    """A copy of those of each row, uint64 [n, entries]."""

    entries: list[np.ndarray]

    def store(self, source: int, rows: np.ndarray, number: np.ndarray, entry: np.ndarray) -> None:
        self.entries[source][rows, number] = entry

    def read(self, source: int) -> np.ndarray:
        return self.entries[source]


@dataclasses.dataclass
class Flight:
    """A step whose results were not asked for yet. touched: (rank, block), slots: (rank, slot) that it works on."""

    touched: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    slots: set[tuple[int, int]] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Rows of a rank's step that tokens were drawn from, uint64, and which sequences of the step they are."""

    chosen: list[int]
    h: np.ndarray


@dataclasses.dataclass(frozen=True)
class FakeOutput:
    """Results that come when they are asked for, once and in order. sampled: of each rank, of a step without drafts."""

    device: FakeDevice
    flight: Flight
    outputs: list[StepOutput]
    seconds: float
    sampled: list[Sampled] = dataclasses.field(default_factory=list)
    draft: list[DraftOutput] | None = None

    def host(self) -> list[StepOutput]:
        assert self.device.flights.popleft() is self.flight, "results are asked for out of order"
        self.device.clock.advance(self.seconds)
        if self.device.fail_host is not None:
            error, self.device.fail_host = self.device.fail_host, None
            raise error
        if self.draft is None:
            return self.outputs
        pairs = zip(self.outputs, self.draft, strict=True)
        return [dataclasses.replace(output, draft=draft) for output, draft in pairs]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FakeVerification(Verification):
    """Of each rank: the plan's fields, the rows' hidden states uint64 and the lengths int [R] before the step."""

    flight: Flight
    bucket: Bucket
    views: list[dict[str, np.ndarray]]
    length: list[np.ndarray]


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

    local_ranks: of a process that hosts a part of the mesh. ledgers, tables: of these, in their order; with them, steps
    are checked against who holds what and where the host believes each sequence to be. fail_launch, fail_host: an error
    that the next launch, or the next wait, ends with; fail_program: of which program, any by default. spoil: the next
    step's first log-probability is none. calls: what was launched, the same in every process. drafted, verified,
    accepted: drafts so far. falsified: number of a `draft` whose confidences the host is told wrong.

    Below, and in `flights`, a rank is its place among the local ones.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: CacheLayout,
        plan: DeviceMesh,
        local_ranks: Sequence[int] | None = None,
        drafting: Drafting | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.layout, self.plan = FakeModel(config), layout, plan
        self.parallel, self.mesh = Parallel(plan), plan.build()
        self.local_ranks = list(range(plan.world) if local_ranks is None else local_ranks)
        self.clock = Clock()
        self.resets = 0
        self.calls: list[Any] = []
        self.warm: set[Any] = set()
        self.ledgers: Sequence[BlockManager] = ()
        self.tables: Sequence[SlotTable] = ()
        self.drafting, self.rng = drafting, np.random.default_rng(seed)
        self.profile: StepProfile | None = None
        self.drafted = self.verified = self.accepted = self.drafts_made = 0
        self.falsified: int | None = None
        self.flights: deque[Flight] = deque()
        self.fail_launch: Exception | None = None
        self.fail_host: Exception | None = None
        self.fail_program: str | None = None
        self.spoil = False
        self._due = Flight()  # what was touched before the next step
        self._dirty: list[tuple[set[int], set[int]]] = []
        self._empty()

    def _empty(self) -> None:
        drafts = 0 if self.drafting is None else self.drafting.num_drafts
        self.state = [Caches(self.model.config, self.layout, drafts) for _ in self.local_ranks]
        self._dirty = [(set(), set()) for _ in self.local_ranks]  # blocks and slots used since they were scribbled on

    # -- as the engine sees it

    def warm_up(self, buckets: Iterable[Bucket]) -> None:
        self.warm.update(buckets)
        self.warm.update({("draft", bucket.requests) for bucket in self.warm if isinstance(bucket, Bucket)})

    def warm_up_programs(self, snapshot_layers: int | None) -> None:
        self.warm.add(("copy", None))
        if snapshot_layers is not None:
            self.warm.add(("snapshot", snapshot_layers))

    idle = True

    def settle(self) -> None:
        pass

    def repair(self) -> None:
        pass

    def reset(self) -> None:
        self._empty()
        self.flights.clear()
        self._due = Flight()
        self.resets += 1

    @property
    def speculates(self) -> bool:
        return self.drafting is not None

    def execute(self, plans: Sequence[StepPlan]) -> FakeOutput:
        bucket = plans[0].bucket
        assert not bucket.drafts
        flight, views = self._launch("execute", plans)
        self._check_shares(bucket, views)
        run = self._decode if bucket.decode else self._prefill
        outputs, sampled = [], []
        for rank, view in enumerate(views):
            chosen, h = run(rank, bucket, view)
            token, logprob = self._sample(rank, view, chosen, h)
            if self.spoil and (view["sample"] > 0).any():
                self.spoil, logprob[0] = False, np.nan
            outputs.append(StepOutput(token, logprob, None, None, None))
            sampled.append(Sampled(chosen, np.array(h, U)))
        seconds = 2e-3 if bucket.decode else 1e-3 + 2e-5 * bucket.rows
        return FakeOutput(self, flight, outputs, seconds, sampled)

    def resample(
        self, output: FakeOutput, rows: Sequence[np.ndarray], allowed: Sequence[np.ndarray] | None = None
    ) -> FakeOutput:
        self._program("resample", allowed is not None)
        assert self.flights[-1] is output.flight
        outputs = []
        for rank, (step, own, sampled) in enumerate(zip(output.outputs, rows, output.sampled, strict=True)):
            view = dict(zip(COLUMNS, own, strict=True))
            masks = None if allowed is None else self._allowed(allowed[rank][:, 0])
            chosen = [at for at, s in enumerate(sampled.chosen) if view["chosen"][s]]
            if masks is not None:
                free = masks.all(axis=1) | (view["sample"] == 0) | (view["chosen"] > 0)
                assert free.all(), "a sequence that must match something is not drawn again"
            which = [sampled.chosen[at] for at in chosen]
            own_masks = None if masks is None else masks[which]
            token, logprob = self._sample(rank, view, which, sampled.h[chosen], own_masks)
            again = np.isin(np.arange(len(token)), which)
            token = np.where(again, token, step.token)
            logprob = np.where(again & np.isfinite(step.logprob), logprob, step.logprob)
            outputs.append(dataclasses.replace(step, token=token, logprob=logprob, top=self._top(token)))
        return dataclasses.replace(output, outputs=outputs)

    # -- a decode step with drafts

    def verify(self, plans: Sequence[StepPlan]) -> FakeVerification:
        bucket = plans[0].bucket
        assert bucket.drafts == self._drafts.num_drafts
        flight, views = self._launch("verify", plans)
        hidden, verified, length = zip(*(self._verify(r, bucket, view) for r, view in enumerate(views)), strict=True)
        of_ranks: Any = hidden, verified, None
        return FakeVerification(*of_ranks, None, flight=flight, bucket=bucket, views=views, length=list(length))

    def _verify(self, rank: int, bucket: Bucket, view: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        caches, size = self.state[rank], self.layout.block_size
        given = np.flatnonzero(view["cap"] >= 0)
        slot = view["slot"].astype(np.int64)
        assert len(set(slot[given].tolist())) == len(given), "two sequences of a step have one slot"
        self._touch_slots(rank, slot[given])
        length, drafts = caches.length[slot], caches.draft_token[slot]
        live = (view["cap"] >= 0) & (length < view["capacity"] - 1)
        known = np.cumprod(drafts >= 0, axis=1).sum(axis=1)
        caps = np.clip(np.minimum(np.minimum(view["cap"], view["capacity"] - length - 2), known), 0, None)
        caps = np.where(live, caps, -1).astype(np.int32)
        budget = min(int(view["budget"][0]), bucket.rows - int(live.sum()))
        verified = allocate_reference(caches.draft_confidence[slot], caps, budget)
        rows = pack_reference(verified, bucket.rows)
        request, offset = rows.request[rows.valid], rows.offset[rows.valid]
        if self.tables:
            self._check_bounds(self.tables[rank], view, given, length, live, caps, verified)
        checked = live & (verified > 0)
        assert (caches.draft_at[slot] == length)[checked].all(), "drafts of another place are verified"
        drawn_by = self._drawn_by(view, view["origin"])
        assert (drawn_by == caches.drawn_by[slot])[live].all(), "a sequence is drawn in another way than before"
        assert (view["cap"][view["forced"] >= 0] <= 0).all(), "drafts of forced tokens"
        token = np.where(offset == 0, caches.last_token[slot][request], drafts[request, offset - 1])
        table = view["block_table"].astype(np.int64)
        position = length[request] + offset
        assert (position <= view["capacity"][request] - 2).all()
        caches.keep_table(slot[live], table[live])
        h = self._rows(rank, slot[request], token, position, table[request])
        assert (position // size < bucket.context_blocks).all()
        self.verified += int(np.maximum(verified, 0).sum())
        self._leave_context(rank, slot[request], position)
        return h, verified, length

    def _check_bounds(
        self,
        table: SlotTable,
        view: dict[str, np.ndarray],
        given: np.ndarray,
        length: np.ndarray,
        live: np.ndarray,
        caps: np.ndarray,
        verified: np.ndarray,
    ) -> None:
        """The host's idea of a step against what it is."""
        slot = view["slot"][given]
        low, ahead = table.position[slot], table.ahead[slot]
        assert ((low <= length[given]) & (length[given] <= low + ahead)).all(), (
            f"lengths {length[given].tolist()} are not within {low.tolist()} + {ahead.tolist()}"
        )
        last = (length + np.maximum(verified, 0))[given][live[given]]
        assert (last // self.layout.block_size < table.num_blocks[slot][live[given]]).all(), "rows beyond the blocks"
        if not ahead.any():
            assert live[given].all() and (caps[given] == view["cap"][given]).all(), "other drafts than the host expects"
            assert np.maximum(verified, 0).sum() == view["budget"][0], "rows that are left empty"

    def accept(
        self,
        verification: FakeVerification,
        rows: Sequence[np.ndarray] | None = None,
        allowed: Sequence[np.ndarray] | None = None,
    ) -> FakeOutput:
        assert allowed is None or rows is not None
        v = verification
        assert self.flights[-1] is v.flight
        self._program("accept", v.bucket.requests, v.bucket.rows, rows is not None, allowed is not None)
        outputs = []
        for rank in range(len(self.local_ranks)):
            if rows is not None:
                assert rows[rank].shape == (len(OF_REQUEST), v.bucket.requests)
                assert (rows[rank].T[v.views[rank]["cap"] < 0] == NEUTRAL).all()
            output = self._accept(rank, v, None if allowed is None else allowed[rank])
            outputs.append(output if rows is None else dataclasses.replace(output, top=self._top(output.token)))
        return FakeOutput(self, v.flight, outputs, 1e-3 + 5e-5 * v.bucket.rows)

    def _accept(self, rank: int, v: FakeVerification, allowed: np.ndarray | None) -> StepOutput:
        caches, view, verified, length = self.state[rank], v.views[rank], np.asarray(v.verified[rank]), v.length[rank]
        packed = pack_reference(verified, v.bucket.rows)
        request, offset = packed.request[packed.valid], packed.offset[packed.valid]
        index = (length + 1 - view["origin"])[request] + offset
        masks = None if allowed is None else self._allowed(allowed[request, offset])
        own = {name: view[name][request] for name in ("temperature", "seed_low", "seed_high")}
        drawn, logprobs = self._draw(own, np.asarray(v.hidden[rank]), index, masks)
        drawn = np.where((offset == 0) & (view["forced"][request] >= 0), view["forced"][request], drawn)
        k, slots = v.bucket.drafts, view["slot"]
        token = np.full((len(verified), k + 1), -1, np.int32)
        logprob = np.zeros(token.shape, np.float32)
        for r in np.flatnonzero(verified >= 0).tolist():
            first, ell, slot = int(packed.start[r]), int(verified[r]), int(slots[r])
            right = drawn[first : first + ell] == caches.draft_token[slot, :ell]
            count = int(np.cumprod(right).sum())
            token[r, : count + 1] = drawn[first : first + count + 1]
            logprob[r, : count + 1] = logprobs[first : first + count + 1]
            caches.length[slot], caches.last_token[slot] = length[r] + count + 1, token[r, count]
            caches.draft_token[slot], caches.draft_at[slot] = -1, -1
            dead = np.arange(length[r] + count + 1, length[r] + ell + 1)
            many = np.full(len(dead), slot), np.repeat(view["block_table"][r : r + 1], len(dead), axis=0)
            caches.forget(many[0], dead, many[1].astype(np.int64), self.rng)
            self.accepted += count
        if self.spoil and (verified >= 0).any():
            self.spoil, logprob[np.flatnonzero(verified >= 0)[0], 0] = False, np.nan
        error = self.rng.random(len(verified), np.float32)
        output: Any = dict(token=token, logprob=logprob, verified=verified, error=error)
        return StepOutput(logits=None, trace=None, load=None, **output)

    def draft(self, rows: Sequence[np.ndarray]) -> list[DraftOutput]:
        requests = rows[0].shape[1]
        assert len(rows) == len(self.local_ranks)
        assert ("draft", requests) in self.warm, f"drafts of {requests} sequences are compiled while requests run"
        self._program("draft", requests)
        outputs = []
        for rank, own in enumerate(rows):
            assert own.shape == (len(DRAFT_COLUMNS), requests)
            token, confidence = self._draft(rank, dict(zip(DRAFT_COLUMNS, own, strict=True)))
            told = 1 - confidence if self.falsified == self.drafts_made else confidence
            outputs.append(packed_draft(token, told))
        self.drafts_made += 1
        return outputs

    def _draft(self, rank: int, view: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32 [R, k], confidences fp32 [R, k])."""
        caches, how = self.state[rank], self._drafts
        k, vocabulary = how.num_drafts, self.model.config.vocab_size
        shape = len(view["slot"]), k
        valid = np.flatnonzero(view["slot"] != NO_SLOT)
        slot = view["slot"][valid].astype(np.int64)
        assert len(set(slot.tolist())) == len(slot), "two sequences draft in one slot"
        assert {(rank, s) for s in slot.tolist()} <= self.flights[-1].slots, "drafts of who had no part in the step"
        # A sequence whose answer is full has no row, though the host may not know yet: its drafts are left as they are.
        unused = (caches.draft_token[slot] == -1).all(axis=1) | (caches.draft_at[slot] == caches.length[slot])
        assert unused.all(), "drafts of an earlier place are still there"
        length, ring = caches.length[slot], caches.context_at.shape[1]
        span = length[:, None] - 1 - np.arange(self.model.window)
        stale = (span >= 0) & (caches.context_at[slot[:, None], span % ring] != span)
        assert not stale.any(), f"drafts from windows without context at {span[stale].tolist()}"
        drawn_by = self._drawn_by(view, view["origin"])[valid]
        assert (drawn_by == caches.drawn_by[slot]).all(), "drafts are drawn in another way than the answer"
        ids = np.arange(vocabulary) if how.ids is None else np.array(how.ids)
        token = self.rng.choice(ids, shape).astype(np.int32)
        confidence = self.rng.random(shape, np.float32)
        if how.confidence == "random":
            edge = self.rng.integers(0, 6, shape)
            confidence = np.where(edge == 0, np.float32(0), np.where(edge == 1, np.float32(1), confidence))
        else:
            confidence[:] = how.confidence
        right = np.cumprod(self.rng.random((len(slot), k)) < how.right, axis=1, dtype=np.int64)
        own = {name: view[name][valid] for name in ("temperature", "seed_low", "seed_high")}
        first = caches.length[slot] + 1 - view["origin"][valid]
        for place, truth in enumerate(self._look_ahead(rank, slot, own, first, int(right.sum(axis=1).max(initial=0)))):
            token[valid, place] = np.where(right[:, place], truth, token[valid, place])
        caches.draft_token[slot], caches.draft_confidence[slot] = token[valid], confidence[valid]
        caches.draft_at[slot] = caches.length[slot]
        self.drafted += len(slot) * k
        return token, confidence

    def _look_ahead(
        self, rank: int, slot: np.ndarray, own: dict[str, np.ndarray], first: np.ndarray, count: int
    ) -> Iterable[np.ndarray]:
        """The next `count` tokens of sequences, computed on a copy of what the caches hold of them."""
        if not count:
            return
        caches, n = self.state[rank], np.arange(len(slot))
        copy = object.__new__(Caches)
        for name in ("window", "window_at", "pairs", "pairs_at", "history", "history_at"):
            setattr(copy, name, getattr(caches, name)[slot])
        entries = [page[caches.table[slot]].reshape(len(slot), -1) for page in caches.pages]
        entries = [np.pad(own_entries, ((0, 0), (0, 128))) for own_entries in entries]
        token, length = caches.last_token[slot], caches.length[slot]
        for ahead in range(count):
            h = self._forward(copy, n, token, length + ahead, Copied(entries))
            token, _ = self._draw(own, h, first + ahead)
            yield token

    @property
    def _drafts(self) -> Drafting:
        assert self.drafting is not None
        return self.drafting

    @staticmethod
    def _drawn_by(view: dict[str, np.ndarray], origin: np.ndarray) -> np.ndarray:
        return np.stack([origin, view["temperature"], view["seed_low"], view["seed_high"]], axis=1).astype(np.int64)

    def _allowed(self, words: np.ndarray) -> np.ndarray:
        """bool [n, V] of int32 [n, words]."""
        ids = np.arange(self.model.config.vocab_size)
        return (words.view(np.uint32)[:, ids // MASK_BITS] >> (ids % MASK_BITS).astype(np.uint32) & 1).astype(bool)

    def _top(self, token: np.ndarray) -> TopTokens:
        """Something that follows from the token that was emitted."""
        ids = (token[..., None] + np.arange(TOPS)) % self.model.config.vocab_size
        return TopTokens(1 + token % 50, ids, np.broadcast_to(-np.arange(TOPS, dtype=np.float32), ids.shape))

    def _program(self, name: str, *what: Any) -> None:
        """A program is launched."""
        if self.fail_launch is not None and self.fail_program in (None, name):
            error, self.fail_launch = self.fail_launch, None
            raise error
        self.calls.append((name, *what))

    def _launch(self, name: str, plans: Sequence[StepPlan]) -> tuple[Flight, list[dict[str, np.ndarray]]]:
        bucket = plans[0].bucket
        assert len(plans) == len(self.local_ranks) and all(plan.bucket == bucket for plan in plans)
        assert bucket in self.warm, f"{bucket} is compiled while requests run"
        self._program(name, bucket)
        flight, self._due = self._due, Flight()
        self.flights.append(flight)
        return flight, [bucket.unpack(plan.buffer.copy()) for plan in plans]

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

    def _prefill(self, rank: int, bucket: Bucket, view: dict[str, np.ndarray]) -> tuple[list[int], Sequence[np.uint64]]:
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
        return chosen, [last[int(view["sample_row"][s])] for s in chosen]

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
                    self._leave_context(rank, np.full(len(position), slot), position)
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

    def _decode(self, rank: int, bucket: Bucket, view: dict[str, np.ndarray]) -> tuple[list[int], np.ndarray]:
        caches = self.state[rank]
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
        if not bucket.bare:
            self._leave_context(rank, slot, t)
        return live.tolist(), self._rows(rank, slot, token, t, view["block_table"][live].astype(np.int64))

    def _leave_context(self, rank: int, slot: np.ndarray, position: np.ndarray) -> None:
        """To the draft, of rows in the order of their positions."""
        at = self.state[rank].context_at
        at[slot, position % at.shape[1]] = position

    def _rows(self, rank: int, slot: np.ndarray, token: np.ndarray, t: np.ndarray, table: np.ndarray) -> np.ndarray:
        """Hidden states of decode rows, int [n] each, through the caches of a rank. table: int [n, blocks]."""
        size = self.layout.block_size
        for own, last in zip(table, (t // size).tolist(), strict=True):
            assert last < len(own), "the block table is too narrow"
            self._touch(rank, own[: last + 1], writes=False)
            self._touch(rank, own[last : last + 1])
        table = table[:, : int(t.max(initial=0)) // size + 1]
        return self._forward(self.state[rank], slot, token, t, Paged(self.state[rank].pages, table))

    def _forward(
        self, caches: Caches, slot: np.ndarray, token: np.ndarray, t: np.ndarray, entries: Entries
    ) -> np.ndarray:
        """Rows of several sequences, some of them perhaps of one; all of a layer are stored before any is read."""
        model = self.model
        _store_one(caches.history, caches.history_at, slot, token, t)
        looks = [
            _read_one(caches.history, caches.history_at, slot, t - back, -1) for back in range(model.look_back + 1)
        ]
        h = model.embed(looks)
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
                entry = model.entry(source, [member + (number * ratio).astype(U) for member in members])
                if len(ends):
                    entries.store(source, ends, number, entry)
            ring, at = caches.window[:, layer], caches.window_at[:, layer]
            _store_one(ring, at, slot, model.key(layer, h, t), t)
            span = t[:, None] - np.arange(model.window)
            near = _read_one(ring, at, slot[:, None], span, 0).sum(axis=1, dtype=U)
            far = np.zeros(len(h), U)
            if source >= 0:
                known = entries.read(source)
                seen = np.arange(known.shape[1]) < ((t + 1) // model.ratios[source])[:, None]
                far = np.where(seen, known, U(0)).sum(axis=1, dtype=U)
            h = model.layer(layer, h, near, far)
        return h

    def _draw(
        self, view: dict[str, np.ndarray], h: np.ndarray, index: np.ndarray, allowed: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        words = [view[name].view(np.uint32).astype(U) for name in ("seed_low", "seed_high")]
        temperature = view["temperature"].view(np.float32).astype(np.float64)
        return self.model.draw(h, temperature, words[0] | words[1] << U(32), index, allowed)

    def _sample(
        self,
        rank: int,
        view: dict[str, np.ndarray],
        chosen: Sequence[int],
        h: Sequence[np.uint64] | np.ndarray,
        allowed: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens, logprobs = np.full(len(view["slot"]), -7, np.int32), np.full(len(view["slot"]), -7, np.float32)
        if not len(chosen):
            return tokens, logprobs
        caches, slot, index = self.state[rank], view["slot"][chosen], view["output_index"][chosen]
        own = {name: view[name][chosen] for name in ("temperature", "seed_low", "seed_high")}
        drawn, logprob = self._draw(own, np.array(h, U), index, allowed)
        forced = view["forced"][chosen]
        tokens[chosen], logprobs[chosen] = np.where(forced >= 0, forced, drawn), logprob
        caches.last_token[slot] = tokens[chosen]
        caches.draft_token[slot], caches.draft_at[slot] = -1, -1
        if "block_table" in view:
            caches.keep_table(slot, view["block_table"][chosen].astype(np.int64))
            end = np.where(view["start"] < 0, caches.length[view["slot"]], view["start"] + view["count"])[chosen]
            caches.drawn_by[slot] = self._drawn_by(own, end - index)
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
