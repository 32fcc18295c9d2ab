"""What a step's results do to the requests: tokens appended, blocks that can be found, stops tested, endings."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from di_jax.engine.batch import Batch, DecodeBatch, DecodePart
from di_jax.engine.runner import StepOutput
from di_jax.engine.scheduler import Scheduler
from di_jax.engine.sequence import Request, RequestFailure, Sequence, Status, TokenTop

STOP, LENGTH, ABORT = "stop", "length", "abort"
MODEL_ERROR = "model_error"

# Ends a request that cannot be answered any further.
Fail = Callable[[Request, float, RequestFailure], None]


class Results:
    """Books the results of steps, in the order in which they were launched."""

    def __init__(self, scheduler: Scheduler, eos_token_id: int, fail: Fail) -> None:
        self.scheduler, self.eos, self.fail = scheduler, eos_token_id, fail
        self._tokens = 0  # of the step that is being booked
        self._rank_of = {ledger.rank: rank for rank in scheduler.ranks for ledger in rank.ledgers}

    def book(
        self, batch: Batch | DecodeBatch, outputs: dict[int, StepOutput], now: float
    ) -> tuple[dict[str, Request], list[Sequence], int]:
        """(the requests that got tokens, the sequences that ended, the number of tokens). outputs: by rank, of this
        process's."""
        moved: dict[str, Request] = {}
        ended: list[Sequence] = []
        self._tokens = 0
        if isinstance(batch, DecodeBatch):
            self._decoded(batch, outputs, moved, ended, now)
        else:
            self._prefilled(batch, outputs, moved, ended, now)
        return moved, ended, self._tokens

    def _prefilled(
        self,
        batch: Batch,
        outputs: dict[int, StepOutput],
        moved: dict[str, Request],
        ended: list[Sequence],
        now: float,
    ) -> None:
        for rank, place, work in batch.results():
            sequence, output = work.sequence, outputs[rank]
            if work.held:
                self._rank_of[rank].computed(sequence, work.held, work.end)
            if work.chunk.sample and sequence.status is Status.RUNNING:
                token, logprob = int(output.token[place]), float(output.logprob[place])
                _keep_top(sequence, output, place)
                if sequence.held:
                    self._rank_of[rank].tell(sequence, now)
                self._append(sequence, token, logprob, moved, ended, now)

    def _decoded(
        self,
        batch: DecodeBatch,
        outputs: dict[int, StepOutput],
        moved: dict[str, Request],
        ended: list[Sequence],
        now: float,
    ) -> None:
        running, plain = Status.RUNNING, 0
        for part in batch.parts:
            output, count = outputs[part.rank], len(part.sequences)
            tokens, logprobs = output.token[:count].tolist(), output.logprob[:count].tolist()
            finite = bool(np.isfinite(output.logprob[:count]).all())
            self._register(part)
            if output.top is not None:
                for place, sequence in enumerate(part.sequences):
                    if sequence.status is running:
                        _keep_top(sequence, output, place)
            for sequence, token, logprob in zip(part.sequences, tokens, logprobs, strict=True):
                if sequence.status is not running:
                    # It ended while this step was in flight: no token, so no time between two.
                    part.table.told[part.slots[part.sequences.index(sequence)]] = np.nan
                    continue
                sequence.decode_steps += 1
                ids = sequence.output_ids
                if (
                    token in sequence.stop_ids
                    or len(ids) + 1 >= sequence.max_tokens
                    or sequence.sampling.stop
                    or not finite
                ):
                    self._append(sequence, token, logprob, moved, ended, now)
                    continue
                # What `_append` does with a token that ends nothing, without a call for each of hundreds of them.
                ids.append(token)
                sequence.logprobs.append(logprob)
                moved[sequence.request_id] = sequence.request  # type: ignore[assignment]
                plain += 1
        self._tokens += plain

    def _register(self, part: DecodePart) -> None:
        """Blocks that a decode step completed; before sequences end and give theirs up."""
        data_rank = self._rank_of[part.rank]
        crossing = np.flatnonzero((part.position + 1) % data_rank.block_size == 0)
        for at in crossing.tolist():
            sequence = part.sequences[at]
            if sequence.held:
                data_rank.computed(sequence, sequence.held, int(part.position[at]) + 1)

    def _append(
        self,
        sequence: Sequence,
        token: int,
        logprob: float,
        moved: dict[str, Request],
        ended: list[Sequence],
        now: float,
    ) -> None:
        request = sequence.request
        assert request is not None
        moved[request.request_id] = request
        if not math.isfinite(logprob):
            what = f"output token {len(sequence.output_ids)}: the model's logits are not finite; check the weights"
            self.fail(request, now, RequestFailure(MODEL_ERROR, what))
            return
        sequence.output_ids.append(token)
        sequence.logprobs.append(logprob)
        self._tokens += 1
        if request.first_token is None:
            request.first_token = now
        if (
            token in sequence.stop_ids or len(sequence.output_ids) >= sequence.max_tokens or sequence.sampling.stop
        ) and (ending := self._ending(sequence, token)) is not None:
            reason, sequence.stop_reason = ending
            self.finish(sequence, reason, now)
            ended.append(sequence)

    def _ending(self, sequence: Sequence, token: int) -> tuple[str, str | int | None] | None:
        """(finish_reason, stop_reason) when this token ends the answer: the end token, a stop id, a stop text, then
        length. The text of an ending id is left out unless include_stop_str_in_output."""
        sampling, detokenizer, count = sequence.sampling, sequence.detokenizer, len(sequence.output_ids)
        ended = token == self.eos and not sampling.ignore_eos
        stopped = token in (sampling.stop_token_ids or ())
        shown = count if not (ended or stopped) or sampling.include_stop_str_in_output else count - 1
        if sampling.stop:
            sequence.detokenize(shown)
        if ended or stopped:
            sequence.text_tokens = shown
            return STOP, None if ended else token
        if detokenizer is not None and detokenizer.stopped is not None:
            return STOP, detokenizer.stopped
        return (LENGTH, None) if count >= sequence.max_tokens else None

    def finish(self, sequence: Sequence, reason: str | None, now: float) -> None:
        """Ends a sequence. reason: its finish_reason; None for a failed one."""
        if sequence.text_tokens is None:
            sequence.text_tokens = len(sequence.output_ids)
        detokenizer = sequence.detokenizer
        if detokenizer is not None and sequence.sampling.stop:
            sequence.detokenize(sequence.text_tokens)
            detokenizer.flush()
            # The U+FFFD of a character that the last token left unfinished may complete a stop text.
            if reason == LENGTH and detokenizer.stopped is not None:
                reason, sequence.stop_reason = STOP, detokenizer.stopped
        self.scheduler.finish(sequence, reason, now)


def _keep_top(sequence: Sequence, output: StepOutput, place: int) -> None:
    """The likeliest ids beside the token that a sequence is about to get, when it asked for them."""
    if sequence.extra is None or sequence.extra.top is None or output.top is None:
        return
    top, count = output.top, sequence.extra.top
    ids, logprobs = top.ids[place, :count].tolist(), top.logprobs[place, :count].tolist()
    sequence.tops.append(TokenTop(int(top.rank[place]), ids, logprobs))
