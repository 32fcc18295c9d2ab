"""di_jax/engine/confidence.py: survival, calibration error, sequential temperature scaling."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from di_jax.engine.confidence import (
    BINS,
    GRID,
    calibration_error,
    fit_temperatures,
    reliability,
    roc_auc,
    survival,
)

TRUE = GRID[[30, 24, 20, 14, 26]]  # what the logits below are to be divided by


def blocks(seed: int, count: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are TRUE times too large, and what is accepted at the right chances: an independent oracle."""
    rng = np.random.default_rng(seed)
    right = rng.normal(1.0, 1.5, (count, len(TRUE)))
    alone = rng.random(right.shape) < 1 / (1 + np.exp(-right))
    accepted = np.zeros(right.shape)
    for row, steps in enumerate(alone):
        first = int(np.argmin(steps)) if not steps.all() else len(steps)
        accepted[row, :first] = 1
    return right * TRUE, accepted


def errors(logits: np.ndarray, accepted: np.ndarray, temperatures: np.ndarray | None) -> list[float]:
    chance = survival(logits, temperatures)
    return [calibration_error(chance[:, i], accepted[:, i]) for i in range(logits.shape[1])]


def test_temperatures_of_known_calibration_are_found() -> None:
    found = fit_temperatures(*blocks(0))
    # A step of the grid is a factor of 1.12; later positions have fewer survivors to tell it from.
    assert (np.abs(np.log(found / TRUE)) < 0.36).all()
    held_out = blocks(1)
    before, after = errors(*held_out, None), errors(*held_out, found)
    assert max(before) > 0.06 and max(after) < 0.015


def test_temperatures_keep_the_order_of_a_position() -> None:
    logits, accepted = blocks(2, 300)
    found = fit_temperatures(logits, accepted)
    order = np.argsort(logits[:, 0], kind="stable")
    assert (np.diff(survival(logits, found)[order, 0]) >= 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_calibrated_draft_keeps_its_logits(seed: int) -> None:
    """T24's other half: where there is nothing to mend, noise is not fitted."""
    logits, accepted = blocks(seed, 4000)
    assert fit_temperatures(logits / TRUE, accepted).tolist() == [1.0] * len(TRUE)


@pytest.mark.parametrize("scale", [0.4, 2.5])
def test_held_out_errors_fall_at_every_position_and_the_ranking_stays(scale: float) -> None:
    """T24, on blocks that no temperature was fitted on."""
    logits, accepted = blocks(0)
    found = fit_temperatures(logits / TRUE * scale, accepted)
    assert (found != 1).all()
    held_out, kept = blocks(1)
    held_out = held_out / TRUE * scale
    before, after = errors(held_out, kept, None), errors(held_out, kept, found)
    assert all(now < then - 0.005 for now, then in zip(after, before, strict=True)) and max(after) < 0.02
    for k in range(len(TRUE)):
        # Of a position's own confidence where all before are accepted: a temperature keeps every pair's order.
        reached = np.ones(len(kept), bool) if k == 0 else kept[:, k - 1] > 0
        column, taken = held_out[reached, k : k + 1], kept[reached, k]
        own = [roc_auc(survival(column, t)[:, 0], taken) for t in (None, found[k : k + 1])]
        assert own[0] == own[1] > 0.7
        # Of the survival, a product: calibrated factors may turn pairs around, a few, and mostly the right way.
        whole = [roc_auc(survival(held_out, t)[:, k], kept[:, k]) for t in (None, found)]
        assert -0.001 < whole[1] - whole[0] < 0.01


def test_noise_is_seldom_fitted_and_by_the_least_error_alone_it_would_be() -> None:
    found = {"least": 0, "fitted": 0}
    for seed in range(20):
        logits, accepted = blocks(seed, 200)
        logits, accepted = logits[:, :1] / TRUE[0], accepted[:, :1]
        each = [calibration_error(survival(logits, np.array([t]))[:, 0], accepted[:, 0]) for t in GRID]
        found["least"] += GRID[int(np.argmin(each))] != 1
        found["fitted"] += fit_temperatures(logits, accepted)[0] != 1
    assert found["least"] > 14 and found["fitted"] < 3, found


def test_blocks_of_one_text_are_judged_together() -> None:
    """Twelve texts, each repeated: block by block each is on both sides of every fold, and its noise looks real."""
    logits, accepted = blocks(7, 12)
    text = np.tile(np.arange(12), 100)
    logits, accepted = np.tile(logits / TRUE, (100, 1)), np.tile(accepted, (100, 1))
    assert (fit_temperatures(logits, accepted) != 1).any()
    assert fit_temperatures(logits, accepted, text).tolist() == [1.0] * len(TRUE)
    one = np.zeros(len(text), np.int64)
    assert fit_temperatures(logits, accepted, one).tolist() == [1.0] * len(TRUE)  # nothing to judge by


@given(st.integers(0, 2**32), st.integers(2, 40))
@settings(max_examples=50)
def test_the_area_is_that_of_its_definition(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    chance, accepted = rng.integers(0, 5, count) / 4, rng.random(count)
    weight = accepted[:, None] * (1 - accepted)  # of the pair (i, j): i accepted, j not
    above = (chance[:, None] > chance) + (chance[:, None] == chance) / 2
    assert roc_auc(chance, accepted) == pytest.approx((weight * above).sum() / weight.sum())
    assert np.isnan(roc_auc(chance, np.ones(count)))


def test_equals_go_to_the_temperature_nearest_to_one() -> None:
    """Logits of zero are a half whatever divides them."""
    assert fit_temperatures(np.zeros((10, 3)), np.zeros((10, 3))).tolist() == [1.0, 1.0, 1.0]


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 6))
@settings(max_examples=50)
def test_survival_falls_and_is_a_chance(seed: int, count: int, drafts: int) -> None:
    rng = np.random.default_rng(seed)
    chance = survival(rng.normal(0, 100, (count, drafts)), rng.uniform(0.1, 10, drafts))
    assert chance.shape == (count, drafts) and (chance >= 0).all() and (chance <= 1).all()
    assert (np.diff(chance, axis=1) <= 0).all()


@given(st.integers(0, 2**32), st.integers(1, 200))
@settings(max_examples=50)
def test_the_error_is_that_of_its_definition(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    chance, accepted = rng.random(count), (rng.random(count) < 0.5).astype(float)
    expected = 0.0
    for low in np.arange(BINS) / BINS:
        inside = (chance >= low) & (chance < low + 1 / BINS)
        if inside.any():
            expected += abs(chance[inside].mean() - accepted[inside].mean()) * inside.sum() / count
    assert calibration_error(chance, accepted) == pytest.approx(expected, abs=1e-6)
    table = reliability(chance, accepted)
    assert table.shape == (BINS, 3) and table[:, 0].sum() == count
    assert np.isnan(table[table[:, 0] == 0, 1:]).all()


def test_certainty_is_in_the_last_bin_and_may_be_wrong() -> None:
    assert calibration_error(np.ones(4), np.array([1, 1, 0, 0])) == pytest.approx(0.5)
    assert calibration_error(np.array([1.0, 0.0]), np.array([1, 0])) == 0.0


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[blocks, drafts\], found \(3,\)"):
        survival(np.zeros(3))
    with pytest.raises(ValueError, match="2 positive temperatures are needed"):
        survival(np.zeros((3, 2)), np.array([1.0, 0.0]))
    with pytest.raises(ValueError, match="must be alike"):
        fit_temperatures(np.zeros((3, 2)), np.zeros((3, 3)))
    with pytest.raises(ValueError, match="must be alike"):
        fit_temperatures(np.zeros((0, 2)), np.zeros((0, 2)))
    with pytest.raises(ValueError, match=r"texts must be \[3\]"):
        fit_temperatures(np.zeros((3, 2)), np.zeros((3, 2)), np.zeros(2))
