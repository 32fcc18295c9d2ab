"""The engine loop: requests in, one device step at a time, tokens and endings out.

Synchronous and for one thread: a step is planned, run and handled before the next. It knows ids and stop conditions;
prompts as text or messages are the business of `di_jax.llm`.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Sequence as SequenceOf

import numpy as np

from di_jax.config import EngineGroup
from di_jax.engine.compile_counter import COMPILATIONS
from di_jax.engine.expert_balancer import ExpertBalancer
from di_jax.engine.metrics import StatusLine, StepReport
from di_jax.engine.runner import StepOutput
from di_jax.engine.scheduler import DECODE, PREFILL, Batch, Scheduler, data_ranks, rank_plans
from di_jax.engine.sequence import Request, RequestFailure, Sequence, Status
from di_jax.engine.setup import EngineParts
from di_jax.engine.step_plan import Bucket
from di_jax.engine.step_policy import Demand, demand_of, make_policy
from di_jax.parallel import processes
from di_jax.prompts import RequestError, check_token_ids
from di_jax.sampling_params import SamplingParams, choice_seed
from di_jax.tokenizer import IncrementalDetokenizer

logger = logging.getLogger(__name__)

STOP, LENGTH, ABORT = "stop", "length", "abort"
MODEL_ERROR, INTERRUPTED = "model_error", "interrupted"


class Engine:
    """Continuous batching over one runner. With several processes each has an engine, schedules the ranks that it
    hosts, and steps when the others do, until nobody has work.

    requests: unfinished ones by id. changes: steps, and endings of requests outside of steps, so far; as long as it
    stays the same no request got on. compiles_when_ready: the process's compilations when warm-up ended.
    """

    def __init__(self, parts: EngineParts, config: EngineGroup) -> None:
        self.parts, self.config = parts, config
        layout = parts.layout
        self.scheduler = Scheduler(
            data_ranks(parts.runner.local_ranks, parts.ladder.cp, layout),
            parts.ladder,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self.policy = make_policy(config.policy, config.ttft_target_ms, config.itl_target_ms)
        self.agreement = processes.current()
        self._owners = processes.data_rank_owners(parts.runner.mesh, parts.runner.plan)
        self._prefill_ms = 0.0
        self.balancer: ExpertBalancer | None = None
        if parts.runner.parallel.balanced:
            experts = parts.model_config.n_routed_experts
            self.balancer = ExpertBalancer(parts.runner, parts.eplb, experts, self.agreement.sum)
        self.requests: dict[str, Request] = {}
        self.status = StatusLine(config.log_interval)
        self.num_steps = self.changes = 0
        self._resets = parts.runner.resets
        self._ids = itertools.count()
        if config.warmup:
            parts.runner.warm_up(parts.ladder.buckets())
            if self.balancer is not None:
                self.balancer.warm_up()
        self.compiles_when_ready = COMPILATIONS.count
        self.agreement.working(None)

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_work

    def serves(self, index: int) -> bool:
        """Whether request number `index` of a list that every process has is for this one: it goes to the process of
        data-parallel rank index mod dp."""
        return self._owners[index % len(self._owners)] == self.agreement.process_id

    @property
    def compiles_after_warmup(self) -> int:
        """Compilations of this process since the engine was ready: 0 when warm-up covered everything."""
        return COMPILATIONS.count - self.compiles_when_ready

    def add_request(
        self, prompt_ids: SequenceOf[int], sampling: SamplingParams, request_id: str | None = None
    ) -> Request:
        """Queues a request. request_id: default a running number. Raises RequestError and queues nothing."""
        request_id = str(next(self._ids)) if request_id is None else request_id
        if request_id in self.requests:
            raise RequestError(f"request {request_id!r} is running already; give another id")
        ids, room = self._check(prompt_ids, sampling)
        seed = sampling.resolved_seed()
        request = Request(request_id, ids, sampling, seed)
        request.sequences = [
            Sequence(
                request_id,
                index,
                request.prompt_ids,
                sampling,
                choice_seed(seed, index),
                max_tokens=min(sampling.max_tokens, room),
                detokenizer=self._detokenizer(sampling),
            )
            for index in range(sampling.n)
        ]
        if not self.has_unfinished:
            self.status.restart()
        self.requests[request_id] = request
        for sequence in request.sequences:
            self.scheduler.add(sequence)
        return request

    def step(self) -> StepReport | None:
        """Runs one step and handles its tokens; None when there is nothing to do, in any process. Collective.

        An error of the device, or an interrupt, goes on up. It costs every request in the caches its answer (`failure`
        says why); requests that wait, and the engine itself, go on.
        """
        began = time.perf_counter()
        self.parts.runner.repair()
        self._fail_lost(MODEL_ERROR, "its caches were lost when another step over them failed; ask again")
        try:
            kind = self._choose_kind(began)
            if kind is None:
                return None
            batch = self.scheduler.schedule(kind)
            bucket, num_sequences, num_tokens = self._choose_bucket(batch)
            outputs = self.parts.runner.execute(rank_plans(bucket, batch, self.parts.runner.local_ranks)).host()
            now = time.perf_counter()
            self.num_steps += 1
            self.changes += 1
            requests = self._handle(batch, outputs, now)
            if self.balancer is not None:
                self.balancer.after_step(outputs)
        except BaseException as error:
            self._recover(error)
            raise
        report = StepReport(
            kind,
            bucket,
            num_sequences,
            num_tokens,
            time.perf_counter() - began,
            list(requests.values()),
            None if self.balancer is None else self.balancer.moe_lb,
        )
        if kind == PREFILL:
            self._prefill_ms = 1e3 * report.seconds
        ledgers = self.scheduler.ledgers
        self.status.observe(
            report,
            len(self.scheduler.running),
            len(self.scheduler.waiting),
            sum(ledger.num_free_blocks for ledger in ledgers),
            sum(ledger.num_blocks for ledger in ledgers),
        )
        return report

    def abort(self, request_id: str) -> None:
        """Ends a request where it is and frees its blocks; its unfinished answers end with `abort`. Unknown or
        finished ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self.changes += 1
            self._end(request, time.perf_counter())

    def _choose_kind(self, now: float) -> str | None:
        """PREFILL, DECODE, or None when no process has work: the same in all of them."""

        def waited_ms(sequence: Sequence) -> float:
            return 1e3 * (now - self.requests[sequence.request_id].arrived)

        own = demand_of(self.scheduler, waited_ms, self._prefill_ms)
        demands = self.agreement.gather(own.numbers(), "the kind of a step")
        kind = self.policy.choose([Demand.from_numbers(row) for row in demands])
        self.agreement.working(None if kind is None else f"step {self.num_steps}, {kind}")
        return kind

    def _choose_bucket(self, batch: Batch) -> tuple[Bucket, int, int]:
        """The smallest bucket that holds the batches of all processes, and how many sequences and tokens they have."""
        own = np.array([*self.scheduler.need(batch), len(batch.work), batch.num_tokens], np.int32)
        everyones = self.agreement.gather(own, "the bucket of a step")
        rows, context = everyones[:, :2].max(axis=0).tolist()
        num_sequences, num_tokens = everyones[:, 2:].sum(axis=0).tolist()
        bucket = self.parts.ladder.bucket(batch.kind == DECODE, rows, context)
        self.agreement.working(f"step {self.num_steps}, {batch.kind}, {rows} rows and {context} blocks of context")
        return bucket, num_sequences, num_tokens

    def _recover(self, error: BaseException) -> None:
        """After a step that did not come to its end. What it did to the caches and to `last_token` is unknown, on the
        device or in the host's books, so neither is gone on with. Other processes may wait for this one: they end."""
        self.agreement.fail(error)
        if self.parts.runner.resets == self._resets:
            self.parts.runner.reset()
        if isinstance(error, Exception):
            self._fail_lost(MODEL_ERROR, f"the step that computed it failed ({type(error).__name__}: {error})"[:500])
        else:
            self._fail_lost(INTERRUPTED, "the step that computed it was interrupted; ask again")

    def _fail_lost(self, kind: str, message: str) -> None:
        """Fails every request with a place in caches that were emptied since the last look."""
        if self.parts.runner.resets == self._resets:
            return
        now = time.perf_counter()
        for request in list(self.requests.values()):
            states = [sequence.status for sequence in request.sequences]
            if Status.PREFILL in states or Status.RUNNING in states or Status.WAITING not in states:
                self.changes += 1
                self._end(request, now, RequestFailure(kind, message))
        self._resets = self.parts.runner.resets

    def _check(self, prompt_ids: SequenceOf[int], sampling: SamplingParams) -> tuple[list[int], int]:
        """The prompt as plain integers, and the tokens that the context leaves for the answer. Raises RequestError."""
        limit, vocabulary = self.config.max_model_len, self.parts.model_config.vocab_size
        if not len(prompt_ids):  # not its truth: it may be an array
            raise RequestError("prompt: is empty; give at least one token")
        if len(prompt_ids) >= limit:
            raise RequestError(
                f"prompt: has {len(prompt_ids)} tokens; engine.max_model_len = {limit} leaves room for {limit - 1} and "
                "one token of answer: shorten the prompt or raise engine.max_model_len"
            )
        ids = check_token_ids("prompt_token_ids", prompt_ids, vocabulary)
        check_token_ids("sampling.stop_token_ids", sampling.stop_token_ids or (), vocabulary)
        check_token_ids("sampling.forced_token_ids", sampling.forced_token_ids or (), vocabulary, low=-1)
        room = limit - len(prompt_ids)
        unfit = self.scheduler.never_fits(len(prompt_ids) + min(sampling.max_tokens, room))
        if unfit:
            raise RequestError(unfit)
        return ids, room

    def _detokenizer(self, sampling: SamplingParams) -> IncrementalDetokenizer | None:
        if not sampling.detokenize:
            return None
        return IncrementalDetokenizer(
            self.parts.tokenizer,
            sampling.stop_texts,
            include_stop_str=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
        )

    def _handle(self, batch: Batch, outputs: list[StepOutput], now: float) -> dict[str, Request]:
        """Books a step that ran: caches grown, tokens appended, stops tested. Returns the requests it moved.

        outputs: of each of this process's ranks.
        """
        of_rank = {
            rank: (output.token.tolist(), output.logprob.tolist())
            for rank, output in zip(self.parts.runner.local_ranks, outputs, strict=True)
        }
        self.scheduler.computed(batch)
        moved: dict[str, Request] = {}
        for rank, place, work in batch.results():
            sequence = work.sequence
            if not work.chunk.sample or sequence.finished:
                continue
            token, logprob = (values[place] for values in of_rank[rank])
            request = moved[sequence.request_id] = self.requests[sequence.request_id]
            if not math.isfinite(logprob):
                what = f"output token {len(sequence.output_ids)}: the model's logits are not finite; check the weights"
                self._end(request, now, RequestFailure(MODEL_ERROR, what))
                continue
            sequence.output_ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.decode_steps += batch.kind == DECODE
            request.first_token = now if request.first_token is None else request.first_token
            if (ending := self._ending(sequence, token)) is not None:
                reason, sequence.stop_reason = ending
                self._finish(sequence, reason)
            if all(s.finished for s in request.sequences):
                self._end(request, now)
        return moved

    def _ending(self, sequence: Sequence, token: int) -> tuple[str, str | int | None] | None:
        """(finish_reason, stop_reason) when this token ends the answer: the end token, a stop id, a stop text, then
        length. The text of an ending id is left out unless include_stop_str_in_output."""
        sampling, detokenizer = sequence.sampling, sequence.detokenizer
        ended = token == self.parts.model_config.eos_token_id and not sampling.ignore_eos
        stopped = token in (sampling.stop_token_ids or ())
        if detokenizer is not None and (not (ended or stopped) or sampling.include_stop_str_in_output):
            detokenizer.push([token])
        if ended:
            return STOP, None
        if stopped:
            return STOP, token
        if detokenizer is not None and detokenizer.stopped is not None:
            return STOP, detokenizer.stopped
        return (LENGTH, None) if len(sequence.output_ids) >= sequence.max_tokens else None

    def _finish(self, sequence: Sequence, reason: str | None) -> None:
        if (detokenizer := sequence.detokenizer) is not None:
            detokenizer.flush()
            # The U+FFFD of a character that the last token left unfinished may complete a stop text.
            if reason == LENGTH and detokenizer.stopped is not None:
                reason, sequence.stop_reason = STOP, detokenizer.stopped
        self.scheduler.finish(sequence, reason)

    def _end(self, request: Request, now: float, failure: RequestFailure | None = None) -> None:
        """Ends a request; answers still open are aborted, or have no reason when it failed."""
        for sequence in request.sequences:
            if not sequence.finished:
                self._finish(sequence, None if failure else ABORT)
        request.failure, request.ended = failure, now
        del self.requests[request.request_id]
