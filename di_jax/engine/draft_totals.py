"""What became of the drafts of an engine."""

from __future__ import annotations

import numpy as np


class DraftTotals:
    """What became of drafts, from the start. Each step of a sequence counts for itself.

    steps: those that had drafts to verify; drafted, verified, accepted: drafts; error: sum over the verified ones of
    how far the confidence was from the chance of acceptance; accepted_at: by place in the block.
    """

    def __init__(self) -> None:
        self.steps = self.drafted = self.verified = self.accepted = 0
        self.error = 0.0
        self.accepted_at: dict[int, int] = {}

    def add(self, drafted: np.ndarray, verified: np.ndarray, accepted: np.ndarray, error: np.ndarray) -> None:
        """Of the sequences of a step, [n] each."""
        self.steps += int((drafted > 0).sum())
        self.drafted += int(drafted.sum())
        self.verified += int(verified.sum())
        self.accepted += int(accepted.sum())
        self.error += float(error.sum())
        # How many kept more than 0, 1, 2, ...
        for place, count in enumerate((len(accepted) - np.cumsum(np.bincount(accepted)))[:-1].tolist()):
            self.accepted_at[place] = self.accepted_at.get(place, 0) + count

    @property
    def accept_rate(self) -> float | None:
        """Accepted of the verified ones."""
        return self.accepted / self.verified if self.verified else None

    @property
    def confidence_error(self) -> float | None:
        """Mean over the verified ones."""
        return self.error / self.verified if self.verified else None
