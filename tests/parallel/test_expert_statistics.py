"""The window of expert counts and the balance statistic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.parallel.eplb import initial_slots, moe_lb, pool_window
from di_jax.parallel.expert_statistics import BALANCE_STEPS, BalanceStatistic, ExpertWindow, expert_tokens


def steps_until_due(window: ExpertWindow, counts: np.ndarray, first: int) -> int:
    """Records counts[first], counts[first + 1], ... until a rearrangement is due: how many."""
    experts = initial_slots(counts.shape[1], counts.shape[2], counts.shape[2])
    for n in range(1, len(counts) + 1):
        window.record(counts[first + n - 1], experts)
        if window.due:
            return n
    raise AssertionError("never due")


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_first_after_a_quarter_then_every_interval_on_the_last_steps(first: int, second: int, seed: int) -> None:
    size, interval = sorted((first, second))
    counts = np.random.default_rng(seed).integers(0, 1000, (interval + max(1, interval // 4), 2, 3))
    window = ExpertWindow(size, interval, 2, 3)
    begun = steps_until_due(window, counts, 0)
    assert begun == max(1, interval // 4)
    early = window.take()
    assert early.dtype == np.int64 and 1 <= len(early) <= 16
    np.testing.assert_array_equal(early.sum(axis=0), counts[max(0, begun - size) : begun].sum(axis=0))
    assert not window.due
    assert steps_until_due(window, counts, begun) == interval
    np.testing.assert_array_equal(window.take(), pool_window(counts[begun + interval - size :]))


def test_presets_at_their_size() -> None:
    one = np.ones((1, 1), np.int64)
    for size, interval in ((100, 1_000), (1_000, 10_000)):
        window = ExpertWindow(size, interval, 1, 1)
        assert steps_until_due(window, np.broadcast_to(one, (interval, 1, 1)), 0) == interval // 4
        taken = window.take()
        assert len(taken) == 16 and taken.sum() == size and np.ptp(taken) <= 1


def test_steps_after_the_window_wait_for_the_next() -> None:
    experts = initial_slots(1, 2, 2)
    window = ExpertWindow(2, 4, 1, 2)
    window.record(np.array([[1, 0]]), experts)
    assert window.due
    window.record(np.array([[100, 100]]), experts)
    np.testing.assert_array_equal(window.take(), [[[1, 0]]])
    for tokens in (5, 6, 7, 8):
        assert not window.due
        window.record(np.array([[tokens, 0]]), experts)
    np.testing.assert_array_equal(window.take(), [[[7, 0]], [[8, 0]]])


def test_slots_may_change_experts_within_a_window() -> None:
    window = ExpertWindow(1, 1, 1, 2)
    window.record(np.array([[3, 4, 5]]), np.array([[0, 1, 0]], np.int32))
    np.testing.assert_array_equal(window.take(), [[[8, 4]]])
    window.record(np.array([[3, 4, 5]]), np.array([[1, 1, 0]], np.int32))
    np.testing.assert_array_equal(window.take(), [[[5, 7]]])


def test_processes_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(0)
    slot_experts = rng.permuted(np.tile(np.arange(6, dtype=np.int32) % 4, (3, 1)), axis=1)
    whole, left, right = (ExpertWindow(4, 4, 3, 4) for _ in range(3))
    balance, balance_left, balance_right = (BalanceStatistic(3, ranks, num_steps=5) for ranks in (3, 2, 1))
    taken = []
    for _ in range(5):
        tokens = rng.integers(0, 50, (3, 6))
        for window, statistic, mine in (
            (whole, balance, slice(None)),
            (left, balance_left, slice(4)),
            (right, balance_right, slice(4, None)),
        ):
            window.record(tokens[:, mine], slot_experts[:, mine])
            statistic.record(tokens[:, mine])
        if whole.due:
            assert left.due and right.due
            parts = left.take() + right.take()
            np.testing.assert_array_equal(whole.take(), parts)
            taken.append(parts)
    assert len(taken) == 2
    together = np.concatenate([balance_left.take(), balance_right.take()], axis=2)
    assert moe_lb(balance.take()) == moe_lb(together)


def test_interval_zero_records_nothing() -> None:
    window = ExpertWindow(0, 0, 1, 2)
    for _ in range(3):
        window.record(np.array([[1, 1]]), initial_slots(1, 2, 2))
    assert not window.due
    with pytest.raises(RuntimeError, match="due after 0 steps"):
        window.take()


def test_taking_early_is_an_error() -> None:
    window = ExpertWindow(2, 8, 1, 2)
    with pytest.raises(RuntimeError, match="due after 8 steps, of which 6 have passed"):
        window.take()


@pytest.mark.parametrize(("window", "interval"), [(0, 10), (11, 10), (-1, 10)])
def test_a_window_that_does_not_fit_is_refused(window: int, interval: int) -> None:
    with pytest.raises(ValueError, match=f"a window of {window} steps does not fit an interval of {interval}"):
        ExpertWindow(window, interval, 1, 2)


def test_balance_covers_the_last_128_steps() -> None:
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 100, (BALANCE_STEPS + 40, 2, 6))
    statistic = BalanceStatistic(2, 3)
    for step, each in enumerate(tokens):
        assert statistic.full == (step >= 128)
        statistic.record(each)
    loads = statistic.take()
    assert loads.shape == (128, 2, 3)
    per_rank = tokens[40:].reshape(128, 2, 3, 2).sum(axis=3)
    assert moe_lb(loads) == pytest.approx(per_rank.max(axis=2).sum() / per_rank.mean(axis=2).sum())
    assert not statistic.full and len(statistic.take()) == 0


def test_large_counts_stay_exact() -> None:
    tokens = expert_tokens(np.array([[2**40, 1, 2**40]]), np.array([[1, 0, 1]], np.int32), 3)
    assert tokens.tolist() == [[1, 2**41, 0]]
