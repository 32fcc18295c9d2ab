"""Counters, histograms and their rendering; reports and the status line."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine import metrics as module
from di_jax.engine.metrics import MFU_STEPS, EngineMetrics, Family, Histogram, StatusLine, StepReport
from di_jax.engine.step_plan import Bucket
from di_jax.engine.step_policy import DECODE, PREFILL


def report(kind: str = DECODE, tokens: int = 8, seconds: float = 0.01, **fields: float) -> StepReport:
    return StepReport(kind, Bucket(kind == DECODE, 8, 1), 1, tokens, seconds, [], **fields)  # type: ignore[arg-type]


BOUNDS = (0.1, 1.0, 10.0, 1000.0)
observed = st.tuples(st.floats(0, 1e4) | st.sampled_from(BOUNDS), st.integers(1, 5))


@given(st.lists(observed, max_size=50), st.floats(0.01, 1.0))
def test_a_histogram_counts_by_bounds(values: list[tuple[float, int]], share: float) -> None:
    histogram, bounds = Histogram(BOUNDS), BOUNDS
    for value, times in values:
        histogram.observe(value, times)
    flat = sorted(value for value, times in values for _ in range(times))
    assert histogram.total == len(flat) == sum(histogram.counts)
    assert histogram.sum == pytest.approx(sum(flat))
    for n, bound in enumerate(bounds):
        assert sum(histogram.counts[: n + 1]) == sum(value <= bound for value in flat)
    if not flat:
        assert histogram.quantile(share) is None and histogram.mean is None
        return
    exact = flat[max(0, math.ceil(share * len(flat)) - 1)]
    assert histogram.quantile(share) == min((b for b in bounds if b >= exact), default=math.inf)


@pytest.fixture
def busy() -> EngineMetrics:
    """After three steps and two requests."""
    metrics = EngineMetrics(peak_flops=1e6)
    for now, flops in ((1.0, 5e5), (2.0, 1e5), (3.0, 3e5)):
        step = report(schedule_s=1e-4, launch_s=2e-4, wait_s=8e-3, post_s=3e-4, flops=flops)
        metrics.observe_step(step, now)
    metrics.observe_step(report(PREFILL, 100, 0.5, moe_lb=1.25), 5.0)
    metrics.running, metrics.waiting = 2, 1
    metrics.blocks_total, metrics.blocks_used, metrics.blocks_cached, metrics.blocks_free = 24, 6, 4, 14
    metrics.prefix_queries, metrics.prefix_hits = 200, 128
    counts = [np.array(each) for each in ([5, 5, 0], [3, 5, 0], [3, 1, 0], [0.5, 0.1, 0.0])]
    metrics.drafts.add(*counts)
    metrics.first_token.observe(0.03)
    metrics.inter_token.observe(0.011, 7)
    times = {"arrived": 10.0, "started": 10.5, "first_token": 11.0, "ended": 14.0}
    metrics.observe_end("length", prompt_tokens=100, generated_tokens=8, preemptions=1, **times)
    lost = {"arrived": 10.0, "started": None, "first_token": None, "ended": 20.0}
    metrics.observe_end("abort", prompt_tokens=50, generated_tokens=0, preemptions=0, **lost)  # type: ignore[arg-type]
    metrics.reject("max_waiting")
    return metrics


def samples(families: list[Family]) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in families:
        for suffix, labels, value in family.samples:
            yield family.name + suffix, dict(labels), value


def test_every_number_is_rendered_under_its_name(busy: EngineMetrics) -> None:
    found = {(name, *sorted(labels.items())): value for name, labels, value in samples(busy.render())}
    assert found["vllm:num_requests_running",] == 2 and found["vllm:num_requests_waiting",] == 1
    assert found["vllm:kv_cache_usage_perc",] == 0.25
    assert found["vllm:prefix_cache_queries_total",] == 200 and found["vllm:prefix_cache_hits_total",] == 128
    assert found["vllm:request_success_total", ("finished_reason", "length")] == 1
    assert found["vllm:request_success_total", ("finished_reason", "stop")] == 0
    assert found["vllm:admission_rejections_total", ("reason", "max_waiting")] == 1
    assert found["di_jax:steps_total", ("kind", "decode")] == 3
    assert found["vllm:inter_token_latency_seconds_bucket", ("le", "0.01")] == 0
    assert found["vllm:inter_token_latency_seconds_bucket", ("le", "0.015")] == 7
    assert found["vllm:inter_token_latency_seconds_bucket", ("le", "+Inf")] == 7
    assert found["vllm:inter_token_latency_seconds_count",] == 7
    assert found["vllm:inter_token_latency_seconds_sum",] == pytest.approx(0.077)
    assert found["di_jax:step_wait_seconds_sum", ("kind", "decode")] == pytest.approx(0.024)
    assert found["di_jax:step_seconds_count", ("kind", "prefill")] == 1
    assert found["vllm:request_prefill_time_seconds_count",] == 1, "one ended in the queue"
    assert found["vllm:e2e_request_latency_seconds_count",] == 2
    assert found["di_jax:moe_lb",] == 1.25
    assert found["di_jax:model_flops_total",] == 9e5
    assert found["vllm:spec_decode_num_drafts_total",] == 2
    assert found["vllm:spec_decode_num_draft_tokens_total",] == 10
    assert found["di_jax:spec_decode_num_verified_tokens_total",] == 8
    assert found["vllm:spec_decode_num_accepted_tokens_total",] == 4 and found["di_jax:draft_accept_rate",] == 0.5
    assert found["di_jax:draft_accepted_length",] == 1 + 4 / 2 and found["di_jax:draft_verified_length",] == 8 / 2
    assert found["di_jax:draft_confidence_error",] == pytest.approx(0.6 / 8)
    by_place = [found["vllm:spec_decode_num_accepted_tokens_per_pos_total", ("position", str(k))] for k in range(3)]
    assert by_place == [2, 1, 1]


def test_families_are_whole(busy: EngineMetrics) -> None:
    """Names once, `_total` for counters alone, buckets that rise to the count."""
    families = busy.render()
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.kind in ("counter", "gauge", "histogram") and family.help and "\n" not in family.help
        suffixes = {sample.suffix for sample in family.samples}
        expected = {"counter": {"_total"}, "gauge": {""}, "histogram": {"_bucket", "_sum", "_count"}}[family.kind]
        assert suffixes <= expected
        if family.kind == "histogram":
            assert suffixes == expected
            for kind in {sample.labels.get("kind") for sample in family.samples}:
                own = [sample for sample in family.samples if sample.labels.get("kind") == kind]
                buckets = [(float(s.labels["le"]), s.value) for s in own if s.suffix == "_bucket"]
                assert buckets == sorted(buckets) and [v for _, v in buckets] == sorted(v for _, v in buckets)
                assert buckets[-1] == (math.inf, next(s.value for s in own if s.suffix == "_count"))


def test_every_attribute_is_in_the_snapshot(busy: EngineMetrics) -> None:
    """So that a number that is counted can be read; the copy does not change."""
    plain = busy.snapshot()
    for name, value in vars(busy).items():
        if name.startswith("_") or name in ("peak_flops", "drafts"):
            continue
        if isinstance(value, dict) and any(isinstance(one, Histogram) for one in value.values()):
            assert {f"{name}_{kind}" for kind in value} <= set(plain)
        else:
            assert name in plain
    assert plain["first_token"] == {"count": 1, "sum": 0.03, "mean": 0.03, "p50": 0.04, "p99": 0.04}
    assert plain["finished"] == {"stop": 0, "length": 1, "abort": 1, "error": 0}
    busy.finished["length"] += 1
    busy.first_token.observe(1.0)
    assert plain["finished"]["length"] == 1 and plain["first_token"]["count"] == 1  # type: ignore[index,call-overload]


def test_what_is_not_known_has_no_sample() -> None:
    metrics = EngineMetrics()
    metrics.observe_step(report(flops=1e5), 1.0)
    metrics.observe_step(report(flops=1e5), 2.0)
    names = {name for name, _, _ in samples(metrics.render())}
    assert metrics.mfu is None and "di_jax:mfu" not in names and "di_jax:moe_lb" not in names
    assert metrics.kv_cache_usage == 0.0, "before the pool has blocks"
    assert metrics.snapshot()["mfu"] is None


def test_mfu_counts_all_steps_but_the_first_of_its_window(busy: EngineMetrics) -> None:
    assert busy.mfu == pytest.approx((1e5 + 3e5 + 0) / 4.0 / 1e6)
    busy.restart()
    assert busy.mfu is None
    for n in range(3 * MFU_STEPS):
        busy.observe_step(report(flops=2e5 if n >= MFU_STEPS else 7e5), 10.0 + 0.5 * n)
    assert busy.mfu == pytest.approx(2e5 / 0.5 / 1e6)
    busy.observe_step(report(flops=2e5), 10.0 + 0.5 * (3 * MFU_STEPS - 1) + 64.0)
    steps = MFU_STEPS - 1
    assert busy.mfu == pytest.approx(steps * 2e5 / (0.5 * (steps - 1) + 64.0) / 1e6), "idle time counts"


def test_the_status_line_tells_what_happened_since_the_last(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    line, metrics = StatusLine(10, clock=lambda: now[0]), EngineMetrics()
    metrics.running, metrics.waiting = 3, 2
    metrics.blocks_total, metrics.blocks_free, metrics.blocks_cached = 24, 5, 3
    with caplog.at_level(logging.INFO, logger=module.__name__):
        for kind, tokens, at in ((PREFILL, 100, 4.0), (DECODE, 50, 9.0), (DECODE, 50, 10.0), (DECODE, 70, 11.0)):
            now[0] = at
            line.observe(report(kind, tokens), metrics)
        quiet = "prefill 10 tok/s, decode 10 tok/s, 3 running, 2 waiting, 8 of 24 blocks free"
        assert caplog.messages == [quiet]
        metrics.prefix_queries, metrics.prefix_hits, metrics.preemptions = 400, 100, 2
        metrics.inter_token.observe(0.02, 10)
        metrics.drafts.add(*(np.array(each) for each in ([5, 5], [5, 4], [3, 0], [0.1, 0.1])))
        now[0] = 20.0
        line.observe(report(DECODE, 30, moe_lb=1.5), metrics)
        assert caplog.messages[1] == (
            "prefill 0 tok/s, decode 10 tok/s, 3 running, 2 waiting, 8 of 24 blocks free, "
            "prefix hits 25%, 2 preempted, itl 20.0 ms, 4.5 drafts verified, 1.5 accepted, moe_lb 1.500"
        )
        now[0] = 30.0
        line.observe(report(DECODE, 0), metrics)
        assert caplog.messages[2] == quiet.replace("10 tok/s", "0 tok/s"), "changes since the last line alone"
        silent = StatusLine(0, clock=lambda: 1e9)
        silent.observe(report(), metrics)
        assert len(caplog.messages) == 3
