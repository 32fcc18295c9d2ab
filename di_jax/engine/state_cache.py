"""Snapshots of window state at block boundaries, in host memory, so that a prefix hit can continue exactly."""

from __future__ import annotations

import logging
from collections import OrderedDict

import numpy as np

logger = logging.getLogger(__name__)


class WindowStateCache:
    """Snapshots by block key (`prefix_cache.BlockKeys`), at most `budget_bytes` of them, least recently used out first.

    budget_bytes: engine.state_cache_bytes; 0 keeps nothing. nbytes: bytes kept, never over the budget. hits, misses: of
    `get`; evictions: snapshots dropped for the budget; all since the start.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"engine.state_cache_bytes must be at least 0, got {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.nbytes = self.hits = self.misses = self.evictions = 0
        self._snapshots: OrderedDict[bytes, np.ndarray] = OrderedDict()  # the least recently used one first
        self._refusal_logged = False

    def __len__(self) -> int:
        return len(self._snapshots)

    def __contains__(self, key: bytes) -> bool:
        """Whether there is a snapshot. Not a use of it."""
        return key in self._snapshots

    def put(self, key: bytes, snapshot: np.ndarray) -> bool:
        """Keeps a snapshot as the most recently used one, in place of an earlier one of that key.

        snapshot: any shape and dtype. One that owns its memory is kept itself and becomes read-only, and so is the
        whole of a read-only array, such as what a device sent (a copy of 1.4 MB would cost a decode step 0.5 ms). Other
        views are copied: their buffer may be larger than what is counted, and may change. False when it is larger than
        the whole budget.
        """
        if snapshot.nbytes > self.budget_bytes:
            if self.budget_bytes and not self._refusal_logged:
                self._refusal_logged = True
                logger.warning(
                    "engine.state_cache_bytes is %d, less than one snapshot of %d bytes: no window state is kept",
                    self.budget_bytes,
                    snapshot.nbytes,
                )
            return False
        self.drop(key)
        while self.nbytes + snapshot.nbytes > self.budget_bytes:
            self.drop(next(iter(self._snapshots)))
            self.evictions += 1
        kept = snapshot if snapshot.flags.owndata or _is_whole(snapshot) else snapshot.copy()
        kept.flags.writeable = False
        self._snapshots[key] = kept
        self.nbytes += kept.nbytes
        return True

    def get(self, key: bytes) -> np.ndarray | None:
        """The snapshot, read-only, which becomes the most recently used one; None when there is none."""
        snapshot = self._snapshots.get(key)
        if snapshot is None:
            self.misses += 1
            return None
        self.hits += 1
        self._snapshots.move_to_end(key)
        return snapshot

    def drop(self, key: bytes) -> None:
        """Drops the snapshot of a key, if there is one. Not counted as an eviction."""
        snapshot = self._snapshots.pop(key, None)
        if snapshot is not None:
            self.nbytes -= snapshot.nbytes

    def clear(self) -> None:
        """Drops every snapshot."""
        self._snapshots.clear()
        self.nbytes = 0


def _is_whole(view: np.ndarray) -> bool:
    """Whether a view has all of an array that nobody can write to."""
    whole = view.base
    return isinstance(whole, np.ndarray) and not whole.flags.writeable and whole.nbytes == view.nbytes
