"""What answers with extra sampling need around a step: their slots begun, their tokens drawn by the second program."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import islice

import numpy as np

from di_jax.engine.batch import Batch, DecodeBatch, Work
from di_jax.engine.extra_sampling import NEUTRAL, SlotState, pack_rows
from di_jax.engine.runner import ModelRunner, StepOutput
from di_jax.engine.sampling_programs import NO_SLOT
from di_jax.engine.step_plan import Bucket, StepPlan


class SamplingChores:
    """Runs the second program of steps that have such answers. Programs run over the whole mesh, so the processes
    launch as many of each."""

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        self.runner, self.vocab_size = runner, vocab_size

    def launches(self, batch: Batch | DecodeBatch) -> list[int]:
        """What this process needs: 1 for the second program, and how many writes of slots before it."""
        if isinstance(batch, DecodeBatch):
            return [int(any(part.table.numbers[part.slots, 0].any() for part in batch.parts)), 0]
        begun = [len(self._begun(batch, rank)) for rank in self.runner.local_ranks]
        extra = any(work.chunk.sample and work.sequence.extra is not None for work in batch.work)
        return [int(extra), max(begun, default=0)]

    def after(
        self,
        batch: Batch | DecodeBatch,
        plans: SequenceOf[StepPlan],
        output: StepOutput,
        begins: int,
        allowed: SequenceOf[np.ndarray] | None = None,
    ) -> StepOutput:
        """The step's results with the tokens of such answers. Call right after the step was launched; plans: of it.

        allowed: `Matching.masks` of each rank.
        """
        ranks = self.runner.local_ranks
        if isinstance(batch, Batch):
            due = [self._begun(batch, rank) for rank in ranks]
            for turn in range(begins):
                of_ranks = [next(islice(works, turn, None), None) for works in due]
                slots = [NO_SLOT if w is None else w.chunks[r].slot for r, w in zip(ranks, of_ranks, strict=True)]
                self.runner.begin_answers(slots, [None if work is None else self._state(work) for work in of_ranks])
        rows = [pack_rows(plan, _numbers(batch, rank)) for rank, plan in zip(ranks, plans, strict=True)]
        return self.runner.resample(output, rows, allowed)

    def numbers(self, batch: DecodeBatch, bucket: Bucket) -> list[np.ndarray]:
        """How each sequence of a step with drafts is drawn, int32 [OF_REQUEST, R] of each rank."""
        found = []
        for rank in self.runner.local_ranks:
            rows = np.repeat(NEUTRAL[:, None], bucket.sequences, axis=1)
            if len(own := np.asarray(_numbers(batch, rank))):
                rows[:, : len(own)] = own.T
            found.append(rows)
        return found

    def _begun(self, batch: Batch, rank: int) -> list[Work]:
        """Parts of a rank's prefill step that draw a first token, or the first after a preemption, from slots."""
        return [
            work
            for work in batch.work
            if rank in work.chunks and work.chunk.sample and work.sequence.extra and work.sequence.extra.has_state
        ]

    def _state(self, work: Work) -> SlotState:
        sequence = work.sequence
        assert sequence.extra is not None
        return sequence.extra.slot_state(
            sequence.prompt_ids, sequence.output_ids, sorted(sequence.stop_ids), self.vocab_size
        )


def _numbers(batch: Batch | DecodeBatch, rank: int) -> SequenceOf[np.ndarray] | np.ndarray:
    """`ExtraSampling.numbers` of a rank's sequences, in the order of its plan."""
    if isinstance(batch, DecodeBatch):
        return next((part.table.numbers[part.slots] for part in batch.parts if part.rank == rank), [])
    sequences = [work.sequence for work in batch.work if rank in work.chunks]
    return [NEUTRAL if s.extra is None else s.extra.numbers for s in sequences]
