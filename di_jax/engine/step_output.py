"""What steps give back: small arrays on device, and their way to the host."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from di_jax.engine.sampling_programs import TopTokens
from di_jax.model.engram import RowSource
from di_jax.model.rows import META
from di_jax.model.transformer import LayerTrace


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class DraftOutput:
    """Drafts of R sequences, with a leading axis of ranks on device; anything where a sequence is none."""

    token: Array  # int32 [R, k]
    confidence: Array  # fp32 [R, k] chance that each is accepted, given that all before it are

    def host(self) -> list[DraftOutput]:
        """Waits for them: NumPy arrays of each rank of this process, in their order."""
        return by_rank(self)


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """Small results of a step: of all ranks on device, with a leading axis of ranks, or of one rank on the host.

    A decode step with k drafts has S x (k + 1) tokens and log-probabilities, -1 and 0 behind those that it emitted, and
    as much of `top`.
    """

    token: Array  # int32 [S]
    logprob: Array  # fp32 [S]
    logits: Array | None  # fp32 [T, V] when asked for
    trace: list[LayerTrace] | None
    load: Array | None  # int32 [L, expert slots] rows that the rank sent to each slot, when counted
    host_tables: RowSource | None = dataclasses.field(default=None, metadata=META)  # that the step asked
    hidden: Array | None = None  # [S, D] of the rows that tokens were drawn from; stays on device
    top: TopTokens | None = None  # where a request asked for log-probabilities, of `resample` or `accept`
    verified: Array | None = None  # int32 [S] drafts that were verified; -1: the sequence had no row
    error: Array | None = None  # fp32 [S] sum over those of how far the confidence was off
    draft: DraftOutput | None = None  # that followed the step

    def host(self) -> list[StepOutput]:
        """Waits for the results: one output with NumPy arrays for each rank of this process, in their order. Raises
        what a look-up in host memory failed with (CheckpointError, naming the file)."""
        outputs = by_rank(dataclasses.replace(self, hidden=None))
        if self.host_tables is not None:
            self.host_tables.raise_failure()
        return outputs


def by_rank[Tree](tree: Tree) -> list[Tree]:
    """Arrays with a leading axis of ranks on the host: one tree for each rank of this process, in their order."""
    leaves, structure = jax.tree.flatten(tree)
    if all(leaf.is_fully_addressable for leaf in leaves):
        whole: Any = jax.device_get(leaves)  # one transfer for all arrays
        return [jax.tree.unflatten(structure, [a[rank] for a in whole]) for rank in range(len(whole[0]))]
    shards = [sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start) for leaf in leaves]
    return [jax.tree.unflatten(structure, [np.asarray(s.data)[0] for s in rank]) for rank in zip(*shards)]
