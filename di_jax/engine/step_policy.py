"""Whether the next step is a prefill or a decode, for all ranks alike: pure policy over what each process could do.

Every process holds a policy of its own and feeds it the same demands, in the order of processes, so all choose alike.
A policy sees no clock and no device: waiting and step times come with the demands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

PREFILL, DECODE = "prefill", "decode"
NORMAL, PROMPT, COMPLETION = "normal", "prompt", "completion"  # engine.type

# Prefill steps in a row while sequences wait to decode. New requests start soon (their blocks fill the batch), and a
# running answer stalls for four steps at most, however long the prompts that arrive.
MAX_PREFILL_STREAK = 4
# Decode steps in a row while a prompt could run: nobody waits longer, whatever the targets and the clocks say.
MAX_DECODE_STREAK = 70
# A prompt that may wait, waits half of its time to first token at most; the other half is for its own steps.
DEADLINE_SHARE = 2
# With no more than half of a process's slots decoding, a decode step is too thin to hold prompts back for it.
FULL_ENOUGH_PERCENT = 50
# Where a decode step alone takes the inter-token target or nearly, a prefill step still gets a quarter of it.
QUOTA_FLOOR = 0.25
NO_QUOTA = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Demand:
    """What the ranks of one process could do in the next step, in whole numbers that processes exchange.

    can_prefill, can_decode: whether such a step would have work (a prompt that finds no room, or that the watermark
    keeps out, is none). waits: whether a prompt waits, even for room. used_percent: blocks in use, rounded up.
    decoding_percent: slots whose sequences decode, rounded down. waited_ms: how long the prompt that waits longest has
    waited. prefill_us, decode_us: time of the last prefill step and of a usual decode step.
    quota: tokens that a rank of this process can prefill in `StepPolicy.quota_s`, with the longest context of those
    that it would run (`StepCost.largest`); NO_QUOTA where that is None or nothing could be prefilled.
    """

    can_prefill: bool
    can_decode: bool
    waits: bool = False
    used_percent: int = 0
    decoding_percent: int = 100
    waited_ms: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    quota: int = NO_QUOTA

    def numbers(self) -> np.ndarray:
        """The fields as int32 [9], to be exchanged."""
        return np.array([min(max(value, 0), NO_QUOTA) for value in vars(self).values()], np.int32)

    @classmethod
    def from_numbers(cls, numbers: np.ndarray) -> Demand:
        can_prefill, can_decode, waits, *rest = numbers.tolist()
        return cls(bool(can_prefill), bool(can_decode), bool(waits), *rest)


class StepPolicy:
    """Prompts start soon, and running answers stall for a bounded time.

    Prefill when any process can, but at most MAX_PREFILL_STREAK times while another could decode. ttft_target_ms: with
    it, prompts give way to answers until the deadline of one nears, unless a process that could prefill decodes with
    no more than half of its slots. itl_target_ms: with it, prefill steps in a row, and the tokens of each, end where
    the next decode step would come too late.

    engine_type: with COMPLETION prompts give way without a deadline too. A PROMPT engine ends every request with its
    first token, so nothing decodes and every step is a prefill.
    """

    def __init__(
        self,
        ttft_target_ms: float | None = None,
        itl_target_ms: float | None = None,
        engine_type: str = NORMAL,
    ) -> None:
        self.ttft_target_ms, self.itl_target_ms, self.engine_type = ttft_target_ms, itl_target_ms, engine_type
        self._prefills = self._decodes = 0  # steps in a row
        self._spent_us = 0  # time of the prefill steps in a row

    def choose(self, demands: Sequence[Demand]) -> str | None:
        """PREFILL, DECODE, or None when nobody has work. demands: of every process, in their order."""
        prefill, decode = any(d.can_prefill for d in demands), any(d.can_decode for d in demands)
        if self._prefills:
            self._spent_us += max(d.prefill_us for d in demands)
        if prefill and decode:
            prefill = self._may_stall(demands) and not self._holds(demands)
        if prefill:
            self._prefills, self._decodes = self._prefills + 1, 0
            return PREFILL
        self._prefills, self._spent_us, self._decodes = 0, 0, self._decodes + decode
        return DECODE if decode else None

    def quota_s(self, decode_s: float) -> float | None:
        """Seconds between two decode steps that are free for prefill, None for any. decode_s: of a decode step."""
        if self.itl_target_ms is None:
            return None
        return max(QUOTA_FLOOR * self.itl_target_ms / 1e3, self.itl_target_ms / 1e3 - decode_s)

    def budget(self, demands: Sequence[Demand]) -> int:
        """Tokens that each rank may prefill in the step that `choose` just made a prefill; NO_QUOTA for any number.

        The least quota of all processes that could prefill, as all wait for the slowest; of it the share that earlier
        prefill steps in a row have left. Only while somebody waits to decode.
        """
        quota = min((d.quota for d in demands if d.can_prefill), default=NO_QUOTA)
        free_us = self._free_us(demands)
        if free_us is None or quota == NO_QUOTA or not any(d.can_decode for d in demands):
            return NO_QUOTA
        return max(1, int(quota * max(0.0, 1 - self._spent_us / free_us)))

    def _free_us(self, demands: Sequence[Demand]) -> float | None:
        """`quota_s` in microseconds, with the decode step of the slowest process."""
        free = self.quota_s(max(d.decode_us for d in demands) / 1e6)
        return None if free is None else 1e6 * free

    def _may_stall(self, demands: Sequence[Demand]) -> bool:
        """Whether answers can wait for one more prefill step."""
        free_us, last_us = self._free_us(demands), max(1, *(d.prefill_us for d in demands))
        fits = free_us is None or not self._prefills or self._spent_us + last_us <= free_us
        return fits and self._prefills < MAX_PREFILL_STREAK

    def _holds(self, demands: Sequence[Demand]) -> bool:
        """Whether prompts can wait while answers go on."""
        if self._decodes >= MAX_DECODE_STREAK:
            return False
        if self.ttft_target_ms is None and self.engine_type != COMPLETION:
            return False
        deadline = float("inf") if self.ttft_target_ms is None else self.ttft_target_ms
        return not any(
            d.waited_ms * DEADLINE_SHARE >= deadline or d.decoding_percent <= FULL_ENOUGH_PERCENT
            for d in demands
            if d.can_prefill
        )


class VotingPolicy(StepPolicy):
    """The released system's vote (engine.md 2.3), for comparisons: prompts wait up to 70 or 100 decode steps.

    Steps that decode are counted from the last prefill. Where the count is a multiple of ANY_INTERVAL a prefill needs
    one process that wants it; else, where it is 0 or a multiple of ALL_INTERVAL, it needs all of them. A process wants
    one while a prompt waits and at most the share `watermark` of its blocks is in use. The second vote drops a prefill
    that would have no work. Unlike there, a prefill is not held back by decode steps without work, and those who vote
    are processes, not data-parallel ranks.
    """

    ANY_INTERVAL = 100
    ALL_INTERVAL = 70
    WATERMARK = 0.9

    def __init__(self, watermark: float = WATERMARK) -> None:
        super().__init__()
        self.max_used_percent = int(100 * watermark + 1e-9)

    def choose(self, demands: Sequence[Demand]) -> str | None:
        if not any(d.can_decode for d in demands):
            prefill = any(d.can_prefill for d in demands)
            if not prefill:
                return None
        else:
            prefill = self._vote([d.waits and d.used_percent <= self.max_used_percent for d in demands], demands)
        self._decodes = 0 if prefill else self._decodes + 1
        return PREFILL if prefill else DECODE

    def _vote(self, wants: Sequence[bool], demands: Sequence[Demand]) -> bool:
        if self._decodes and self._decodes % self.ANY_INTERVAL == 0:
            agreed = any(wants)
        elif self._decodes % self.ALL_INTERVAL == 0:
            agreed = all(wants)
        else:
            return False
        return agreed and any(want and d.can_prefill for want, d in zip(wants, demands, strict=True))


def make_policy(
    name: str,
    ttft_target_ms: float | None = None,
    itl_target_ms: float | None = None,
    *,
    engine_type: str = NORMAL,
    watermark: float | None = None,
) -> StepPolicy:
    """The policy of `engine.policy`: default, or deepinfer, which knows no targets and votes in NORMAL engines alone.

    watermark: of deepinfer's vote, None for its own.
    """
    if name != "deepinfer":
        return StepPolicy(ttft_target_ms, itl_target_ms, engine_type)
    if engine_type != NORMAL:
        raise ValueError(f"engine.policy: deepinfer has no vote with engine.type = {engine_type}; use the default")
    return VotingPolicy(VotingPolicy.WATERMARK if watermark is None else watermark)
