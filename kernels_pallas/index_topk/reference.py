"""Index scores over the paged keys and the choice of entries, in plain jnp (numerics 8)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from di_jax.model.cache import CacheLayout
from di_jax.model.rows import Rows
from kernels_pallas.tiling import map_tiles

NO_ENTRY = jnp.iinfo(jnp.int32).max


def scores(query: Array, weights: Array, keys: Array) -> Array:
    """sum_h w_h relu(q_h . k): query [..., H, d], weights [..., H], keys [N, d] or [..., N, d] -> [..., N], fp32."""
    spec = "...hd,nd->...hn" if keys.ndim == 2 else "...hd,...nd->...hn"
    dots = jnp.einsum(spec, query, keys, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return jnp.sum(jnp.maximum(dots, 0) * weights[..., None], axis=-2)


def ascending(entry: Array, found: Array) -> Array:
    """Entries [..., k] that were found, in ascending order, -1 padded."""
    entry = jnp.sort(jnp.where(found, entry, NO_ENTRY), axis=-1)
    return jnp.where(entry == NO_ENTRY, -1, entry)


def best_entries(score: Array, k: int) -> Array:
    """The k best of score [..., N] that are not -inf: int32 [..., k] ascending, -1 padded; ties take the lower."""
    k_here = min(k, score.shape[-1])
    # `top_k` puts -0, which heads that see nothing may sum up to, below 0: as scores they are a tie.
    value, entry = lax.top_k(jnp.where(score == 0, 0.0, score), k_here)
    chosen = ascending(entry.astype(jnp.int32), value > -jnp.inf)
    return jnp.pad(chosen, [(0, 0)] * (chosen.ndim - 1) + [(0, k - k_here)], constant_values=-1)


def candidate_blocks(score: Array, reachable: Array, size: int, k: int) -> Array:
    """The k best blocks of `size` entries by their best reachable entry: int32 [..., k] ascending, -1 padded.

    score [..., N] (-inf where unreachable), reachable int32 [...] entries of the query; the block of the last
    reachable entry is always kept (numerics 8.7).
    """
    blocks = -(-score.shape[-1] // size)
    padded = jnp.pad(
        score, [(0, 0)] * (score.ndim - 1) + [(0, blocks * size - score.shape[-1])], constant_values=-jnp.inf
    )
    best = jnp.max(padded.reshape(*score.shape[:-1], blocks, size), axis=-1)
    pinned = jnp.arange(blocks) == ((reachable - 1) // size)[..., None]
    return best_entries(jnp.where(pinned & (reachable > 0)[..., None], jnp.inf, best), k)


def all_entries(reachable: Array, k: int) -> Array:
    """Every reachable entry [T], at most k: int32 [T, k] ascending, -1 padded (numerics 8.6: nothing to choose)."""
    entry = jnp.arange(k, dtype=jnp.int32)
    return jnp.where(entry < reachable[:, None], entry, -1)


def index_topk(
    query: Array,
    weights: Array,
    pool: Array,
    rows: Rows,
    layout: CacheLayout,
    *,
    source: int,
    candidates: Array | None,
    make_candidates: bool,
) -> tuple[Array, Array | None]:
    """See `api.index_topk`."""
    config, codec, dtype = layout.config, layout.formats.index, query.dtype
    ratio, per_block = config.kv_source_ratios[source], layout.entries_per_block[source]
    first = layout.source_offset[source]
    heads, dim = query.shape[1:]
    capacity = rows.block_table.shape[-1] * per_block
    size, top_k, top_blocks = config.candidate_block_size, config.index_topk, config.candidate_topk_blocks
    tile = rows.tile
    if candidates is not None and top_blocks * size >= capacity:
        candidates = None  # every reachable block is a candidate: the filter is the identity

    def tiled(x: Array) -> Array:
        return x.reshape(rows.num_tiles, tile, *x.shape[1:])

    reachable = (rows.position + 1) // ratio
    if capacity <= top_k and not (make_candidates and top_blocks * size < capacity):
        return all_entries(reachable, top_k), None  # unscored

    def scan_all(x: tuple[Array, ...]) -> tuple[Array, Array | None]:
        q, w, reach, sequence = x
        page = pool[rows.block_table[sequence[0]], first : first + per_block]
        keys = codec.decode(page.reshape(capacity, -1)).astype(dtype)
        visible = jnp.arange(capacity) < reach[:, None]
        score = jnp.where(visible, scores(q, w, keys), -jnp.inf)
        blocks = candidate_blocks(score, reach, size, top_blocks) if make_candidates else None
        return best_entries(score, top_k), blocks

    def scan_candidates(x: tuple[Array, ...]) -> tuple[Array, None]:
        q, w, reach, sequence, blocks = x
        entry = (blocks[..., None] * size + jnp.arange(size)).reshape(tile, -1)
        usable = jnp.repeat(blocks >= 0, size, axis=-1) & (entry < reach[:, None])
        safe = jnp.where(usable, entry, 0)
        row = layout.entry_row(source, rows.block_table[sequence[0]], safe.reshape(-1))
        keys = codec.decode(pool.reshape(-1, pool.shape[-1])[row]).astype(dtype).reshape(tile, -1, dim)
        score = jnp.where(usable, scores(q, w, keys), -jnp.inf)
        # Ascending candidates keep "lower entry first" on ties; then map compact coordinates back.
        compact = best_entries(score, top_k)
        chosen = jnp.take_along_axis(entry, jnp.maximum(compact, 0), axis=-1)
        return jnp.where(compact >= 0, chosen, -1), None

    xs: tuple[Array, ...] = (tiled(query), tiled(weights), tiled(reachable), tiled(rows.sequence))
    if candidates is None:
        per_tile = 4 * capacity * (tile * (heads + 3) + dim)
        chosen, blocks = map_tiles(scan_all, xs, per_tile)
    else:
        per_tile = 4 * tile * top_blocks * size * (heads + dim + 3)
        chosen, blocks = map_tiles(scan_candidates, (*xs, tiled(candidates)), per_tile)
    flat = (rows.num_rows, -1)
    return chosen.reshape(flat), None if blocks is None else blocks.reshape(flat)
