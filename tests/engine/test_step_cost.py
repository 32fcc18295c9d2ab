"""The cost model of prefill steps. Times are made up: no clock."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import nnls

from di_jax.engine.step_cost import MAX_CELLS, StepCost

LIMIT = 32768
ROWS = (128, 256, 512, 1024, 2048)
CONTEXTS = (0, 1000, 8000, 60_000)

Coefficients = tuple[float, float, float, float]
scales = st.sampled_from([0.0, 0.3, 1.0, 3.0])
# Seconds: about 5 ms a launch, 10 us a row, and 1 ns a row and entry.
quadratics = st.tuples(scales, scales, scales, scales).map(
    lambda f: (5e-3 * f[0], 1e-5 * f[1], 1e-9 * f[2], 1e-9 * f[3])
)


def seconds_of(known: Coefficients, q: int, c: float) -> float:
    a, b, d, e = known
    return a + b * q + d * q * c + e * q * q


def fitted(known: Coefficients, rows: tuple[int, ...] = ROWS, contexts: tuple[int, ...] = CONTEXTS) -> StepCost:
    cost = StepCost()
    for q, c in itertools.product(rows, contexts):
        for _ in range(2):
            cost.observe(q, c, seconds_of(known, q, c))
    return cost


@given(quadratics)
def test_it_recovers_a_quadratic(known: Coefficients) -> None:
    assume(seconds_of(known, 128, 0) > 0)
    cost = fitted(known)
    for q, c in itertools.product((64, 300, 2048, 8192), (0, 5000, 200_000)):
        assert cost.predict(q, c) == pytest.approx(seconds_of(known, q, c), rel=1e-3)


@given(quadratics, st.integers(0, 2**32))
def test_noise_and_outliers_move_it_little(known: Coefficients, seed: int) -> None:
    """5% of noise; one of five observations of every cell is a compilation."""
    assume(seconds_of(known, 128, 0) > 0)
    rng, cost = random.Random(seed), StepCost()
    for n in range(5):
        for q, c in itertools.product(ROWS, CONTEXTS):
            compiles = rng.random() < 0.02 or n == 2
            cost.observe(q, c, seconds_of(known, q, c) * rng.uniform(0.95, 1.05) + 3.0 * compiles)
    for q, c in itertools.product(ROWS, CONTEXTS):
        assert cost.predict(q, c) == pytest.approx(seconds_of(known, q, c), rel=0.35)


def test_one_outlier_counts_for_nothing_from_the_first() -> None:
    cost = StepCost()
    cost.observe(1024, 0, 30.0)
    assert cost.predict(1024, 0) is None and cost.largest(0.01, 0, 2048) == 2048
    cost.observe(1024, 0, 0.02)
    assert cost.predict(1024, 0) == pytest.approx(0.02)
    cost.observe(1024, 0, 45.0)
    cost.observe(1024, 0, 0.02)
    assert cost.predict(1024, 0) == pytest.approx(0.02)


@given(
    st.lists(st.tuples(st.integers(1, LIMIT), st.integers(0, 10**6), st.floats(1e-4, 10.0)), min_size=1, max_size=40),
    st.tuples(st.integers(1, LIMIT), st.integers(0, 10**6)),
    st.tuples(st.integers(0, 1000), st.integers(0, 10**5)),
)
def test_more_rows_and_more_context_never_cost_less(
    observed: list[tuple[int, int, float]], at: tuple[int, int], more: tuple[int, int]
) -> None:
    """Whatever was observed, contradictions included."""
    cost = StepCost()
    for q, c, seconds in observed * 2:
        cost.observe(q, c, seconds)
    assert cost.coefficients is not None and all(0 <= x < float("inf") for x in cost.coefficients)
    little, much = cost.predict(*at), cost.predict(at[0] + more[0], at[1] + more[1])
    assert little is not None and much is not None and 0 <= little <= much


@given(st.lists(st.tuples(st.sampled_from(ROWS), st.sampled_from(CONTEXTS), st.floats(1e-3, 1.0)), min_size=1))
def test_the_fit_is_the_best_of_those_without_negative_terms(observed: list[tuple[int, int, float]]) -> None:
    """In relative errors, against a solver that finds it another way."""
    last = {(q, c): seconds for q, c, seconds in observed}
    cost = StepCost()
    for (q, c), seconds in last.items():
        for _ in range(2):
            cost.observe(q, c, seconds)
    terms = np.array([[1, q, q * c, q * q] for q, c in last], float) / np.array(list(last.values()))[:, None]
    scale = np.linalg.norm(terms, axis=0)
    scale[scale == 0] = 1
    _, best = nnls(terms / scale, np.ones(len(last)))
    found = np.linalg.norm(terms @ np.array(cost.coefficients) - 1)
    assert found == pytest.approx(best, rel=1e-4, abs=1e-4)


@given(quadratics, st.floats(0, 2.0), st.integers(0, 10**6), st.integers(1, LIMIT), st.integers(1, 256))
def test_the_largest_step_is_the_inverse(known: Coefficients, quota: float, c: int, limit: int, at_least: int) -> None:
    assume(seconds_of(known, 128, 0) > 0)
    cost = fitted(known)
    rows = cost.largest(quota, c, limit, at_least)
    assert min(at_least, limit) <= rows <= limit

    def seconds(q: int) -> float:
        predicted = cost.predict(q, c)
        assert predicted is not None
        return predicted

    assert rows == min(at_least, limit) or seconds(rows) <= quota * (1 + 1e-9)
    assert rows == limit or seconds(rows + 1) > quota * (1 - 1e-9)


def test_the_same_step_again_and_again_converges() -> None:
    """Known at that size exactly; other sizes are guesses that grow with the rows, until they are seen."""
    cost = StepCost()
    for _ in range(20):
        cost.observe(2048, 4096, 0.05)
    assert cost.predict(2048, 4096) == pytest.approx(0.05, rel=1e-6)
    assert cost.largest(0.05 * 1.0001, 4096, LIMIT) == pytest.approx(2048, abs=1)
    half = cost.largest(0.025, 4096, LIMIT)
    assert 256 < half < 2048
    for _ in range(2):
        cost.observe(half, 4096, 0.05 * half / 2048)
    assert cost.largest(0.025, 4096, LIMIT) == pytest.approx(1024, rel=0.05)


def test_the_loop_of_quota_and_observation_settles() -> None:
    """Steps of the size that it gives, growing contexts of a long prompt: from the tenth on each fits the quota within
    a tenth, and uses it."""
    known, quota, cost = (2e-3, 1e-5, 2e-10, 5e-10), 0.02, StepCost()
    rng, c, times = random.Random(3), 0, []
    while c < 200_000:
        q = cost.largest(quota, c, 2048, 128)
        seconds = seconds_of(known, q, c) * rng.uniform(0.97, 1.03)
        cost.observe(q, c, seconds)
        times.append(seconds)
        c += q
    assert max(times[10:]) < 1.1 * quota
    assert sum(times[10:]) / len(times[10:]) > 0.85 * quota


def test_it_follows_a_change() -> None:
    cost = StepCost()
    for scale in (1.0, 3.0):
        for _ in range(8):
            for q in ROWS:
                cost.observe(q, 0, scale * (1e-3 + 1e-5 * q))
        assert cost.predict(1024, 0) == pytest.approx(scale * (1e-3 + 1e-5 * 1024), rel=0.01)


def test_it_stays_small_and_refits_only_on_change(monkeypatch: pytest.MonkeyPatch) -> None:
    import di_jax.engine.step_cost as module

    fits = []
    fit = module._fit
    monkeypatch.setattr(module, "_fit", lambda points: fits.append(len(points)) or fit(points))
    cost = StepCost()
    for c in range(0, 40):
        for q in (1, 8, 64, 512, 4096):
            for _ in range(2):
                cost.observe(q, 256 * 2 ** (c / 2), 0.01)
    assert cost.predict(1, 0) is not None
    assert max(fits) <= MAX_CELLS and len(fits) == 1
    for _ in range(5):
        cost.observe(4096, 256 * 2 ** (39 / 2), 0.0101)
        cost.predict(1, 0)
    assert len(fits) == 1


def test_nonsense_is_not_observed() -> None:
    cost = StepCost()
    for q, c, seconds in ((0, 0, 1.0), (10, -1, 1.0), (10, 0, 0.0), (10, 0, float("nan")), (10, 0, float("inf"))):
        for _ in range(3):
            cost.observe(q, c, seconds)
    assert cost.coefficients is None and cost.largest(0.0, 0, 77, 3) == 77
