"""How the Hopper kernel is tuned, and the choice measured on a device."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

TUNED = Path(__file__).parent / "tuned"


@dataclasses.dataclass(frozen=True)
class SparseAttentionConfig:
    """Of one block of threads, which takes rows one after another, or a split of one row.

    blocks: how many run at once, one per multiprocessor. registers: per thread of the warpgroup of scores, of each of
    the two of values, and of the producer; over the four they sum to 512 or less. records_ahead: the next row's records
    come into the L2 cache while a row is computed. split_tiles: (rows of a step up to which, tiles of a split of each),
    ascending; the rows of larger steps are not split. `blocks` and `records_ahead` are of rows that are not split.
    """

    blocks: int = 132
    registers: tuple[int, int, int] = (80, 160, 112)
    records_ahead: bool = False
    split_tiles: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        scores, values, producer = self.registers
        if scores + 2 * values + producer > 512 or any(r % 8 for r in self.registers):
            raise ValueError(f"registers: {self.registers} do not fit 65,536 of a multiprocessor, in steps of 8")
        limits = [rows for rows, _ in self.split_tiles]
        if limits != sorted(set(limits)) or any(rows < 1 or tiles < 1 for rows, tiles in self.split_tiles):
            raise ValueError(f"split_tiles: {self.split_tiles} must be pairs of 1 or more, ascending in their first")

    def splits(self, rows: int, tiles: int) -> int:
        """How many blocks of threads share each of the `rows` of a step, of up to `tiles` tiles each; 1: none does."""
        return next((-(-tiles // each) for limit, each in self.split_tiles if rows <= limit), 1)


@functools.cache
def tuned(device: str) -> SparseAttentionConfig:
    """The measured choice for a device kind as JAX names it, or the defaults where none was measured."""
    path = TUNED / (device.lower().replace(" ", "-") + ".json")
    fields = json.loads(path.read_text()) if path.exists() else {}
    return SparseAttentionConfig(**{name: _tuples(value) for name, value in fields.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
