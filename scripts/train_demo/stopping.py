"""How a training ends when it is asked to: SIGINT (Ctrl-C) and SIGTERM wait for the step that runs, and for the saving.

Needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """False until the process is asked to stop."""

    def __init__(self) -> None:
        self.by: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.by is not None

    def status(self, saved: str) -> int:
        """What a stretch returns at its end: 0, or as a shell has it 128 and the signal, 130 or 143.

        Says on stderr then by what it was stopped, what is `saved`, and how to go on.
        """
        if self.by is None:
            return 0
        print(f"stopped by {self.by.name}: {saved}; the same command goes on from there", file=sys.stderr, flush=True)
        return 128 + self.by


@contextlib.contextmanager
def stopping() -> Iterator[Stop]:
    """Inside, the first SIGINT or SIGTERM is only noted; a second one of either ends the process at once.

    At once even inside a compilation, where Python would come to no exception for a minute: the second is left to the
    system. A signal that was ignored stays so, as SIGINT is in what a shell script has begun with `&`. Python's
    handlers are the main thread's: elsewhere this does nothing. They are restored at the end.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(number: int, _: FrameType | None) -> None:
        stop.by = signal.Signals(number)
        for each in caught:
            signal.signal(each, signal.SIG_DFL)
        # No print: the signal may have come in the middle of one, which cannot be entered again.
        os.write(2, f"{stop.by.name}: saving after this step; a second one ends at once, unsaved\n".encode())

    before = {number: signal.getsignal(number) for number in STOPS}
    caught = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    try:
        for number in caught:
            signal.signal(number, note)
        yield stop
    finally:
        for number in caught:
            signal.signal(number, before[number])
