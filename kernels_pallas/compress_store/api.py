"""Stores of a step: window rows, open compressor pairs, completed compressed entries and index keys."""

from __future__ import annotations

from jax import Array

from di_jax.model.cache import CacheLayout
from di_jax.model.rows import Rows
from kernels_pallas.choice import choose
from kernels_pallas.compress_store import reference

OPERATION = "compress_store"


def store_window(
    ring: Array, layer: Array | int, kv: Array, rows: Rows, layout: CacheLayout, *, implementation: str = "auto"
) -> Array:
    """Quantizes kv [T, d] and stores it at (layer, slot, position mod ring) of ring [layers, slots, ring, record].

    Of several layers at once: layer int32 [n, 1] and kv [n, T, d]. Rows below their sequence's `window_start` are left
    out.
    """
    run = choose(OPERATION, implementation, {"reference": reference.store_window})
    return run(ring, layer, kv, rows, layout)


def pool_groups(
    pair: Array, ring: Array, rows: Rows, ratio: int, *, implementation: str = "auto"
) -> tuple[Array, Array, Array, Array]:
    """Channelwise softmax pooling of the groups that this step completes (numerics 7).

    pair fp32 [T, 2, d] (gate, latent); ring fp32 [slots, ring, 2, d] holds the pairs before this step.
    Returns pooled fp32 [N, d], and for each its last row [N], its entry number [N] and whether it emits, bool [N].
    """
    return choose(OPERATION, implementation, {"reference": reference.pool_groups})(pair, ring, rows, ratio)


def store_pairs(ring: Array, ordinal: int, pair: Array, rows: Rows, *, implementation: str = "auto") -> Array:
    """Keeps the last pairs of every sequence in ring [pooled sources, slots, ring, 2, d]."""
    return choose(OPERATION, implementation, {"reference": reference.store_pairs})(ring, ordinal, pair, rows)


def store_entries(
    pool: Array,
    source: int,
    record: Array,
    row: Array,
    entry: Array,
    emits: Array,
    rows: Rows,
    layout: CacheLayout,
    *,
    implementation: str = "auto",
) -> Array:
    """Stores record [N, record] as entry [N] of the sequence of row [N] where emits [N]; returns the pool.

    Entries of positions below their sequence's `cached`, a multiple of the ratio, are left as they are.
    """
    run = choose(OPERATION, implementation, {"reference": reference.store_entries})
    return run(pool, source, record, row, entry, emits, rows, layout)
