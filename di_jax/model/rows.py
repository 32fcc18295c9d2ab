"""The rows of one step: which tokens run, to which sequence each belongs, and where its caches are.

A step has T rows in tiles of `tile` rows; the rows of a tile belong to one sequence, at consecutive positions, and a
sequence's rows are consecutive in the step. Decode uses tiles of one row, so any mix of sequences fits; prefill uses
larger tiles, so that a tile shares its window and its index keys. Padding rows are not valid: they store nothing,
route to no expert and their results are never read.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

META = {"static": True}


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Rows:
    """T rows of S sequences. All arrays int32 unless said."""

    token: Array  # [T] ids; 0 on padding rows
    image: Array  # bool [T] position inside an image span: dead for the Engram, routed with bias_vl (numerics 12.5)
    valid: Array  # bool [T]
    position: Array  # [T] absolute, 0-based
    sequence: Array  # [T] index into the arrays below
    start: Array  # [S] position of the sequence's first row of this step = tokens already in the caches
    first_row: Array  # [S] row of that token
    count: Array  # [S] valid rows of the sequence in this step
    slot: Array  # [S] state slot (rings, Engram history)
    block_table: Array  # [S, blocks] pool blocks, one per `block_size` positions
    tile: int = dataclasses.field(metadata=META)
    decode: bool = dataclasses.field(metadata=META)

    @property
    def num_rows(self) -> int:
        return self.token.shape[0]

    @property
    def num_tiles(self) -> int:
        return self.num_rows // self.tile

    def row_start(self) -> Array:
        """[T] position of the first row that the row's sequence has in this step."""
        return self.start[self.sequence]

    def row_of(self, position: Array, sequence: Array) -> Array:
        """Row of `position` of `sequence` (broadcast); meaningful only inside the sequence's rows of this step."""
        row = self.first_row[sequence] + position - self.start[sequence]
        return jnp.clip(row, 0, self.num_rows - 1)

    def slot_of_rows(self, num_slots: int) -> Array:
        """[T] state slot, or `num_slots` (out of bounds: a scatter in drop mode skips it) on padding rows."""
        return jnp.where(self.valid, self.slot[self.sequence], num_slots)


def make_rows(
    token: Array,
    tile_sequence: Array,
    start: Array,
    first_row: Array,
    count: Array,
    slot: Array,
    block_table: Array,
    *,
    decode: bool,
    image: Array | None = None,
) -> Rows:
    """Expands what the host sends: token [T], tile_sequence [T / tile], and the [S] arrays of `Rows`."""
    num_rows, tile = token.shape[0], token.shape[0] // tile_sequence.shape[0]
    sequence = jnp.repeat(tile_sequence, tile)
    offset = jnp.arange(num_rows, dtype=jnp.int32) - first_row[sequence]
    valid = (offset >= 0) & (offset < count[sequence])
    return Rows(
        token=jnp.where(valid, token, 0),
        image=jnp.zeros(num_rows, bool) if image is None else image & valid,
        valid=valid,
        position=jnp.where(valid, start[sequence] + offset, 0),
        sequence=sequence,
        start=start,
        first_row=first_row,
        count=count,
        slot=slot,
        block_table=block_table,
        tile=tile,
        decode=decode,
    )
