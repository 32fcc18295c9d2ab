"""Cache writes of a layer: window rows, open compressor pairs, completed compressed entries and index keys.

A source's entries and keys are two calls, with the product that makes keys of latents between them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from di_jax.model.cache import CacheLayout
from di_jax.model.quantization import CacheFormats, Codec
from di_jax.model.rows import Rows
from kernels_pallas.compress_store import reference
from kernels_pallas.compress_store.config import tuned
from kernels_pallas.hopper import choose_kernel, unavailable

OPERATION = "compress_store"
MOST_RECORDS = 2**31 - 1
QUANTIZED = CacheFormats.quantized()


def store_window(
    ring: Array, layer: Array | int, kv: Array, rows: Rows, layout: CacheLayout, *, implementation: str = "auto"
) -> Array:
    """Quantizes kv [T, d] and stores it at (layer, slot, position mod ring) of ring [layers, slots, ring, record].

    Of n consecutive layers at once, from `layer` on: kv [n, T, d]. Rows below their sequence's `window_start` are left
    out. UnsupportedShape, here and below: the named kernel cannot run.
    """
    why = unavailable() or unsupported(kv, 512, layout, "window") or _too_many(ring)
    run = choose_kernel(OPERATION, implementation, _kernel("store_window"), reference.store_window, why)
    return run(ring, layer, kv, rows, layout)


def store_projected(
    ring: Array,
    layer: Array | int,
    projected: Array,
    norm_weight: Array,
    cos_sin: tuple[Array, Array],
    rows: Rows,
    layout: CacheLayout,
    *,
    implementation: str = "auto",
) -> Array:
    """`store_window` of the projection itself: norms projected [T, d] with norm_weight [layers, d] at `layer` and
    rotates it by cos and sin, fp32 [T, rope / 2], first (numerics 6.2).
    """
    why = unavailable() or unsupported(projected, 512, layout, "window", norm_weight) or _too_many(ring)
    run = choose_kernel(OPERATION, implementation, _kernel("store_projected"), reference.store_projected, why)
    return run(ring, layer, projected, norm_weight, cos_sin, rows, layout)


def store_entries(
    pool: Array,
    ring: Array,
    source: int,
    gate: Array | None,
    latent: Array,
    norm_weight: Array,
    rows: Rows,
    layout: CacheLayout,
    *,
    dtype: jnp.dtype,
    implementation: str = "auto",
) -> tuple[Array, Array, Array]:
    """Pools, norms, rotates and quantizes what KV source `source` completes in this step (numerics 7).

    pool [blocks, rows_per_block, record] of compressed KV; ring fp32 [pooled sources, slots, ring, 2, d] holds the
    pairs (gate, latent) before this step; gate and latent fp32 [T, d], or gate None and latent [T, d] of `dtype` for a
    source of ratio 1, which pools nothing; norm_weight [sources, d]. Entries of positions below their sequence's
    `cached`, a multiple of the ratio, are left as they are.
    Returns the pool, the ring with this step's last pairs, and the normed latents before rotation [N, d] of `dtype`:
    ceil(tile / ratio) to a tile of rows. A latent that no group became has no meaning.
    """
    why = unavailable() or unsupported_entries(latent, source, rows, layout, norm_weight, dtype, pool, ring)
    run = choose_kernel(OPERATION, implementation, _kernel("store_entries"), reference.store_entries, why)
    return run(pool, ring, source, gate, latent, norm_weight, rows, layout, dtype)


def store_keys(
    pool: Array,
    source: int,
    key: Array,
    norm_weight: Array,
    rows: Rows,
    layout: CacheLayout,
    *,
    implementation: str = "auto",
) -> Array:
    """Norms, rotates and quantizes key [N, d], projected from the latents of `store_entries`, into the pool of index
    keys [blocks, rows_per_block, record], at the places of their entries (numerics 8.1). norm_weight [sources, d].
    """
    why = unavailable() or unsupported(key, 128, layout, "index", norm_weight)
    why = why or _splits_groups(source, rows, layout) or _too_many(pool)
    run = choose_kernel(OPERATION, implementation, _kernel("store_keys"), reference.store_keys, why)
    return run(pool, source, key, norm_weight, rows, layout)


def _kernel(name: str) -> Any:
    def run(*args: Any) -> Any:
        from kernels_pallas.compress_store import mosaic_gpu_sm90

        return getattr(mosaic_gpu_sm90, name)(*args, tuning=tuned(jax.devices()[0].device_kind))

    return run


def unsupported(
    x: Array, channels: int, layout: CacheLayout, cache: str, norm_weight: Array | None = None
) -> str | None:
    """Why the Hopper kernel cannot take rows [..., T, d] for a cache of `layout.formats`; None where it can."""
    codec: Codec = getattr(layout.formats, cache)
    if x.dtype != jnp.bfloat16:
        return f"rows must be bfloat16, they are {x.dtype}"
    if x.shape[-1] != channels or layout.config.qk_rope_head_dim != 64:
        return (
            f"{cache} rows must have {channels} channels, 64 of them rotated, they have {x.shape[-1]} and "
            f"{layout.config.qk_rope_head_dim}"
        )
    if codec != getattr(QUANTIZED, cache):
        return "the caches must hold quantized records (model.quantize_caches)"
    if norm_weight is not None and norm_weight.dtype != jnp.bfloat16:
        return f"norm weights must be bfloat16, they are {norm_weight.dtype}"
    return None if x.size else "there are no rows"


def unsupported_entries(
    latent: Array,
    source: int,
    rows: Rows,
    layout: CacheLayout,
    norm_weight: Array,
    dtype: jnp.dtype,
    pool: Array,
    ring: Array,
) -> str | None:
    """Why the Hopper kernel cannot take what a KV source makes of a step; None where it can."""
    ratio = layout.config.kv_source_ratios[source]
    rounded: Any = jax.ShapeDtypeStruct(latent.shape, dtype)
    if ratio > 1 and latent.dtype != jnp.float32:
        return f"pairs must be float32, they are {latent.dtype}"
    why = unsupported(rounded, 512, layout, "compressed", norm_weight) or _splits_groups(source, rows, layout)
    return why or _too_many(pool) or _too_many(ring)


def _splits_groups(source: int, rows: Rows, layout: CacheLayout) -> str | None:
    ratio = layout.config.kv_source_ratios[source]
    if ratio > 2:
        return f"compress ratios must be 1 or 2, source {source} has {ratio}"
    return f"tiles of rows must be even, they have {rows.tile}" if rows.tile > 1 and rows.tile % ratio else None


def _too_many(pool: Array) -> str | None:
    """Records are numbered in int32."""
    records = pool.size // pool.shape[-1]
    return f"a cache must have less than 2^31 records, one has {records}" if records > MOST_RECORDS else None
