"""How many drafts the next step verifies, and whether it drafts: host policy over older confidences (dspark 3).

A step has R requests with k drafts each: one row per request that is always computed, and one per verified draft. The
survival of a draft is the chance that it and all before it are accepted. For each step the host fixes the number of
drafts to verify, K, from confidences of an older block; the device then picks which, from those of the block itself
(`engine.allocation`). The host must not see the latter: what is verified would depend on the tokens drafted, and the
answers would be biased (dspark 3.3, the counterexample in 7-T9).

With several data-parallel ranks each chooses its rows (`choose_rows`), the engine takes the most of any, and each
rank's K is what fills them (`fill`). Whatever is done with sizes alone keeps the answers unbiased.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from di_jax.engine.runtime_estimator import StepTimes

# A smaller survival counts as 0, on the host and on device: some devices flush what is below 1.2e-38 to 0 and others do
# not, and all are to agree in every bit.
SURVIVAL_FLOOR = 2.0**-100
# Fewer drafts than all must promise so much more: the estimates are no better, and losses were measured where the
# promise was less (1.5% at 16 requests a rank, dspark 5).
MARGIN = 0.01
# Older blocks that a budget looks at, in all and of each request at most. One block of a request says little of its
# next: with one of each, two requests that happened to draft badly lost more than they saved.
ENOUGH_BLOCKS = 256
# Known blocks that tell what a batch of another size may expect.
TELLING_BLOCKS = 64
# Drafts that should have survived, of the newest, of which the share is taken that did.
PROMISED = 512
HISTORY = 16


def survival(confidence: np.ndarray) -> np.ndarray:
    """Chance float32 [R, k] that all drafts up to each are accepted, from float32 [R, k] of each given those before.

    The product from left to right in float32. It never rises along a row: what is above 1 counts as 1, and what is not
    a number, or below SURVIVAL_FLOOR, as 0.
    """
    bounded = np.minimum(np.asarray(confidence, np.float32), np.float32(1))
    chance = np.empty_like(bounded)
    so_far = np.ones(bounded.shape[:1], np.float32)
    for k in range(bounded.shape[1]):
        so_far = so_far * bounded[:, k]
        so_far = np.where(so_far >= np.float32(SURVIVAL_FLOOR), so_far, np.float32(0))
        chance[:, k] = so_far
    return chance


def draft_caps(left: np.ndarray, num_drafts: int) -> np.ndarray:
    """Drafts int32 [R] that may be verified. left: int [R], tokens that each may still emit, by max_tokens and by the
    model's length; one of them is the step's own (dspark 2.5)."""
    return np.clip(np.asarray(left) - 1, 0, num_drafts).astype(np.int32)


def choose_rows(survival: np.ndarray, caps: np.ndarray, times: StepTimes, margin: float = MARGIN) -> int:
    """Rows of the bucket with the most expected tokens a second, the smaller of equals; 0 without requests.

        rate(g) = (R + sum of the K(g) largest survivals) / seconds(g),    K(g) = min(g - R, sum of caps)

    A bucket costs the same however full it is, so that it is taken as full: the best of all K, filled up, is the best
    of the filled buckets. The bucket of all drafts is taken instead when the rate of the best is not more than `margin`
    above its rate, or while times are unknown.

    survival float [B, R, k], of B older blocks of each request (`Round.survival`), over which the sum is averaged; caps
    int [R], 0..k. Raises ValueError when no bucket holds the R rows; drafts that no bucket holds are not verified.
    """
    requests, most = len(caps), int(np.sum(caps))
    if not requests:
        return 0
    first = times.bucket(requests)
    last = times.bucket(min(requests + most, int(times.rows[-1])))
    if times.seconds is None:
        return int(times.rows[last])
    rows = times.rows[first : last + 1]
    rate = _tokens(survival, caps)[np.minimum(rows - requests, most)] / times.seconds[first : last + 1]
    best = int(np.argmax(rate))
    if rate[best] < (1 + margin) * rate[-1]:
        best = len(rows) - 1
    return int(rows[best])


def fill(rows: int, caps: np.ndarray) -> int:
    """K, the drafts that a step of `rows` rows verifies: all that it has room for, as its rows are computed anyway."""
    return min(max(0, rows - len(caps)), int(np.sum(caps)))


def expected_tokens(survival: np.ndarray, caps: np.ndarray, drafts: int) -> float:
    """Tokens that a step is expected to emit when it verifies `drafts` drafts; arguments as `choose_rows` has them."""
    if drafts == int(np.sum(caps)):  # all: no need to know which are best
        return len(caps) + float(_allowed(survival, caps).sum()) / len(survival)
    return float(_tokens(survival, caps)[drafts])


def _tokens(survival: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """Expected tokens float64 [sum of caps + 1] by the number of drafts verified, best first."""
    best = np.sort(_allowed(survival, caps), axis=1)[:, ::-1].mean(axis=0)
    return len(caps) + np.concatenate([[0.0], np.cumsum(best)])


def _allowed(survival: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """Survivals float64 [B, sum of caps] of the drafts within their caps."""
    chances = np.asarray(survival, np.float64)
    found: np.ndarray = chances[:, np.arange(chances.shape[2]) < np.asarray(caps)[:, None]]
    return found


class Round(NamedTuple):
    """What is known of n requests when a round of each begins.

    survival: float32 [B, n, k], of B older blocks of each, the newest first: what the round's budget may see. known:
    bool [B, n], false where there is no such block and each draft counts as certain. owners: int64 [n], of the slots,
    for `RateLedger.process`.
    """

    survival: np.ndarray
    known: np.ndarray
    owners: np.ndarray


class RateLedger:
    """Survivals of the blocks of the request in every slot, and which of them a step's budget may see.

    In a round of a request (a step it takes part in, prefill or decode) a block is verified and the next one drafted.
    Round N verifies what round N - 1 drafted, so its budget may see what round N - 2 drafted, and older blocks. A step
    is scheduled when all rounds before it came back, or all but one; the counts of both tell, and it is always round
    N - 2 that is the newest seen (dspark 3.3, 3.4).

    scheduled, processed: int64 [slots], rounds since the slot's request came.
    """

    def __init__(self, num_slots: int, num_drafts: int) -> None:
        self.scheduled, self.processed, self._owner = np.zeros((3, num_slots), np.int64)
        self._rounds = np.full((num_slots, HISTORY + 1, num_drafts), np.nan, np.float32)  # by round modulo HISTORY + 1

    def reset(self, slots: np.ndarray) -> None:
        """Other requests have these slots now, or the same after a preemption or a move; rounds in flight are void."""
        self.scheduled[slots] = self.processed[slots] = 0
        self._rounds[slots] = np.nan
        self._owner[slots] += 1

    def forget(self) -> None:
        """What is known is too old to tell of the rounds that follow."""
        self._rounds[:] = np.nan

    def schedule(self, slots: np.ndarray, look: bool = True) -> Round:
        """Begins a round of the requests in `slots`, int [n], no two equal.

        look: whether its budget is to see older blocks; else they are as good as unknown. Raises RuntimeError when two
        rounds of a slot are in flight.
        """
        slots = np.asarray(slots)
        scheduled, ahead = self.scheduled[slots], self.scheduled[slots] - self.processed[slots]
        if (wrong := (ahead < 0) | (ahead > 1)).any():
            slot = int(slots[wrong][0])
            raise RuntimeError(
                f"slot {slot}: {self.scheduled[slot]} rounds scheduled, {self.processed[slot]} processed; at most one "
                "may be in flight when the next is scheduled"
            )
        if not look:
            self.scheduled[slots] += 1
            shape = 1, len(slots), self._rounds.shape[2]
            return Round(np.ones(shape, np.float32), np.zeros(shape[:2], bool), self._owner[slots])
        blocks = min(HISTORY, -(-ENOUGH_BLOCKS // max(1, len(slots))))
        rounds = scheduled - 2 - np.arange(blocks)[:, None]
        seen = self._rounds[slots, rounds % (HISTORY + 1)]
        known = (rounds >= 0) & ~np.isnan(seen).any(axis=2)
        self.scheduled[slots] += 1
        return Round(np.where(known[:, :, None], seen, np.float32(1)), known, self._owner[slots])

    def newest(self, slots: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """Survivals float32 [n, k] of the blocks that the rounds verify which come back next, NaN where not known.
        slots, owners: as of `process`."""
        found = self._rounds[slots, (self.processed[slots] - 1) % (HISTORY + 1)]
        return np.where((self._owner[slots] == owners)[:, None], found, np.float32(np.nan))

    def process(
        self,
        slots: np.ndarray,
        owners: np.ndarray,
        confidence: np.ndarray | None,
        drafted: np.ndarray | None = None,
    ) -> None:
        """A round came back. slots, owners: of its `schedule`; slots that changed hands since are left alone.

        confidence: float32 [n, k] of the blocks that it drafted, None where the step did not draft. drafted: bool [n],
        which did when it was not all. Raises RuntimeError for a round that was not scheduled.
        """
        same = self._owner[slots] == owners
        slots = np.asarray(slots)[same]
        processed = self.processed[slots]
        if (wrong := processed >= self.scheduled[slots]).any():
            slot = int(slots[wrong][0])
            raise RuntimeError(f"slot {slot}: a round came back that was not scheduled ({self.scheduled[slot]} were)")
        block = np.float32(np.nan) if confidence is None else survival(np.asarray(confidence)[same])
        if confidence is not None and drafted is not None:
            block = np.where(drafted[same][:, None], block, np.float32(np.nan))
        self._rounds[slots, processed % (HISTORY + 1)] = block
        self.processed[slots] += 1


class Promises:
    """How many drafts are accepted of those that were to survive by their confidences: these were fitted on other
    texts, and to chances of sampled drafts where greedy ones are judged by equality. Over the last PROMISED or so; what
    is learned is as old as what a budget may see.
    """

    def __init__(self) -> None:
        self._promised = self._kept = PROMISED / 8  # as promised, until there is more

    @property
    def ratio(self) -> np.float32:
        """Accepted over promised, within bounds."""
        return np.float32(min(max(self._kept / self._promised, 0.1), 1.25))

    def add(self, survival: np.ndarray, verified: np.ndarray, accepted: np.ndarray) -> None:
        """Of n requests: survivals float32 [n, k] of the blocks that a step verified, NaN where they are not known, so
        many of each, and how many of those were accepted."""
        known = (verified > 0) & ~np.isnan(survival).any(axis=1)
        inside = np.arange(survival.shape[1]) < verified[known, None]
        self._promised += float(survival[known][inside].sum())
        self._kept += float(accepted[known].sum())
        if self._promised > PROMISED:
            self._kept *= PROMISED / self._promised
            self._promised = float(PROMISED)


class TypicalBlock:
    """What a block is taken for that is not known: the mean of its request's known ones, and of a request without any
    the mean of the last ENOUGH_BLOCKS of all requests; certain only before the first block of all.

    Taken as certain they made the first steps after a pause verify everything, and a mean of 16 blocks of which one or
    two are known promise several tokens: 16 requests that gain nothing from drafts drafted in 23% of 1,000 steps and
    lost 27% of their tokens/s in a simulation; with this, 5% and 4%. All that is averaged is as old as what a budget
    may see.
    """

    def __init__(self, num_drafts: int) -> None:
        self.survival = np.ones(num_drafts, np.float32)
        self._blocks = 0  # that it is the mean of

    def accepted(self, promises: Promises) -> float:
        """Drafts of a block that are accepted; all while too few blocks are known to tell."""
        if self._blocks < TELLING_BLOCKS:
            return float(len(self.survival))
        return float(self.survival.sum() * promises.ratio)

    def fill(self, begun: Round) -> np.ndarray:
        """`begun.survival` with the blocks that are not known, float32 [B, n, k]; once for every round."""
        newest = begun.survival[0][begun.known[0]]
        if len(newest):
            self._blocks = max(min(self._blocks + len(newest), ENOUGH_BLOCKS), len(newest))
            self.survival += (newest.mean(axis=0) - self.survival) * np.float32(len(newest) / self._blocks)
        if begun.known.all():
            return begun.survival
        known, count = begun.known[:, :, None], begun.known.sum(axis=0, dtype=np.float32)[:, None]
        own = np.where(known, begun.survival, 0).sum(axis=0) / np.maximum(count, 1)
        filled: np.ndarray = np.where(known, begun.survival, np.where(count > 0, own, self.survival))
        return filled


# Steps whose mean says whether drafting pays: one bad block is chance. Fewer tell of a batch with more blocks each.
# Once it was seen to pay, the mean is over so many times as many: one request whose text is hard to guess now and then
# lost 12% by pauses after eight bad steps (H200, where drafting all the time gains a third).
JUDGED_STEPS, LEAST_JUDGED, REMEMBERED = 16, 2, 4
# Steps of a trial before there is a known block.
UNKNOWN_STEPS = 2
# What trials may cost a batch that never gains, as a share of its time, by the estimates; it sets the steps between two
# of them, within bounds. They were seen to cost three times as much (64 requests on two cores: 9 plain steps, and 2.8
# estimated): what a batch drafts first after a pause is verified by what others drafted.
TRIAL_SHARE = 0.002
LEAST_PAUSE, LONGEST_PAUSE = 32, 8192
# Every trial in a row that fails doubles the pause, so often at most: gains are estimates, and were found too high.
MOST_DOUBLINGS = 3
OTHER_BATCH = 1.5


class DraftSwitch:
    """Whether steps draft: not while the draft takes more time than its tokens save.

    It judges batches by their size, those of 2^n to 2^(n+1) - 1 requests together: a batch that drains and fills up
    again comes back to what was found for its size. Until it has grown or shrunk by OTHER_BATCH it is the same batch:
    one of 64 requests of which now and then one ends and another begins would else be two, and neither be judged.
    Deterministic in what it is told. With several ranks all are told
    the same: tokens and requests of all together, and the times of the slowest. What it sees is as old as what the
    budget sees, so answers stay unbiased.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Verdict] = {}
        self._last = _Verdict()
        self._requests = 0.0  # of the batch when it became this one
        self.pays = False  # so the batch was judged

    @property
    def pause(self) -> int:
        """Decode steps of the batch as it is that do not draft from now on."""
        return self._last.pause

    def next(
        self, requests: int, gain: float | None, most: Callable[[], float] = lambda: math.inf, context: float = 0.0
    ) -> bool:
        """Whether the step that is planned now drafts; once for every decode step.

        gain: `drafting_gain` of this step; None while most of what its requests drafted is not known (`Round.known`),
        as after a pause. most: tells what it could be at most by what other batches drafted. Where that is no gain, a
        batch of a size that was not judged yet has a pause without a trial: one that fills up from 1 request to 64
        would else have seven, each cut short by the next and begun again when the next batch fills up (5 of 145 steps,
        each five times as long as one without drafts: 12% of the tokens/s on two CPU cores). context: what the steps
        before the end of a pause cost that leave the draft its context, in plain steps.
        """
        if not self._requests / OTHER_BATCH < requests < self._requests * OTHER_BATCH:
            self._requests, self._last = requests, self._sizes.setdefault(requests.bit_length(), _Verdict())
            if not self._last.judged(requests) and (limit := most()) < 1:
                self._last.pause = pause_steps(limit, judged_steps(requests) + UNKNOWN_STEPS, context)
        now, self.pays = self._last, False
        if now.pause:
            now.pause -= 1
            return False
        if gain is not None:
            now.gains.append(gain)
        enough = judged_steps(requests)
        if len(now.gains) < enough:
            return True
        recent = list(now.gains)[-REMEMBERED * enough :]
        mean = sum(recent) / len(recent)
        if mean >= 1:
            now.failures, self.pays = 0, True
            return True
        pause = pause_steps(mean, enough + UNKNOWN_STEPS, context) << min(now.failures, MOST_DOUBLINGS)
        now.pause = min(pause, LONGEST_PAUSE) - 1
        now.failures += 1
        now.gains.clear()
        return False


class _Verdict:
    """On batches of one size. gains: of the last steps that drafted. pause: steps until it is tried again. failures:
    trials in a row that did not pay."""

    def __init__(self) -> None:
        self.gains: deque[float] = deque(maxlen=REMEMBERED * JUDGED_STEPS)
        self.pause = self.failures = 0

    def judged(self, requests: int) -> bool:
        return bool(self.pause or self.failures or len(self.gains) >= judged_steps(requests))


def judged_steps(requests: int) -> int:
    """Steps of so many requests that tell whether drafting pays: those of ENOUGH_BLOCKS blocks, within bounds."""
    return min(JUDGED_STEPS, max(LEAST_JUDGED, -(-ENOUGH_BLOCKS // max(1, requests))))


def pause_steps(gain: float, trial: int, context: float = 0.0) -> int:
    """Steps without drafts after a trial of `trial` steps with this mean gain, below 1: each took 1 / gain as long as
    without drafts for the same tokens. What that and the `context` of the next trial cost, in plain steps, is to be
    TRIAL_SHARE of the pause."""
    lost = trial * (1 / max(gain, 1e-3) - 1) + context
    return int(min(max(lost / TRIAL_SHARE, LEAST_PAUSE), LONGEST_PAUSE))


def drafting_gain(tokens: float, seconds: float, requests: int, plain_seconds: float) -> float:
    """Tokens a second with drafts over those without; above 1, drafting pays.

    tokens: `expected_tokens` of the step with drafts. seconds: of that step, drafting the next block included.
    plain_seconds: of a step of the same requests that neither verifies nor drafts; it emits one token each.
    """
    return tokens * plain_seconds / (seconds * requests)
