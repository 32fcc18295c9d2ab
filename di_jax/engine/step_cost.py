"""How long a prefill step takes, learned from the steps that ran, and the largest one that fits a time.

    cost(q, c) = a + b q + d q c + e q^2      a, b, d, e >= 0, in seconds

q: rows of the step, c: context computed before them. a is what launching costs, b the matrix products, and d and e
what each row spends on every entry of the context and of the step before it.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque

import numpy as np

# Observations are kept in cells of half an octave of q and of c; the median of a cell counts, so that neither a
# compilation nor a page fault does. Two are the least of which one can be an outlier (it is the larger).
KEPT_PER_CELL = 7
LEAST_PER_CELL = 2
MAX_CELLS = 64
CONTEXT_GRAIN = 256  # contexts shorter than this share the first cells
REFIT_CHANGE = 0.02  # a median that moved by less leaves the fit as it is
# Relative to the mean square of a column: decides between fits that are equally good, as with one cell only.
RIDGE = 1e-10

Observation = tuple[int, float, float]  # q, c, seconds

_SUBSETS = np.array([[subset >> term & 1 for term in range(4)] for subset in range(1, 16)], np.float64)


class StepCost:
    """The cost model of one process. Bounded in memory: the MAX_CELLS cells that were seen last."""

    def __init__(self) -> None:
        self._cells: OrderedDict[tuple[int, int], deque[Observation]] = OrderedDict()
        self._medians: dict[tuple[int, int], Observation] = {}
        self._coefficients: tuple[float, float, float, float] | None = None
        self._stale = False

    def observe(self, q: int, c: float, seconds: float) -> None:
        """A step of q rows took so long. c: tokens before the chunk of each row, the mean over the rows."""
        if q <= 0 or c < 0 or not 0 < seconds < math.inf:
            return
        cell = (round(2 * math.log2(q)), round(2 * math.log2(1 + c / CONTEXT_GRAIN)))
        kept = self._cells.get(cell)
        if kept is None:
            kept = self._cells[cell] = deque(maxlen=KEPT_PER_CELL)
            if len(self._cells) > MAX_CELLS:
                oldest, _ = self._cells.popitem(last=False)
                self._stale |= self._medians.pop(oldest, None) is not None
        self._cells.move_to_end(cell)
        kept.append((q, c, seconds))
        if len(kept) < LEAST_PER_CELL:
            return
        # By time per row, as q differs a little inside a cell.
        median = sorted(kept, key=lambda one: one[2] / one[0])[(len(kept) - 1) // 2]
        known = self._medians.get(cell)
        if known is None or abs(median[2] / median[0] - known[2] / known[0]) > REFIT_CHANGE * known[2] / known[0]:
            self._medians[cell] = median
            self._stale = True

    @property
    def coefficients(self) -> tuple[float, float, float, float] | None:
        """(a, b, d, e), or None before enough is known."""
        if self._stale:
            self._coefficients, self._stale = _fit(list(self._medians.values())), False
        return self._coefficients

    def predict(self, q: int, c: float) -> float | None:
        """Seconds of a step of q rows with c tokens before each, or None before enough is known."""
        if (known := self.coefficients) is None:
            return None
        a, b, d, e = known
        return a + q * (b + d * c + e * q)

    def largest(self, quota_s: float, c: float, limit: int, at_least: int = 1) -> int:
        """The most rows, from `at_least` to `limit`, that the quota is enough for; `limit` before enough is known.

        At least `at_least` even where they take longer, so that every prompt gets on.
        """
        least = min(at_least, limit)
        if (known := self.coefficients) is None:
            return limit
        a, b, d, e = known
        room, slope = quota_s - a, b + d * c
        if limit * (slope + e * limit) <= room:
            return limit
        divisor = slope + math.sqrt(slope * slope + 4 * e * max(0.0, room))
        if room <= 0 or divisor <= 0:
            return least
        rows = int(2 * room / divisor)
        # The division rounds: to the other side at most by one.
        rows += (rows + 1) * (slope + e * (rows + 1)) <= room
        return max(least, min(rows, limit))


def _fit(points: list[Observation]) -> tuple[float, float, float, float] | None:
    """Non-negative least squares of the relative errors. None without points.

    The best non-negative fit is the best of those fits of a subset of the terms that come out non-negative: 15 systems
    of 4 equations, solved at once.
    """
    if not points:
        return None
    q, c, seconds = np.array(points, np.float64).T
    terms = np.stack([np.ones_like(q), q, q * c, q * q], axis=1) / seconds[:, None]
    norms = np.sqrt(np.mean(terms**2, axis=0))
    norms[norms == 0] = 1.0  # no context seen: its term stays 0
    terms /= norms
    square = terms.T @ terms / len(points) + RIDGE * np.eye(4)
    against = terms.mean(axis=0)
    masked = square * _SUBSETS[:, :, None] * _SUBSETS[:, None, :] + np.eye(4) * (1 - _SUBSETS)[:, None, :]
    fits = np.linalg.solve(masked, (against * _SUBSETS)[:, :, None])[:, :, 0]
    gains = np.where((fits >= -1e-12).all(axis=1), fits @ against, -np.inf)
    best = np.maximum(fits[np.argmax(gains)], 0) / norms
    a, b, d, e = best.tolist()
    return a, b, d, e
