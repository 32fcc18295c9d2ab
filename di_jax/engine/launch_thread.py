"""A thread that launches programs one after the other, so that the host goes on meanwhile.

On a GPU a launch returns when the program is in the device's queue, and until then it holds its thread, but not Python:
5 ms for the three programs of a decode step with drafts of the demo checkpoint on an H200, in a step of 7 ms of which
the host needs another 1.5 to plan and to book. One after the other, the device waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any


class LaunchThread:
    """Runs jobs in the order they come in. When one fails those behind it are not run but fail alike, until `settle`:
    they were planned for a state that is gone. For one thread of callers."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "launches")
        self._last: Future[Any] | None = None
        self._failure: BaseException | None = None

    def submit[Result](self, job: Callable[[], Result]) -> Future[Result]:
        """Returns at once; what the job returns or raises is with the future."""

        def run() -> Result:
            if self._failure is not None:
                raise self._failure
            try:
                return job()
            except BaseException as error:
                self._failure = error
                raise

        future = self._pool.submit(run)
        self._last = future
        return future

    @property
    def idle(self) -> bool:
        """Whether all jobs have ended."""
        return self._last is None or self._last.done()

    def settle(self) -> None:
        """Waits for all jobs; failures are theirs to tell. The next ones run again."""
        if self._last is not None:
            wait([self._last])
        self._failure = None


def failed(result: object) -> bool:
    """Whether it is of a job that raised something."""
    return isinstance(result, Future) and result.done() and result.exception() is not None


def done[Result](result: Result | Future[Result]) -> Result:
    """What a job of a thread returned, or the thing itself. Waits; raises what the job raised."""
    return result.result() if isinstance(result, Future) else result
