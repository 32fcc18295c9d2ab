"""All compressed entries as keys under a mask of the selected ones: dense products, and a gradient for training.

Costs context / k times the flops of the gather, and none of its scatter in the backward pass (495 of 870 ms a step
of the demo model on an H200 at 512 entries). Never the engine's choice: its cost grows with the context.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from di_jax.model.cache import CacheLayout
from di_jax.model.rope import rotate
from di_jax.model.rows import Rows
from kernels_pallas.sparse_attention.reference import attend
from kernels_pallas.tiling import map_tiles

ALL_REACHABLE = -2  # in the first selected entry of a row: it attends to every entry that it can reach


def sparse_attention(
    query: Array,
    step_kv: Array,
    ring: Array,
    pool: Array | None,
    selected: Array | None,
    sink: Array,
    cos_sin: tuple[Array, Array],
    rows: Rows,
    layout: CacheLayout,
    *,
    source: int,
    scale: float,
) -> Array:
    """See `api.sparse_attention`. Prefill from empty caches only: history in the ring is not read."""
    window_rows, tile = layout.config.sliding_window, rows.tile
    heads, dim = query.shape[1:]
    dtype = query.dtype
    capacity = 0 if pool is None else rows.block_table.shape[-1] * layout.entries_per_block[source]

    @jax.checkpoint
    def one_tile(x: tuple[Array, ...]) -> Array:
        q, position, sequence, *chosen = x
        sequence = sequence[0]
        span = position[0] - (window_rows - 1) + jnp.arange(window_rows + tile - 1, dtype=jnp.int32)
        keys = step_kv[rows.row_of(span, sequence)]
        age = position[:, None] - span[None, :]
        mask = (age >= 0) & (age < window_rows) & (span >= rows.start[sequence])
        if chosen and pool is not None:
            first = layout.source_offset[source]
            pages = pool[rows.block_table[sequence], first : first + layout.entries_per_block[source]]
            far = layout.formats.compressed.decode(pages.reshape(capacity, -1)).astype(dtype)
            entry = chosen[0]
            picked = jnp.zeros((tile, capacity), bool)
            picked = picked.at[jnp.arange(tile)[:, None], jnp.where(entry >= 0, entry, capacity)].set(True, mode="drop")
            reachable = (position + 1) // layout.config.kv_source_ratios[source]
            every = (entry[:, :1] == ALL_REACHABLE) & (jnp.arange(capacity) < reachable[:, None])
            keys, mask = jnp.concatenate([keys, far]), jnp.concatenate([mask, picked | every], axis=1)
        none = jnp.zeros((tile, 0), bool)
        return attend(q, keys, mask, jnp.zeros((tile, 0, dim), dtype), none, sink, scale)

    def tiled(x: Array) -> Array:
        return x.reshape(rows.num_tiles, tile, *x.shape[1:])

    xs = [tiled(query), tiled(rows.position), tiled(rows.sequence)]
    if selected is not None:
        xs.append(tiled(selected))
    per_tile = 4 * (window_rows + tile + capacity) * (dim + 2 * tile * heads)
    out = map_tiles(one_tile, tuple(xs), per_tile).reshape(rows.num_rows, heads, dim)
    cos, sin = cos_sin
    return rotate(out, (cos[:, None], sin[:, None]), inverse=True)
