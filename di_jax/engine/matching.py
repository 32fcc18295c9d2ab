"""Answers that must match something, a grammar for example: which ids each row of a step may give.

A matcher lives on the host and sees what was emitted. A step's tokens are therefore drawn only once the results of the
step before are in; the model itself runs meanwhile. Drafts are looked at one after the other: row j of a sequence may
give what can follow its answer and the drafts x_1..x_j (dspark 2.6). A draft that is not allowed is never accepted, so
the rows behind it do not matter.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import closing
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np

from di_jax.engine.batch import Batch, DecodeBatch
from di_jax.engine.sequence import Sequence, Status
from di_jax.engine.step_plan import Bucket

MASK_DTYPE = np.dtype(np.int32)
MASK_BITS = 32


class Matcher(Protocol):
    """What an answer has to match, and how much of it the answer has matched so far."""

    def allowed(self) -> np.ndarray:
        """bool [V]: ids that may come next; at least one."""
        ...

    def accept(self, token: int) -> bool:
        """Goes on with a token; False, and nothing changes, when it is not allowed."""
        ...

    def rollback(self, count: int) -> None:
        """Takes the last `count` accepted tokens back."""
        ...


class MatcherLostError(Exception):
    """A matcher did not take drafts back: where it is, nobody knows."""


class Matching:
    """The masks of steps, and what became of them. vocab_size: V."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.words = -(-vocab_size // MASK_BITS)
        # Of the step that was looked at last: the output whose ids a sequence's matcher could not tell, and why.
        self._failed: WeakKeyDictionary[Sequence, tuple[int, str]] = WeakKeyDictionary()

    def concerns(self, batch: Batch | DecodeBatch) -> bool:
        """Whether a sequence of the step has a matcher and is given a token."""
        if isinstance(batch, DecodeBatch):
            return any(bool(part.table.matched[part.slots].any()) for part in batch.parts)
        return any(work.chunk.sample and work.sequence.matcher is not None for work in batch.work)

    def masks(self, batch: Batch | DecodeBatch, rank: int, bucket: Bucket) -> np.ndarray:
        """int32 [R, rows, ceil(V / 32)]: ids that each row of a rank's sequences may give, bit i of word w for id
        32 w + i; rows: 1 and the drafts. The results of the steps before must be in. All ids from the row on that a
        matcher fails at (`accept` tells)."""
        masks = np.full((bucket.sequences, 1 + bucket.drafts, self.words), -1, MASK_DTYPE)
        for place, sequence in _places(batch, rank):
            if sequence.matcher is None or sequence.status is not Status.RUNNING:
                continue
            self._look(sequence, sequence.drafts if bucket.drafts else (), masks[place])
        return masks

    def _look(self, sequence: Sequence, drafts: SequenceOf[int], masks: np.ndarray) -> None:
        """Fills a sequence's masks, int32 [rows, words], as far as its matcher tells."""
        self._failed.pop(sequence, None)
        row, known = 0, len(sequence.output_ids)
        try:
            with closing(rows_allowed(sequence.matcher, drafts)) as rows:
                for allowed in rows:
                    masks[row] = self._packed(allowed)
                    row += 1
        except MatcherLostError as error:
            self._failed[sequence] = known, _failure(sequence.matcher, error.__cause__ or error)
        except Exception as error:
            self._failed[sequence] = known + row, _failure(sequence.matcher, error)

    def _packed(self, allowed: np.ndarray) -> np.ndarray:
        """`pack_mask`. Raises ValueError for what is no mask of V ids, or a mask of none."""
        if np.shape(allowed) != (self.vocab_size,):
            raise ValueError(f"a mask of shape {np.shape(allowed)} for {self.vocab_size} ids")
        if not np.any(allowed):
            raise ValueError("it allows no id")
        return pack_mask(allowed, self.words)

    def accept(self, sequence: Sequence, token: int) -> str | None:
        """A sequence is about to get its next token, and its matcher goes on with it; else why the answer ends."""
        output, why = self._failed.get(sequence, (-1, ""))
        if output == len(sequence.output_ids):
            return why
        try:
            fits = sequence.matcher.accept(token)
        except Exception as error:
            return _failure(sequence.matcher, error)
        return None if fits else f"id {token} does not match what the answer has to"


def _failure(matcher: Matcher, error: BaseException) -> str:
    return f"{type(matcher).__name__}, which the answer has to match, failed ({type(error).__name__}: {error})"[:500]


def rows_allowed(matcher: Matcher, drafts: SequenceOf[int]) -> Generator[np.ndarray]:
    """bool [V] of each row until a draft is not allowed; afterwards the matcher is where it was. Raises what the
    matcher raises; MatcherLostError when that is while it takes the drafts back."""
    accepted = 0
    try:
        yield matcher.allowed()
        for draft in drafts:
            if draft < 0 or not matcher.accept(draft):
                return
            accepted += 1
            yield matcher.allowed()
    finally:
        try:
            if accepted:
                matcher.rollback(accepted)
        except Exception as error:
            raise MatcherLostError from error


def pack_mask(allowed: np.ndarray, words: int) -> np.ndarray:
    """int32 [words] of bool [V]; bits beyond V are 0."""
    bits = np.zeros(words * MASK_BITS, bool)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view("<i4").astype(MASK_DTYPE)


def _places(batch: Batch | DecodeBatch, rank: int) -> Iterator[tuple[int, Sequence]]:
    """Places among a rank's sequences of the step, of those that are given a token."""
    if isinstance(batch, DecodeBatch):
        for part in batch.parts:
            if part.rank == rank:
                yield from enumerate(part.sequences)
    else:
        own = [work for work in batch.work if rank in work.chunks]
        yield from ((place, work.sequence) for place, work in enumerate(own) if work.chunk.sample)
