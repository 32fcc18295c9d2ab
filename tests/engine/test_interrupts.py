"""Ctrl-C waits where something must not be left half done."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from di_jax.engine.interrupts import uninterrupted


def test_an_interrupt_inside_comes_at_the_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("all of it")
        done.append("nothing after it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_inside_goes_on_up() -> None:
    with pytest.raises(ValueError, match="x"), uninterrupted():
        raise ValueError("x")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_are_left_alone() -> None:
    seen = []

    def work() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
