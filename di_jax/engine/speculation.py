"""Speculative decoding as the host runs it: how many drafts a step verifies, whether it drafts, and what came of both
(dspark 3). The decisions are those of `engine.verification`; here they meet batches, ranks and processes.

A step N verifies the drafts of step N - 1 while the host knows what step N - 2 drafted; step N - 1 may still run. So
the number of rows follows from older confidences, and which drafts get them is for the device to say.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from di_jax.engine.batch import Batch, DecodeBatch, DecodePart
from di_jax.engine.extra_sampling import NEUTRAL, OF_REQUEST
from di_jax.engine.runtime_estimator import ForwardRuntimeEstimator, SamplerRuntimeEstimator, StepTimes
from di_jax.engine.sampling_programs import NO_SLOT
from di_jax.engine.slot_table import SlotTable
from di_jax.engine.speculative_programs import DRAFT_COLUMNS
from di_jax.engine.step_output import StepOutput
from di_jax.engine.step_plan import Bucket, BucketLadder
from di_jax.engine.step_profile import StepProfile
from di_jax.engine.verification import (
    DraftSwitch,
    Promises,
    RateLedger,
    TypicalBlock,
    choose_rows,
    drafting_gain,
    expected_tokens,
    fill,
)

# Of expected tokens, which the processes tell each other as whole numbers.
FRACTIONS = 1024
# Steps from one look at older confidences to the next, once drafting was seen to pay: what they say changes slowly, and
# a look takes 0.1 to 0.3 ms of a host that small models wait for (H200, 1 to 64 requests, steps of 7 ms).
LOOK_EVERY = 4
# What a step with fewer rows than were chosen must save, as where the last tokens of an answer leave little to verify:
# one or two such steps come between many of the chosen shape, and changing shapes costs time too (H200, one request:
# 7.2 ms a step on average, 6.7 where all have one shape).
ANOTHER_SHAPE = 0.1
# Of the sequences of a step that drafts, those that must have their context: what a trial finds is to be said of all.
ENOUGH_CONTEXT = 7 / 8
_TRUNCATION = [OF_REQUEST.index(name) for name in ("min_p", "top_k", "top_p")]


class Began(NamedTuple):
    """The sequences of a rank whose round a step is: their slots, owners (`Round`), and which of them may draft after
    it, bool [n]: the draft has their context; None where nobody does."""

    slots: np.ndarray
    owners: np.ndarray
    may_draft: np.ndarray | None


Rounds = dict[int, Began]  # by rank


@dataclasses.dataclass(frozen=True)
class Outlook:
    """What the ranks of this process, or all together, expect of a step: tokens, in FRACTIONS, of `requests`, and the
    tokens if every draft were verified of typical blocks; of how many of these earlier drafts are known, and of how
    many the draft will have the context; and the most sequences of one rank that take part."""

    tokens: int = 0
    typical: int = 0
    requests: int = 0
    known: int = 0
    with_context: int = 0
    drafters: int = 0

    def numbers(self) -> list[int]:
        return [self.tokens, self.typical, self.requests, self.known, self.with_context, self.drafters]

    @classmethod
    def of_all(cls, numbers: np.ndarray) -> Outlook:
        """From `numbers` of every process, int [processes, 6]."""
        tokens, typical, requests, known, with_context = numbers[:, :-1].sum(axis=0).tolist()
        return cls(tokens, typical, requests, known, with_context, int(numbers[:, -1].max()))


class Speculation:
    """The books of one engine. tables: of this process's ranks. profile: what steps take, the same in all processes;
    None where every step verifies all that it can. window: positions of context that the draft reads. filters: whether
    drafts are drawn behind the min-p, top-k and top-p of their request (dspark 2.1); any way leaves answers distributed
    as without drafts.

    In a pause of the switch nobody needs the draft's context until a window before its end: till then plain steps leave
    none (they are bare, and cost what they cost without a draft). A sequence does not draft before its window is whole
    again: what it would draft says nothing of what it drafts otherwise.
    """

    def __init__(
        self,
        ladder: BucketLadder,
        tables: Mapping[int, SlotTable],
        profile: StepProfile | None,
        window: int,
        *,
        filters: bool = True,
    ) -> None:
        self.ladder, self.tables, self.window, self.filters = ladder, tables, window, filters
        self.ledgers = {rank: RateLedger(len(t.sequences), ladder.drafts) for rank, t in tables.items()}
        rows = sorted({rows for requests in ladder.decode_rows for rows in ladder.verify_rows(requests)})
        self.profile = profile
        self.forward = ForwardRuntimeEstimator(rows, {} if profile is None else profile.forward)
        self.sampling = SamplerRuntimeEstimator(None if profile is None else profile.sampling)
        self.drafting = SamplerRuntimeEstimator(None if profile is None else profile.drafting)
        self._at_start: dict[int, StepTimes] = {}  # by sequences of a step
        self.switch = DraftSwitch()
        self.typical, self.promises = TypicalBlock(ladder.drafts), Promises()
        self._chosen: dict[tuple[int, int], int] = {}  # rows of the last look, by rank and sequences of a step
        self._turn = 0  # decode steps
        self._waits = False  # to draft until the sequences have their context
        self._idle = False  # in a pause so long that steps are no rounds

    # -- planning

    def plan(self, batch: DecodeBatch) -> DecodeBatch:
        """The batch with the rows that each rank would verify."""
        bare = self.switch.pause >= self.window
        if bare and all(part.is_plain for part in batch.parts):
            # Nothing happens that the books are about, and they cost host time (0.3 ms a step on two busy cores).
            self._idle = True
            return dataclasses.replace(batch, bare=True)
        if self._idle:
            self._idle = False
            for ledger in self.ledgers.values():
                ledger.forget()
        return dataclasses.replace(batch, parts=[self._part(part) for part in batch.parts], bare=bare)

    def _part(self, part: DecodePart) -> DecodePart:
        requests, ledger = self.ladder.decode_rung(len(part.slots)), self.ledgers[part.rank]
        if not part.caps.any():  # nothing to verify, as in a pause: no time for a choice
            return dataclasses.replace(
                part, round=ledger.schedule(part.slots, False), rows=self.ladder.verify_rows(requests)[0]
            )
        key = part.rank, requests
        looks = self.profile is not None and (self._looks or key not in self._chosen)
        now = ledger.schedule(part.slots, looks)
        if looks:
            now = now._replace(survival=self.typical.fill(now) * self.promises.ratio)
            # As if no answer were about to end: those that follow keep the shape.
            full = np.where(part.caps > 0, self.ladder.drafts, 0)
            self._chosen[key] = choose_rows(now.survival, full, self._times(requests))
        every = self.ladder.verify_rows(requests)
        needed = every[min(bisect_left(every, len(part.slots) + int(part.caps.sum())), len(every) - 1)]
        chosen = self._chosen.get(key, needed)
        if needed < chosen and self._saves(requests, needed, chosen):
            chosen = needed
        return dataclasses.replace(part, round=now, rows=chosen)

    def _saves(self, requests: int, needed: int, chosen: int) -> bool:
        """Whether a step of as few rows as can be filled is worth another shape than the chosen one."""
        times = self._times(requests)
        least, most = times.at(needed), times.at(chosen)
        return least is None or most is None or least < (1 - ANOTHER_SHAPE) * most

    @property
    def _looks(self) -> bool:
        """Whether the next step looks at older confidences: the same in all processes."""
        return not self.switch.pays or self._turn % LOOK_EVERY == 0

    def _times(self, requests: int) -> StepTimes:
        """Of steps of so many sequences, by their rows. Where there is no choice, nothing is known."""
        return self._among(self.forward, requests)

    def _times_at_start(self, requests: int) -> StepTimes:
        """The same by the profile alone, alike in all processes."""
        if requests not in self._at_start:
            rows = self.forward.buckets
            self._at_start[requests] = self._among(ForwardRuntimeEstimator(rows, self.forward.profile), requests)
        return self._at_start[requests]

    def _among(self, forward: ForwardRuntimeEstimator, requests: int) -> StepTimes:
        rows = np.array(self.ladder.verify_rows(requests), np.int64)
        every = forward.times(self.sampling.seconds(requests) + self.drafting.seconds(requests))
        seconds = None if every.seconds is None else every.seconds[np.searchsorted(every.rows, rows)]
        return StepTimes(rows, seconds)

    def outlook(self, batch: Batch | DecodeBatch) -> Outlook:
        """Of this process."""
        if isinstance(batch, Batch):
            return Outlook(drafters=max(map(len, self._sampled(batch).values()), default=0))
        tokens, requests, known, with_context = 0.0, 0, 0, 0
        for part in batch.parts:
            requests += len(part.slots)
            if part.round is not None and part.round.known.any():
                drafts = fill(part.rows, part.caps)
                tokens += expected_tokens(part.round.survival, part.caps, drafts)
                known += int(part.round.known[0].sum())
            else:
                tokens += len(part.slots)
            if not batch.bare:
                with_context += int(part.table.has_context(part.slots, self.window, part.position + 1).sum())
        drafters = max((len(part.slots) for part in batch.parts), default=0)
        typical = requests * (1 + self.typical.accepted(self.promises))
        return Outlook(round(tokens * FRACTIONS), round(typical * FRACTIONS), requests, known, with_context, drafters)

    def drafts(self, outlook: Outlook, bucket: Bucket) -> bool:
        """Whether the step that is about to be launched drafts. outlook: of all processes. Once for every step."""
        if not outlook.drafters or self.profile is None:
            return bool(outlook.drafters)
        if not bucket.decode:
            return not (self.switch.pause or self._waits)
        self._turn += 1
        ready = outlook.with_context >= ENOUGH_CONTEXT * outlook.requests
        size = self.ladder.decode_rung(outlook.drafters)
        plain, gain = self.profile.plain[size], None
        context = self.window * max(0.0, self.profile.context[size] / plain - 1)
        if ready and 2 * outlook.known >= outlook.requests and bucket.drafts:
            seconds = self._times_at_start(size).at(bucket.rows)
            assert seconds is not None
            gain = drafting_gain(outlook.tokens / FRACTIONS, seconds, outlook.requests, plain)
        wanted = self.switch.next(outlook.requests, gain, lambda: self._most(outlook, size, plain), context)
        self._waits = wanted and not ready
        return wanted and ready

    def _most(self, outlook: Outlook, size: int, plain: float) -> float:
        """What drafting gains at most in steps of this size: with typical blocks, and as many rows as do best, of
        which each emits a token."""
        times = self._times_at_start(size)
        assert times.seconds is not None
        tokens = np.minimum(outlook.typical / FRACTIONS, times.rows * (outlook.requests / outlook.drafters))
        return float(np.max(tokens / times.seconds)) * plain / outlook.requests

    # -- drafting

    def rows(self, rounds: Rounds, ranks: SequenceOf[int], outlook: Outlook) -> list[np.ndarray]:
        """What the draft of a step needs, int32 [columns, R] for each of `ranks`; marks its sequences as drafted.
        rounds: of its `begin`."""
        requests = self.ladder.decode_rung(outlook.drafters)
        none = np.zeros(0, np.int64)
        nobody = Began(none, none, none > 0)
        return [self._draft_rows(rank, rounds.get(rank, nobody), requests) for rank in ranks]

    def _draft_rows(self, rank: int, began: Began, requests: int) -> np.ndarray:
        table, slots, n = self.tables[rank], began.slots, len(began.slots)
        assert began.may_draft is not None
        rows = np.zeros((len(DRAFT_COLUMNS), requests), np.int32)
        column = dict(zip(DRAFT_COLUMNS, rows, strict=True))
        column["slot"][:] = NO_SLOT
        column["slot"][:n] = np.where(began.may_draft, slots, NO_SLOT)
        column["origin"][:n] = table.origin[slots]
        column["temperature"][:n] = table.temperature[slots].view(np.int32)
        column["seed_low"][:n], column["seed_high"][:n] = table.seed_low[slots], table.seed_high[slots]
        for name, at in zip(("min_p", "top_k", "top_p"), _TRUNCATION, strict=True):
            column[name][:] = NEUTRAL[at]
            if self.filters:
                column[name][:n] = table.numbers[slots, at]
        table.drafted[slots] = began.may_draft
        return rows

    def _sampled(self, batch: Batch) -> dict[int, np.ndarray]:
        """Slots of the sequences that a prefill step gives a token and that go on, by rank."""
        found: dict[int, list[int]] = {}
        for rank, _, work in batch.results():
            slot = work.chunk.slot
            if work.chunk.sample and self.tables[rank].left[slot] > 0:
                found.setdefault(rank, []).append(slot)
        return {rank: np.array(slots) for rank, slots in found.items()}

    # -- rounds

    def begin(self, batch: Batch | DecodeBatch, drafts: bool) -> Rounds:
        """A step was launched. To the sequences that it samples a prefill step is a round like any other. drafts:
        whether it does."""
        rounds: Rounds = {}
        if isinstance(batch, DecodeBatch):
            for part in batch.parts:
                if part.round is not None:
                    table, may_draft = part.table, None
                    if drafts:
                        may_draft = table.has_context(part.slots, self.window, table.position[part.slots])
                    rounds[part.rank] = Began(part.slots, part.round.owners, may_draft)
            return rounds
        for rank, slots in self._sampled(batch).items():
            self.ledgers[rank].reset(slots)
            rounds[rank] = Began(slots, self.ledgers[rank].schedule(slots).owners, np.ones(len(slots), bool))
        return rounds

    def completed(self, rounds: Rounds, outputs: Mapping[int, StepOutput]) -> None:
        """The results of a step are in. rounds: of its `begin`."""
        for rank, (slots, owners, may_draft) in rounds.items():
            draft, verified = outputs[rank].draft, outputs[rank].verified
            if verified is not None:
                accepted = np.sum(np.asarray(outputs[rank].token) >= 0, axis=1)[: len(slots)] - 1
                self.promises.add(
                    self.ledgers[rank].newest(slots, owners), np.asarray(verified)[: len(slots)], accepted
                )
            confidence = None if draft is None else draft.confidence[: len(slots)]
            self.ledgers[rank].process(slots, owners, confidence, may_draft)
            table = self.tables[rank]
            for place in np.flatnonzero(table.matched[slots]).tolist():
                if (sequence := table.sequences[slots[place]]) is not None:
                    sequence.drafts = []
                    if draft is not None and may_draft is not None and may_draft[place]:
                        sequence.drafts = draft.token[place].tolist()

    def observe(self, bucket: Bucket, seconds: float, drafted: bool) -> None:
        """A decode step took so long."""
        if not bucket.drafts:
            return
        seconds -= self.sampling.seconds(bucket.requests)
        seconds -= self.drafting.seconds(bucket.requests) if drafted else 0.0
        self.forward.observe(bucket.rows, max(seconds, 0.0))
