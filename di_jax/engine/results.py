"""What a step's results do to the requests: tokens appended, blocks that can be found, stops tested, endings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from di_jax.engine.batch import Batch, DecodeBatch, DecodePart
from di_jax.engine.draft_totals import DraftTotals
from di_jax.engine.matching import Matching
from di_jax.engine.scheduler import Scheduler
from di_jax.engine.sequence import Request, RequestFailure, Sequence, Status, TokenTop
from di_jax.engine.step_output import StepOutput

STOP, LENGTH, ABORT = "stop", "length", "abort"
MODEL_ERROR = "model_error"

# Ends a request that cannot be answered any further.
Fail = Callable[[Request, float, RequestFailure], None]


@dataclass
class _Booked:
    """What the booking of a step brings: requests that got tokens, by id, sequences that ended, and how many tokens."""

    now: float
    moved: dict[str, Request] = field(default_factory=dict)
    ended: list[Sequence] = field(default_factory=list)
    tokens: int = 0


class Results:
    """Books the results of steps, in the order in which they were launched.

    emitted: of the step booked last, if it verified drafts: tokens that each sequence got, by rank.
    """

    def __init__(
        self, scheduler: Scheduler, eos_token_id: int, fail: Fail, drafts: DraftTotals, matching: Matching
    ) -> None:
        self.scheduler, self.eos, self.fail, self.drafts = scheduler, eos_token_id, fail, drafts
        self.matching = matching
        self.emitted: dict[int, np.ndarray] = {}
        self._rank_of = {ledger.rank: rank for rank in scheduler.ranks for ledger in rank.ledgers}

    def book(
        self, batch: Batch | DecodeBatch, outputs: dict[int, StepOutput], now: float, verified: bool = False
    ) -> tuple[dict[str, Request], list[Sequence], int]:
        """(the requests that got tokens, the sequences that ended, the number of tokens). outputs: by rank, of this
        process's. verified: the step verified drafts."""
        booked = _Booked(now)
        self.emitted = {}
        if isinstance(batch, DecodeBatch) and verified:
            self._verified(batch, outputs, booked)
        elif isinstance(batch, DecodeBatch):
            self._decoded(batch, outputs, booked)
        else:
            self._prefilled(batch, outputs, booked)
        return booked.moved, booked.ended, booked.tokens

    def _prefilled(
        self,
        batch: Batch,
        outputs: dict[int, StepOutput],
        booked: _Booked,
    ) -> None:
        for rank, place, work in batch.results():
            sequence, output = work.sequence, outputs[rank]
            if work.held:
                self._rank_of[rank].computed(sequence, work.held, work.end)
            if work.chunk.sample and sequence.status is Status.RUNNING:
                token, logprob = int(output.token[place]), float(output.logprob[place])
                _keep_top(sequence, output, place)
                if sequence.held:
                    self._rank_of[rank].tell(sequence, booked.now)
                self._append(sequence, token, logprob, booked)

    def _decoded(
        self,
        batch: DecodeBatch,
        outputs: dict[int, StepOutput],
        booked: _Booked,
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
                    or sequence.matcher is not None
                    or not finite
                ):
                    self._append(sequence, token, logprob, booked)
                    continue
                # What `_append` does with a token that ends nothing, without a call for each of hundreds of them.
                ids.append(token)
                sequence.logprobs.append(logprob)
                booked.moved[sequence.request_id] = sequence.request  # type: ignore[assignment]
                plain += 1
        booked.tokens += plain

    def _verified(
        self,
        batch: DecodeBatch,
        outputs: dict[int, StepOutput],
        booked: _Booked,
    ) -> None:
        """Of a step that verified drafts: one token of each sequence or several, of which those behind a stop go."""
        for part in batch.parts:
            output, count, data_rank = outputs[part.rank], len(part.sequences), self._rank_of[part.rank]
            assert output.verified is not None and output.error is not None
            token, logprob = np.asarray(output.token[:count]), np.asarray(output.logprob[:count])
            emitted: np.ndarray = np.sum(token >= 0, axis=1)
            finite = np.all(np.isfinite(logprob) | (token < 0), axis=1).tolist()
            tokens, logprobs, news = token.tolist(), logprob.tolist(), emitted.tolist()
            verified, errors = output.verified[:count].tolist(), output.error[:count].tolist()
            ran, goes_on = np.ones((2, count), bool)
            got = emitted.copy()
            drafted = np.where(part.drafted, part.table.num_drafts, 0)
            drafts = drafted.tolist()
            plain, block_size, running, tops = 0, data_rank.block_size, Status.RUNNING, output.top is not None
            columns = zip(part.sequences, tokens, logprobs, news, drafts, verified, errors, finite, strict=True)
            for place, (sequence, row, chances, new, drawn, checked, error, fine) in enumerate(columns):
                if sequence.status is not running:
                    part.table.told[part.slots[place]] = np.nan
                    ran[place] = goes_on[place] = False
                    got[place] = 0
                    continue
                ids = sequence.output_ids
                if not new:
                    raise RuntimeError(
                        f"request {sequence.request_id}: {len(ids)} of {sequence.max_tokens} tokens "
                        "are out and the device gave no more"
                    )
                sequence.count_drafts(drawn, checked, new - 1, error)
                del row[new:]
                if (
                    len(ids) + new >= sequence.max_tokens
                    or not sequence.stop_ids.isdisjoint(row)
                    or sequence.sampling.stop
                    or sequence.matcher is not None
                    or tops
                    or not fine
                ):
                    got[place] = self._append_each(part.rank, sequence, place, row, chances, output, booked)
                    goes_on[place] = sequence.status is running
                    continue
                # What `_append_each` does with tokens that end nothing, without calls for each of hundreds of them.
                ids += row
                sequence.logprobs += chances[:new]
                end = len(sequence) - 1
                if end // block_size > sequence.num_registered and sequence.held:
                    data_rank.computed(sequence, sequence.held, end)
                booked.moved[sequence.request_id] = sequence.request  # type: ignore[assignment]
                plain += new
            booked.tokens += plain
            part.table.settle(part.slots[goes_on], part.caps[goes_on], emitted[goes_on])
            self.drafts.add(drafted[ran], np.array(verified)[ran], emitted[ran] - 1, np.array(errors)[ran])
            self.emitted[part.rank] = got

    def _append_each(
        self,
        rank: int,
        sequence: Sequence,
        place: int,
        tokens: list[int],
        logprobs: list[float],
        output: StepOutput,
        booked: _Booked,
    ) -> int:
        """Tokens of a step of a sequence, one after another up to one that ends it; how many were appended."""
        known = len(sequence.output_ids)
        for at, (token, logprob) in enumerate(zip(tokens, logprobs, strict=False)):
            self._register_known(rank, sequence)
            _keep_top(sequence, output, place, at)
            self._append(sequence, token, logprob, booked)
            if sequence.status is not Status.RUNNING:
                break
        return len(sequence.output_ids) - known

    def _register_known(self, rank: int, sequence: Sequence) -> None:
        """Blocks that a step completed; while its next token is booked, all before that are in the caches."""
        data_rank, end = self._rank_of[rank], len(sequence)
        if sequence.held and end // data_rank.block_size > sequence.num_registered:
            data_rank.computed(sequence, sequence.held, end)

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
        booked: _Booked,
    ) -> None:
        request = sequence.request
        assert request is not None
        booked.moved[request.request_id] = request
        if not math.isfinite(logprob):
            what = f"output token {len(sequence.output_ids)}: the model's logits are not finite; check the weights"
            self.fail(request, booked.now, RequestFailure(MODEL_ERROR, what))
            return
        if sequence.matcher is not None and (why := self.matching.accept(sequence, token)) is not None:
            what = f"output token {len(sequence.output_ids)}: {why}"
            self.fail(request, booked.now, RequestFailure(MODEL_ERROR, what))
            return
        sequence.output_ids.append(token)
        sequence.logprobs.append(logprob)
        booked.tokens += 1
        if request.first_token is None:
            request.first_token = booked.now
        if (
            token in sequence.stop_ids or len(sequence.output_ids) >= sequence.max_tokens or sequence.sampling.stop
        ) and (ending := self._ending(sequence, token)) is not None:
            reason, sequence.stop_reason = ending
            self.finish(sequence, reason, booked.now)
            booked.ended.append(sequence)

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


def _keep_top(sequence: Sequence, output: StepOutput, *place: int) -> None:
    """The likeliest ids beside the token that a sequence is about to get, when it asked for them. place: of the
    sequence among the step's, and of the token among the sequence's where there are several."""
    if sequence.extra is None or sequence.extra.top is None or output.top is None:
        return
    top, count = output.top, sequence.extra.top
    ids, logprobs = top.ids[place][:count].tolist(), top.logprobs[place][:count].tolist()
    sequence.tops.append(TokenTop(int(top.rank[place]), ids, logprobs))
