"""Tuning of the hyper-connection kernels: measured choices are data, one file a device."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Shapes of the two launches of a site."""

    warpgroups: int = 1  # of 64 rows, in a CTA of the first launch
    chunks: tuple[int, ...] = (64,)  # channels of every stream in such a CTA, loaded, mixed and stored in this order
    norm_groups: int = 4  # warpgroups of the second launch that norm; each CTA has 4 rows

    def __post_init__(self) -> None:
        if not self.chunks or any(chunk not in (16, 32, 64) for chunk in self.chunks):
            raise ValueError(f"chunks {self.chunks}: each must be 16, 32 or 64")
        if self.norm_groups not in (1, 2, 4):
            raise ValueError(f"norm_groups {self.norm_groups}: expected 1, 2 or 4")

    @property
    def channels(self) -> int:
        return sum(self.chunks)


@cache
def tuned(device: str, hidden: int) -> tuple[tuple[int, Tuning], ...]:
    """(rows up to which it was the fastest, choice) of a device kind, ascending; empty where nothing was measured."""
    path = Path(__file__).parent / "tuned" / f"{device.lower().replace(' ', '-')}.json"
    if not path.exists():
        return ()
    choices = json.loads(path.read_text()).get(str(hidden), [])
    return tuple((c["rows"], Tuning(**c["tuning"] | {"chunks": tuple(c["tuning"]["chunks"])})) for c in choices)


def tuning_for(device: str, hidden: int, rows: int) -> Tuning:
    """The measured choice for a step of `rows`, else the default."""
    choices = tuned(device, hidden)
    for limit, tuning in choices:
        if rows <= limit:
            return tuning
    return choices[-1][1] if choices else Tuning()
