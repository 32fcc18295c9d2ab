"""scripts/train_demo/stopping.py and options.py: signals that wait for the saving, and what options may be."""

from __future__ import annotations

import argparse
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.train_demo import options
from scripts.train_demo.stopping import STOPS, stopping

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_noted(number: signal.Signals, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(n) for n in STOPS]
    with stopping() as stop:
        assert not stop and stop.status("all") == 0
        signal.raise_signal(number)
        assert stop and stop.status("all is saved") == status
        # The next one of either is the system's, which ends the process.
        assert [signal.getsignal(n) for n in STOPS] == [signal.SIG_DFL] * 2
    assert [signal.getsignal(n) for n in STOPS] == before
    told = capsys.readouterr().err
    assert told == f"stopped by {number.name}: all is saved; the same command goes on from there\n"


@pytest.mark.parametrize("second", STOPS)
def test_the_second_signal_ends_at_once(second: signal.Signals) -> None:
    program = (
        "import signal\nfrom scripts.train_demo.stopping import stopping\n"
        "with stopping() as stop:\n"
        "    signal.raise_signal(signal.SIGINT)\n    print('noted', flush=True)\n"
        f"    signal.raise_signal({int(second)})\n    print('not reached', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -second and done.stdout == "noted\n"
    assert done.stderr == "SIGINT: saving after this step; a second one ends at once, unsaved\n"


def test_what_was_ignored_stays_so() -> None:
    """As SIGINT in what a shell script has begun with `&`."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stopping() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_catches_nothing() -> None:
    before, found = [signal.getsignal(n) for n in STOPS], []

    def work() -> None:
        with stopping() as stop:
            found.append((bool(stop), [signal.getsignal(n) for n in STOPS]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(False, before)]


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (options.COUNT, {"1": 1, "30": 30}, ["0", "-1", "1.5", "nan", "x"]),
        (options.SEED, {"0": 0, "7": 7}, ["-1", "1.5"]),
        (options.POSITIVE, {"2e-3": 2e-3, "9": 9.0}, ["0", "-1", "nan", "inf", "x", ""]),
        (options.WEIGHT, {"0": 0.0, "2": 2.0}, ["-0.5", "nan", "inf"]),
        (options.SHARE, {"0": 0.0, "0.2": 0.2, "1": 1.0}, ["2", "-0.1", "nan"]),
        (options.ROW_LENGTH, {"128": 128, "4608": 4608}, ["0", "-128", "100", "128.0"]),
    ],
)
def test_an_option_is_told_with_its_value(
    kind: Callable[[str], Any], right: dict[str, float], wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--given", type=kind)
    for word, value in right.items():
        found = parser.parse_args(["--given", word]).given
        assert found == value and type(found) is type(value) and math.isfinite(found)
    for word in wrong:
        with pytest.raises(SystemExit):
            parser.parse_args(["--given", word])
        assert f"error: argument --given: {word}: not a" in capsys.readouterr().err
