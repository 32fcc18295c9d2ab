"""What is done to the caches on device between steps: forks get their copies, window state comes and goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from di_jax.engine.runner import ModelRunner
from di_jax.engine.scheduler import Chores
from di_jax.engine.sequence import Sequence
from di_jax.engine.state_cache import WindowStateCache
from di_jax.engine.state_programs import NOTHING, Snapshot, StateCopies


@dataclass
class Pending:
    """Snapshots that a step left behind, by rank what each is of: on their way to the host."""

    taken: list[tuple[Snapshot, dict[int, tuple[Sequence, int]]]] = field(default_factory=list)

    def lengths(self) -> dict[Sequence, int]:
        """Tokens known now of the sequences."""
        return {sequence: len(sequence) for _, owners in self.taken for sequence, _ in owners.values()}


class CacheChores:
    """Runs the `Chores` of a step. Programs run over the whole mesh, so the processes launch as many of each.

    layers: window rings in a snapshot.
    """

    def __init__(self, runner: ModelRunner, snapshots: WindowStateCache, layers: int, block_size: int) -> None:
        self.runner, self.snapshots, self.layers, self.block_size = runner, snapshots, layers, block_size

    def launches(self, chores: Chores) -> list[int]:
        """Programs that this process needs: restores, copies, snapshots."""
        copies = self._copies(chores) if chores.block_copies or chores.slot_copies else []
        return [_most(chores.restores), max((own.launches for own in copies), default=0), _most(chores.snapshots)]

    def before(self, chores: Chores, restores: int) -> None:
        """Window state that a prefill goes on from, put into its slots. Call before the step."""
        by_rank = {rank: [one[1:] for one in chores.restores if one[0] == rank] for rank in self._ranks}
        for turn in range(restores):
            due = [next(islice(by_rank[rank], turn, None), (NOTHING, None)) for rank in self._ranks]
            slots, rings = zip(*due, strict=True)
            self.runner.restore(slots, rings, self.layers)

    def after(self, chores: Chores, copies: int, snapshots: int) -> Pending:
        """Copies for forks, and snapshots. Call after the step."""
        if copies:
            self.runner.copy(self._copies(chores), copies)
        pending = Pending()
        by_rank = {rank: [s for s in chores.snapshots if s[0] == rank] for rank in self._ranks}
        for turn in range(snapshots):
            due = {rank: next(islice(by_rank[rank], turn, None), None) for rank in self._ranks}
            slots = [NOTHING if one is None else one[1] for one in due.values()]
            taken = self.runner.snapshot(slots, self.layers)
            pending.taken.append((taken, {rank: one[2:] for rank, one in due.items() if one is not None}))
        return pending

    def keep(self, pending: Pending, before: Mapping[Sequence, int] | None = None) -> None:
        """Snapshots whose step is complete, and whose tokens are therefore known, enter the cache. What a sequence left
        there while it decoded is replaced: the next turn of a conversation goes on from its end.

        before: of a step that verified drafts, the tokens known of its sequences before its own: only one that crossed
        the boundary in it left a window that ends there.
        """
        for snapshot, owners in pending.taken:
            rings = dict(zip(self._ranks, snapshot.host(), strict=True))
            for rank, (sequence, boundary) in owners.items():
                keys, ring = sequence.keys, rings[rank]
                if keys is None or ring is None or len(sequence) < boundary:
                    continue
                # The newest token known is in no cache yet.
                if before is not None and not before[sequence] - 1 < boundary <= len(sequence) - 1:
                    continue
                if keys.num_tokens < boundary:
                    keys.extend(sequence.tokens(keys.num_tokens, boundary))
                key = keys.keys[boundary // self.block_size - 1]
                if self.snapshots.put(key, ring) and boundary > len(sequence.prompt_ids):
                    if sequence.snapshot:
                        self.snapshots.drop(sequence.snapshot)
                    sequence.snapshot = key

    @property
    def _ranks(self) -> SequenceOf[int]:
        return self.runner.local_ranks

    def _copies(self, chores: Chores) -> list[StateCopies]:
        def of(rank: int, moves: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
            return [(source, target) for r, source, target in moves if r == rank]

        return [StateCopies(of(rank, chores.block_copies), of(rank, chores.slot_copies)) for rank in self._ranks]


def _most(entries: SequenceOf[tuple[Any, ...]]) -> int:
    """The most entries of one rank, which is their first field."""
    return max(Counter(entry[0] for entry in entries).values()) if entries else 0
