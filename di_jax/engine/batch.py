"""What one step runs: chunks of prompts, or one token of every running sequence, on each rank of this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from di_jax.engine.block_manager import BlockManager
from di_jax.engine.sequence import Holding, Sequence
from di_jax.engine.slot_table import SlotTable, idle_plan
from di_jax.engine.step_plan import FREE_TOKEN, Bucket, BucketLadder, Chunk, StepPlan, build_plan
from di_jax.engine.step_policy import DECODE, PREFILL
from di_jax.engine.verification import Round

# What a decode step has to do for drafts, from the least on: nothing, leave the draft its context, verify some.
BARE, CONTEXT, VERIFIES = range(3)


@dataclass(frozen=True)
class Need:
    """The smallest bucket that holds a batch: rows, kept rows of the decoder layers and blocks of context; of an engine
    that drafts also sequences, and BARE, CONTEXT or VERIFIES. 0: no work."""

    rows: int = 0
    kept_rows: int = 0
    context_blocks: int = 0
    requests: int = 0
    drafts: int = BARE

    def numbers(self) -> list[int]:
        return [self.rows, self.kept_rows, self.context_blocks, self.requests, self.drafts]

    def bucket(self, ladder: BucketLadder, decode: bool) -> Bucket:
        """The shape of a step in which this is what the rank that needs most needs."""
        requests = self.requests if self.drafts == VERIFIES else 0
        bare = decode and bool(ladder.drafts) and self.drafts == BARE
        return ladder.bucket(decode, self.rows, self.context_blocks, self.kept_rows, requests, bare)


@dataclass(frozen=True)
class Work:
    """A sequence's part of a step. chunks: by rank; under context parallelism a prompt runs on several.

    held: what it held when the step was launched. end: tokens in the caches after the step. parent: of a fork, whose
    chunk has no tokens: the part whose last row it samples.
    """

    sequence: Sequence
    chunks: dict[int, Chunk]
    held: tuple[Holding, ...] = ()
    end: int = 0
    parent: Work | None = None

    @property
    def rank(self) -> int:
        """The rank whose results count; the others compute the same."""
        return next(iter(self.chunks))

    @property
    def chunk(self) -> Chunk:
        return self.chunks[self.rank]


@dataclass(frozen=True)
class Batch:
    """Chunks of sequences. A chunk with `sample` yields its sequence's next token."""

    kind: str = PREFILL
    work: list[Work] = field(default_factory=list)

    @property
    def num_sequences(self) -> int:
        return len(self.work)

    @property
    def num_tokens(self) -> int:
        return sum(len(work.chunk.tokens) for work in self.work)

    @property
    def mean_context(self) -> float:
        """Tokens before the chunk of a row, the mean over all rows."""
        total = sum(work.chunk.start * len(work.chunk.tokens) for work in self.work)
        return total / max(1, self.num_tokens)

    def of_rank(self, rank: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        at = 0  # of the last chunk with tokens: forks stand behind their parent
        for work in self.work:
            if (chunk := work.chunks.get(rank)) is None:
                continue
            if work.parent is None:
                at = len(chunks)
            else:
                chunk = dataclasses.replace(chunk, samples_of=at)
            chunks.append(chunk)
        return chunks

    def results(self) -> Iterator[tuple[int, int, Work]]:
        """(rank, place among the rank's chunks, work), once for every sequence."""
        places: dict[int, int] = {}
        for work in self.work:
            yield work.rank, places.get(work.rank, 0), work
            for rank in work.chunks:
                places[rank] = places.get(rank, 0) + 1

    def need(self, ladder: BucketLadder, ledgers: SequenceOf[BlockManager]) -> Need:
        """Of the rank that needs most."""
        rows = kept = context = 0
        for ledger in ledgers:
            if chunks := self.of_rank(ledger.rank):
                blocks = max(ledger.blocks_of(chunk.start + len(chunk.tokens)) for chunk in chunks)
                bucket = ladder.fit(
                    self.kind == DECODE,
                    [len(chunk.tokens) for chunk in chunks],
                    blocks,
                    kept=[chunk.num_kept for chunk in chunks],
                )
                rows, context = max(rows, bucket.rows), max(context, bucket.context_blocks)
                kept = max(kept, bucket.kept_rows)
        return Need(rows, kept, context)

    def plans(self, bucket: Bucket, ranks: SequenceOf[int]) -> list[StepPlan]:
        """The step plans of these ranks."""
        return [build_plan(bucket, self.of_rank(rank), rank % bucket.cp) for rank in ranks]


@dataclass(frozen=True)
class DecodePart:
    """The slots of one rank that decode, with the least positions that they feed.

    caps: drafts of each that the step may verify. drafted: which have drafts at all. round: of `RateLedger.schedule`,
    when steps verify drafts. rows: that the rank would verify, 0 without drafts.
    """

    rank: int
    table: SlotTable
    slots: np.ndarray  # int [n]
    position: np.ndarray  # int32 [n]
    sequences: list[Sequence]
    caps: np.ndarray  # int32 [n]
    drafted: np.ndarray  # bool [n]
    round: Round | None = None
    rows: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to verify and it is known which position each sequence feeds."""
        return not (self.caps.any() or self.table.ahead[self.slots].any())

    @property
    def last_position(self) -> int:
        """The furthest that the step feeds."""
        return int(self.table.last_position(self.slots, self.caps).max())


@dataclass(frozen=True)
class DecodeBatch:
    """One token of every running sequence, or the drafts that follow it too. num_drafts: of a sequence at most. bare:
    there will be no drafts for so long that a step that verifies none leaves the draft no context."""

    parts: list[DecodePart]
    kind: str = DECODE
    num_drafts: int = 0
    bare: bool = False

    @property
    def num_sequences(self) -> int:
        return sum(len(part.slots) for part in self.parts)

    @property
    def num_tokens(self) -> int:
        return self.num_sequences

    mean_context = 0.0  # decode steps are not what the cost of prefill steps is learned from

    def advance(self, verifies: bool = False, bare: bool = False) -> None:
        """The step was launched. verifies: one that may verify drafts. bare: as in `Bucket`."""
        for part in self.parts:
            part.table.advance(part.slots, part.caps if verifies else None, bare)

    def need(self, ladder: BucketLadder, ledgers: SequenceOf[BlockManager]) -> Need:
        """Of the rank that needs most."""
        rows = max((len(part.slots) for part in self.parts), default=0)
        if not rows:
            return Need()
        block_size = ledgers[0].block_size
        blocks = max(part.last_position // block_size + 1 for part in self.parts if len(part.slots))
        bucket = ladder.fit(True, range(rows), blocks)
        if not self.num_drafts or (ladder.varlen and all(part.is_plain for part in self.parts)):
            requests = bucket.rows if self.num_drafts else 0  # another process may have drafts to verify
            drafts = CONTEXT if self.num_drafts and not self.bare else BARE
            return Need(bucket.rows, bucket.kept_rows, bucket.context_blocks, requests, drafts)
        wanted = max(part.rows for part in self.parts)
        return Need(wanted, 0, bucket.context_blocks, bucket.rows, VERIFIES)

    def plans(self, bucket: Bucket, ranks: SequenceOf[int]) -> list[StepPlan]:
        """The step plans of these ranks."""
        parts = {part.rank: part for part in self.parts}
        return [
            part.table.plan(bucket, part.slots, part.caps)
            if (part := parts.get(rank))
            else idle_plan(bucket)
            if bucket.drafts
            else build_plan(bucket, ())
            for rank in ranks
        ]


def work_of(
    sequence: Sequence,
    tokens: list[int],
    start: int,
    *,
    sample: bool,
    keep_tokens: int = 0,
    look_back: int = 0,
) -> Work:
    """Tokens of a sequence from position `start` on, on every rank that holds it.

    keep_tokens: rows of the end of its prompt that go through the decoder layers; 0: all. look_back: tokens before the
    first one that the Engram sees.
    """
    hit, goal = sequence.hit, sequence.goal
    # A snapshot holds the decoder's rings only when there is no decoder replay; else its windows begin where rows do.
    decoder_start = max(goal - keep_tokens, hit.start, 0) if keep_tokens else hit.window_start

    def chunk(holding: Holding) -> Chunk:
        return Chunk(
            tokens=tokens,
            start=start,
            slot=holding.slot,
            blocks=holding.blocks,
            sample=sample,
            temperature=sequence.sampling.temperature,
            seed=sequence.seed,
            output_index=len(sequence.output_ids),
            forced=sequence.forced_token(len(sequence.output_ids)) if sample else FREE_TOKEN,
            window_start=hit.window_start,
            decoder_start=decoder_start,
            cached=hit.length,
            history=sequence.tokens(max(0, start - look_back), start),
        )

    chunks = {holding.rank: chunk(holding) for holding in sequence.held}
    return Work(sequence, chunks, tuple(sequence.held), start + len(tokens))
