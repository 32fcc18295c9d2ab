"""What the engine did: counters, gauges and histograms, one report a step, and a status line every few seconds.

Names are vLLM's where it has the metric (serving.md 3.5), so that its dashboards work; ours begin with `di_jax:`.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from di_jax.engine.draft_totals import DraftTotals
from di_jax.engine.step_policy import DECODE, PREFILL

if TYPE_CHECKING:
    from di_jax.engine.sequence import Request
    from di_jax.engine.step_plan import Bucket

logger = logging.getLogger(__name__)

Value = float | int | None

# Upper bounds of histogram buckets, in seconds unless said. First token: 1 ms to 2,560 s; whole requests: 0.3 s to
# 7,680 s (serving.md 3.5).
FIRST_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160, 640,
                 2560)  # fmt: skip
TOKEN_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1,
           2, 5, 10, 30)  # fmt: skip
REQUEST_S = (0.3, 0.6, 1, 2, 4, 7.5, 15, 30, 60, 120, 240, 480, 960, 1920, 3840, 7680)
STEP_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16)
HOST_S = (0.00002, 0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1, 1)
COUNTS = tuple(4**n for n in range(11))  # tokens of a request, 1 to 1,048,576
STEP_TOKENS = tuple(2**n for n in range(16))  # 1 to 32,768
FEW = (0, 1, 2, 5, 10, 20, 50)

MFU_STEPS = 128  # steps that the MFU gauge looks back on


@dataclass(frozen=True)
class StepReport:
    """One executed step. num_sequences, num_tokens: fed, in all processes; of a step with drafts num_tokens are those
    that it emitted in this one. seconds: from planning to the last token
    handled on the host, of which the four others are parts: planning it, sending it to the device, waiting for its
    tokens, handling them.

    requests: those that got a token, or ended, in this step. moe_lb: rows of the busiest expert rank over those of the
    mean one, in the last 128 steps counted; None without EPLB. flops: of the model, see engine.flops.
    """

    kind: str  # step_policy.PREFILL or DECODE
    bucket: Bucket
    num_sequences: int
    num_tokens: int
    seconds: float
    requests: list[Request]
    moe_lb: float | None = None
    schedule_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    post_s: float = 0.0
    flops: float = 0.0


class Histogram:
    """Counts of observations by fixed bounds, and their sum."""

    __slots__ = ("bounds", "counts", "sum", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one: above all bounds
        self.sum = 0.0
        self.total = 0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `times` observations of a value; bounds belong to the bucket below them."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
        self.total += times

    @property
    def mean(self) -> float | None:
        return self.sum / self.total if self.total else None

    def quantile(self, share: float) -> float | None:
        """The upper bound of the bucket that holds the quantile, infinity above all; None without observations."""
        if not self.total:
            return None
        below = 0
        for bound, count in zip(self.bounds, self.counts):
            below += count
            if below >= share * self.total:
                return bound
        return float("inf")


class Sample(NamedTuple):
    """One number. suffix: what its line appends to the family's name (`_total`, `_bucket`, `_sum`, `_count`)."""

    suffix: str
    labels: Mapping[str, str]
    value: float


class Family(NamedTuple):
    """A metric with its samples. kind: counter, gauge or histogram."""

    name: str
    kind: str
    help: str
    samples: list[Sample]


# Attribute of EngineMetrics, or path of attributes, name, help.
_GAUGES = (
    ("running", "vllm:num_requests_running", "Requests that run"),
    ("waiting", "vllm:num_requests_waiting", "Requests that wait"),
    ("kv_cache_usage", "vllm:kv_cache_usage_perc", "Share of blocks in use, 0 to 1"),
    ("blocks_total", "di_jax:blocks", "Blocks of the pool"),
    ("blocks_used", "di_jax:blocks_used", "Blocks that sequences hold"),
    ("blocks_cached", "di_jax:blocks_cached", "Blocks kept for their prefix only"),
    ("blocks_free", "di_jax:blocks_free", "Blocks without content"),
    ("snapshot_bytes", "di_jax:snapshot_bytes", "Host memory of window-state snapshots"),
    ("mfu", "di_jax:mfu", "Share of the devices' peak operations that the model's were, in the last steps"),
    ("drafts.accept_rate", "di_jax:draft_accept_rate", "Accepted drafts of the verified ones"),
    ("drafts.accepted_length", "di_jax:draft_accepted_length", "Tokens of a step with drafts: those accepted, and one"),
    ("drafts.verified_length", "di_jax:draft_verified_length", "Drafts that a step with drafts verified"),
    (
        "drafts.confidence_error",
        "di_jax:draft_confidence_error",
        "How far confidences are from the chance of acceptance",
    ),
    ("moe_lb", "di_jax:moe_lb", "Rows of the busiest expert rank over those of the mean one"),
)
_COUNTERS = (
    ("prompt_tokens", "vllm:prompt_tokens", "Prompt tokens of requests that were taken in"),
    ("cached_tokens", "vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache"),
    ("generated_tokens", "vllm:generation_tokens", "Tokens generated"),
    ("prefix_queries", "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache"),
    ("prefix_hits", "vllm:prefix_cache_hits", "Tokens found in the prefix cache"),
    ("preemptions", "vllm:num_preemptions", "Sequences sent back to the queue for their blocks"),
    ("snapshot_hits", "di_jax:snapshot_hits", "Window-state snapshots found"),
    ("snapshot_misses", "di_jax:snapshot_misses", "Window-state snapshots not found"),
    ("replayed_tokens", "di_jax:replayed_tokens", "Tokens run again for their window state"),
    ("evicted_blocks", "di_jax:evicted_blocks", "Cached blocks overwritten"),
    ("deadline_exceeded", "di_jax:deadline_exceeded", "Requests ended by their deadline"),
    ("compilations", "di_jax:compilations", "Programs compiled since the engine was ready"),
    ("model_flops", "di_jax:model_flops", "Operations of the model in FP8-equivalents"),
    ("drafts.steps", "vllm:spec_decode_num_drafts", "Blocks of drafts that came to verification"),
    ("drafts.drafted", "vllm:spec_decode_num_draft_tokens", "Drafts in those blocks"),
    ("drafts.verified", "di_jax:spec_decode_num_verified_tokens", "Drafts that were verified"),
    ("drafts.accepted", "vllm:spec_decode_num_accepted_tokens", "Drafts that were accepted"),
)
_LABELLED = (
    ("finished", "vllm:request_success", "finished_reason", "Requests ended, by reason"),
    ("rejected", "vllm:admission_rejections", "reason", "Requests not taken in, by reason"),
    ("steps", "di_jax:steps", "kind", "Steps, by kind"),
    (
        "drafts.accepted_at",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "position",
        "Drafts that were accepted, by place in the block",
    ),
)
_HISTOGRAMS = (
    ("first_token", "vllm:time_to_first_token_seconds", "Arrival to first token"),
    ("inter_token", "vllm:inter_token_latency_seconds", "Between two tokens of an answer"),
    ("queue_time", "vllm:request_queue_time_seconds", "Arrival to the first step"),
    ("prefill_time", "vllm:request_prefill_time_seconds", "First step to first token"),
    ("decode_time", "vllm:request_decode_time_seconds", "First token to the end"),
    ("request_time", "vllm:e2e_request_latency_seconds", "Arrival to the end"),
    ("request_prompt", "vllm:request_prompt_tokens", "Prompt tokens of a request"),
    ("request_generated", "vllm:request_generation_tokens", "Generated tokens of a request"),
    ("request_preemptions", "vllm:request_num_preemptions", "Preemptions of a request"),
    ("step_tokens", "vllm:iteration_tokens_total", "Tokens of a step"),
)
_STEP_HISTOGRAMS = (
    ("step_time", "di_jax:step_seconds", "A step, by kind"),
    ("schedule_time", "di_jax:step_schedule_seconds", "Planning a step, by its kind"),
    ("launch_time", "di_jax:step_launch_seconds", "Sending a step to the device, by its kind"),
    ("wait_time", "di_jax:step_wait_seconds", "Waiting for the tokens of a step, by its kind"),
    ("post_time", "di_jax:step_post_seconds", "Handling the tokens of a step, by its kind"),
)


class EngineMetrics:
    """The numbers of one engine. Counters, from the start, and gauges are plain attributes that the engine adds to or
    sets; histograms have `observe`. One thread writes; others may read.

    peak_flops: of all devices together, FP8-equivalents a second (engine.flops.peak_flops); None: no MFU.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        self.peak_flops = peak_flops
        self.running = self.waiting = 0
        self.blocks_total = self.blocks_used = self.blocks_cached = self.blocks_free = 0
        self.snapshot_bytes = 0
        self.moe_lb: float | None = None
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.prefix_queries = self.prefix_hits = self.evicted_blocks = 0
        self.snapshot_hits = self.snapshot_misses = self.replayed_tokens = 0
        self.preemptions = self.deadline_exceeded = self.compilations = 0
        self.model_flops = 0.0
        self.drafts = DraftTotals()
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.rejected: dict[str, int] = {}
        self.steps = {PREFILL: 0, DECODE: 0}
        self.first_token = Histogram(FIRST_TOKEN_S)
        self.inter_token = Histogram(TOKEN_S)
        self.queue_time, self.prefill_time = Histogram(REQUEST_S), Histogram(REQUEST_S)
        self.decode_time, self.request_time = Histogram(REQUEST_S), Histogram(REQUEST_S)
        self.request_prompt, self.request_generated = Histogram(COUNTS), Histogram(COUNTS)
        self.request_preemptions = Histogram(FEW)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.step_time, self.wait_time = _by_kind(STEP_S), _by_kind(STEP_S)
        self.schedule_time, self.launch_time, self.post_time = _by_kind(HOST_S), _by_kind(HOST_S), _by_kind(HOST_S)
        self._recent: deque[tuple[float, float]] = deque()  # end and operations of the last steps
        self._recent_flops = 0.0  # of all of them but the first

    @property
    def kv_cache_usage(self) -> float:
        return self.blocks_used / self.blocks_total if self.blocks_total else 0.0

    @property
    def mfu(self) -> float | None:
        """Operations of the last steps but the first, over what the devices could have done from the end of the first
        to the end of the last (engine.md 12.1). None without a peak or with fewer than two steps."""
        if self.peak_flops is None or len(self._recent) < 2:
            return None
        seconds = self._recent[-1][0] - self._recent[0][0]
        return self._recent_flops / seconds / self.peak_flops if seconds > 0 else None

    def observe_step(self, report: StepReport, now: float) -> None:
        """Counts a step that ended at `now`, in seconds."""
        kind = report.kind
        self.steps[kind] += 1
        self.step_tokens.observe(report.num_tokens)
        self.step_time[kind].observe(report.seconds)
        self.schedule_time[kind].observe(report.schedule_s)
        self.launch_time[kind].observe(report.launch_s)
        self.wait_time[kind].observe(report.wait_s)
        self.post_time[kind].observe(report.post_s)
        self.moe_lb = report.moe_lb
        self.model_flops += report.flops
        recent = self._recent
        if recent:
            self._recent_flops += report.flops
        recent.append((now, report.flops))
        if len(recent) > MFU_STEPS:
            recent.popleft()
            self._recent_flops -= recent[0][1]

    def restart(self) -> None:
        """Begins the MFU anew, after an idle time."""
        self._recent.clear()
        self._recent_flops = 0.0

    def observe_end(
        self,
        reason: str,
        *,
        prompt_tokens: int,
        generated_tokens: int,
        preemptions: int,
        arrived: float,
        started: float | None,
        first_token: float | None,
        ended: float,
    ) -> None:
        """Counts a request that ended. reason: its finish_reason, or `error`. Times in seconds of one clock; started:
        when its first step was launched, None for one that ended in the queue, as first_token."""
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.request_time.observe(ended - arrived)
        self.request_prompt.observe(prompt_tokens)
        self.request_generated.observe(generated_tokens)
        self.request_preemptions.observe(preemptions)
        if started is not None and first_token is not None:
            self.prefill_time.observe(first_token - started)
        if first_token is not None:
            self.decode_time.observe(ended - first_token)

    def reject(self, reason: str) -> None:
        """Counts a request that was not taken in."""
        self.rejected[reason] = self.rejected.get(reason, 0) + 1

    def snapshot(self) -> dict[str, Value | dict[str, Value]]:
        """Every number by the name of its attribute, labelled ones as dicts by label; a histogram as a dict of its
        count, sum, mean, p50 and p99 (upper bounds of buckets), those by kind under NAME_KIND. A copy."""
        plain: dict[str, Value | dict[str, Value]] = {
            name: attrgetter(name)(self) for name, *_ in (*_GAUGES, *_COUNTERS)
        }
        plain.update({name: dict(attrgetter(name)(self)) for name, *_ in _LABELLED})
        for name, *_ in _HISTOGRAMS:
            plain[name] = _summary(getattr(self, name))
        for name, *_ in _STEP_HISTOGRAMS:
            for kind, histogram in getattr(self, name).items():
                plain[f"{name}_{kind}"] = _summary(histogram)
        return plain

    def render(self) -> list[Family]:
        """Every metric in Prometheus terms; one without a value (no peak, no EPLB) has no samples. The caller adds the
        labels that all share."""
        families = [Family(name, "gauge", text, _plain("", attrgetter(attr)(self))) for attr, name, text in _GAUGES]
        families += [
            Family(name, "counter", text, _plain("_total", attrgetter(attr)(self))) for attr, name, text in _COUNTERS
        ]
        for attr, name, label, text in _LABELLED:
            samples = [
                Sample("_total", {label: str(key)}, value) for key, value in dict(attrgetter(attr)(self)).items()
            ]
            families.append(Family(name, "counter", text, samples))
        for attr, name, text in _HISTOGRAMS:
            families.append(Family(name, "histogram", text, _buckets(getattr(self, attr), {})))
        for attr, name, text in _STEP_HISTOGRAMS:
            samples = [s for kind, one in getattr(self, attr).items() for s in _buckets(one, {"kind": kind})]
            families.append(Family(name, "histogram", text, samples))
        return families


def _by_kind(bounds: tuple[float, ...]) -> dict[str, Histogram]:
    return {PREFILL: Histogram(bounds), DECODE: Histogram(bounds)}


def _summary(histogram: Histogram) -> dict[str, Value]:
    return {
        "count": histogram.total,
        "sum": histogram.sum,
        "mean": histogram.mean,
        "p50": histogram.quantile(0.5),
        "p99": histogram.quantile(0.99),
    }


def _plain(suffix: str, value: float | None) -> list[Sample]:
    return [] if value is None else [Sample(suffix, {}, value)]


def _buckets(histogram: Histogram, labels: Mapping[str, str]) -> list[Sample]:
    samples, below = [], 0
    for bound, count in zip((*histogram.bounds, None), list(histogram.counts), strict=True):
        below += count
        le = "+Inf" if bound is None else repr(float(bound))
        samples.append(Sample("_bucket", {**labels, "le": le}, below))
    return [*samples, Sample("_sum", labels, histogram.sum), Sample("_count", labels, below)]


class StatusLine:
    """Logs what happened since the last line, at most every `interval` seconds; 0 is never."""

    def __init__(self, interval: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.interval, self._clock = interval, clock
        self._before = (0, 0, 0, 0.0, 0, 0, 0, 0)
        self.restart()

    def observe(self, report: StepReport, metrics: EngineMetrics) -> None:
        """Counts a step; metrics: the state after it."""
        if report.kind == PREFILL:
            self._prefilled += report.num_tokens
        else:
            self._decoded += report.num_tokens
        if not self.interval or (now := self._clock()) - self._since < self.interval:
            return
        seconds = now - self._since
        m, gaps, d = metrics, metrics.inter_token, metrics.drafts
        current = (
            m.prefix_queries,
            m.prefix_hits,
            m.preemptions,
            gaps.sum,
            gaps.total,
            d.steps,
            d.verified,
            d.accepted,
        )
        queries, hits, preemptions, gap_s, tokens, blocks, verified, accepted = (
            new - old for new, old in zip(current, self._before, strict=True)
        )
        self._before = current
        parts = [
            f"prefill {self._prefilled / seconds:.0f} tok/s",
            f"decode {self._decoded / seconds:.0f} tok/s",
            f"{m.running} running",
            f"{m.waiting} waiting",
            f"{m.blocks_free + m.blocks_cached} of {m.blocks_total} blocks free",
        ]
        if queries:
            parts.append(f"prefix hits {100 * hits / queries:.0f}%")
        if preemptions:
            parts.append(f"{preemptions} preempted")
        if tokens:
            parts.append(f"itl {1e3 * gap_s / tokens:.1f} ms")
        if blocks:
            parts.append(f"{verified / blocks:.1f} drafts verified, {accepted / blocks:.1f} accepted")
        if (mfu := m.mfu) is not None:
            parts.append(f"mfu {100 * mfu:.1f}%")
        if report.moe_lb is not None:
            parts.append(f"moe_lb {report.moe_lb:.3f}")
        logger.info("%s", ", ".join(parts))
        self.restart()

    def restart(self) -> None:
        """Starts counting anew, such as after an idle time."""
        self._since, self._prefilled, self._decoded = self._clock(), 0, 0
