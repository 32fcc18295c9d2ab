"""Measured choices of the Hopper kernel, as data: `tuned/<device>.json`."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

TUNED = Path(__file__).parent / "tuned"


@dataclasses.dataclass(frozen=True)
class Tuning:
    """stages: units of 128 keys in flight. units: most of them that a block scores. rows: most rows of a block, in
    prefill; decode has one. score_bytes: most bytes of scores at a time; more rows go in turns.
    """

    stages: int = 3
    units: int = 16
    rows: int = 4
    score_bytes: int = 512 * 2**20

    def __post_init__(self) -> None:
        for name, low, high in (("stages", 2, 8), ("units", 1, 512)):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"index_topk tuning: {name} = {getattr(self, name)} is not in {low}..{high}")
        if self.rows not in (1, 2, 4, 8):
            raise ValueError(f"index_topk tuning: rows = {self.rows} is not 1, 2, 4 or 8")


@cache
def tuned(device: str) -> Tuning:
    """The measured choice for a device kind as JAX spells it ("NVIDIA H200"), or the defaults."""
    path = TUNED / f"{device.lower().replace(' ', '-')}.json"
    return Tuning(**json.loads(path.read_text())) if path.exists() else Tuning()
