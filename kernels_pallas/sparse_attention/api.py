"""Attention over the window and the selected compressed entries, inverse rope included."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from di_jax.model.cache import CacheLayout
from di_jax.model.quantization import CacheFormats
from di_jax.model.rows import Rows
from kernels_pallas.hopper import choose_kernel, unavailable
from kernels_pallas.sparse_attention import reference
from kernels_pallas.sparse_attention.config import tuned

OPERATION = "sparse_attention"
MOST_RECORDS = 2**31 - 1


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
    implementation: str = "auto",
) -> Array:
    """[T, H, d] attention output, position-free (numerics 6.3-6.5).

    query [T, H, d] rotated; step_kv [T, d] this step's window KV after its quantizer; window [layers, slots, ring,
    record] read at `layer` (in decode it already holds this step's rows, in prefill not yet); pool [blocks,
    rows_per_block, record] of compressed KV, read at KV source `source`; selected int32 [T, k] entries, -1 = none, or
    None for a window-only layer; sink fp32 [layers, H] read at `layer`; cos_sin of the rows' positions. Windows end at
    `rows.window_start`, 0 or more; a row below it has the selected entries and the sink alone. Bytes per row:
    528 * window + 288 * k, the floor of decode; flops per row: 4 * H * d * (window + k). Rows that are not valid have
    no meaning. Stacks come whole: the kernel cannot take a slice that does not begin at a multiple of 256 bytes.
    """
    why = unavailable() or unsupported(query, cos_sin[0], layout)
    run = choose_kernel(OPERATION, implementation, _kernel, reference.sparse_attention, why)
    return run(layer, query, step_kv, window, pool, selected, sink, cos_sin, rows, layout, source=source, scale=scale)


def _kernel(*args: Any, **options: Any) -> Array:
    from kernels_pallas.sparse_attention.mosaic_gpu_sm90 import sparse_attention

    return sparse_attention(*args, **options, config=tuned(jax.devices()[0].device_kind))


def unsupported(query: Array, cos: Array, layout: CacheLayout) -> str | None:
    """Why the Hopper kernel cannot take a query [T, H, d], cos [T, rope / 2] and caches; None where it can."""
    rows, heads, channels = query.shape
    quantized = CacheFormats.quantized()
    if query.dtype != jnp.bfloat16:
        return f"the query must be bfloat16, it is {query.dtype}"
    if (heads, channels, 2 * cos.shape[-1]) != (64, 512, 64):
        return (
            f"heads, head_dim and qk_rope_head_dim must be 64, 512, 64, they are {heads, channels, 2 * cos.shape[-1]}"
        )
    if (layout.formats.window, layout.formats.compressed) != (quantized.window, quantized.compressed):
        return "the caches must hold 528- and 288-byte records (model.quantize_caches)"
    # Records are numbered in int32, those of a step behind its layer's. 131,072 tokens of 256 requests have 84 million.
    c = layout.config
    rings, pool = layout.num_slots * c.window_ring, layout.num_blocks * layout.rows_per_block
    if max(layout.window_layers * rings, rings + rows, pool) > MOST_RECORDS:
        return f"caches must have less than 2^31 records, rings have {layout.window_layers * rings}, blocks {pool}"
    return None if rows else "there are no rows"
