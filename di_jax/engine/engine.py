"""The engine loop: requests in, device steps, tokens and endings out.

Steps are launched one ahead: step N+1 is planned and launched while N runs, and N's tokens are handled while N+1 runs
(engine.async_scheduling; without it each step is handled before the next is planned, with the same tokens). One thread.
It knows ids and stop conditions; prompts as text or messages are the business of `di_jax.llm`.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from di_jax.config import EngineGroup
from di_jax.engine import step_profile
from di_jax.engine.batch import Batch, DecodeBatch, Need
from di_jax.engine.cache_chores import CacheChores
from di_jax.engine.compile_counter import COMPILATIONS
from di_jax.engine.data_rank import CacheRules, data_ranks
from di_jax.engine.demand import demand_of
from di_jax.engine.expert_balancer import ExpertBalancer
from di_jax.engine.intake import Intake
from di_jax.engine.matching import Matcher, Matching
from di_jax.engine.measurement import Measurement
from di_jax.engine.metrics import EngineMetrics, StepReport
from di_jax.engine.results import ABORT, MODEL_ERROR, Results
from di_jax.engine.sampling_chores import SamplingChores
from di_jax.engine.scheduler import Limits, Scheduler
from di_jax.engine.sequence import Request, RequestFailure, Status
from di_jax.engine.setup import EngineParts
from di_jax.engine.speculation import Speculation
from di_jax.engine.state_cache import WindowStateCache
from di_jax.engine.step_cost import StepCost
from di_jax.engine.step_launcher import Launched, Launches, StepLauncher
from di_jax.engine.step_plan import Bucket
from di_jax.engine.step_policy import DECODE, NO_QUOTA, PREFILL, Demand, make_policy
from di_jax.engine.step_profile import StepProfile
from di_jax.parallel import processes
from di_jax.prompts import QueueFullError, RequestError
from di_jax.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

INTERRUPTED, DEADLINE = "interrupted", "deadline_exceeded"
# Steps in flight when the next one is planned.
DEPTH = 1
# Plans in a row without work, after which something is wrong.
EMPTY_PLANS = 3
# Decode steps whose median is what a decode step takes.
DECODE_TIMES = 9


@dataclass
class Flight:
    """A step that was launched and whose results are not handled yet. Times in seconds."""

    step: Launched
    batch: Batch | DecodeBatch
    bucket: Bucket
    num_sequences: int  # of all processes, as num_tokens
    num_tokens: int
    slot_experts: np.ndarray | None
    launched: float
    schedule_s: float
    launch_s: float


class Engine:
    """Continuous batching over one runner. With several processes each has an engine, schedules the ranks that it
    hosts, and steps when the others do, until nobody has work.

    requests: unfinished ones by id. changes: steps, and endings of requests outside of steps, so far; as long as it
    stays the same no request got on. compiles_when_ready: the process's compilations when warm-up ended. profile: what
    steps with drafts take; None: measured here.
    """

    def __init__(self, parts: EngineParts, config: EngineGroup, profile: StepProfile | None = None) -> None:
        self.parts, self.config = parts, config
        self.runner = parts.runner
        self.snapshots = WindowStateCache(config.state_cache_bytes if config.prefix_caching else 0)
        snapshots = self.snapshots.budget_bytes > 0
        rules = CacheRules.of(config, parts.model_config)
        ranks = data_ranks(self.runner.local_ranks, parts.ladder, parts.layout, rules, self.snapshots)
        limits = Limits(config.max_num_batched_tokens, config.max_sum_context, snapshots)
        self.scheduler = Scheduler(ranks, parts.ladder, limits)
        self.intake = Intake(parts, config, self.scheduler)
        layers = rules.snapshot_layers(parts.model_config)
        self.chores = CacheChores(self.runner, self.snapshots, layers, parts.layout.block_size)
        self.policy = make_policy(
            config.policy,
            config.ttft_target_ms,
            config.itl_target_ms,
            engine_type=config.type,
            watermark=config.watermark,
        )
        self.cost = StepCost()
        self.agreement = processes.current()
        self._owners = processes.data_rank_owners(self.runner.mesh, self.runner.plan)
        self.balancer: ExpertBalancer | None = None
        if self.runner.parallel.balanced:
            experts = parts.model_config.n_routed_experts
            self.balancer = ExpertBalancer(self.runner, parts.eplb, experts, self.agreement.sum)
        self.requests: dict[str, Request] = {}
        self.measurement = Measurement(
            self.scheduler,
            self.snapshots,
            parts.model_config,
            compact=config.replay.decoder == "compact",
            device_kind=self.runner.mesh.devices.flat[0].device_kind,
            num_devices=len(self.runner.local_ranks),
            log_interval=config.log_interval,
        )
        vocab_size = parts.model_config.vocab_size
        matching = Matching(vocab_size)
        self.results = Results(
            self.scheduler, parts.model_config.eos_token_id, self._end, self.measurement.metrics.drafts, matching
        )
        self.num_steps = self.changes = 0
        self._depth = DEPTH if config.async_scheduling else 0
        self._flights: deque[Flight] = deque()
        self._moved: dict[str, Request] = {}  # since the last report
        self._deadlines: list[tuple[float, int, str]] = []
        self._prefill_s = self._last_complete = 0.0
        self._decode_s: deque[float] = deque(maxlen=DECODE_TIMES)
        self._resets = self.runner.resets
        self._ids = itertools.count()
        self._reports: deque[StepReport] = deque()  # of steps that were handled ahead of their turn
        if config.warmup:
            self.runner.warm_up(parts.ladder.buckets())
            self.runner.warm_up_programs(layers if snapshots else None)
            if self.balancer is not None:
                self.balancer.warm_up()
        self.speculation = self._speculation(parts, profile)
        self._resets = self.runner.resets  # the profile empties the caches
        self.launcher = StepLauncher(
            self.runner,
            self.scheduler,
            self.chores,
            SamplingChores(self.runner, vocab_size),
            matching,
            self.speculation,
        )
        self.compiles_when_ready = COMPILATIONS.count
        self.measurement.ready()
        self.agreement.working(None)

    def _speculation(self, parts: EngineParts, profile: StepProfile | None) -> Speculation | None:
        if not parts.ladder.drafts:
            return None
        tables = {
            ledger.rank: table
            for rank in self.scheduler.ranks
            for ledger, table in zip(rank.ledgers, rank.tables, strict=True)
        }
        # Without warm-up nothing is compiled, and to time it all would take the time that was to be saved.
        if parts.ladder.varlen and self.config.warmup and profile is None:
            profile = step_profile.measure(self.runner, parts.ladder)
        if not parts.ladder.varlen:
            profile = None  # all is verified, whatever it takes
        window, filters = parts.model_config.sliding_window, parts.speculative.draft_filters
        return Speculation(parts.ladder, tables, profile, window, filters=filters)

    # -- requests

    @property
    def metrics(self) -> EngineMetrics:
        return self.measurement.metrics

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_work or bool(self._flights) or bool(self._reports)

    @property
    def has_room(self) -> bool:
        """Whether `add_request` would take one more (engine.max_waiting)."""
        return self.config.max_waiting is None or self.scheduler.num_waiting < self.config.max_waiting

    def serves(self, index: int) -> bool:
        """Whether request number `index` of a list that every process has is for this one: it goes to the process of
        data-parallel rank index mod dp."""
        return self._owners[index % len(self._owners)] == self.agreement.process_id

    @property
    def compiles_after_warmup(self) -> int:
        """Compilations of this process since the engine was ready: 0 when warm-up covered everything."""
        return COMPILATIONS.count - self.compiles_when_ready

    def add_request(
        self,
        prompt_ids: SequenceOf[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        matcher: Callable[[], Matcher] | None = None,
    ) -> Request:
        """Queues a request. request_id: default a running number. matcher: makes what each of its answers has to match.
        Raises RequestError and queues nothing; QueueFullError when engine.max_waiting sequences wait."""
        request_id = str(next(self._ids)) if request_id is None else request_id
        if request_id in self.requests:
            raise RequestError(f"request {request_id!r} is running already; give another id")
        if not self.has_room:
            self.metrics.reject("queue_full")
            raise QueueFullError(
                f"{self.scheduler.num_waiting} requests wait, engine.max_waiting is {self.config.max_waiting}; "
                "try again later"
            )
        request = self.intake.request(request_id, prompt_ids, sampling, matcher)
        if not self.has_unfinished:
            self.measurement.begin()
        self.requests[request_id] = request
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.sequences[0].arrival, request_id))
        self.scheduler.add(request.sequences, request.arrived)
        return request

    def abort(self, request_id: str) -> None:
        """Ends a request where it is; its unfinished answers end with `abort`. Its blocks are free as soon as no step
        that may write them is in flight. Unknown or finished ids are ignored."""
        request = self.requests.get(request_id)
        if request is None:
            return
        self.changes += 1
        self._end(request, time.perf_counter())
        if not self.requests and self._alone:
            try:
                self._drain()
            except BaseException as error:
                self._recover(error)
                raise

    @property
    def _alone(self) -> bool:
        return self.agreement.num_processes == 1

    def _drain(self) -> None:
        """Handles the steps in flight."""
        while self._flights:
            self._complete()

    # -- steps

    def step(self) -> StepReport | None:
        """Handles the next step that completes, having launched the one after it; None when there is nothing to do, in
        any process. Collective.

        An error of the device, or an interrupt, goes on up. It costs every request in the caches its answer (`failure`
        says why); requests that wait, and the engine itself, go on.
        """
        if self._reports:
            return self._reports.popleft()
        if self.runner.idle and not any(flight.step.failed for flight in self._flights):
            self.runner.repair()
            self._fail_lost(MODEL_ERROR, "its caches were lost when another step over them failed; ask again")
        try:
            while True:
                launched = self._launch()
                while self._flights and (not launched or len(self._flights) > self._depth):
                    self._reports.append(self._complete())
                if self._reports and not self.requests and self._alone:
                    self._drain()  # nobody may ever step again
                if self._reports or not launched:
                    return self._reports.popleft() if self._reports else None
        except BaseException as error:
            self._recover(error)
            raise

    def _launch(self, again: int = 0) -> bool:
        """Plans the next step and launches it; False when no process has work. again: plans that came to nothing."""
        began = time.perf_counter()
        self._expire(began)
        kind, tokens = self._choose_kind(began)
        if kind is None:
            return False
        batch = self.scheduler.schedule(kind, began, tokens=tokens, preempt=not self._flights)
        if batch is None:
            raise RuntimeError("a decode step was planned without room for it while another was in flight")
        if self.speculation is not None and isinstance(batch, DecodeBatch):
            batch = self.speculation.plan(batch)
        need, launches = batch.need(self.parts.ladder, self.scheduler.ledgers), self.launcher.launches(batch)
        own = [*need.numbers(), batch.num_sequences, batch.num_tokens, *launches.numbers()]
        everyones = self.agreement.gather(np.array(own, np.int32), "the bucket of a step")
        need = Need(*everyones[:, :5].max(axis=0).tolist())
        num_sequences, num_tokens = everyones[:, 5:7].sum(axis=0).tolist()
        launches = Launches.of_all(everyones[:, 7:])
        if not need.rows:
            if self._flights:
                return False  # what is in flight ends first
            if again == EMPTY_PLANS:
                raise RuntimeError(f"a {kind} step was chosen, but no process has work for it")
            return self._launch(again + 1)  # all that were to decode gave way to prompts
        bucket = need.bucket(self.parts.ladder, kind == DECODE)
        what = f"step {self.num_steps}, {kind}, {need.rows} rows and {need.context_blocks} blocks of context"
        self.agreement.working(what)
        planned = time.perf_counter()
        step = self.launcher.launch(batch, bucket, launches, self._complete_early)
        launched = time.perf_counter()
        self.measurement.launched(batch, launched)
        slot_experts = None if self.balancer is None else self.balancer.slot_experts
        self._flights.append(
            Flight(
                step,
                batch,
                bucket,
                num_sequences,
                num_tokens,
                slot_experts,
                launched,
                planned - began,
                launched - planned,
            )
        )
        return True

    def _choose_kind(self, now: float) -> tuple[str | None, int | None]:
        """PREFILL, DECODE, or None when no process has work, and the tokens that a rank may prefill, None for any: the
        same in all processes. None too when one needs to preempt: steps in flight are handled first."""
        decode_s = statistics.median(self._decode_s) if self._decode_s else 0.0
        quota_s = self.policy.quota_s(decode_s)
        own = demand_of(self.scheduler, now, self._prefill_s, decode_s, self.cost, quota_s)
        short = self.scheduler.is_short
        told = self.agreement.gather(np.append(own.numbers(), np.int32(short)), "the kind of a step")
        if self._flights and told[:, -1].any():
            return None, None
        demands = [Demand.from_numbers(row[:-1]) for row in told]
        kind = self.policy.choose(demands)
        self.agreement.working(None if kind is None else f"step {self.num_steps}, {kind}")
        tokens = self.policy.budget(demands) if kind == PREFILL else NO_QUOTA
        return kind, None if tokens == NO_QUOTA else tokens

    def _complete_early(self) -> None:
        """Handles all steps in flight while another is being launched."""
        while self._flights:
            self._reports.append(self._complete())

    def _complete(self) -> StepReport:
        """Waits for the oldest step in flight and handles its results."""
        flight = self._flights[0]
        began = time.perf_counter()
        outputs = flight.step.host()
        now = time.perf_counter()
        self.num_steps += 1
        self.changes += 1
        by_rank = dict(zip(self.runner.local_ranks, outputs, strict=True))
        verified = bool(flight.bucket.drafts)
        lengths = flight.step.pending.lengths() if verified else None
        moved, ended, generated = self.results.book(flight.batch, by_rank, now, verified)
        self._moved |= moved
        for sequence in ended:
            request = self.requests.get(sequence.request_id)
            if request is not None and all(s.finished for s in request.sequences):
                self._end(request, now)
        self._flights.popleft()
        self.chores.keep(flight.step.pending, lengths)
        self.scheduler.completed(flight.step.number)
        if self.balancer is not None:
            self.balancer.after_step(outputs, flight.slot_experts)
        seconds = now - max(flight.launched - flight.launch_s, self._last_complete)
        self._last_complete = now
        if flight.batch.kind == PREFILL:
            self._prefill_s = seconds
            self.cost.observe(flight.bucket.rows, flight.batch.mean_context, seconds)
        else:
            self._decode_s.append(seconds)
        if self.speculation is not None:
            self.speculation.completed(flight.step.rounds, by_rank)
            if verified:
                self.speculation.observe(flight.bucket, seconds, flight.step.draft is not None)
        report = StepReport(
            kind=flight.batch.kind,
            bucket=flight.bucket,
            num_sequences=flight.num_sequences,
            num_tokens=generated if verified else flight.num_tokens,
            seconds=seconds,
            requests=list(self._moved.values()),
            moe_lb=None if self.balancer is None else self.balancer.moe_lb,
            schedule_s=flight.schedule_s,
            launch_s=flight.launch_s,
            wait_s=now - began,
            post_s=time.perf_counter() - now,
            flops=self.measurement.operations(flight.batch, by_rank),
        )
        self._moved = {}
        self.measurement.completed(report, flight.batch, generated, self.results.emitted, now)
        return report

    # -- endings

    def _expire(self, now: float) -> None:
        """Fails the requests whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, arrival, request_id = heapq.heappop(self._deadlines)
            request = self.requests.get(request_id)
            if request is None or request.sequences[0].arrival != arrival:
                continue  # it ended; the id may have come again
            tokens = request.num_output_tokens
            self.changes += 1
            self.metrics.deadline_exceeded += 1
            message = (
                f"not finished within its deadline of {deadline - request.arrived:g} s, {tokens} tokens were answered; "
                "raise deadline_s or ask when less is running"
            )
            self._end(request, now, RequestFailure(DEADLINE, message))

    def _recover(self, error: BaseException) -> None:
        """After a step that did not come to its end. What it did to the caches and to `last_token` is unknown, on the
        device or in the host's books, so neither is gone on with. Other processes may wait for this one: they end."""
        self.agreement.fail(error)
        self._flights.clear()
        self.runner.settle()
        if self.runner.resets == self._resets:
            self.runner.reset()
        if isinstance(error, Exception):
            self._fail_lost(MODEL_ERROR, f"the step that computed it failed ({type(error).__name__}: {error})"[:500])
        else:
            self._fail_lost(INTERRUPTED, "the step that computed it was interrupted; ask again")

    def _fail_lost(self, kind: str, message: str) -> None:
        """Fails every request with a place in caches that were emptied since the last look."""
        if self.runner.resets == self._resets:
            return
        now = time.perf_counter()
        self._flights.clear()
        self.scheduler.reset()
        for request in list(self.requests.values()):
            states = [sequence.status for sequence in request.sequences]
            if Status.PREFILL in states or Status.RUNNING in states or Status.WAITING not in states:
                self.changes += 1
                self._end(request, now, RequestFailure(kind, message))
        self._resets = self.runner.resets

    def _end(self, request: Request, now: float, failure: RequestFailure | None = None) -> None:
        """Ends a request; answers still open are aborted, or have no reason when it failed."""
        if request.finished:
            return
        for sequence in request.sequences:
            if not sequence.finished:
                self.results.finish(sequence, None if failure else ABORT, now)
        request.failure, request.ended = failure, now
        self.measurement.ended(request)
        self._moved[request.request_id] = request
        del self.requests[request.request_id]
        for sequence in request.sequences:
            sequence.request = None  # no ring: what ended goes at once, not in a collector's pause of 30 to 300 ms
