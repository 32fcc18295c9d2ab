"""Programs launched by a thread of their own: the order, failures, and what waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from di_jax.engine import launch_thread
from di_jax.engine.launch_thread import LaunchThread, done, failed


def test_jobs_run_in_order_and_their_results_are_theirs() -> None:
    lane, seen, gate = LaunchThread(), [], threading.Event()

    def job(number: int) -> int:
        gate.wait(30)
        seen.append(number)
        return number * number

    futures = [lane.submit(lambda n=n: job(n)) for n in range(20)]  # type: ignore[misc]
    assert not lane.idle and not seen, "the caller goes on"
    gate.set()
    assert [done(future) for future in futures] == [n * n for n in range(20)] and seen == list(range(20))
    assert lane.idle and done(7) == 7 and not failed(futures[0])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_behind_a_failure_nothing_runs_until_it_is_settled(error: type[BaseException]) -> None:
    lane, seen, gate = LaunchThread(), [], threading.Event()

    def fails() -> None:
        gate.wait(30)
        raise error("lost")

    futures = [lane.submit(fails), lane.submit(lambda: seen.append(1))]
    gate.set()
    for future in futures:
        with pytest.raises(error, match="lost"):
            done(future)
        assert failed(future)
    assert not seen
    lane.settle()
    done(lane.submit(lambda: seen.append(2)))
    assert seen == [2]


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("queued", [True, False])
def test_a_job_whose_submission_was_interrupted_is_waited_for(
    queued: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """queued: whether the interrupt came behind that, so that the job runs though nobody has its future. It ends only
    once `settle` waits."""
    lane, seen, gate = LaunchThread(), list[int](), threading.Event()

    def job() -> None:
        assert gate.wait(30)
        seen.append(1)
        if fails:
            raise RuntimeError("lost")

    def interrupted(run: Callable[[], None]) -> None:
        if queued:
            submit(run)
        raise KeyboardInterrupt

    def opening(futures: list[Future[Any]]) -> None:
        gate.set()
        wait(futures)

    submit, wait = lane._pool.submit, launch_thread.wait
    with monkeypatch.context() as patch:
        patch.setattr(lane._pool, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lane.submit(job)
    assert not lane.idle and not seen
    monkeypatch.setattr(launch_thread, "wait", opening)
    lane.settle()
    assert lane.idle and seen == [1] * queued
    assert done(lane.submit(lambda: 2)) == 2, "what failed is settled"


def test_a_thread_without_jobs_is_settled_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for the state settles, at every step."""
    lane = LaunchThread()
    monkeypatch.setattr(launch_thread, "wait", None)
    lane.settle()
    done(lane.submit(lambda: 1))
    lane.settle()
    assert lane.idle
