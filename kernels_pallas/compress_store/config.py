"""Tuning of the stores: the measured choice is data, one file a device."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

TUNED = Path(__file__).parent / "tuned"


@dataclasses.dataclass(frozen=True)
class Tuning:
    """warpgroups: of a block of threads; each of its warps takes a row."""

    warpgroups: int = 1

    def __post_init__(self) -> None:
        if self.warpgroups not in (1, 2, 4):
            raise ValueError(f"warpgroups {self.warpgroups}: expected 1, 2 or 4")


@functools.cache
def tuned(device: str) -> Tuning:
    """The measured choice for a device kind as JAX names it, or the default where none was measured."""
    path = TUNED / (device.lower().replace(" ", "-") + ".json")
    return Tuning(**json.loads(path.read_text())) if path.exists() else Tuning()
