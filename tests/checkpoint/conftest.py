"""A tiny released checkpoint, and a way to damage copies of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_files import Parts, join_file, split_file


@pytest.fixture
def tiny(golden: Path) -> Path:
    """The tiny checkpoint in the released format; read only."""
    return golden / "tiny-v41-fp8"


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


@pytest.fixture
def damage(copy: Path) -> Callable[[Callable[[Parts], None]], Path]:
    """damage(change): applies `change` to the copy's tensors and returns the folder."""

    def apply(change: Callable[[Parts], None]) -> Path:
        parts = split_file(copy / "model.safetensors")
        change(parts)
        join_file(copy / "model.safetensors", parts)
        return copy

    return apply


@pytest.fixture
def sharded(copy: Path) -> Path:
    """The copy cut into three shards with an index."""
    parts = split_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    weight_map = {}
    for number in range(3):
        file = copy / f"model-{number + 1:05}-of-00003.safetensors"
        names = list(parts)[number::3]
        join_file(file, {name: parts[name] for name in names})
        weight_map |= dict.fromkeys(names, file.name)
    index = {
        "metadata": {"total_size": sum(len(data) for _, data in parts.values())},
        "weight_map": weight_map,
    }
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    return copy
