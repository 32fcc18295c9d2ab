"""How long decode steps take by their rows, from a profile taken at start and from the steps that ran (dspark 3.5).

A step takes what its forward takes, which depends on its rows, and what sampling and drafting take, which depends on
its requests. Times in seconds. Only medians count, so a page fault, a compilation or a stalled peer changes nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

# Forward: what steps take beyond the profile drifts with the length of the contexts, over thousands of steps.
FORWARD_WINDOW = 5000
LEAST_PER_BUCKET = 10


@dataclass(frozen=True, eq=False)
class StepTimes:
    """What a step of every row bucket takes.

    rows: int64 [B], rising, the buckets. seconds: float64 [B], non-decreasing; None while nothing is known.
    """

    rows: np.ndarray
    seconds: np.ndarray | None

    def bucket(self, rows: int) -> int:
        """The index of the smallest bucket that holds so many rows. Raises ValueError when none does."""
        at = int(np.searchsorted(self.rows, rows))
        if at == len(self.rows):
            raise ValueError(f"no decode bucket holds {rows} rows; the largest has {self.rows[-1]}")
        return at

    def at(self, rows: int) -> float | None:
        """Seconds of a step of so many rows: those of its bucket, since steps are padded to it. Raises ValueError."""
        at = self.bucket(rows)
        return None if self.seconds is None else float(self.seconds[at])


@dataclass
class ForwardRuntimeEstimator:
    """Seconds of the forward by row bucket: the profile, and what the steps since have shown.

        seconds(g) = profile(g) + residual(g) g,    residual(g) = median over steps of (t - profile(g)) / g

    over the last FORWARD_WINDOW steps; for a bucket with less than LEAST_PER_BUCKET of them the slope instead, the
    median of the others' residuals, or 0 if that is less: the longer the contexts, the more each row costs. The spec
    has the slope for all buckets. But a step that waits for its host takes no less time for fewer rows, and only steps
    of fewer rows tell: on an H200 with 128 requests 9.7 ms with 512 rows and 9.5 with 768, by the profile 9.1 and 10.3.

    buckets: rows, rising. profile: seconds by bucket, of all of them, measured at start; empty where there is none, and
    then nothing is known (the caller verifies everything). Noise may make a larger bucket look faster: the profile is
    its running maximum, and so are the times. Raises ValueError for other buckets or profiles.
    """

    buckets: Sequence[int]
    profile: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rows = np.array(self.buckets, np.int64)
        if not len(self._rows) or self._rows[0] < 1 or (np.diff(self._rows) <= 0).any():
            raise ValueError(f"row buckets must be positive and rising, found {list(self.buckets)}")
        self._curve: np.ndarray | None = None
        if self.profile:
            missing = [rows for rows in self.buckets if not 0 < self.profile.get(rows, 0) < math.inf]
            if missing:
                raise ValueError(f"the profile has no positive time for the buckets of {missing} rows")
            self._curve = np.maximum.accumulate([float(self.profile[rows]) for rows in self.buckets])
        self._steps: deque[tuple[int, float]] = deque()  # bucket's index and residual per row, oldest first
        self._sorted: list[list[float]] = [[] for _ in self.buckets]  # the same residuals, by bucket and size

    def observe(self, rows: int, seconds: float) -> None:
        """The forward of a step padded to a bucket of `rows` took so long. Times that are none are ignored.

        Not to be told: steps that compiled or moved experts, and those of other ranks. Raises ValueError for rows that
        are no bucket.
        """
        at = int(np.searchsorted(self._rows, rows))
        if at == len(self._rows) or self._rows[at] != rows:
            raise ValueError(f"{rows} rows are no decode bucket; there are {list(self.buckets)}")
        if self._curve is None or not 0 < seconds < math.inf:
            return
        residual = (seconds - float(self._curve[at])) / rows
        self._steps.append((at, residual))
        insort(self._sorted[at], residual)
        if len(self._steps) > FORWARD_WINDOW:
            oldest, gone = self._steps.popleft()
            del self._sorted[oldest][bisect_left(self._sorted[oldest], gone)]

    @property
    def slope(self) -> float:
        """Seconds that a row takes beyond the profile, 0 before enough is known."""
        residuals = self._residuals().values()
        return max(0.0, median(residuals)) if residuals else 0.0

    def _residuals(self) -> dict[int, float]:
        """Medians by the index of a bucket, of those with enough steps."""
        return {at: _middle(each) for at, each in enumerate(self._sorted) if len(each) >= LEAST_PER_BUCKET}

    def times(self, others_s: float = 0.0) -> StepTimes:
        """Of whole steps. others_s: what a step takes besides its forward, whatever its rows."""
        if self._curve is None:
            return StepTimes(self._rows, None)
        residuals = self._residuals()
        per_row = np.full(len(self._rows), self.slope)
        per_row[list(residuals)] = list(residuals.values())
        return StepTimes(self._rows, np.maximum.accumulate(self._curve + per_row * self._rows) + others_s)


class SamplerRuntimeEstimator:
    """Seconds that sampling or drafting take by the number of requests, as the profile at start has them.

    Nothing is observed, though dspark 3.5 has a window of steps for each number of requests: an engine that is a step
    ahead is told when a step's results came and not when each of its programs ended, and to wait for them one by one
    costs more than they do (12.9 ms for a step of 7.7 on an H200). What they take more while it runs is in the times of
    whole steps, which `ForwardRuntimeEstimator` sees. They depend on the vocabulary and the requests, not on contexts.

    profile: seconds by requests; the next larger entry counts, as steps are padded to it, or the last; 0 without one.
    """

    def __init__(self, profile: Mapping[int, float] | None = None) -> None:
        self._profile = sorted((profile or {}).items())

    def seconds(self, requests: int) -> float:
        """Of a step of so many requests."""
        if not self._profile:
            return 0.0
        at = bisect_left(self._profile, requests, key=lambda point: point[0])
        return self._profile[min(at, len(self._profile) - 1)][1]


def _middle(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
