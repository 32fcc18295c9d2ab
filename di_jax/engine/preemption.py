"""Which running sequence gives its blocks back when the pool runs dry: pure policy over what each would cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# Costs within this factor of the least count as equal, and the younger sequence is taken: it loses the least waiting.
NEAR_TIE = 1.1


class Candidate(NamedTuple):
    """A running sequence. priority: lower is more important. arrival: number of its request, rising.

    recompute_tokens: tokens that must run again (those that its cached blocks would not spare it). blocks_freed: blocks
    that nobody else holds.
    """

    priority: int
    arrival: int
    recompute_tokens: int
    blocks_freed: int


def choose_victim(candidates: Sequence[Candidate]) -> int | None:
    """The index of the candidate to preempt, or None when there are none.

    The least important class gives first, and of it the candidate with the fewest tokens to recompute for each block
    that it frees; within NEAR_TIE of that the youngest. The oldest of the most important class is spared as long as
    there are others, so that at any time somebody runs to the end (engine.md 15.8).
    """
    if len(candidates) < 2:
        return 0 if candidates else None
    indices = range(len(candidates))
    spared = min(indices, key=lambda i: (candidates[i].priority, candidates[i].arrival))
    last = max(candidates[i].priority for i in indices if i != spared)
    group = [i for i in indices if i != spared and candidates[i].priority == last]
    costs = {i: _cost(candidates[i]) for i in group}
    limit = NEAR_TIE * min(costs.values())
    return max((i for i in group if costs[i] <= limit), key=lambda i: candidates[i].arrival)


def _cost(candidate: Candidate) -> float:
    """Tokens to recompute for each block freed."""
    return candidate.recompute_tokens / candidate.blocks_freed if candidate.blocks_freed > 0 else math.inf
