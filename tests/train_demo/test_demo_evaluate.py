"""scripts/train_demo/evaluate.py: what is measured, in how many calls."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from di_jax.checkpoint.demo import demo_checkpoint
from scripts.train_demo import evaluate
from scripts.train_demo.evaluate import Findings
from scripts.train_demo.identity import weights_digest


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
    (tmp_path / "manifest.json").write_text("{}")
    shutil.copy(demo_checkpoint() / "tokenizer.json", tmp_path)
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
        words = ["--data", str(tmp_path), "--checkpoint", "demo", "--out", str(out), "--sets", "copy", "json"]
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


def test_nor_do_those_of_weights_that_were_there_before(call, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(demo_checkpoint(), folder)
    call("--minutes", "0.5", "--checkpoint", str(folder))
    with (folder / "tokenizer.json").open("a") as file:  # a part of the digest
        file.write("\n")
    call("--minutes", "0.5", "--checkpoint", str(folder))
    assert Engine.asked.count("perplexity") == 2


def test_results_name_their_weights_and_data(call) -> None:
    result = json.loads(call().read_text())
    assert result["weights_sha256"] == weights_digest(demo_checkpoint()) and len(result["data_sha256"]) == 64
    assert (
        result["command"].startswith("python -m scripts.train_demo.evaluate --data")
        and "copy json" in result["command"]
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--limit", "0"], "--limit 0: at least 1"),
        (["--text-tokens", "256"], "--text-tokens 256: more than 256"),
        (["--out", "nowhere/eval.json"], "its folder does not exist"),
    ],
)
def test_options_that_measure_nothing_are_refused(call, capsys, words: list[str], told: str) -> None:
    with pytest.raises(SystemExit):
        call(*words)
    assert told in capsys.readouterr().err and not Engine.asked


def test_data_of_another_tokenizer_are_refused(call, tmp_path: Path, capsys) -> None:
    """They would score 0% in silence."""
    file = tmp_path / "tokenizer.json"
    other = json.loads(file.read_text(encoding="utf-8"))
    other["model"]["merges"] = other["model"]["merges"][:-1]
    file.write_text(json.dumps(other), encoding="utf-8")
    with pytest.raises(SystemExit):
        call()
    assert "its tokenizer is not that of --data" in capsys.readouterr().err and not Engine.asked


@pytest.mark.parametrize("text", ["[1]", "{", '{"what": {}, "found": 3}'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "eval.json.partial"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"eval\.json\.partial: damaged"):
        Findings(file, {}, math.inf)


def test_findings_are_kept_at_once(tmp_path: Path) -> None:
    file = tmp_path / "kept"
    Findings(file, {"checkpoint": "a"}, math.inf).keep("tasks", "copy", {"score": 1.0})
    again = Findings(file, {"checkpoint": "a"}, time.monotonic() - 1)
    assert again.missing("tasks", ["copy", "sort"]) == ["sort"] and again.over()
    assert Findings(file, {"checkpoint": "b"}, math.inf).missing("tasks", ["copy"]) == ["copy"]
