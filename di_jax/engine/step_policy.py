"""Whether the next step is a prefill or a decode, for all ranks alike: pure policy over what each process could do.

Every process holds a policy of its own and feeds it the same demands, in the order of processes, so all choose alike.
A policy sees no clock and no device: waiting and step times come with the demands.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np

from di_jax.engine.scheduler import DECODE, PREFILL, Scheduler
from di_jax.engine.sequence import Sequence, Status

# Prefill steps in a row while sequences wait to decode. New requests start soon (their blocks fill the batch), and a
# running answer stalls for four steps at most, however long the prompts that arrive.
MAX_PREFILL_STREAK = 4
# Decode steps in a row while a prompt could run: nobody waits longer, whatever the targets and the clocks say.
MAX_DECODE_STREAK = 70
# A prompt that may wait, waits half of its time to first token at most; the other half is for its own steps.
DEADLINE_SHARE = 2
# With fewer of a process's slots decoding, a decode step is too thin to hold prompts back for it.
FULL_ENOUGH_PERCENT = 50


@dataclasses.dataclass(frozen=True)
class Demand:
    """What the ranks of one process could do in the next step, in whole numbers that processes exchange.

    can_prefill, can_decode: whether such a step would have work. waits: whether a prompt waits, even for room.
    used_percent: blocks in use, rounded up. decoding_percent: slots whose sequences decode. waited_ms: how long the
    prompt that waits longest has waited. prefill_ms: time of the last prefill step.
    """

    can_prefill: bool
    can_decode: bool
    waits: bool = False
    used_percent: int = 0
    decoding_percent: int = 100
    waited_ms: int = 0
    prefill_ms: int = 0

    def numbers(self) -> np.ndarray:
        """The fields as int32 [7], to be exchanged."""
        return np.array(dataclasses.astuple(self), np.int64).clip(0, 2**31 - 1).astype(np.int32)

    @classmethod
    def from_numbers(cls, numbers: np.ndarray) -> Demand:
        can_prefill, can_decode, waits, *rest = (int(number) for number in numbers)
        return cls(bool(can_prefill), bool(can_decode), bool(waits), *rest)


def demand_of(scheduler: Scheduler, waited_ms: Callable[[Sequence], float], prefill_ms: float) -> Demand:
    """The demand of a process's scheduler. waited_ms: time since the request of a sequence arrived."""
    ledgers, running = scheduler.ledgers, scheduler.running
    blocks = sum(ledger.num_blocks for ledger in ledgers)
    used = blocks - sum(ledger.num_free_blocks for ledger in ledgers)
    decoding = sum(sequence.status is Status.RUNNING for sequence in running)
    # First come, first served: those in progress, and the head of the queue, came before all others.
    prompts = [sequence for sequence in running if sequence.status is Status.PREFILL]
    prompts += itertools.islice(scheduler.waiting, 1)
    return Demand(
        scheduler.can_prefill,
        decoding > 0,
        bool(prompts),
        -(-100 * used // blocks),
        100 * decoding // sum(ledger.num_slots for ledger in ledgers),
        int(max(map(waited_ms, prompts), default=0)),
        int(prefill_ms),
    )


class StepPolicy:
    """Prompts start soon, and running answers stall for a bounded time.

    Prefill when any process can, but at most MAX_PREFILL_STREAK times while another could decode. ttft_target_ms: with
    it, prompts give way to answers until the deadline of one nears, unless a process that could prefill decodes with
    less than half of its slots. itl_target_ms: with it, prefill steps in a row end where the next would exceed it.
    """

    def __init__(self, ttft_target_ms: float | None = None, itl_target_ms: float | None = None) -> None:
        self.ttft_target_ms, self.itl_target_ms = ttft_target_ms, itl_target_ms
        self._prefills = self._decodes = 0  # steps in a row

    def choose(self, demands: SequenceOf[Demand]) -> str | None:
        """PREFILL, DECODE, or None when nobody has work. demands: of every process, in their order."""
        prefill, decode = any(d.can_prefill for d in demands), any(d.can_decode for d in demands)
        if prefill and decode:
            prefill = self._prefills < self._most_prefills(demands) and not self._holds(demands)
        if prefill:
            self._prefills, self._decodes = self._prefills + 1, 0
            return PREFILL
        self._prefills, self._decodes = 0, self._decodes + decode
        return DECODE if decode else None

    def _most_prefills(self, demands: SequenceOf[Demand]) -> int:
        """Prefill steps in a row that running answers wait for."""
        if self.itl_target_ms is None:
            return MAX_PREFILL_STREAK
        step_ms = max(1, *(d.prefill_ms for d in demands))
        return int(min(MAX_PREFILL_STREAK, max(1, self.itl_target_ms // step_ms)))

    def _holds(self, demands: SequenceOf[Demand]) -> bool:
        """Whether prompts can wait while answers go on."""
        if self.ttft_target_ms is None or self._decodes >= MAX_DECODE_STREAK:
            return False
        return not any(
            d.waited_ms * DEADLINE_SHARE >= self.ttft_target_ms or d.decoding_percent < FULL_ENOUGH_PERCENT
            for d in demands
            if d.can_prefill
        )


class VotingPolicy(StepPolicy):
    """The released system's vote (engine.md 2.3), for comparisons: prompts wait up to 70 or 100 decode steps.

    Steps that decode are counted from the last prefill. Where the count is a multiple of ANY_INTERVAL a prefill needs
    one process that wants it; else, where it is 0 or a multiple of ALL_INTERVAL, it needs all of them. A process wants
    one while a prompt waits and at most MAX_USED_PERCENT of its blocks are in use. The second vote drops a prefill that
    would have no work. Unlike there, a prefill is not held back by decode steps without work, and those who vote are
    processes, not data-parallel ranks.
    """

    ANY_INTERVAL = 100
    ALL_INTERVAL = 70
    MAX_USED_PERCENT = 90

    def choose(self, demands: SequenceOf[Demand]) -> str | None:
        if not any(d.can_decode for d in demands):
            prefill = any(d.can_prefill for d in demands)
            if not prefill:
                return None
        else:
            prefill = self._vote([d.waits and d.used_percent <= self.MAX_USED_PERCENT for d in demands], demands)
        self._decodes = 0 if prefill else self._decodes + 1
        return PREFILL if prefill else DECODE

    def _vote(self, wants: SequenceOf[bool], demands: SequenceOf[Demand]) -> bool:
        if self._decodes and self._decodes % self.ANY_INTERVAL == 0:
            agreed = any(wants)
        elif self._decodes % self.ALL_INTERVAL == 0:
            agreed = all(wants)
        else:
            return False
        return agreed and any(want and d.can_prefill for want, d in zip(wants, demands, strict=True))


def make_policy(name: str, ttft_target_ms: float | None = None, itl_target_ms: float | None = None) -> StepPolicy:
    """The policy of `engine.policy`: default or deepinfer, which knows no targets."""
    return VotingPolicy() if name == "deepinfer" else StepPolicy(ttft_target_ms, itl_target_ms)
