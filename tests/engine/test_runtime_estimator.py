"""Step times from a profile and from observations (dspark 7: T16)."""

from __future__ import annotations

import math
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine import runtime_estimator
from di_jax.engine.runtime_estimator import LEAST_PER_BUCKET, ForwardRuntimeEstimator, SamplerRuntimeEstimator

LADDER = [1, 2, 4, 8, 16]
PROFILE = {1: 0.010, 2: 0.010, 4: 0.011, 8: 0.012, 16: 0.014}


def test_without_observations_the_profile_counts() -> None:
    times = ForwardRuntimeEstimator(LADDER, PROFILE).times(0.002)
    np.testing.assert_allclose(times.seconds, np.array(list(PROFILE.values())) + 0.002)
    assert times.rows.tolist() == LADDER


def test_a_step_costs_what_its_bucket_costs() -> None:
    times = ForwardRuntimeEstimator(LADDER, PROFILE).times()
    assert [times.at(rows) for rows in (1, 3, 4, 5, 8, 9, 16)] == [0.010, 0.011, 0.011, 0.012, 0.012, 0.014, 0.014]
    with pytest.raises(ValueError, match="no decode bucket holds 17 rows; the largest has 16"):
        times.at(17)


def test_constant_observations_are_converged_to() -> None:
    forward = ForwardRuntimeEstimator(LADDER, PROFILE)
    for _ in range(LEAST_PER_BUCKET - 1):
        forward.observe(8, PROFILE[8] + 8 * 50e-6)
    assert forward.slope == 0
    forward.observe(8, PROFILE[8] + 8 * 50e-6)
    assert forward.slope == pytest.approx(50e-6)
    assert forward.times().at(8) == pytest.approx(PROFILE[8] + 8 * 50e-6)
    assert forward.times().at(16) == pytest.approx(PROFILE[16] + 16 * 50e-6)  # and so for buckets not seen


def test_every_bucket_has_one_vote() -> None:
    forward = ForwardRuntimeEstimator(LADDER, PROFILE)
    for rows, slope, count in ((4, 10e-6, 400), (8, 20e-6, LEAST_PER_BUCKET), (16, 30e-6, LEAST_PER_BUCKET), (1, 1, 9)):
        for _ in range(count):
            forward.observe(rows, PROFILE[rows] + rows * slope)
    assert forward.slope == pytest.approx(20e-6)


def test_faster_than_the_profile_is_not_believed_of_others() -> None:
    forward = ForwardRuntimeEstimator(LADDER, PROFILE)
    for _ in range(50):
        forward.observe(8, 0.95 * PROFILE[8])
    assert forward.slope == 0
    assert forward.times().at(8) == pytest.approx(0.95 * PROFILE[8]) and forward.times().at(16) == PROFILE[16]


def test_steps_that_wait_for_their_host_take_the_same_time_with_fewer_rows() -> None:
    """By the profile and the slope fewer rows take less, until steps of fewer rows were seen."""
    forward, host = ForwardRuntimeEstimator(LADDER, PROFILE), 1.5 * PROFILE[16]
    for _ in range(LEAST_PER_BUCKET):
        forward.observe(16, host)
    before = forward.times()
    assert before.at(16) == pytest.approx(host) and before.at(8) < 0.9 * host
    for _ in range(LEAST_PER_BUCKET):
        forward.observe(8, host)
    assert forward.times().at(8) == forward.times().at(16) == pytest.approx(host)


def test_outliers_and_times_that_are_none_change_nothing() -> None:
    forward = ForwardRuntimeEstimator(LADDER, PROFILE)
    for i in range(40):
        forward.observe(8, 5.0 if i % 3 == 0 else PROFILE[8] + 8 * 50e-6)
    slope = forward.slope
    assert slope == pytest.approx(50e-6)
    for bad in (math.nan, math.inf, -1.0) * 20:
        forward.observe(8, bad)
    assert forward.slope == slope


def test_the_curve_never_falls() -> None:
    noisy = {1: 0.010, 2: 0.012, 4: 0.011, 8: 0.009, 16: 0.020}
    times = ForwardRuntimeEstimator(LADDER, noisy).times()
    assert times.seconds is not None and times.seconds.tolist() == [0.010, 0.012, 0.012, 0.012, 0.020]


@given(
    st.lists(st.floats(1e-4, 1.0), min_size=5, max_size=5),
    st.lists(st.tuples(st.sampled_from(LADDER), st.floats(1e-5, 10.0)), max_size=120),
)
def test_estimates_rise_with_rows(profile: list[float], steps: list[tuple[int, float]]) -> None:
    forward = ForwardRuntimeEstimator(LADDER, dict(zip(LADDER, profile)))
    for rows, seconds in steps:
        forward.observe(rows, seconds)
    times = forward.times(0.001)
    assert times.seconds is not None and (np.diff(times.seconds) >= 0).all() and (times.seconds > 0).all()


@given(st.lists(st.tuples(st.sampled_from(LADDER), st.floats(1e-3, 0.1)), max_size=90))
def test_only_the_window_counts(steps: list[tuple[int, float]]) -> None:
    window = 30
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime_estimator, "FORWARD_WINDOW", window)
        forward = ForwardRuntimeEstimator(LADDER, PROFILE)
        for rows, seconds in steps:
            forward.observe(rows, seconds)
    kept = steps[-window:]
    medians = []
    for rows in LADDER:
        mine = [(seconds - PROFILE[rows]) / rows for at, seconds in kept if at == rows]
        medians += [median(mine)] if len(mine) >= LEAST_PER_BUCKET else []
    assert forward.slope == pytest.approx(max(0, median(medians)) if medians else 0, abs=1e-12)


def test_without_a_profile_nothing_is_known() -> None:
    forward = ForwardRuntimeEstimator(LADDER)
    for _ in range(50):
        forward.observe(8, 0.01)
    times = forward.times(0.002)
    assert times.seconds is None and times.at(8) is None and times.rows.tolist() == LADDER


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(ValueError, match="no positive time for the buckets of \\[4, 16\\] rows"):
        ForwardRuntimeEstimator(LADDER, {**PROFILE, 4: 0.0, 16: math.nan})
    with pytest.raises(ValueError, match="positive and rising"):
        ForwardRuntimeEstimator([4, 2])
    with pytest.raises(ValueError, match="3 rows are no decode bucket"):
        ForwardRuntimeEstimator(LADDER, PROFILE).observe(3, 0.01)


def test_sampling_takes_what_the_next_larger_profile_says() -> None:
    """A count that was not profiled falls back to the one that its steps are padded to, none at all to nothing."""
    sampler = SamplerRuntimeEstimator({8: 0.003, 1: 0.001})
    assert [sampler.seconds(n) for n in (1, 2, 8, 9)] == [0.001, 0.003, 0.003, 0.003]
    assert SamplerRuntimeEstimator().seconds(3) == SamplerRuntimeEstimator({}).seconds(1) == 0
