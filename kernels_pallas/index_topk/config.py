"""Measured choices of the Hopper kernel, as data: `tuned/<device>.json`."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

TUNED = Path(__file__).parent / "tuned"


@dataclasses.dataclass(frozen=True)
class Tuning:
    """kind: operands of the products when a block has one row ("e4m3" or "bf16"; with more rows bf16). stages: units of
    keys in flight. units: most units of 128 keys of a block. rows: most rows of a block, in prefill.
    score_bytes: most bytes of scores at a time; more rows go in turns.
    """

    kind: str = "e4m3"
    stages: int = 3
    units: int = 16
    rows: int = 8
    warpgroups: int = 1
    score_bytes: int = 512 * 2**20

    def __post_init__(self) -> None:
        if self.kind not in ("bf16", "e4m3"):
            raise ValueError(f"index_topk tuning: kind {self.kind!r} is neither 'bf16' nor 'e4m3'")
        for name, low, high in (("stages", 2, 8), ("units", 1, 512), ("warpgroups", 1, 6), ("rows", 1, 8)):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"index_topk tuning: {name} = {getattr(self, name)} is not in {low}..{high}")


@cache
def tuned(device: str) -> Tuning:
    """The measured choice for a device kind as JAX spells it ("NVIDIA H200"), or the defaults."""
    path = TUNED / f"{device.lower().replace(' ', '-')}.json"
    return Tuning(**json.loads(path.read_text())) if path.exists() else Tuning()
