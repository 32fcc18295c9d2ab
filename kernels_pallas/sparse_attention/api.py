"""Attention over the window and the selected compressed entries, inverse rope included."""

from __future__ import annotations

from jax import Array

from di_jax.model.cache import CacheLayout
from di_jax.model.rows import Rows
from kernels_pallas.choice import choose
from kernels_pallas.sparse_attention import reference


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
    implementation: str = "auto",
) -> Array:
    """[T, H, d] attention output, position-free (numerics 6.3-6.5).

    query [T, H, d] rotated; step_kv [T, d] this step's window KV after its quantizer; ring [slots, ring, record] of the
    layer (in decode it already holds this step's rows, in prefill not yet); pool [blocks, rows_per_block, record] of
    compressed KV, read at KV source `source`; selected int32 [T, k] entries, -1 = none, or None for a window-only
    layer; sink fp32 [H]; cos_sin of the rows' positions. Windows end at `rows.window_start`, 0 or more; a row below it
    has the selected entries and the sink alone. Bytes per row: 528 * window + 288 * k, the floor of decode.
    """
    run = choose("sparse_attention", implementation, {"reference": reference.sparse_attention})
    return run(query, step_kv, ring, pool, selected, sink, cos_sin, rows, layout, source=source, scale=scale)
