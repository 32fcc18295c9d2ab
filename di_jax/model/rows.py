"""The rows of one step: which tokens run, to which sequence each belongs, and where its caches are.

A step has T rows in tiles of `tile` rows; the rows of a tile belong to one sequence, at consecutive positions, and a
sequence's rows are consecutive in the step. Decode uses tiles of one row, so any mix of sequences fits; prefill uses
larger tiles, so that a tile shares its window and its index keys. Padding rows are not valid: they store nothing,
route to no expert and their results are never read.

Under context parallelism a rank works on a share of the tiles as queries and stores what all of them write: `share`
takes the first from the second, and `gathered` is the way back for what the rows' owners computed.

Bounded replay (numerics 13) runs rows of which only a part matters to the decoder layers. `masked` are all of them as
these layers see them, `kept` that part alone, in a layout of its own: rows of a step like any other.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

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
    window_start: Array  # [S] no window reaches below it; rows below it see no window key and store none
    decoder_start: Array  # [S] `window_start` of the decoder layers
    cached: Array  # [S] compressed entries and index keys of positions below it exist and are left alone
    history: Array  # [S, n] ids right before `start`, the most recent last; -1: dead, or before the sequence's first
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

    @property
    def end(self) -> Array:
        """[S] position after the sequence's last row of this step = tokens in the caches afterwards."""
        return self.start + self.count

    @property
    def masked(self) -> Rows:
        """These rows in the decoder layers when all are computed: what is below `decoder_start` is never read."""
        whole = None if self.whole is None else self.whole.masked
        return dataclasses.replace(self, window_start=self.decoder_start, whole=whole)

    def kept(self, num_rows: int, tile_sequence: Array, first_row: Array) -> Rows:
        """The rows of this whole step from `decoder_start` on: what the decoder layers run when the others are dropped.

        tile_sequence [tiles], first_row [S]: where the host put them among `num_rows`, as in `make_rows`.
        """
        start = jnp.maximum(self.start, self.decoder_start)
        rows = make_rows(
            jnp.zeros(num_rows, jnp.int32),
            tile_sequence,
            start,
            first_row,
            jnp.maximum(self.end - start, 0),
            self.slot,
            self.block_table,
            decode=self.decode,
            seed=self.seed,
            window_start=self.decoder_start,
            decoder_start=self.decoder_start,
            cached=self.cached,
        )
        origin = self.row_of(rows.position, rows.sequence)
        token = jnp.where(rows.valid, self.token[origin], 0)
        return dataclasses.replace(rows, token=token, image=self.image[origin] & rows.valid)

    def taken(self, rows: Rows, arrays: Any) -> Any:
        """What is for these kept rows of arrays [T, ...] of `rows`, the step's rows that this rank computes."""
        if self.whole is None:
            origin = rows.row_of(self.position, self.sequence)
            return jax.tree.map(lambda x: x[origin], arrays)
        # Kept rows have other owners than before: each rank lays what it has into zeros, and one term of each sum is
        # not zero. The kept rows are few.
        total, sequence = self.whole.num_rows, rows.sequence
        row = self.first_row[sequence] + rows.position - self.start[sequence]
        row = jnp.where(rows.valid & (rows.position >= self.start[sequence]), row, total)
        laid = jax.tree.map(lambda x: jnp.zeros((total, *x.shape[1:]), x.dtype).at[row].set(x, mode="drop"), arrays)
        return jax.tree.map(self.own, lax.psum(laid, self.axes))

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
    window_start: Array | None = None,
    decoder_start: Array | None = None,
    cached: Array | None = None,
    history: Array | None = None,
) -> Rows:
    """Expands what the host sends: token [T], tile_sequence [T / tile], and the [S] arrays of `Rows`.

    window_start, decoder_start, cached: None for 0, nothing cut and nothing cached; history: None for nothing before.
    """
    num_rows, tile = token.shape[0], token.shape[0] // tile_sequence.shape[0]
    sequence = jnp.repeat(tile_sequence, tile)
    offset = jnp.arange(num_rows, dtype=jnp.int32) - first_row[sequence]
    valid = (offset >= 0) & (offset < count[sequence])
    zero = jnp.zeros_like(start)
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
        window_start=zero if window_start is None else window_start,
        decoder_start=zero if decoder_start is None else decoder_start,
        cached=zero if cached is None else cached,
        history=jnp.zeros((*start.shape, 0), jnp.int32) if history is None else history,
        tile=tile,
        decode=decode,
    )
