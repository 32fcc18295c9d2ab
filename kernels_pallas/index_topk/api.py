"""Choice of the compressed entries that a query attends to."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from di_jax.model.cache import CacheLayout
from di_jax.model.rows import Rows
from kernels_pallas.hopper import choose_kernel, unavailable
from kernels_pallas.index_topk import reference
from kernels_pallas.index_topk.config import tuned

OPERATION = "index_topk"


def index_topk(
    query: Array,
    weights: Array,
    pool: Array,
    rows: Rows,
    layout: CacheLayout,
    *,
    source: int,
    candidates: Array | None = None,
    make_candidates: bool = False,
    implementation: str = "auto",
) -> tuple[Array, Array | None]:
    """(selected int32 [T, index_topk] ascending, -1 padded; candidate blocks int32 [T, candidate_topk_blocks] or None).

    query [T, H, d] after rope and quantizer; weights fp32 [T, H], scaled; pool [blocks, rows_per_block, record] of
    index keys, read at KV source `source`; candidates [T, blocks] restricts the choice (Reindex layers),
    make_candidates produces them (the candidate source). None instead of candidates means that all entries are.
    `rows` may hold slices of one array. The others come whole or computed: Mosaic GPU takes no slice in place that does
    not begin at a multiple of 256 bytes.
    Bytes per row tile: 68 * context / ratio; flops per row: 2 * H * d * context / ratio.
    """
    why = unavailable() or unsupported(query, rows, layout, source)
    run = choose_kernel(OPERATION, implementation, _kernel, reference.index_topk, why)
    return run(
        query, weights, pool, rows, layout, source=source, candidates=candidates, make_candidates=make_candidates
    )


def _kernel(*args: Any, **options: Any) -> tuple[Array, Array | None]:
    from kernels_pallas.index_topk.mosaic_gpu_sm90 import index_topk

    return index_topk(*args, **options, tuning=tuned(jax.devices()[0].device_kind))


def unsupported(query: Array, rows: Rows, layout: CacheLayout, source: int) -> str | None:
    """Why the Hopper kernel cannot take a query [T, H, d] and the keys of KV source `source`; None where it can."""
    from kernels_pallas.index_topk import mosaic_gpu_sm90 as kernel

    return kernel.unsupported(query, rows, layout, source)
