"""Window plus selected compressed entries, shared-KV attention with sinks, in plain jnp (numerics 6.3-6.5)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from di_jax.model.cache import CacheLayout
from di_jax.model.rope import rotate
from di_jax.model.rows import Rows
from kernels_pallas.tiling import map_tiles

MASKED = -1e30


def attend(
    query: Array,
    window: Array,
    window_mask: Array,
    selected: Array,
    selected_mask: Array,
    sink: Array,
    scale: float,
) -> Array:
    """Attention of one tile of rows over two key sets, each key also the value, shared by all heads.

    query [B, H, d]; window [W, d] with bool mask [B, W]; selected [B, K, d] with bool mask [B, K]; sink fp32 [H], an
    unscaled logit that only enlarges the denominator. Returns [B, H, d] in the query's dtype; probabilities take the
    keys' dtype for the value product while their sum stays fp32 (numerics 6.4).
    """
    exact = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    near = jnp.einsum("bhd,wd->bhw", query, window, **exact) * scale
    far = jnp.einsum("bhd,bkd->bhk", query, selected, **exact) * scale
    near = jnp.where(window_mask[:, None], near, MASKED)
    far = jnp.where(selected_mask[:, None], far, MASKED)
    peak = jnp.maximum(jnp.max(near, axis=-1), sink)
    if far.shape[-1]:
        peak = jnp.maximum(peak, jnp.max(far, axis=-1))
    near, far = jnp.exp(near - peak[..., None]), jnp.exp(far - peak[..., None])
    total = jnp.sum(near, axis=-1) + jnp.sum(far, axis=-1) + jnp.exp(sink - peak)
    out = jnp.einsum("bhw,wd->bhd", near.astype(window.dtype), window, **exact)
    out += jnp.einsum("bhk,bkd->bhd", far.astype(selected.dtype), selected, **exact)
    return (out / total[..., None]).astype(query.dtype)


def sparse_attention(
    layer: Array | int,
    query: Array,
    step_kv: Array,
    window: Array,
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
    """See `api.sparse_attention`."""
    window_rows, ring_rows, tile = layout.config.sliding_window, layout.config.window_ring, rows.tile
    heads, dim = query.shape[1:]
    sink = sink[layer]
    formats, dtype = layout.formats, query.dtype
    top_k = 0 if selected is None else selected.shape[-1]
    if pool is not None:
        pool = pool.reshape(-1, pool.shape[-1])

    def one_tile(x: tuple[Array, ...]) -> Array:
        q, position, sequence, *chosen = x
        sequence = sequence[0]
        # The tile's rows are consecutive, so their windows together are one span that ends with the last row.
        span = position[0] - (window_rows - 1) + jnp.arange(window_rows + tile - 1, dtype=jnp.int32)
        keys = formats.window.decode(window[layer, rows.slot[sequence], span % ring_rows]).astype(dtype)
        if not rows.decode:  # rows of this step are not in the ring yet: prefill reads history before it stores
            fresh = step_kv[rows.row_of(span, sequence)]
            keys = jnp.where((span >= rows.start[sequence])[:, None], fresh, keys)
        # Below the first key that counts the ring holds what another sequence left: 0 * NaN would be NaN.
        real = span >= rows.window_start[sequence]
        keys = jnp.where(real[:, None], keys, 0)
        age = position[:, None] - span[None, :]
        near = (age >= 0) & (age < window_rows) & real
        if not chosen:
            empty = jnp.zeros((tile, 0, dim), dtype)
            return attend(q, keys, near, empty, jnp.zeros((tile, 0), bool), sink, scale)
        entry = chosen[0]
        row = layout.entry_row(source, rows.block_table[sequence], jnp.maximum(entry, 0).reshape(-1))
        assert pool is not None
        far = formats.compressed.decode(pool[row]).astype(dtype).reshape(tile, top_k, dim)
        # What is read for no entry may be another sequence's, in a block that was given anew: the same.
        exists = entry >= 0
        far = jnp.where(exists[..., None], far, 0)
        return attend(q, keys, near, far, exists, sink, scale)

    def tiled(x: Array) -> Array:
        return x.reshape(rows.num_tiles, tile, *x.shape[1:])

    xs = [tiled(query), tiled(rows.position), tiled(rows.sequence)]
    if selected is not None:
        xs.append(tiled(selected))
    per_tile = 4 * ((window_rows + tile) * (dim + tile * heads) + tile * top_k * (dim + 2 * heads))
    out = map_tiles(one_tile, tuple(xs), per_tile).reshape(rows.num_rows, heads, dim)
    cos, sin = cos_sin
    return rotate(out, (cos[:, None], sin[:, None]), inverse=True)
