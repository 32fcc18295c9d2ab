"""Programs launched by a thread of their own: the order, failures, and what waits for it."""

from __future__ import annotations

import threading

import pytest

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
