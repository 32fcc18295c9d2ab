"""Which sequences run in the next step, and which of their tokens. Pure host policy: no device, no text, no clock."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from di_jax.engine.block_manager import BlockManager
from di_jax.engine.sequence import Holding, Sequence, Status
from di_jax.engine.step_plan import DEVICE_TOKEN, FREE_TOKEN, Bucket, BucketLadder, Chunk, StepPlan, build_plan
from di_jax.model.cache import CacheLayout

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True)
class Work:
    """A sequence's part of a step. chunks: by rank; under context parallelism a prompt runs on several."""

    sequence: Sequence
    chunks: dict[int, Chunk]

    @property
    def rank(self) -> int:
        """The rank whose results count; the others compute the same."""
        return next(iter(self.chunks))

    @property
    def chunk(self) -> Chunk:
        return self.chunks[self.rank]


@dataclass(frozen=True)
class Batch:
    """One step's work. A chunk with `sample` yields its sequence's next token."""

    kind: str  # PREFILL or DECODE
    work: list[Work] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(work.chunk.tokens) for work in self.work)

    def of_rank(self, rank: int) -> list[Chunk]:
        return [work.chunks[rank] for work in self.work if rank in work.chunks]

    def results(self) -> Iterator[tuple[int, int, Work]]:
        """(rank, place among the rank's chunks, work), once for every sequence."""
        places: dict[int, int] = {}
        for work in self.work:
            yield work.rank, places.get(work.rank, 0), work
            for rank in work.chunks:
                places[rank] = places.get(rank, 0) + 1


class DataRank:
    """One data-parallel rank: the sequences it runs, and the ledgers of its context ranks."""

    def __init__(self, ledgers: SequenceOf[BlockManager]) -> None:
        self.ledgers = list(ledgers)
        self.running: list[Sequence] = []  # admitted, in order of admission

    @property
    def free_blocks(self) -> int:
        """On the context rank that has the fewest: a prompt needs blocks on all of them."""
        return min(ledger.num_free_blocks for ledger in self.ledgers)

    def can_admit(self, sequence: Sequence) -> bool:
        return all(ledger.can_allocate(sequence) for ledger in self.ledgers)

    def admit(self, sequence: Sequence) -> None:
        for ledger in self.ledgers:
            ledger.allocate(sequence)
        sequence.status = Status.PREFILL
        self.running.append(sequence)

    def settle(self, sequence: Sequence) -> None:
        """The prompt is through: the context rank with the most room keeps the sequence, the others free it. Room is
        the lesser of the shares of slots and of blocks that are free: a new prompt needs both on every rank."""
        owner = max(self.ledgers, key=lambda r: min(r.num_free_slots / r.num_slots, r.num_free_blocks / r.num_blocks))
        for ledger in self.ledgers:
            if ledger is not owner:
                ledger.free(sequence)
        sequence.status = Status.RUNNING

    def release(self, sequence: Sequence) -> None:
        for ledger in self.ledgers:
            ledger.free(sequence)


class Scheduler:
    """First come, first served: sequences wait in `waiting`, and run on one data-parallel rank from admission to end.

    ranks: the data-parallel ranks that this process schedules; a new sequence goes where the step has the most room
    left, then where the most blocks are free. max_num_batched_tokens: tokens of one rank's prefill step.
    """

    def __init__(self, ranks: SequenceOf[DataRank], ladder: BucketLadder, *, max_num_batched_tokens: int) -> None:
        self.ranks, self.ladder = list(ranks), ladder
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()

    @property
    def running(self) -> list[Sequence]:
        return [sequence for rank in self.ranks for sequence in rank.running]

    @property
    def ledgers(self) -> list[BlockManager]:
        """Of all ranks, in their order."""
        return [ledger for rank in self.ranks for ledger in rank.ledgers]

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or any(rank.running for rank in self.ranks)

    @property
    def can_prefill(self) -> bool:
        """Whether a prefill step would have work."""
        if any(s.status is Status.PREFILL for s in self.running):
            return True
        return bool(self.waiting) and any(rank.can_admit(self.waiting[0]) for rank in self.ranks)

    @property
    def can_decode(self) -> bool:
        return any(s.status is Status.RUNNING for s in self.running)

    def never_fits(self, num_tokens: int) -> str | None:
        """Why a sequence of that many positions could not run even alone, or None."""
        ledger = self.ledgers[0]
        need = ledger.blocks_of(num_tokens)
        most = min(ledger.num_blocks, self.ladder.context_blocks[-1])
        if need <= most:
            return None
        return (
            f"prompt and max_tokens are {num_tokens} tokens, {need} blocks of {ledger.block_size}; the engine has "
            f"{most}: shorten the prompt, lower sampling.max_tokens or raise engine.num_blocks"
        )

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self, kind: str) -> Batch:
        """The next step of that kind, without work when there is none. Call `computed` after it ran."""
        return self._prefill() if kind == PREFILL else self._decode()

    def computed(self, batch: Batch) -> None:
        """Counts the batch's tokens as cached; the caller appends the sampled ones."""
        for work in batch.work:
            sequence = work.sequence
            sequence.num_computed += len(work.chunk.tokens)
            if sequence.status is Status.PREFILL and not sequence.remaining_prompt:
                self._rank_of(sequence).settle(sequence)

    def finish(self, sequence: Sequence, reason: str | None) -> None:
        """Ends a sequence in any state and frees what it holds. reason: its finish_reason; None for a failed one."""
        if sequence.finished:
            return
        # In neither when an interrupt cut its admission short.
        if sequence.status is Status.WAITING:
            with contextlib.suppress(ValueError):
                self.waiting.remove(sequence)
        for rank in self.ranks:
            with contextlib.suppress(ValueError):
                rank.running.remove(sequence)
            rank.release(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason

    def need(self, batch: Batch) -> tuple[int, int]:
        """(rows, context blocks) of the smallest bucket that holds every rank's part of the batch; (0, 0) for none."""
        return bucket_need(batch, self.ledgers, self.ladder)

    def _rank_of(self, sequence: Sequence) -> DataRank:
        return next(rank for rank in self.ranks if sequence in rank.running)

    def _prefill(self) -> Batch:
        """Prompts in progress first, then new ones while slots, blocks, rows and tokens last."""
        work: list[Work] = []
        rooms = [_Room(self.ladder, self.max_num_batched_tokens) for _ in self.ranks]
        for rank, room in zip(self.ranks, rooms, strict=True):
            for sequence in rank.running:
                if sequence.status is Status.PREFILL and room.is_open:
                    work.append(self._prompt(sequence, room))
        while self.waiting:
            sequence = self.waiting[0]
            fits = [i for i, rank in enumerate(self.ranks) if rooms[i].is_open and rank.can_admit(sequence)]
            if not fits:
                break
            best = max(fits, key=lambda i: (rooms[i].tokens, self.ranks[i].free_blocks))
            self.waiting.popleft()
            self.ranks[best].admit(sequence)
            work.append(self._prompt(sequence, rooms[best]))
        return Batch(PREFILL, work)

    def _prompt(self, sequence: Sequence, room: _Room) -> Work:
        """As much of the rest of a prompt as the room holds."""
        start = sequence.num_computed
        end = start + room.take(sequence.remaining_prompt)
        return work_of(sequence, sequence.prompt_ids[start:end], start, sample=end == len(sequence.prompt_ids))

    def _decode(self) -> Batch:
        """One row for every running sequence; its token is still on device, in the slot."""
        decoding = [s for s in self.running if s.status is Status.RUNNING]
        return Batch(DECODE, [work_of(s, [DEVICE_TOKEN], s.num_computed, sample=True) for s in decoding])


class _Room:
    """What is left of one rank's prefill step."""

    def __init__(self, ladder: BucketLadder, tokens: int) -> None:
        self.ladder, self.tokens, self.rows = ladder, tokens, ladder.prefill_rows[-1]
        self.grain = ladder.prefill_row_cost(1)

    @property
    def is_open(self) -> bool:
        return self.rows >= self.grain and self.tokens > 0

    def take(self, wanted: int) -> int:
        """Reserves rows for up to `wanted` tokens; returns how many they are."""
        count = min(wanted, self.tokens, self.rows // self.grain * self.grain)
        self.rows -= self.ladder.prefill_row_cost(count)
        self.tokens -= count
        return count


def work_of(sequence: Sequence, tokens: list[int], start: int, *, sample: bool) -> Work:
    """Tokens of a sequence from position `start` on, on every rank that holds it."""

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
            forced=sequence.forced_token if sample else FREE_TOKEN,
        )

    return Work(sequence, {holding.rank: chunk(holding) for holding in sequence.held})


def data_ranks(local_ranks: SequenceOf[int], cp: int, layout: CacheLayout) -> list[DataRank]:
    """The data-parallel ranks made of this process's ranks, cp neighbours each, with empty ledgers."""
    ledgers = [BlockManager(layout.num_blocks, layout.num_slots, layout.block_size, rank) for rank in local_ranks]
    return [DataRank(ledgers[at : at + cp]) for at in range(0, len(ledgers), cp)]


def bucket_need(batch: Batch, ledgers: SequenceOf[BlockManager], ladder: BucketLadder) -> tuple[int, int]:
    """(rows, context blocks) of the smallest bucket that holds every rank's part of the batch; (0, 0) for none."""
    rows = context = 0
    for ledger in ledgers:
        if chunks := batch.of_rank(ledger.rank):
            blocks = max(ledger.blocks_of(chunk.start + len(chunk.tokens)) for chunk in chunks)
            bucket = ladder.fit(batch.kind == DECODE, [len(chunk.tokens) for chunk in chunks], blocks)
            rows, context = max(rows, bucket.rows), max(context, bucket.context_blocks)
    return rows, context


def rank_plans(bucket: Bucket, batch: Batch, ranks: SequenceOf[int]) -> list[StepPlan]:
    """The step plans of these ranks."""
    return [build_plan(bucket, batch.of_rank(rank), rank % bucket.cp) for rank in ranks]
