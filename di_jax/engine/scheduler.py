"""Which sequences run in the next step, and which of their tokens. Pure host policy: no device, no text, no clock.

A step is launched before the tokens of the one before it are known. What a sequence held is therefore given back
(`completed`) only when the last step that was launched while it held it has been seen complete.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from di_jax.engine.batch import Batch, DecodeBatch, DecodePart, Work, work_of
from di_jax.engine.block_manager import BlockManager
from di_jax.engine.chunking import cut, gets_tokens, share_tokens
from di_jax.engine.data_rank import DataRank
from di_jax.engine.preemption import choose_victim
from di_jax.engine.prefix_cache import hit_limit
from di_jax.engine.sequence import Holding, Sequence, Status
from di_jax.engine.step_plan import BucketLadder
from di_jax.engine.step_policy import PREFILL
from di_jax.engine.waiting_queue import WaitingQueue

# Sequences behind one that finds no room which may go before it, and how long it is patient with them.
LOOK_AHEAD = 8
PATIENCE_S = 10.0


@dataclass(frozen=True)
class Limits:
    """Of one rank's prefill step. stops: whether chunks end where a snapshot of the window state is wanted."""

    max_num_batched_tokens: int
    max_sum_context: int | None = None
    snapshots: bool = False


@dataclass
class Chores:
    """What has to be done to the caches around a step.

    restores: (rank, slot, window rings) before it. block_copies, slot_copies: (rank, source, destination), and
    snapshots: (rank, slot, sequence, boundary in tokens), after it.
    """

    restores: list[tuple[int, int, np.ndarray]] = field(default_factory=list)
    block_copies: list[tuple[int, int, int]] = field(default_factory=list)
    slot_copies: list[tuple[int, int, int]] = field(default_factory=list)
    snapshots: list[tuple[int, int, Sequence, int]] = field(default_factory=list)


class Scheduler:
    """The queue, and the sequences that run on this process's ranks. Every sequence ends in `finish`.

    preemptions, replays: so far; replays are prefix hits without window state. chores: of the step scheduled last.
    """

    def __init__(self, ranks: SequenceOf[DataRank], ladder: BucketLadder, limits: Limits) -> None:
        self.ranks, self.ladder, self.limits = list(ranks), ladder, limits
        self.block_size = self.ranks[0].block_size
        self.waiting: WaitingQueue[Sequence] = WaitingQueue()
        self.preemptions = self.replays = 0
        self.chores = Chores()
        self._followers: dict[Sequence, list[Sequence]] = {}  # of a leader whose prompt is under way
        self._retired: deque[tuple[int, DataRank, Holding]] = deque()  # until a step is complete
        self._launched = self._complete = self._prefills = 0

    # -- state

    @property
    def running(self) -> list[Sequence]:
        return [sequence for rank in self.ranks for sequence in rank.running]

    @property
    def num_running(self) -> int:
        return sum(rank.num_running for rank in self.ranks)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + sum(map(len, self._followers.values()))

    @property
    def ledgers(self) -> list[BlockManager]:
        """Of all ranks, in their order."""
        return [ledger for rank in self.ranks for ledger in rank.ledgers]

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or any(rank.num_running for rank in self.ranks)

    @property
    def can_decode(self) -> bool:
        return any(bool((table.left > 0).any()) for rank in self.ranks for table in rank.tables)

    @property
    def is_short(self) -> bool:
        """Whether a decode step would need more blocks than there are: somebody has to be preempted."""
        return any(
            len(table.short(table.ready(), self.block_size)) > ledger.num_available
            for rank in self.ranks
            for ledger, table in zip(rank.ledgers, rank.tables, strict=True)
        )

    def can_prefill(self, now: float) -> bool:
        """Whether a prefill step would have work."""
        if any(rank.prompts for rank in self.ranks):
            return True
        if not any(rank.has_slot for rank in self.ranks):
            return False
        for passed, sequence in enumerate(self.waiting.ordered(now), 1):
            if any(rank.can_admit(sequence) for rank in self.ranks):
                return True
            if not _may_pass(passed, sequence, now):
                break
        return False

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

    def check(self) -> None:
        """Raises RuntimeError unless every block and slot of every rank is accounted for."""
        held: dict[int, list[tuple[list[int], int]]] = {ledger.rank: [] for ledger in self.ledgers}
        for holding in [h for s in self.running for h in s.held] + [h for _, _, h in self._retired]:
            held[holding.rank].append((holding.blocks, holding.slot))
        for ledger in self.ledgers:
            ledger.check(held[ledger.rank])

    # -- life of a sequence

    def add(self, sequences: SequenceOf[Sequence], now: float) -> None:
        """Queues the answers of one request. Those behind the first wait for its prompt, to go on from its caches."""
        leader, *followers = sequences
        self._wait(leader, now)
        if followers:
            self._followers[leader] = followers

    def finish(self, sequence: Sequence, reason: str | None, now: float) -> None:
        """Ends a sequence in any state. reason: its finish_reason; None for a failed one."""
        if sequence.finished:
            return
        self.waiting.remove(sequence)
        self._retire(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        self._release_followers(sequence, now)
        if sequence.leader in self._followers:
            self._followers[sequence.leader].remove(sequence)

    def launched(self) -> int:
        """A step was launched; its number. Call `completed` with it."""
        self._launched += 1
        return self._launched

    def completed(self, step: int) -> None:
        """All of a step's results are in: what was given up before the next one was launched is free."""
        self._complete = step
        while self._retired and self._retired[0][0] <= step:
            _, rank, holding = self._retired.popleft()
            rank.release(holding)

    def reset(self) -> None:
        """The caches on device were emptied, no step is in flight. Call `finish` for every sequence that ran before."""
        for _, _, holding in self._retired:
            holding.blocks = []
        self._retired.clear()
        self._complete = self._launched
        for rank in self.ranks:
            for sequence in list(rank.running):
                sequence.held = []
            rank.reset()

    def _retire(self, sequence: Sequence) -> None:
        for rank in self.ranks:
            if sequence in rank.prompts or sequence in rank.decoding:
                self._later(rank, rank.leave(sequence))

    def _later(self, rank: DataRank, held: SequenceOf[Holding], step: int | None = None) -> None:
        """Releases holdings once a step is complete: by default the last one that was launched."""
        step = self._launched if step is None else step
        for holding in held:
            if step <= self._complete:
                rank.release(holding)
            else:
                self._retired.append((step, rank, holding))

    def _release_followers(self, leader: Sequence, now: float) -> None:
        """They need not wait for the leader's prompt any more."""
        for sequence in self._followers.pop(leader, ()):
            self._wait(sequence, now)

    def _wait(self, sequence: Sequence, now: float) -> None:
        sequence.waiting_since = now
        self.waiting.add(sequence, sequence.priority, sequence.arrival, now)

    # -- steps

    def schedule(
        self, kind: str, now: float, *, tokens: int | None = None, preempt: bool = False
    ) -> Batch | DecodeBatch | None:
        """The next step of that kind, without work when there is none. What it changes counts on its being launched.

        tokens: of a prefill step of one rank, if fewer than the limits allow. preempt: no step is in flight, so a
        sequence that finds no block may take those of another. None when only that would help.
        """
        self.chores = Chores()
        return self._prefill(now, tokens) if kind == PREFILL else self._decode(now, preempt)

    def _prefill(self, now: float, tokens: int | None) -> Batch:
        """Prompts in progress and new ones, each with its share of the step."""
        budget, buckets = self.limits.max_num_batched_tokens, self.ladder.prefill_rows
        rows = buckets[-1]
        if tokens is not None:
            # A row takes as long as all rows of its bucket: whole ones, of at least a block.
            whole = max((rows for rows in buckets if rows <= tokens), default=0)
            rows = next(rows for rows in buckets if rows >= min(budget, max(self.block_size, whole)))
            budget = min(budget, rows)
        turn, self._prefills = self._prefills, self._prefills + 1
        self._take_in(now, budget, turn)
        work: list[Work] = []
        for rank in self.ranks:
            prompts = _oldest_first(rank.prompts)
            shares = share_tokens([s.remaining_prompt for s in prompts], budget, self.block_size, turn)
            room = _Room(self.ladder, rows, budget, self.limits.max_sum_context)
            for sequence, share in zip(prompts, shares, strict=True):
                if share and room.holds(sequence):
                    work += self._chunk(rank, sequence, room.take(share), room, now)
        return Batch(PREFILL, work)

    def _take_in(self, now: float, budget: int, turn: int) -> None:
        """Admits waiting sequences that get tokens of this step, in order; a few may pass one that finds no room.

        Those that take the tokens of others, being shorter, are as few: with prompts of ever falling length a step
        would take in the whole queue, of which it could run but the end.
        """
        passed = displacing = 0
        admitted: list[Sequence] = []
        remaining = {rank: [s.remaining_prompt for s in _oldest_first(rank.prompts)] for rank in self.ranks}
        for sequence in self.waiting.ordered(now):
            best: tuple[tuple[int, int, int], DataRank, int] | None = None
            for rank in self.ranks:
                if not rank.has_slot:
                    continue
                chain = rank.chain(sequence)
                if not rank.can_admit(sequence, chain):
                    continue
                hit, others = rank.hit(sequence, chain), remaining[rank]
                tokens = len(sequence) - hit.start
                if not gets_tokens(others, tokens, budget, self.block_size, turn):
                    continue
                merit = (hit.length, -sum(others), rank.available)
                if best is None or merit > best[0]:
                    best = merit, rank, tokens
            if best is not None:
                _, rank, tokens = best
                self._admit(rank, sequence)
                admitted.append(sequence)
                displacing += sum(remaining[rank]) >= budget
                remaining[rank].append(tokens)
                if displacing == LOOK_AHEAD:
                    break
                continue
            passed += 1
            if not _may_pass(passed, sequence, now) or not any(rank.has_slot for rank in self.ranks):
                break
        for sequence in admitted:
            self.waiting.remove(sequence)

    def _admit(self, rank: DataRank, sequence: Sequence) -> None:
        rank.admit(sequence)
        hit = sequence.hit
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = hit.length
        self.replays += hit.start < hit.length
        if hit.length and hit.start == hit.length:
            assert sequence.keys is not None
            rings = rank.snapshots.get(sequence.keys.keys[hit.length // self.block_size - 1])
            assert rings is not None
            self.chores.restores += [(holding.rank, holding.slot, rings) for holding in sequence.held]

    def _chunk(self, rank: DataRank, sequence: Sequence, count: int, room: _Room, now: float) -> list[Work]:
        """A chunk of at most `count` tokens, and with a prompt's last one the forks of other answers to it."""
        start, goal = sequence.num_computed, sequence.goal
        count = cut(start, count, goal, self._stops(rank, sequence), self.block_size)
        if not count:
            return []
        end = start + count
        rules = rank.rules
        work = work_of(
            sequence,
            sequence.tokens(start, end),
            start,
            sample=end == goal,
            keep_tokens=rules.keep_tokens,
            look_back=rules.history,
        )
        sequence.num_computed = end
        room.book(sequence, count)
        if self._is_wanted(rank, sequence, end):
            self.chores.snapshots.append((work.rank, sequence.held[0].slot, sequence, end))
        if end < goal:
            return [work]
        self._later(rank, rank.settle(sequence), self._launched + 1)
        (held,) = sequence.held
        chunks = {held.rank: work.chunks[held.rank]} | work.chunks  # the results of the one that goes on count
        work = dataclasses.replace(work, chunks=chunks)
        forks: list[Work] = []
        followers = self._followers.get(sequence, [])
        while followers and room.take_entry():
            child = followers[0]
            copied = rank.fork(sequence, child)
            if copied is None:
                break
            followers.pop(0)
            forks.append(_fork(child, work))
            self.chores.slot_copies.append((held.rank, held.slot, child.held[0].slot))
            if copied[0] >= 0:
                self.chores.block_copies.append((held.rank, *copied))
        self._release_followers(sequence, now)
        return [work, *forks]

    def _stops(self, rank: DataRank, sequence: Sequence) -> list[int]:
        """Boundaries inside the rest of a prompt at which the window state is wanted: where an equal prompt could hit,
        where a longer one could, and where this one did and had to replay."""
        if not self.limits.snapshots:
            return []
        goal, size = sequence.goal, self.block_size
        wanted = {sequence.hit.length}
        if not rank.rules.replay:
            wanted = {hit_limit(goal, rank.rules.look_back, size), goal // size * size}
        return sorted(at for at in wanted if sequence.num_computed < at < goal)

    def _is_wanted(self, rank: DataRank, sequence: Sequence, end: int) -> bool:
        """Whether to keep the window state after a prompt's first `end` tokens. With replay a prompt's last boundary
        is enough: at others a hit replays one block."""
        if not self.limits.snapshots or end % self.block_size:
            return False
        return not rank.rules.replay or end == sequence.hit.length or end + self.block_size > sequence.goal

    def _decode(self, now: float, preempt: bool) -> DecodeBatch | None:
        """One token of every running sequence, and drafts. Its tokens are on device; new blocks for those that need
        them. Drafts get blocks only where there are some to be had: nobody is preempted for them."""
        for rank in self.ranks:
            for ledger, table in zip(rank.ledgers, rank.tables, strict=True):
                while True:
                    short = table.short(table.ready(), self.block_size)
                    if len(short) <= ledger.num_available:
                        break
                    if not preempt:
                        return None
                    if spare := table.unneeded(self.block_size):
                        for slot in spare:
                            rank.shrink(ledger.rank, slot)
                        continue
                    self._preempt(rank, ledger, now)
                for slot in short:
                    rank.grow(ledger.rank, slot)
        parts = []
        for rank in self.ranks:
            for ledger, table in zip(rank.ledgers, rank.tables, strict=True):
                slots = table.ready()
                if not len(slots):
                    continue
                caps = np.zeros(len(slots), np.int32)
                if table.num_drafts:
                    caps = table.caps(slots)
                    for slot in table.short(slots, self.block_size, caps)[: ledger.num_available]:
                        rank.grow(ledger.rank, slot)
                    caps = table.within_blocks(slots, caps, self.block_size)
                sequences: list[Sequence] = [table.sequences[slot] for slot in slots.tolist()]  # type: ignore[misc]
                position, drafted = table.position[slots], table.drafted[slots]
                part = DecodePart(ledger.rank, table, slots, position, sequences, caps, drafted)
                parts.append(part)
                if self.limits.snapshots:
                    self._cross(part)
        return DecodeBatch(parts, num_drafts=self.ladder.drafts)

    def _cross(self, part: DecodePart) -> None:
        """Snapshots after the step of sequences that cross the end of a block in it, or that may."""
        first, last = part.position, part.position
        if part.table.num_drafts:
            last = first + part.table.ahead[part.slots] + part.caps
        boundary = (last + 1) // self.block_size * self.block_size
        for at in (boundary > first).nonzero()[0].tolist():
            self.chores.snapshots.append((part.rank, int(part.slots[at]), part.sequences[at], int(boundary[at])))

    def _preempt(self, rank: DataRank, ledger: BlockManager, now: float) -> None:
        """Sends one sequence that holds blocks of a ledger back to the queue; it will compute its tokens again, but
        those still cached."""
        sequences, candidates = rank.candidates(ledger, len)
        at = choose_victim(candidates)
        if at is None:
            raise RuntimeError("no sequence can be preempted, and none finds a block: the pool is too small")
        victim = sequences[at]
        self._retire(victim)
        victim.status, victim.num_computed, victim.goal = Status.WAITING, 0, 0
        victim.num_preemptions += 1
        self.preemptions += 1
        self._wait(victim, now)


def _oldest_first(sequences: Iterable[Sequence]) -> list[Sequence]:
    return sorted(sequences, key=lambda sequence: sequence.arrival)


def _may_pass(passed: int, sequence: Sequence, now: float) -> bool:
    """Whether those behind a sequence that finds no room, one of `passed` that find none, may go before it."""
    return passed <= LOOK_AHEAD and now - sequence.waiting_since <= PATIENCE_S


def _fork(child: Sequence, parent: Work) -> Work:
    """A part without rows that samples the last row of its parent's chunk."""
    (held,) = child.held
    chunk = dataclasses.replace(
        parent.chunk,
        tokens=(),
        start=parent.end,
        slot=held.slot,
        blocks=held.blocks,
        temperature=child.sampling.temperature,
        seed=child.seed,
        forced=child.forced_token(0),
    )
    return Work(child, {held.rank: chunk}, (), parent.end, parent)


class _Room:
    """What is left of one rank's prefill step. bucket_rows: of the largest bucket that it may take."""

    def __init__(self, ladder: BucketLadder, bucket_rows: int, tokens: int, max_sum_context: int | None) -> None:
        self.ladder, self.bucket_rows, self.tokens, self.rows = ladder, bucket_rows, tokens, bucket_rows
        self.grain = ladder.prefill_row_cost(1, bucket_rows)
        self.context = max_sum_context
        self.empty = True

    def holds(self, sequence: Sequence) -> bool:
        """Whether a chunk of the sequence may join: there are rows, and the step's contexts stay within their sum. The
        first one always may."""
        if self.rows < self.grain or self.tokens <= 0:
            return False
        return self.empty or self.context is None or sequence.goal <= self.context

    def take(self, wanted: int) -> int:
        """Rows for up to `wanted` tokens; how many they are."""
        return min(wanted, self.tokens, self.rows // self.grain * self.grain)

    def book(self, sequence: Sequence, count: int) -> None:
        """A chunk of `count` tokens joins."""
        self.rows -= self.ladder.prefill_row_cost(count, self.bucket_rows)
        self.tokens -= count
        self.empty = False
        if self.context is not None:
            self.context -= sequence.goal

    def take_entry(self) -> bool:
        """Room for a part without rows: buckets have as many entries as grains."""
        if self.rows < self.grain:
            return False
        self.rows -= self.grain
        return True
