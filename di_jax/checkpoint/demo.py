"""The bundled checkpoint: a small trained model in the released format, with every architectural part in use.

It was trained by `scripts.train_demo` (what on, under which licences: `scripts/train_demo/DATA.md`).
"""

from __future__ import annotations

from pathlib import Path

from di_jax.checkpoint.errors import CheckpointError

FOLDER = Path(__file__).with_name("demo_data")
INDEX = "model.safetensors.index.json"


def demo_checkpoint() -> Path:
    """The folder that `model.path: demo` names. Raises CheckpointError when the installation lacks it."""
    if not (FOLDER / INDEX).is_file():
        raise CheckpointError(
            f"model.path: the bundled demo checkpoint is not in this installation ({FOLDER / INDEX} is missing); "
            "install di-jax from its own source, or name another checkpoint"
        )
    return FOLDER
