"""What steps give back: small arrays on device, and their way to the host.

What a decode step with drafts tells comes packed, an array of each program: to bring one more to the host takes 0.1 ms
of its time beside an H200.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from di_jax.engine.sampling_programs import TopTokens
from di_jax.model.engram import RowSource
from di_jax.model.rows import META
from di_jax.model.transformer import LayerTrace


def side_by_side(*columns: Array) -> Array:
    """int32 and float32 [R] or [R, n] side by side: int32 [R, all n], floats by their bits."""
    wide = [column if column.ndim > 1 else column[:, None] for column in columns]
    return jnp.concatenate([lax.bitcast_convert_type(column, jnp.int32) for column in wide], axis=1)


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class DraftOutput:
    """Drafts of R sequences, with a leading axis of ranks on device; anything where a sequence is none."""

    numbers: Array  # int32 [R, 2 k]

    @classmethod
    def of(cls, token: Array, confidence: Array) -> DraftOutput:
        """Of one rank on device."""
        return cls(side_by_side(token, confidence))

    @property
    def token(self) -> np.ndarray:
        """int32 [R, k]"""
        numbers = np.asarray(self.numbers)
        return numbers[..., : numbers.shape[-1] // 2]

    @property
    def confidence(self) -> np.ndarray:
        """float32 [R, k], the chance that each is accepted, given that all before it are."""
        numbers = np.asarray(self.numbers)
        return numbers[..., numbers.shape[-1] // 2 :].view(np.float32)

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


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class VerifiedOutput:
    """Small results of a decode step with k drafts: on device, with a leading axis of ranks; a `StepOutput` on the
    host."""

    # int32 [S, 2 k + 4]: token [S, k + 1], -1 behind those that were emitted; logprob [S, k + 1] of those under the raw
    # logits; error [S], the sum over the verified drafts of |what the confidence predicts - confidence|; verified [S].
    numbers: Array
    load: Array | None = None
    top: TopTokens | None = None
    host_tables: RowSource | None = dataclasses.field(default=None, metadata=META)
    draft: DraftOutput | None = None

    def host(self) -> list[StepOutput]:
        """Waits for the results, as `StepOutput.host`."""
        outputs = by_rank(self)
        if self.host_tables is not None:
            self.host_tables.raise_failure()
        return [output._unpacked() for output in outputs]

    def _unpacked(self) -> StepOutput:
        numbers: Any = self.numbers  # a NumPy array by now
        places = numbers.shape[1] // 2 - 1
        token, logprob, error, verified = np.split(numbers, [places, 2 * places, 2 * places + 1], axis=1)
        return StepOutput(
            token,
            logprob.view(np.float32),
            None,
            None,
            self.load,
            top=self.top,
            verified=verified[:, 0],
            error=error[:, 0].view(np.float32),
            draft=self.draft,
        )


def by_rank[Tree](tree: Tree) -> list[Tree]:
    """Arrays with a leading axis of ranks on the host: one tree for each rank of this process, in their order."""
    leaves, structure = jax.tree.flatten(tree)
    if all(leaf.is_fully_addressable for leaf in leaves):
        whole: Any = jax.device_get(leaves)  # one transfer for all arrays
        return [jax.tree.unflatten(structure, [a[rank] for a in whole]) for rank in range(len(whole[0]))]
    shards = [sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start) for leaf in leaves]
    return [jax.tree.unflatten(structure, [np.asarray(s.data)[0] for s in rank]) for rank in zip(*shards)]
