"""Pooling of open groups, norms, rotation and the stores into rings and pages, in plain jnp (numerics 6.2, 7, 14)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from di_jax.model.cache import CacheLayout
from di_jax.model.linear import rms_norm
from di_jax.model.rope import rotate, rotation
from di_jax.model.rows import Rows


def store_window(ring: Array, layer: Array | int, kv: Array, rows: Rows, layout: CacheLayout) -> Array:
    """See `api.store_window`."""
    ring_rows, slots = ring.shape[2], ring.shape[1]
    slot = jnp.where(stored_in_window(rows, ring_rows), rows.slot[rows.sequence], slots)
    record = layout.formats.window.encode(kv)
    if kv.ndim == 3:
        layer = layer + jnp.arange(len(kv), dtype=jnp.int32)[:, None]
    return ring.at[layer, slot, rows.position % ring_rows].set(record, mode="drop")


def stored_in_window(rows: Rows, ring_rows: int) -> Array:
    """bool [T] rows that leave their KV in the rings."""
    # A chunk longer than the ring would write one row twice in an unspecified order: only its tail is stored.
    first = jnp.maximum(rows.end - ring_rows, rows.window_start)
    return rows.valid & (rows.position >= first[rows.sequence])


def store_projected(
    ring: Array,
    layer: Array | int,
    projected: Array,
    norm_weight: Array,
    cos_sin: tuple[Array, Array],
    rows: Rows,
    layout: CacheLayout,
) -> Array:
    """See `api.store_projected`."""
    kv = _normed(projected, norm_weight[layer], layout, projected.dtype)
    return store_window(ring, layer, rotate(kv, cos_sin), rows, layout)


def store_entries(
    pool: Array,
    ring: Array,
    source: int,
    gate: Array | None,
    latent: Array,
    norm_weight: Array,
    rows: Rows,
    layout: CacheLayout,
    dtype: jnp.dtype,
) -> tuple[Array, Array, Array]:
    """See `api.store_entries`."""
    ratio = layout.config.kv_source_ratios[source]
    if gate is not None:
        ordinal = layout.config.pooled_sources.index(source)
        pair = jnp.stack([gate, latent], axis=1)
        pooled = pool_groups(pair, ring[ordinal], rows, ratio)[0]
        # The ring is read before it is written: an order that XLA sees lets the store run in place (three copies of the
        # ring a step on a CPU otherwise).
        pooled, pair = lax.optimization_barrier((pooled, pair))
        latent = pooled.astype(dtype)
        ring = store_pairs(ring, ordinal, pair, rows)
    latent = _normed(latent, norm_weight[source], layout, dtype)
    row, entry, emits = _entries(rows, ratio)
    record = layout.formats.compressed.encode(rotate(latent, rotation(layout.config, True, entry * ratio)))
    return write_entries(pool, source, record, row, entry, emits, rows, layout), ring, latent


def store_keys(pool: Array, source: int, key: Array, norm_weight: Array, rows: Rows, layout: CacheLayout) -> Array:
    """See `api.store_keys`."""
    ratio = layout.config.kv_source_ratios[source]
    row, entry, emits = _entries(rows, ratio)
    normed = _normed(key, norm_weight[source], layout, key.dtype)
    record = layout.formats.index.encode(rotate(normed, rotation(layout.config, True, entry * ratio)))
    return write_entries(pool, source, record, row, entry, emits, rows, layout)


def _normed(x: Array, weight: Array, layout: CacheLayout, dtype: jnp.dtype) -> Array:
    return rms_norm(x, weight, layout.config.rms_norm_eps).astype(dtype)


def _entries(rows: Rows, ratio: int) -> tuple[Array, Array, Array]:
    """Groups that this step may complete: (last row, entry, whether it emits), each [N]."""
    if ratio == 1:
        return jnp.arange(rows.num_rows, dtype=jnp.int32), rows.position, rows.valid
    row, position, emits = group_ends(rows, ratio)
    return row, position // ratio, emits


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
    """Channelwise softmax pooling of the groups that this step completes (numerics 7).

    pair fp32 [T, 2, d] (gate, latent); ring fp32 [slots, ring, 2, d] holds the pairs before this step.
    Returns pooled fp32 [N, d], and for each its last row [N], its entry number [N] and whether it emits, bool [N].
    """
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
    """Keeps the last pairs of every sequence in ring [pooled sources, slots, ring, 2, d]."""
    ring_rows, slots = ring.shape[2], ring.shape[1]
    slot = rows.slot_of_rows(slots)
    slot = jnp.where(rows.position >= rows.end[rows.sequence] - ring_rows, slot, slots)
    return ring.at[ordinal, slot, rows.position % ring_rows].set(pair, mode="drop")


def write_entries(
    pool: Array, source: int, record: Array, row: Array, entry: Array, emits: Array, rows: Rows, layout: CacheLayout
) -> Array:
    """Stores record [N, record] as entry [N] of the sequence of row [N] where emits [N]; returns the pool."""
    table = rows.block_table[rows.sequence[row]]
    target = layout.entry_row(source, table, entry[:, None])[:, 0]
    flat = pool.reshape(-1, pool.shape[-1])
    missing = entry * layout.config.kv_source_ratios[source] >= rows.cached[rows.sequence[row]]
    target = jnp.where(emits & missing, target, flat.shape[0])
    return flat.at[target].set(record, mode="drop").reshape(pool.shape)
