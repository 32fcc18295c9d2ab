"""What a stretch of training leaves for the next one: all of it on the same machine, the weights for another one."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
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
        return trees, Clock.of(found["clock"])

    def save(self, trees: Mapping[str, Any], clock: Clock) -> None:
        """Keeps this instead of what was kept before; returns when it is on disk. No new steps: nothing to keep."""
        if clock.step == self.manager.latest_step():
            return
        kept = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        args = ocp.args.Composite(**kept, clock=ocp.args.JsonSave(dataclasses.asdict(clock)))
        self.manager.save(clock.step, args=args)
        self.manager.wait_until_finished()


def replace_text(file: Path, text: str) -> None:
    """Writes the file whole or, if the process is killed meanwhile, not at all."""
    aside = file.with_name(f"{file.name}.partial")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, file)


def cut_log(file: Path, step: int) -> None:
    """Drops the records of a log beyond `step`: a killed stretch left them, and their steps are trained again.

    Also lines that were not written to their end. A log that has none of these, or is not there, is left alone.
    """

    def stays(line: str) -> bool:
        try:
            return line.endswith("\n") and json.loads(line)["step"] <= step
        except ValueError:
            return False

    if not file.is_file():
        return
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if stays(line)]
    if len(kept) < len(lines):
        replace_text(file, "".join(kept))


def leave(folder: Path, prefix: str, weights: Mapping[str, Any], clock: Clock) -> None:
    """Weights in files that can travel (`save_parts`), and then how far they are: `PREFIX-progress.json`.

    Files are replaced once all of them are whole: a kill while they are written does not cost what was left before.
    """
    aside = folder / f"{prefix}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for file in save_parts(aside, weights, prefix):
        os.replace(file, folder / file.name)
    aside.rmdir()
    replace_text(folder / f"{prefix}-progress.json", json.dumps(dataclasses.asdict(clock)) + "\n")


def progress(folder: Path, prefix: str) -> Clock | None:
    """How far the weights of `leave` are, or None. Raises ValueError that names the file if it is damaged."""
    file = folder / f"{prefix}-progress.json"
    try:
        return Clock.of(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None
    except ValueError as error:  # of JSON and of UTF-8 as well
        raise ValueError(f"{file} is damaged ({error})") from error


def travelled(folder: Path, prefix: str) -> tuple[dict[str, np.ndarray], Clock] | None:
    """What `leave` wrote, for a machine that has no state: weights, and a clock whose optimizer is fresh; or None.

    Raises ValueError for a damaged file, and where weights or their progress are missing: without it they would be
    trained over from the beginning.
    """
    clock, files = progress(folder, prefix), sorted(folder.glob(f"{prefix}-[0-9]*.npz"))
    if clock is None and not files:
        return None
    if clock is None:
        raise ValueError(
            f"{folder / f'{prefix}-progress.json'} is missing beside {files[0].name}: copy it, too, or delete these"
        )
    if not files:
        raise ValueError(
            f"{folder / f'{prefix}-0.npz'} is missing beside {prefix}-progress.json: copy it, too, or delete that"
        )
    return load_parts(files), clock.with_fresh_optimizer()
