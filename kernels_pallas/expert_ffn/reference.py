"""Routed experts over rows sorted by expert, in plain jnp: work follows the routed rows, not the number of experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from di_jax.model.quantization import expand_weight, matmul, quantize_activation
from kernels_pallas.tiling import zeros_after

Stored = tuple[Array, Array | None]  # weight and its scale, or None for a bf16 weight


def swiglu(gate: Array, up: Array, limit: float) -> Array:
    """silu(min(gate, limit)) * clamp(up, +-limit) in fp32; the gate is not clamped from below (numerics 11.2)."""
    gate = jnp.minimum(gate.astype(jnp.float32), limit)
    up = jnp.clip(up.astype(jnp.float32), -limit, limit)
    return jax.nn.silu(gate) * up


def tile_rows(pairs: int, experts: int) -> int:
    """Rows of one tile: the mean load of an expert, as a power of two in 8..128."""
    tile = 8
    while tile < 128 and tile * experts < pairs:
        tile *= 2
    return tile


def expert_ffn(
    x: Array,
    expert: Array,
    weight: Array,
    w1: Stored,
    w3: Stored,
    w2: Stored,
    layer: Array | int,
    *,
    limit: float,
    quantize: bool,
) -> Array:
    """See `api.expert_ffn`."""
    rows, k = expert.shape
    experts, pairs, dtype = w1[0].shape[1], rows * k, x.dtype
    tile = tile_rows(pairs, experts)
    order = jnp.argsort(expert.reshape(-1), stable=True).astype(jnp.int32)
    count = jnp.zeros(experts + 1, jnp.int32).at[expert.reshape(-1)].add(1)[:experts]
    first = jnp.cumsum(count) - count
    tiles = (count + tile - 1) // tile
    last_tile = jnp.cumsum(tiles)

    def stored(w: Stored, e: Array) -> Array:
        scale = None if w[1] is None else w[1][layer, e]
        return expand_weight(w[0][layer, e], scale, dtype)

    def one_tile(i: Array, out: Array) -> Array:
        e = jnp.searchsorted(last_tile, i, side="right").astype(jnp.int32)
        place = first[e] + (i - (last_tile[e] - tiles[e])) * tile + jnp.arange(tile, dtype=jnp.int32)
        inside = place < first[e] + count[e]
        pair = order[jnp.minimum(place, pairs - 1)]
        h = x[pair // k]
        h = quantize_activation(h) if quantize else h
        a = swiglu(matmul(h, stored(w1, e), dtype), matmul(h, stored(w3, e), dtype), limit)
        a = (a * weight.reshape(-1)[pair][:, None]).astype(dtype)
        a = quantize_activation(a) if quantize else a
        y = matmul(a, stored(w2, e), dtype)
        return out.at[jnp.where(inside, pair, pairs)].set(y, mode="drop")

    out = lax.fori_loop(0, last_tile[-1], one_tile, zeros_after(last_tile[-1], (pairs, x.shape[1]), dtype))
    # The sum runs over the k choices of a row in their fixed order, whatever shared its tiles.
    return jnp.sum(out.reshape(rows, k, -1).astype(jnp.float32), axis=1)
