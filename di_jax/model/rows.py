"""The rows of one step: which tokens run, to which sequence each belongs, and where its caches are.

A step has T rows in tiles of `tile` rows; the rows of a tile belong to one sequence, at consecutive positions, and a
sequence's rows are consecutive in the step. Decode uses tiles of one row, so any mix of sequences fits; prefill uses
larger tiles, so that a tile shares its window and its index keys. Padding rows are not valid: they store nothing,
route to no expert and their results are never read.

Under context parallelism a rank works on a share of the tiles as queries and stores what all of them write: `share`
takes the first from the second, and `gathered` is the way back for what the rows' owners computed.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

META = {"static": True}


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Rows:
    """T rows of S sequences. All arrays int32 unless said.

    first_row counts in the whole step, also in a share.
    """

    token: Array  # [T] ids; 0 on padding rows
    image: Array  # bool [T] position inside an image span: dead for the Engram, routed with bias_vl (numerics 12.5)
    valid: Array  # bool [T]
    position: Array  # [T] absolute, 0-based
    sequence: Array  # [T] index into the arrays below
    start: Array  # [S] position of the sequence's first row of this step = tokens already in the caches
    first_row: Array  # [S] row of that token
    count: Array  # [S] valid rows of the sequence in this step
    slot: Array  # [S] state slot (rings, Engram history)
    seed: Array  # uint32 [S] of the sequence, for choices that must not depend on the batch
    block_table: Array  # [S, blocks] pool blocks, one per `block_size` positions
    tile: int = dataclasses.field(metadata=META)
    decode: bool = dataclasses.field(metadata=META)
    whole: Rows | None = None  # of a share: all rows of the step
    tiles: Array | None = None  # of a share: [own tiles] which of the whole step's are here
    home: Array | None = None  # of a share: [whole tiles] where each tile is among the gathered ones
    axes: tuple[str, ...] = dataclasses.field(default=(), metadata=META)  # of a share: the mesh axes of its ranks

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
        """Row in the whole step of `position` of `sequence` (broadcast); meaningful only inside the sequence's rows."""
        row = self.first_row[sequence] + position - self.start[sequence]
        return jnp.clip(row, 0, self.stored.num_rows - 1)

    def slot_of_rows(self, num_slots: int) -> Array:
        """[T] state slot, or `num_slots` (out of bounds: a scatter in drop mode skips it) on padding rows."""
        return jnp.where(self.valid, self.slot[self.sequence], num_slots)

    @property
    def stored(self) -> Rows:
        """The rows that this rank's caches take in: all of the step."""
        return self if self.whole is None else self.whole

    def share(self, tiles: Array, home: Array, axes: tuple[str, ...]) -> Rows:
        """This rank's queries: some tiles of this step; tiles, home and axes as in `Rows`."""
        share = dataclasses.replace(self, whole=self, tiles=tiles, home=home, axes=axes)
        return dataclasses.replace(
            share,
            token=share.own(self.token),
            image=share.own(self.image),
            valid=share.own(self.valid),
            position=share.own(self.position),
            sequence=share.own(self.sequence),
        )

    def own(self, x: Array) -> Array:
        """What is for this rank's rows of x [whole T, ...]."""
        if self.whole is None:
            return x
        tiles = x.reshape(self.whole.num_tiles, self.tile, *x.shape[1:])
        return tiles[self.tiles].reshape(-1, *x.shape[1:])

    def gathered(self, x: Array) -> Array:
        """What all ranks computed for their rows, x [T, ...] here, in the order of the whole step."""
        if self.whole is None:
            return x
        tiles = x.reshape(self.num_tiles, self.tile, *x.shape[1:])
        everyone = lax.all_gather(tiles, self.axes, tiled=True)
        return everyone[self.home].reshape(self.whole.num_rows, *x.shape[1:])


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
    seed: Array | None = None,
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
        seed=jnp.zeros(slot.shape, jnp.uint32) if seed is None else seed,
        block_table=block_table,
        tile=tile,
        decode=decode,
    )
