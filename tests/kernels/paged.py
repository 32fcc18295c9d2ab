"""Steps and paged pools for kernel tests, addressed by plain Python and not by the code under test."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from golden_model import TINY

from di_jax.model.cache import CacheLayout
from di_jax.model.config import ModelConfig
from di_jax.model.quantization import CacheFormats
from di_jax.model.rows import Rows, make_rows

PLAIN = CacheFormats.plain(jnp.dtype(jnp.float32))


def small_layout(formats: CacheFormats = PLAIN, *, blocks: int = 12, **changes: int) -> CacheLayout:
    """The tiny model's sizes with `changes`, in blocks of 16 positions so that short sequences span several."""
    config: ModelConfig = dataclasses.replace(TINY, **changes)  # type: ignore[arg-type]
    return CacheLayout(config, formats, num_blocks=blocks, num_slots=4, block_size=16)


@dataclasses.dataclass
class Piece:
    """Rows of one sequence in a step. blocks: its block table; window_start and cached as in `Rows`."""

    start: int
    count: int
    slot: int
    blocks: Sequence[int]
    window_start: int = 0
    cached: int = 0

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.count)


def rows_of(pieces: Sequence[Piece], *, tile: int, padding_tiles: int = 1) -> tuple[Rows, list[int]]:
    """The step's Rows (tile 1 = decode) with tiles of padding at its end, and the first row of each piece."""
    tiles = [-(-p.count // tile) for p in pieces]
    first = [tile * sum(tiles[:i]) for i in range(len(pieces))]
    total, sequences = sum(tiles) + padding_tiles, len(pieces) + 1
    owner = np.repeat(np.arange(sequences), [*tiles, padding_tiles]).astype(np.int32)

    def field(values: Sequence[int]) -> jnp.ndarray:
        return jnp.asarray([*values, 0], jnp.int32)

    tables = np.zeros((sequences, max(len(p.blocks) for p in pieces)), np.int32)
    for i, piece in enumerate(pieces):
        tables[i, : len(piece.blocks)] = piece.blocks
    rows = make_rows(
        jnp.ones(total * tile, jnp.int32),
        jnp.asarray(owner),
        start=field([p.start for p in pieces]),
        first_row=field(first),
        count=field([p.count for p in pieces]),
        slot=field([p.slot for p in pieces]),
        block_table=jnp.asarray(tables),
        decode=tile == 1,
        window_start=field([p.window_start for p in pieces]),
        cached=field([p.cached for p in pieces]),
    )
    return rows, first


def page_of(layout: CacheLayout, source: int, blocks: Sequence[int], entry: int) -> tuple[int, int]:
    """(block, row in the block) of a compressed entry: a block holds its positions' entries, source after source."""
    ratios = layout.config.kv_source_ratios
    before = sum(layout.block_size // r for r in ratios[:source])
    position = entry * ratios[source]
    return blocks[position // layout.block_size], before + position % layout.block_size // ratios[source]
