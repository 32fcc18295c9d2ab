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
        future: Future[Result] = Future()

        def run() -> None:
            try:
                if self._failure is not None:
                    raise self._failure
                result = job()
            except BaseException as error:
                self._failure = error
                future.set_exception(error)
            else:
                future.set_result(result)

        # Known before it is queued: an interrupt may come right after that, and the job runs all the same.
        self._last = future
        self._pool.submit(run)
        return future

    @property
    def idle(self) -> bool:
        """Whether all jobs have ended. After an interrupt that kept one from the queue not before `settle`."""
        return self._last is None or self._last.done()

    def settle(self) -> None:
        """Waits for all jobs, those that an interrupt kept from the caller among them; failures are theirs to tell.
        The next ones run again."""
        if not self.idle:
            wait([self._pool.submit(lambda: None)])  # behind all that is queued, which `_last` may not be
            self._last = None
        self._failure = None


def failed(result: object) -> bool:
    """Whether it is of a job that raised something."""
    return isinstance(result, Future) and result.done() and result.exception() is not None


def done[Result](result: Result | Future[Result]) -> Result:
    """What a job of a thread returned, or the thing itself. Waits; raises what the job raised."""
    return result.result() if isinstance(result, Future) else result
