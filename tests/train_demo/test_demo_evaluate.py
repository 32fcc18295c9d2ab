"""scripts/train_demo/evaluate.py: what is measured, in how many calls."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from scripts.train_demo import evaluate
from scripts.train_demo.evaluate import Findings


class Engine:
    """In place of both engines; counts what is asked of it."""

    asked: ClassVar[list[str]] = []

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Runs the command with measurements that take a minute each; returns the JSON's path."""
    for name in ("english", "python"):
        np.save(tmp_path / f"{name}_eval.npy", np.arange(50, dtype=np.uint16))
    np.save(tmp_path / "english_train.npy", np.arange(50, dtype=np.uint16))
    clock = SimpleNamespace(now=0.0)

    def measured(what: str, value: object) -> object:
        Engine.asked.append(what)
        clock.now += 60
        return value

    monkeypatch.setattr(Engine, "asked", [])
    monkeypatch.setattr(evaluate, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(evaluate, "LLM", Engine)
    monkeypatch.setattr(evaluate, "build_engine_parts", Engine)
    monkeypatch.setattr(evaluate, "perplexity", lambda *_: measured("perplexity", 3.0))
    monkeypatch.setattr(evaluate, "exact_rate", lambda _, __, name, ___: measured(name, {"score": 0.5, "n": 2}))
    monkeypatch.setattr(evaluate.ngram_baseline, "perplexity", lambda *_: 5.0)

    def run(*more: str) -> Path:
        out = tmp_path / "eval.json"
        words = ["--data", str(tmp_path), "--checkpoint", "somewhere", "--out", str(out), "--sets", "copy", "json"]
        assert evaluate.main([*words, *more]) == 0
        return out

    return run


def test_a_call_measures_what_an_earlier_one_has_not(call) -> None:
    asked = Engine.asked
    out = call("--minutes", "0.5")
    assert asked == ["perplexity"] and not out.exists()  # one at least is begun in any time
    call("--minutes", "1.5")
    assert asked == ["perplexity", "perplexity", "copy"] and not out.exists()
    call()
    assert asked == ["perplexity", "perplexity", "copy", "json"]
    result = json.loads(out.read_text())
    assert result["tasks"].keys() == {"copy", "json"} and result["perplexity"] == {
        "tokens": {"english": 50, "python": 50},
        "english_five_gram_kneser_ney": 5.0,
        "english": 3.0,
        "python": 3.0,
    }
    assert not out.with_name("eval.json.partial").exists()


def test_findings_of_something_else_do_not_count(call) -> None:
    call("--minutes", "0.5")
    call("--limit", "7")
    assert Engine.asked.count("perplexity") == 3


def test_findings_are_kept_at_once(tmp_path: Path) -> None:
    file = tmp_path / "kept"
    Findings(file, {"checkpoint": "a"}, math.inf).keep("tasks", "copy", {"score": 1.0})
    again = Findings(file, {"checkpoint": "a"}, time.monotonic() - 1)
    assert again.missing("tasks", ["copy", "sort"]) == ["sort"] and again.over()
    assert Findings(file, {"checkpoint": "b"}, math.inf).missing("tasks", ["copy"]) == ["copy"]
