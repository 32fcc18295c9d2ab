"""Which sequences run in the next step, and which of their tokens. Pure host policy: no device, no text, no clock."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass

from di_jax.engine.block_manager import BlockManager
from di_jax.engine.sequence import Sequence, Status
from di_jax.engine.step_plan import DEVICE_TOKEN, FREE_TOKEN, BucketLadder, Chunk

# Prefill steps in a row while sequences wait to decode. New requests start soon (their blocks fill the batch), and a
# running answer stalls for four steps at most, however long the prompts that arrive.
MAX_PREFILL_STREAK = 4

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True)
class Batch:
    """One step's work: chunk i belongs to sequence i. A chunk with `sample` yields that sequence's next token."""

    kind: str  # PREFILL or DECODE
    chunks: list[Chunk]
    sequences: list[Sequence]
    context_blocks: int  # longest block table that a chunk reads


class Scheduler:
    """First come, first served: sequences wait in `waiting`, and run from admission to their end.

    max_num_seqs: admitted at once. max_num_batched_tokens: tokens of one prefill step.
    """

    def __init__(
        self, blocks: BlockManager, ladder: BucketLadder, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.blocks, self.ladder = blocks, ladder
        self.max_num_seqs = min(max_num_seqs, blocks.num_slots, ladder.decode_rows[-1])
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # admitted, in order of admission
        self._prefill_streak = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def never_fits(self, num_tokens: int) -> str | None:
        """Why a sequence of that many positions could not run even alone, or None."""
        need = self.blocks.blocks_of(num_tokens)
        most = min(self.blocks.num_blocks, self.ladder.context_blocks[-1])
        if need <= most:
            return None
        return (
            f"prompt and max_tokens are {num_tokens} tokens, {need} blocks of {self.blocks.block_size}; the engine has "
            f"{most}: shorten the prompt, lower sampling.max_tokens or raise engine.num_blocks"
        )

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> Batch | None:
        """The next step, or None when nothing is left to do. Call `computed` after it ran."""
        decoding = [s for s in self.running if s.status is Status.RUNNING]
        if not decoding or self._prefill_streak < MAX_PREFILL_STREAK:
            batch = self._prefill()
            if batch is not None:
                self._prefill_streak += 1
                return batch
        self._prefill_streak = 0
        return self._decode(decoding) if decoding else None

    def computed(self, batch: Batch) -> None:
        """Counts the batch's tokens as cached; the caller appends the sampled ones."""
        for chunk, sequence in zip(batch.chunks, batch.sequences, strict=True):
            sequence.num_computed += len(chunk.tokens)
            if sequence.status is Status.PREFILL and not sequence.remaining_prompt:
                sequence.status = Status.RUNNING

    def finish(self, sequence: Sequence, reason: str | None) -> None:
        """Ends a sequence in any state and frees what it holds. reason: its finish_reason; None for a failed one."""
        if sequence.finished:
            return
        # In neither when an interrupt cut its admission short.
        with contextlib.suppress(ValueError):
            if sequence.status is Status.WAITING:
                self.waiting.remove(sequence)
            else:
                self.running.remove(sequence)
        self.blocks.free(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason

    def _prefill(self) -> Batch | None:
        """Prompts in progress first, then new ones while slots, blocks, rows and tokens last."""
        rows, tokens = self.ladder.prefill_rows[-1], self.max_num_batched_tokens
        tile = self.ladder.prefill_row_cost(1)
        chunks: list[Chunk] = []
        sequences: list[Sequence] = []
        context = 1
        unfinished = deque(s for s in self.running if s.status is Status.PREFILL)
        while rows >= tile and tokens > 0:
            if unfinished:
                sequence = unfinished.popleft()
            elif (admitted := self._admit()) is not None:
                sequence = admitted
            else:
                break
            count = min(sequence.remaining_prompt, tokens, rows // tile * tile)
            start, end = sequence.num_computed, sequence.num_computed + count
            chunks.append(
                _chunk(sequence, sequence.prompt_ids[start:end], start, sample=end == len(sequence.prompt_ids))
            )
            sequences.append(sequence)
            context = max(context, self.blocks.blocks_of(end))
            rows -= self.ladder.prefill_row_cost(count)
            tokens -= count
        return Batch(PREFILL, chunks, sequences, context) if chunks else None

    def _admit(self) -> Sequence | None:
        """The first waiting sequence with its blocks reserved, or None when it has to wait on."""
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return None
        if not self.blocks.can_allocate(self.waiting[0]):
            return None
        sequence = self.waiting.popleft()
        self.blocks.allocate(sequence)
        sequence.status = Status.PREFILL
        self.running.append(sequence)
        return sequence

    def _decode(self, decoding: list[Sequence]) -> Batch:
        """One row for every running sequence; its token is still on device, in the slot."""
        chunks = [_chunk(s, [DEVICE_TOKEN], s.num_computed, sample=True) for s in decoding]
        context = max(self.blocks.blocks_of(s.num_computed + 1) for s in decoding)
        return Batch(DECODE, chunks, decoding, context)


def _chunk(sequence: Sequence, tokens: list[int], start: int, *, sample: bool) -> Chunk:
    return Chunk(
        tokens=tokens,
        start=start,
        slot=sequence.slot,
        blocks=sequence.blocks,
        sample=sample,
        temperature=sequence.sampling.temperature,
        seed=sequence.seed,
        output_index=len(sequence.output_ids),
        forced=sequence.forced_token if sample else FREE_TOKEN,
    )
