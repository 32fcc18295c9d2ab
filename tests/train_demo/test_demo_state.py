"""scripts/train_demo/state.py: what a stretch leaves for the next one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from scripts.train_demo.curriculum import Clock
from scripts.train_demo.state import State, leave, progress, travelled
from scripts.train_demo.train import optimizer

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
    assert found is not None and found[1] == dataclasses.replace(clock, optimizer_steps=0)
    assert progress(tmp_path, "weights") == clock
    assert found[0].keys() == WEIGHTS.keys()
    for path, value in WEIGHTS.items():
        np.testing.assert_allclose(found[0][path], value, rtol=2**-8)
