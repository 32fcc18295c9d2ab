"""What became of the drafts of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class DraftTotals:
    """What became of drafts, from the start. Each step of a sequence counts for itself.

    steps: those that had drafts to verify; drafted, verified, accepted: drafts; error: sum over the verified ones of
    how far the confidence was from the chance of acceptance; accepted_at: by place in the block. What is a mean is None
    where nothing was verified.
    """

    steps: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    error: float = 0.0
    accepted_at: dict[int, int] = field(default_factory=dict)

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
    def accepted_length(self) -> float | None:
        """Mean tokens of a step, as published lengths count them: the accepted drafts and the one always drawn."""
        return 1 + self.accepted / self.steps if self.verified else None

    @property
    def verified_length(self) -> float | None:
        """Mean drafts that a step verified."""
        return self.verified / self.steps if self.verified else None

    @property
    def confidence_error(self) -> float | None:
        """Mean over the verified ones."""
        return self.error / self.verified if self.verified else None
