"""Pooling of open groups and the stores into rings and pages, in plain jnp (numerics 7 and 14)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from di_jax.model.cache import CacheLayout
from di_jax.model.rows import Rows


def store_window(ring: Array, layer: Array | int, kv: Array, rows: Rows, layout: CacheLayout) -> Array:
    """See `api.store_window`."""
    ring_rows, slots = ring.shape[2], ring.shape[1]
    slot = rows.slot_of_rows(slots)
    # A chunk longer than the ring would write one row twice in an unspecified order: only its tail is stored.
    first = jnp.maximum(rows.end - ring_rows, rows.window_start)
    slot = jnp.where(rows.position >= first[rows.sequence], slot, slots)
    record = layout.formats.window.encode(kv)
    return ring.at[layer, slot, rows.position % ring_rows].set(record, mode="drop")


def group_ends(rows: Rows, ratio: int) -> tuple[Array, Array, Array]:
    """Rows that may complete a group: (row, position, emits), each [tiles * ceil(tile / ratio)].

    A tile's consecutive positions hold at most ceil(tile / ratio) group ends, so a pooled source does 1 / ratio of
    the work of its rows.
    """
    per_tile = -(-rows.tile // ratio)
    first = rows.position.reshape(rows.num_tiles, rows.tile)[:, 0]
    offset = (ratio - 1 - first % ratio)[:, None] + ratio * jnp.arange(per_tile, dtype=jnp.int32)
    inside = (offset < rows.tile).reshape(-1)
    row = (jnp.arange(rows.num_tiles, dtype=jnp.int32)[:, None] * rows.tile + offset).reshape(-1)
    row = jnp.minimum(row, rows.num_rows - 1)
    return row, rows.position[row], inside & rows.valid[row]


def pool_groups(pair: Array, ring: Array, rows: Rows, ratio: int) -> tuple[Array, Array, Array, Array]:
    """See `api.pool_groups`."""
    ring_rows = ring.shape[1]
    row, position, emits = group_ends(rows, ratio)
    sequence = rows.sequence[row]
    member = position[:, None] - (ratio - 1) + jnp.arange(ratio, dtype=jnp.int32)
    history = ring[rows.slot[sequence][:, None], member % ring_rows]
    fresh = pair[rows.row_of(member, sequence[:, None])]
    pairs = jnp.where((member >= rows.start[sequence][:, None])[..., None, None], fresh, history)
    gate, latent = pairs[..., 0, :], pairs[..., 1, :]
    pooled = jnp.sum(jax.nn.softmax(gate, axis=1) * latent, axis=1)
    return pooled, row, position // ratio, emits


def store_pairs(ring: Array, ordinal: int, pair: Array, rows: Rows) -> Array:
    """See `api.store_pairs`."""
    ring_rows, slots = ring.shape[2], ring.shape[1]
    slot = rows.slot_of_rows(slots)
    slot = jnp.where(rows.position >= rows.end[rows.sequence] - ring_rows, slot, slots)
    return ring.at[ordinal, slot, rows.position % ring_rows].set(pair, mode="drop")


def store_entries(
    pool: Array, source: int, record: Array, row: Array, entry: Array, emits: Array, rows: Rows, layout: CacheLayout
) -> Array:
    """See `api.store_entries`."""
    table = rows.block_table[rows.sequence[row]]
    target = layout.entry_row(source, table, entry[:, None])[:, 0]
    flat = pool.reshape(-1, pool.shape[-1])
    missing = entry * layout.config.kv_source_ratios[source] >= rows.cached[rows.sequence[row]]
    target = jnp.where(emits & missing, target, flat.shape[0])
    return flat.at[target].set(record, mode="drop").reshape(pool.shape)
