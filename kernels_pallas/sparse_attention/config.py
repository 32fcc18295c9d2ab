"""How the Hopper kernel is tuned, and the choice measured on a device."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

TUNED = Path(__file__).parent / "tuned"


@dataclasses.dataclass(frozen=True)
class SparseAttentionConfig:
    """Of one block of threads, which takes rows one after another.

    blocks: how many run at once, one per multiprocessor. registers: per thread of the warpgroup of scores, of each of
    the two of values, and of the producer; over the four they sum to 512 or less. records_ahead: the next row's records
    come into the L2 cache while a row is computed.
    """

    blocks: int = 132
    registers: tuple[int, int, int] = (80, 160, 112)
    records_ahead: bool = False

    def __post_init__(self) -> None:
        scores, values, producer = self.registers
        if scores + 2 * values + producer > 512 or any(r % 8 for r in self.registers):
            raise ValueError(f"registers: {self.registers} do not fit 65,536 of a multiprocessor, in steps of 8")


@functools.cache
def tuned(device: str) -> SparseAttentionConfig:
    """The measured choice for a device kind as JAX names it, or the defaults where none was measured."""
    path = TUNED / (device.lower().replace(" ", "-") + ".json")
    if not path.exists():
        return SparseAttentionConfig()
    fields = json.loads(path.read_text())
    return SparseAttentionConfig(**{**fields, "registers": tuple(fields["registers"])})
