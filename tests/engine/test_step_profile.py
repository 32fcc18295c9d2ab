"""What decode steps take: which programs are timed, over which rows, and what is made of the times."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from golden_model import TINY
from hypothesis import given
from hypothesis import strategies as st

from di_jax.config import Config
from di_jax.engine.runtime_estimator import ForwardRuntimeEstimator, SamplerRuntimeEstimator
from di_jax.engine.setup import build_engine_parts
from di_jax.engine.speculative_programs import DRAFT_COLUMNS
from di_jax.engine.step_plan import BucketLadder, StepPlan
from di_jax.engine.step_profile import RUNS, WARM_UP, StepProfile, chain_steps, measure, profile_of
from di_jax.model.cache import CacheLayout
from di_jax.model.quantization import CacheFormats
from di_jax.parallel import processes
from di_jax.parallel.agreement import Agreement

DRAFTS = 5


def ladder_of(decode: tuple[int, ...], *, varlen: bool = True, max_num_seqs: int | None = None) -> BucketLadder:
    return BucketLadder.derive(
        max_num_batched_tokens=512,
        max_num_seqs=max_num_seqs or decode[-1],
        max_context_blocks=8,
        context=[2, 8],
        decode=decode,
        drafts=DRAFTS,
        varlen=varlen,
    )


class StubRunner:
    """A device whose programs take given times: verify by rows, accept by rows and requests, draft by requests.

    A run is one of each, in order. shapes: that take turns; the first turn and two of the others are outliers.
    """

    OUTLIERS = (0.001, 1.0, 1.0, 50.0, 1.0, 1.0, 30.0)  # factors of the turns: two of warm-up, then five

    def __init__(self, slots: int, ranks: int = 1, blocks: int = 8, shapes: int = 8) -> None:
        self.layout = CacheLayout(TINY, CacheFormats.quantized(), blocks, slots)
        self.local_ranks = list(range(ranks))
        self.now, self.state = 0.0, np.zeros(3)
        self.calls: list[str] = []
        self.plans: list[StepPlan] = []
        self.drafted: list[np.ndarray] = []
        self.alone: list[StepPlan] = []
        self._shapes, self._resets = shapes, 0

    def clock(self) -> float:
        return self.now

    def reset(self) -> None:
        self.calls.append("reset")
        self._resets += 1

    def draft(self, rows: list[np.ndarray]) -> Any:
        assert len(rows) == len(self.local_ranks)
        self.calls.append("draft")
        self.drafted = rows
        self._pass(0.5 * rows[0].shape[1])

    def verify(self, plans: list[StepPlan]) -> Any:
        assert len(plans) == len(self.local_ranks)
        self.calls.append("verify")
        self.plans.append(plans[0])
        self._pass(10.0 + plans[0].bucket.rows)
        return plans[0].bucket

    def accept(self, verification: Any) -> Any:
        self.calls.append("accept")
        self._pass(2.0 * verification.requests + 0.25 * verification.rows)

    def execute(self, plans: list[StepPlan]) -> Any:
        self.calls.append("execute")
        self.alone.append(plans[0])
        self._pass(8.0 + plans[0].bucket.rows + (0.0 if plans[0].bucket.bare else 0.5))

    def _pass(self, seconds: float) -> None:
        self.now += seconds * self.OUTLIERS[min(6, (self._resets - 1) // self._shapes)]


def measured(runner: StubRunner, ladder: BucketLadder) -> StepProfile:
    return measure(runner, ladder, clock=runner.clock)  # type: ignore[arg-type]


def test_the_curves_add_up_to_what_steps_take() -> None:
    """Outliers do not count, nor does the first run, which may compile; accepting more rows counts as forward."""
    ladder, runner = ladder_of((1, 16)), StubRunner(slots=16)
    profile = measured(runner, ladder)
    rows = {1: (1, 2, 4, 6), 16: (16, 32, 64, 96)}
    assert {requests: ladder.verify_rows(requests) for requests in ladder.decode_rows} == rows
    assert set(profile.forward) == {each for shapes in rows.values() for each in shapes}
    assert profile.sampling == pytest.approx({1: 2.25, 16: 36.0})
    assert profile.drafting == pytest.approx({1: 0.5, 16: 8.0})
    assert profile.plain == pytest.approx({1: 9.0, 16: 24.0})
    assert profile.context == pytest.approx({1: 9.5, 16: 24.5})
    for requests, shapes in rows.items():
        for each in shapes:
            whole = profile.forward[each] + profile.sampling[requests] + profile.drafting[requests]
            assert whole == pytest.approx(10 + each + 2 * requests + 0.25 * each + 0.5 * requests)


def test_every_run_drafts_verifies_and_accepts_on_its_own_state() -> None:
    ladder, runner = ladder_of((1, 4)), StubRunner(slots=4)
    measured(runner, ladder)
    each = ["reset", "draft", "verify", "accept"]
    # Of each number of requests the shape that verifies nothing is compared with the plain steps.
    turn = [*each, "execute", "execute", *each * 3] * 2
    assert runner.calls == turn * (WARM_UP + RUNS) + ["reset"]


def test_waiting_for_every_program_is_not_what_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait takes 5 ms, which a step pays three times when its programs are timed; a chain pays one."""
    runner, wait = StubRunner(slots=4, shapes=4), 0.005
    monkeypatch.setattr(StubRunner, "_pass", lambda self, seconds: setattr(self, "now", self.now + 1e-6 * seconds))
    monkeypatch.setattr(jax, "block_until_ready", lambda given: setattr(runner, "now", runner.now + wait))
    profile = measured(runner, ladder_of((4,)))
    for rows in (4, 8, 16, 24):
        whole = profile.forward[rows] + profile.sampling[4] + profile.drafting[4]
        true = 1e-6 * (10 + rows + 8 + 0.25 * rows + 2)
        assert whole == pytest.approx(true + wait / 3, rel=0.05), "three steps of three waits take 45 ms, four 60"
    assert profile.plain[4] == pytest.approx(1e-6 * 12 + wait / 3)
    assert profile.context[4] == pytest.approx(1e-6 * 12.5 + wait / 3)


def test_chains_are_short_and_within_the_context() -> None:
    assert [chain_steps(seconds, 99) for seconds in (0.0, 0.001, 0.01, 0.029, 0.06, 1.0)] == [8, 8, 6, 2, 1, 1]
    assert chain_steps(0.001, 5) == 4 and chain_steps(0.001, 1) == 1


def test_the_rows_are_real() -> None:
    """All slots that there are, each to verify drafts within a context that the shortest shape holds."""
    ladder, runner = ladder_of((1, 16), max_num_seqs=10), StubRunner(slots=10, ranks=3, blocks=7)
    measured(runner, ladder)
    assert {plan.bucket.context_blocks for plan in runner.plans} == {2}
    for plan in runner.plans:
        fields, n = plan.bucket.unpack(plan.buffer), min(10, plan.bucket.requests)
        assert fields["slot"][:n].tolist() == list(range(n))
        assert (fields["cap"][:n] == DRAFTS).all() and (fields["cap"][n:] == -1).all()
        assert fields["budget"][0] == min(plan.bucket.rows - n, n * DRAFTS)
        assert (fields["capacity"][:n] == 256).all() and (fields["forced"] == -1).all()
        assert (WARM_UP + RUNS) * (DRAFTS + 1) < 256 - 1, "no run finds a full answer"
        assert fields["block_table"].min() >= 0 and fields["block_table"].max() < 7
    column = dict(zip(DRAFT_COLUMNS, runner.drafted[2], strict=True))
    assert column["slot"].tolist() == [*range(10), *[-1] * 6]
    assert (column["top_p"].view(np.float32) == 1).all() and not column["top_k"].any() and not column["min_p"].any()
    assert (column["temperature"].view(np.float32)[:10] == 1).all()


def test_a_fixed_length_has_one_shape_of_each_number_of_requests() -> None:
    profile = measured(StubRunner(slots=16, shapes=2), ladder_of((1, 16), varlen=False))
    assert profile.forward == pytest.approx({6: 16.0, 96: 106.0})
    assert profile.sampling == pytest.approx({1: 3.5, 16: 56.0})


def test_what_the_estimators_take() -> None:
    """They know every shape, and shapes of equal rows have the longer of their times."""
    ladder = ladder_of((1, 4, 16, 64))
    profile = measured(StubRunner(slots=64, shapes=16), ladder)
    rows = sorted({each for requests in ladder.decode_rows for each in ladder.verify_rows(requests)})
    times = ForwardRuntimeEstimator(rows, profile.forward).times()
    assert times.seconds is not None and (np.diff(times.seconds) >= 0).all()
    assert SamplerRuntimeEstimator(profile.sampling).seconds(16) == profile.sampling[16]
    shared = [ladder.bucket(True, 16, 2, requests=requests) for requests in (4, 16)]
    assert [bucket.rows for bucket in shared] == [16, 16]
    times_of = np.array([[5.0, 1.0, 1.0, 0.0, 0.0], [3.0, 1.0, 2.0, 0.0, 0.0]])
    assert profile_of(shared, times_of).forward == {16: 5.0} == profile_of(shared, times_of[::-1]).forward


@given(st.data())
def test_times_of_steps_are_kept(data: st.DataObject) -> None:
    """Of one number of requests, whatever the times are: forward + sampling is verify + accept, or a little more where
    accepting more rows seemed faster."""
    ladder = ladder_of((8,))
    shapes = [ladder.bucket(True, rows, 2, requests=8) for rows in ladder.verify_rows(8)]
    seconds = np.array([[data.draw(st.floats(0.001, 10)) for _ in range(5)] for _ in shapes])
    profile = profile_of(shapes, seconds)
    for bucket, (verify, accept, *_) in zip(shapes, seconds, strict=True):
        whole = profile.forward[bucket.rows] + profile.sampling[8]
        assert whole == pytest.approx(verify + max(accept, seconds[0, 1]))
        assert profile.forward[bucket.rows] > 0
    assert profile.drafting[8] == pytest.approx(seconds[:, 2].mean())
    assert profile.plain[8] == seconds[0, 3] and profile.context[8] == seconds[0, 4]


def test_all_processes_have_the_times_of_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pair(Agreement):
        """With another process, twice as slow in the first shape and infinitely fast in the others."""

        def gather(self, values: np.ndarray, what: str) -> np.ndarray:
            other = np.zeros_like(values)
            other[:3] = 2 * values[:3]
            return np.stack([values, other])

    alone = measured(StubRunner(slots=16), ladder_of((1, 16)))
    monkeypatch.setattr(processes, "_current", Pair())
    together = measured(StubRunner(slots=16), ladder_of((1, 16)))
    assert together.sampling[1] == pytest.approx(2 * alone.sampling[1])
    assert together.forward[1] == pytest.approx(2 * alone.forward[1])
    assert together.forward[96] == alone.forward[96] and together.sampling[16] == alone.sampling[16]


def test_the_state_is_emptied_when_a_run_fails() -> None:
    runner = StubRunner(slots=4)

    def fail(plans: Any) -> Any:
        raise RuntimeError("out of memory")

    runner.verify = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        measured(runner, ladder_of((4,)))
    assert runner.calls[-1] == "reset"


def test_it_is_quiet_when_piped(capfd: pytest.CaptureFixture[str]) -> None:
    measured(StubRunner(slots=4), ladder_of((4,)))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"speculative.varlen": False}, marks=pytest.mark.slow),
        pytest.param({"mesh.dp": 2, "mesh.ep": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_real_runner(tiny_config: Config, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run of every rank verifies what the shape has rows for, and nothing stays behind."""
    values = {"speculative.enabled": True, "speculative.num_draft_tokens": 1, "engine.decode_buckets": [8]}
    parts = build_engine_parts(tiny_config.with_values({**values, "engine.num_blocks": 3, **changes}))
    runner, seen = parts.runner, []
    accept = runner.accept

    def watched(verification: Any) -> Any:
        output = accept(verification)
        seen.append((verification.hidden.shape[1], np.stack([rank.verified for rank in output.host()])))
        return output

    monkeypatch.setattr(runner, "accept", watched)
    profile = measure(runner, parts.ladder)
    shapes = parts.ladder.verify_rows(8)
    assert set(profile.forward) == set(shapes) and set(profile.sampling) == set(profile.drafting) == {8}
    assert min([*profile.forward.values(), *profile.sampling.values(), *profile.drafting.values()]) > 0
    ranks = changes.get("mesh.dp", 1)
    assert all((verified == np.full((ranks, 8), rows // 8 - 1)).all() for rows, verified in seen)
    assert all(sum(rows == each for rows, _ in seen) >= WARM_UP + RUNS for each in shapes)
    assert not any(np.asarray(leaf).view(np.uint8).any() for leaf in jax.tree.leaves(runner.state))
