"""What a stretch of training leaves for the next one: all of it on the same machine, the weights for another one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from scripts.train_demo.curriculum import Clock
from scripts.train_demo.parameters import load_parts, save_parts


class State:
    """The newest Orbax checkpoint of a folder: trees of arrays by name (`weights`, `optimizer`, ...) and the clock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        options = ocp.CheckpointManagerOptions(max_to_keep=1)
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def restore(self, templates: Mapping[str, Any]) -> tuple[dict[str, Any], Clock] | None:
        """(the trees that `templates` names, in its structures, shapes and dtypes; the clock), or None: none is kept.

        A tree that is kept but not named is left alone.
        """
        step = self.manager.latest_step()
        if step is None:
            return None
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), dict(templates))
        wanted = {name: ocp.args.StandardRestore(tree) for name, tree in shapes.items()}
        found = self.manager.restore(step, args=ocp.args.Composite(**wanted, clock=ocp.args.JsonRestore()))
        # Restored arrays are bound to their device, for which the steps would be compiled anew.
        trees = {name: jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), found[name]) for name in templates}
        return trees, Clock(**found["clock"])

    def save(self, trees: Mapping[str, Any], clock: Clock) -> None:
        """Keeps this instead of what was kept before; returns when it is on disk. No new steps: nothing to keep."""
        if clock.step == self.manager.latest_step():
            return
        kept = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        args = ocp.args.Composite(**kept, clock=ocp.args.JsonSave(dataclasses.asdict(clock)))
        self.manager.save(clock.step, args=args)
        self.manager.wait_until_finished()


def leave(folder: Path, prefix: str, weights: Mapping[str, Any], clock: Clock) -> None:
    """Weights in files that can travel (`save_parts`), and then how far they are: `PREFIX-progress.json`."""
    save_parts(folder, weights, prefix)
    (folder / f"{prefix}-progress.json").write_text(json.dumps(dataclasses.asdict(clock)) + "\n", encoding="utf-8")


def progress(folder: Path, prefix: str) -> Clock | None:
    """How far the weights of `leave` are, or None."""
    file = folder / f"{prefix}-progress.json"
    return Clock(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def travelled(folder: Path, prefix: str) -> tuple[dict[str, np.ndarray], Clock] | None:
    """What `leave` wrote, for a machine that has no state: weights, and a clock whose optimizer is fresh; or None."""
    clock = progress(folder, prefix)
    if clock is None:
        return None
    return load_parts(sorted(folder.glob(f"{prefix}-*.npz"))), dataclasses.replace(clock, optimizer_steps=0)
