"""scripts/train_demo/state.py: what a stretch leaves for the next one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.train_demo import state as states
from scripts.train_demo.curriculum import Clock
from scripts.train_demo.parameters import load_parts
from scripts.train_demo.state import State, cut_log, leave, progress, travelled
from scripts.train_demo.step import optimizer

WEIGHTS = {"a.weight": jnp.asarray(np.random.default_rng(0).normal(size=(4, 32)), jnp.float32), "b": jnp.ones(3)}


def test_arrays_and_the_clock_come_back_as_they_were(tmp_path: Path) -> None:
    opt = optimizer(1e-3)
    grads = jax.tree.map(lambda a: a * 0.1, WEIGHTS)
    _, moments = opt.update(grads, opt.init(WEIGHTS), WEIGHTS)
    clock = Clock(step=7, optimizer_steps=5, trained_s=12.5, stage="dense", recall=0.25)
    assert State(tmp_path).restore({"weights": WEIGHTS}) is None
    State(tmp_path).save({"weights": WEIGHTS, "optimizer": moments}, clock)
    template = jax.eval_shape(lambda: WEIGHTS)
    found = State(tmp_path).restore({"weights": template, "optimizer": jax.eval_shape(opt.init, template)})
    assert found is not None and found[1] == clock and list(found[0]) == ["weights", "optimizer"]
    same = jax.tree.map(np.array_equal, (found[0]["weights"], found[0]["optimizer"]), (WEIGHTS, moments))
    assert jax.tree.all(same) and len(jax.tree.leaves(same)) > 6
    alone = State(tmp_path).restore({"weights": template})
    assert alone is not None and list(alone[0]) == ["weights"]


def test_the_newest_replaces_what_was_kept(tmp_path: Path) -> None:
    state = State(tmp_path)
    for step in (1, 2, 2):
        state.save({"weights": {"a": jnp.full(2, float(step))}}, Clock(step=step))
    found = State(tmp_path).restore({"weights": {"a": jax.ShapeDtypeStruct((2,), jnp.float32)}})
    assert found is not None and found[1].step == 2 and found[0]["weights"]["a"].tolist() == [2.0, 2.0]
    assert [folder.name for folder in tmp_path.iterdir()] == ["2"]


def test_another_machine_gets_weights_and_a_clock_with_a_fresh_optimizer(tmp_path: Path) -> None:
    assert travelled(tmp_path, "weights") is None and progress(tmp_path, "weights") is None
    clock = Clock(step=9, optimizer_steps=9, trained_s=3.0, stage="long", stage_s=2.0)
    leave(tmp_path, "weights", WEIGHTS, clock)
    leave(tmp_path, "draft", {"c": jnp.zeros(2)}, Clock())
    found = travelled(tmp_path, "weights")
    assert found is not None and found[1] == dataclasses.replace(clock, optimizer_steps=0, stretch=2)
    assert progress(tmp_path, "weights") == clock
    assert found[0].keys() == WEIGHTS.keys()
    for path, value in WEIGHTS.items():
        np.testing.assert_allclose(found[0][path], value, rtol=2**-8)


def test_a_clock_of_an_older_training_has_no_stretch() -> None:
    found = dataclasses.asdict(Clock(step=3, trained_s=2.0))
    del found["stretch"]
    assert Clock.of(found | {"trained_s": 2}) == Clock(step=3, trained_s=2.0, stretch=1)


@pytest.mark.parametrize(
    "damage", ['{"foo": 1}', '{"step": 1, "foo": 1}', "{}", "[]", "null", '{"step": "x"}', '{"step": 9, "opt', ""]
)
def test_damaged_progress_is_told_by_its_file(tmp_path: Path, damage: str) -> None:
    leave(tmp_path, "weights", WEIGHTS, Clock(step=9))
    file = tmp_path / "weights-progress.json"
    file.write_text(damage, encoding="utf-8")
    for reader in (progress, travelled):
        with pytest.raises(ValueError, match=f"{file} is damaged"):
            reader(tmp_path, "weights")


def test_weights_without_their_progress_are_not_taken_for_none(tmp_path: Path) -> None:
    """They would be trained over from the beginning; nor is progress without weights."""
    for gone, beside in (("weights-progress.json", "weights-0.npz"), ("weights-0.npz", "weights-progress.json")):
        leave(tmp_path, "weights", WEIGHTS, Clock(step=9))
        (tmp_path / gone).unlink()
        with pytest.raises(ValueError, match=f"{tmp_path / gone} is missing beside {beside}"):
            travelled(tmp_path, "weights")


@pytest.mark.parametrize("damage", ["half", "empty", "text", "bits", "array"])
def test_a_damaged_weight_file_is_named(tmp_path: Path, damage: str) -> None:
    leave(tmp_path, "weights", {"a": jnp.asarray(np.random.default_rng(0).normal(size=3000))}, Clock(step=9))
    file = tmp_path / "weights-0.npz"
    whole = file.read_bytes()
    if damage == "array":
        with file.open("wb") as stream:
            np.save(stream, np.zeros(3))
    else:
        bits = whole[:2000] + bytes(b ^ 255 for b in whole[2000:2010]) + whole[2010:]
        file.write_bytes({"half": whole[: len(whole) // 2], "empty": b"", "text": b"text " * 40, "bits": bits}[damage])
    for reader in (lambda: load_parts([file]), lambda: travelled(tmp_path, "weights")):
        with pytest.raises(ValueError, match=f"{file} is damaged"):
            reader()


def test_what_was_left_outlives_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the next weights are written; what it left half done is gone after the next time."""
    leave(tmp_path, "weights", WEIGHTS, Clock(step=9))
    before = travelled(tmp_path, "weights")

    def killed(folder: Path, *_: object) -> list[Path]:
        (folder / "weights-0.npz").write_bytes(b"PK")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(states, "save_parts", killed)
        with pytest.raises(KeyboardInterrupt):
            leave(tmp_path, "weights", WEIGHTS, Clock(step=11))
    after = travelled(tmp_path, "weights")
    assert before is not None and after is not None and after[1] == before[1]
    assert all(np.array_equal(after[0][path], value) for path, value in before[0].items())
    leave(tmp_path, "weights", WEIGHTS, Clock(step=11))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["weights-0.npz", "weights-progress.json"]


def test_a_log_is_cut_to_what_is_not_trained_again(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    cut_log(file, 3)
    assert not file.exists()
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 21, 41, 61)]
    file.write_text("".join(lines), encoding="utf-8")
    before = file.stat().st_ino
    cut_log(file, 61)
    assert file.read_text() == "".join(lines) and file.stat().st_ino == before  # nothing to cut, nothing written
    with file.open("a") as stream:
        stream.write('{"step": 22, "lo')  # a record that was not written to its end, though its step is kept
    cut_log(file, 41)
    assert file.read_text() == "".join(lines[:3])
    file.write_text("".join(lines[:2]).rstrip(), encoding="utf-8")  # the next record would go on in its line
    cut_log(file, 41)
    assert file.read_text() == lines[0]
    cut_log(file, 0)
    assert file.read_text() == "" and [f.name for f in tmp_path.iterdir()] == ["log.jsonl"]
