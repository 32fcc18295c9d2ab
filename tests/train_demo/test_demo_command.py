"""python -m scripts.train_demo: stages in order, interrupted and resumed; and all of them in small."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import BadZipFile

import jax
import numpy as np
import pytest

from scripts.train_demo import __main__ as command
from scripts.train_demo.__main__ import OPTIONS, SMALL_OPTIONS, Stage, stages
from scripts.train_demo.average import CHOSEN
from scripts.train_demo.curriculum import Clock, plan_of
from scripts.train_demo.dataset import Data
from scripts.train_demo.parameters import load_parts
from scripts.train_demo.state import leave

ROOT = Path(__file__).parents[2]


class Calls:
    """Three stages that take `minutes` each; `b` needs `parts` calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, minutes: float = 1.0, parts: int = 1) -> None:
        self.minutes, self.parts, self.now = minutes, parts, 0.0
        self.made: list[tuple[str, list[str]]] = []
        self.of_b = 0
        self.status = 0
        monkeypatch.setattr(command, "stages", self.stages)
        monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(jax.config, "update", lambda *_: None)

    def run(self, name: str) -> Callable[[list[str]], int]:
        def made(arguments: list[str]) -> int:
            self.made.append((name, arguments))
            self.of_b += name == "b"
            self.now += 60 * self.minutes
            return self.status

        return made

    def stages(self, out: Path, data: Path | None, packages: Path | None) -> list[Stage]:
        def arguments(minutes: float) -> list[Any]:
            return ["--minutes", minutes]

        finished = {"b": lambda: self.of_b >= self.parts}
        return [Stage(n, self.run(n), arguments, 2.0, finished.get(n, lambda: True)) for n in "abc"]

    def names(self) -> str:
        """What was called since the last time."""
        made = "".join(name for name, _ in self.made)
        self.made = []
        return made


def called(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert command.main(["--out", str(tmp_path), *arguments]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_stages_that_are_done_are_left_alone(tmp_path: Path, monkeypatch, capsys) -> None:
    calls = Calls(monkeypatch)
    assert called(tmp_path, capsys) == {"done": 3, "of": 3, "next": None} and calls.names() == "abc"
    assert called(tmp_path, capsys) == {"done": 3, "of": 3, "next": None} and calls.names() == ""
    assert json.loads((tmp_path / "stages.json").read_text())["seconds"] == {"a": 60.0, "b": 60.0, "c": 60.0}


def test_a_call_begins_nothing_that_it_has_no_time_for(tmp_path: Path, monkeypatch, capsys) -> None:
    calls = Calls(monkeypatch)
    assert called(tmp_path, capsys, "--minutes", "3.5") == {"done": 2, "of": 3, "next": "c"}
    assert calls.made == [("a", ["--minutes", "3.5"]), ("b", ["--minutes", "2.5"])] and calls.names() == "ab"
    # What it begins with it begins, however little time it has: it would never come to it otherwise.
    assert called(tmp_path, capsys, "--minutes", "1")["next"] is None and calls.names() == "c"


def test_a_stage_that_is_cut_goes_on_before_the_next(tmp_path: Path, monkeypatch, capsys) -> None:
    calls = Calls(monkeypatch, parts=3)
    for expected, following in (("ab", "b"), ("b", "b"), ("bc", None)):
        assert called(tmp_path, capsys)["next"] == following and calls.names() == expected
    assert json.loads((tmp_path / "stages.json").read_text())["seconds"]["b"] == 180.0


def test_a_failing_stage_is_tried_again(tmp_path: Path, monkeypatch, capsys) -> None:
    calls = Calls(monkeypatch)
    calls.status = 3
    assert command.main(["--out", str(tmp_path)]) == 3 and calls.names() == "a"
    calls.status = 0
    assert called(tmp_path, capsys)["done"] == 3 and calls.names() == "abc"


@pytest.mark.parametrize("error", [KeyError("draft.w"), BadZipFile("not a zip file"), FileNotFoundError("no weights")])
def test_what_is_damaged_is_told_by_its_stage(tmp_path: Path, monkeypatch, capsys, error: Exception) -> None:
    calls = Calls(monkeypatch)

    def breaks(_: float) -> list[Any]:
        raise error

    whole = command.stages
    monkeypatch.setattr(
        command,
        "stages",
        lambda *a: [dataclasses.replace(s, arguments=breaks) if s.name == "b" else s for s in whole(*a)],
    )
    assert command.main(["--out", str(tmp_path)]) == 2 and calls.names() == "a"
    told = capsys.readouterr().err
    assert f"error: stage b: {type(error).__name__}" in told and "stages.json" in told
    monkeypatch.setattr(command, "stages", whole)
    assert called(tmp_path, capsys)["done"] == 3 and calls.names() == "bc"


@pytest.mark.parametrize(
    "ledger", ['{"done": [', "[]", '{"done": 5}', '{"done": null}', '{"done": ["d"]}', '{"seconds": []}']
)
def test_a_damaged_ledger_is_named(tmp_path: Path, monkeypatch, capsys, ledger: str) -> None:
    Calls(monkeypatch)
    (tmp_path / "stages.json").write_text(ledger)
    with pytest.raises(SystemExit):
        command.main(["--out", str(tmp_path)])
    assert "stages.json is damaged" in capsys.readouterr().err


def test_a_stage_that_cannot_be_done_here_is_left_out(tmp_path: Path, monkeypatch, capsys) -> None:
    calls, whole = Calls(monkeypatch), command.stages
    monkeypatch.setattr(
        command,
        "stages",
        lambda *a: [
            dataclasses.replace(s, impossible=lambda: "it is elsewhere") if s.name == "b" else s for s in whole(*a)
        ],
    )
    assert called(tmp_path, capsys) == {"done": 3, "of": 3, "next": None} and calls.names() == "ac"
    kept = json.loads((tmp_path / "stages.json").read_text())
    assert kept["left_out"] == {"b": "it is elsewhere"} and kept["seconds"].keys() == {"a", "c"}


def test_the_masters_are_compared_only_where_they_are(tmp_path: Path) -> None:
    """A folder that moved came without its states."""
    (stage,) = (stage for stage in command.stages(tmp_path, tmp_path, None) if stage.name == "compare")
    for end in command.ENDS:
        assert f"{end}/state" in str(stage.impossible())
        (tmp_path / end / "state").mkdir(parents=True)
    assert stage.impossible() is None


def test_a_folder_goes_on_with_the_data_that_it_was_begun_with(tmp_path: Path, monkeypatch, capsys) -> None:
    Calls(monkeypatch)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").touch()
    manifest = {"seconds": 1, "sha256": {"tokenizer.json": "aa"}}
    (tmp_path / "one" / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "two" / "manifest.json").write_text(json.dumps(manifest | {"seconds": 2}))  # made again
    assert called(tmp_path / "out", capsys, "--data", str(tmp_path / "one"))["next"] is None
    assert called(tmp_path / "out", capsys, "--data", str(tmp_path / "two"))["next"] is None
    (tmp_path / "two" / "manifest.json").write_text(json.dumps({"sha256": {"tokenizer.json": "bb"}}))
    with pytest.raises(SystemExit):
        command.main(["--out", str(tmp_path / "out"), "--data", str(tmp_path / "two")])
    assert f"{tmp_path / 'two'} holds other data than {tmp_path / 'out'} was begun with" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--data", "--out"])
@pytest.mark.parametrize("lacks", ["eval/json.jsonl", "manifest.json"])
def test_prepared_data_that_is_not_whole_is_told_at_once(
    tmp_path: Path, monkeypatch, capsys, option: str, lacks: str
) -> None:
    """A later stage would stop on it, after all trainings."""
    calls, folder = Calls(monkeypatch), tmp_path / "data"
    made = ("english_train.npy", "eval/json.jsonl")
    (folder / "eval").mkdir(parents=True)
    for name in made:
        (folder / name).touch()
    (folder / "manifest.json").write_text(json.dumps({"sha256": dict.fromkeys(made, "")}))
    words = ["--out", str(tmp_path), *(["--data", str(folder)] if option == "--data" else ["--skip", "data"])]
    monkeypatch.setattr(command, "stages", lambda *a: [Stage("data", calls.run("d"), lambda _: []), *calls.stages(*a)])
    (folder / lacks).rename(tmp_path / "gone")
    with pytest.raises(SystemExit):
        command.main(words)
    told = capsys.readouterr().err
    assert f"error: {option}: {folder}" in told and ("lacks 1 of 2" if "/" in lacks else "not prepared") in told
    assert lacks == "manifest.json" or f"the first {lacks}" in told
    assert calls.names() == ""
    (tmp_path / "gone").rename(folder / lacks)
    assert command.main([*words, "--skip", "data"]) == 0 and calls.names() == "abc"


def test_no_stage_begins_without_the_weights_of_the_one_before(tmp_path: Path) -> None:
    """Random ones would be trained on in silence."""
    plan = {stage.name: stage for stage in command.stages(tmp_path, tmp_path, None)}
    for name, before in (("end-2", "end-1"), ("end-3", "end-2"), ("draft", "averaged"), ("export", "averaged")):
        with pytest.raises(FileNotFoundError, match=f"{before} has no weights"):
            plan[name].arguments(9.0)


def test_an_unfinished_training_moves_with_its_own_weights_alone(tmp_path: Path) -> None:
    """At most 32 MiB: those that it began with stay behind."""
    plan = {stage.name: stage for stage in command.stages(tmp_path, tmp_path, None)}
    (tmp_path / "end-2").mkdir()
    leave(tmp_path / "end-2", "weights", {"norm.weight": np.ones(4, np.float32)}, Clock(step=3))
    assert "--weights" not in plan["end-2"].arguments(9.0)
    assert f"{tmp_path / 'end-2' / 'weights-0.npz'}" in map(str, plan["end-3"].arguments(9.0))


def test_options_are_added_and_stages_skipped(tmp_path: Path, monkeypatch, capsys) -> None:
    calls = Calls(monkeypatch)
    called(tmp_path, capsys, "--options", "b=--peak 1e-3 --soft", "--skip", "c")
    assert calls.made == [("a", ["--minutes", "9.0"]), ("b", ["--minutes", "8.0", "--peak", "1e-3", "--soft"])]
    wrong = (["--options", "b"], ["--options", "x=1"], ["--skip", "x"], ["--minutes", "inf"], ["--small"])
    messages = ("not STAGE=WORDS", "a, b, c", "not one of a, b, c", "compiling and saving", "begun without --small")
    archives = ["--packages", str(tmp_path)]
    wrong += (["--small", *archives], ["--data", str(tmp_path), *archives])  # type: ignore[assignment]
    messages += ("not read with --small", "not read with --data")  # type: ignore[assignment]
    for arguments, message in zip(wrong, messages, strict=True):
        with pytest.raises(SystemExit):
            command.main(["--out", str(tmp_path), *arguments])
        assert message in capsys.readouterr().err


def test_the_options_name_stages_and_both_sets_train_alike(tmp_path: Path) -> None:
    for folder, prefix in (
        *((name, "weights") for name in ("end-1", "end-2", "end-3", "averaged")),
        ("draft", "draft"),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"{prefix}-0.npz").touch()
    (tmp_path / "averaged" / CHOSEN).write_text('{"temperature": 1.23}')
    compare = next(stage for stage in stages(tmp_path, tmp_path, None) if stage.name == "compare")
    assert "--temperature 1.23" in " ".join(map(str, compare.arguments(5.0)))  # what the average was cooled by
    names = [stage.name for stage in stages(tmp_path, None, None)]
    assert names == [s.name for s in [*stages(tmp_path, None, None)[:1], *stages(tmp_path, tmp_path, None)]]
    assert {*OPTIONS, *SMALL_OPTIONS} <= {*names}
    for options in (OPTIONS, SMALL_OPTIONS):
        for stage in stages(tmp_path, None, tmp_path):
            words = [*map(str, stage.arguments(5.0)), *options.get(stage.name, "").split()]
            source = inspect.getsource(inspect.getmodule(stage.command))
            assert all(f'"{word}"' in source for word in words if word.startswith("--")), stage.name
        for end in command.ENDS:
            words = options[end].split("--stages ")[1].split(" --")[0].split()
            assert plan_of(words) and "--exact-every 2" in options[end]
        for word in ("--stride 4", "--soft", "--length 2", "--drawn 0.2", "--peak 2e-3"):
            assert f"{word} " in options["draft"]


@pytest.mark.slow
def test_the_whole_in_small_interrupted_twice(tmp_path: Path) -> None:
    """From nothing to an evaluated checkpoint with a draft; one training loses its state, as between machines."""
    out = tmp_path / "out"

    def call(*more: str) -> dict[str, Any]:
        words = [sys.executable, "-m", "scripts.train_demo", "--small", "--out", str(out), *more]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    def log(path: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (out / path).read_text(encoding="utf-8").splitlines()]

    # No time but for one step, which every call makes.
    assert call("--options", "end-1=--minutes 0.5") == {"done": 1, "of": 13, "next": "end-1"}
    assert [record["step"] for record in log("end-1/log.jsonl")] == [1]
    shutil.rmtree(out / "end-1/state")
    assert call("--options", "draft=--minutes 0.3")["next"] == "draft"
    records = log("end-1/log.jsonl")
    assert records[1]["step"] == 2 and records[1]["rate"] == records[0]["rate"]  # a fresh optimizer warms up again
    assert records[-1]["loss"] < records[0]["loss"]
    assert [record["step"] for record in log("draft/draft_log.jsonl")] == [1]
    assert call() == {"done": 13, "of": 13, "next": None}
    records = log("draft/draft_log.jsonl")
    assert records[1]["step"] == 2 and records[1]["rate"] == pytest.approx(2 * records[0]["rate"])  # the same one
    assert records[-1]["step"] == 8 and "held_out" in records[-1]
    assert {record["stage"] for record in log("end-2/log.jsonl")} == {"dense", "sparse"}
    for end in command.ENDS:
        assert log(f"{end}/log.jsonl")[-1]["loss_of"].keys() == {"quantized", "masters"}, end

    for picture in ("end-1/loss.png", "training-log.png", "draft-log.png", "eval.png", "sts.png"):
        assert (out / picture).stat().st_size > 5_000, picture
    masters = json.loads((out / "masters.json").read_text())
    assert masters["masters"] == "float32" and masters["trained"]["steps"] >= 21
    for found in masters["perplexity"].values():
        assert found["ratio"] == pytest.approx(1, abs=0.05) and found["ratio"] != 1
    evaluated = json.loads((out / "eval.json").read_text())
    assert set(evaluated["tasks"]) == {"copy", "recall_256"} and not (out / "eval.json.partial").exists()
    # The average of the ends, cooled, as the engine scores it: worse than none of them would be by chance.
    assert 1 < evaluated["perplexity"]["english"] < 4608
    saved = load_parts(sorted((out / "draft").glob("draft-[0-9].npz")))
    assert any("markov_head" in path for path in saved) and Data(out / "data").text["english"].size > 5_000
    assert call() == {"done": 13, "of": 13, "next": None}
