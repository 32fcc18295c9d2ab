"""Single-pass manifold-constrained hyper-connections in plain jnp (numerics 10).

Streams X are [T, hc, D]; pre and post are fp32 [T, hc]; comb is fp32 [T, hc, hc], from stream j into stream k.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from di_jax.model.linear import rms_norm


def mixes(
    streams: Array, fn: Array, base: Array, scale: Array, *, iterations: int, eps: float, rms_eps: float
) -> tuple[Array, Array, Array]:
    """pre, post and comb of one site. fn fp32 [(2 + hc) hc, hc D] over the stream-major row; base [.], scale [3]."""
    rows, hc, dim = streams.shape
    flat = streams.reshape(rows, hc * dim).astype(jnp.float32)
    z = jnp.einsum("ti,oi->to", flat, fn, precision=lax.Precision.HIGHEST)
    z = z / jnp.sqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + rms_eps)
    pre = jax.nn.sigmoid(z[:, :hc] * scale[0] + base[:hc]) + eps
    post = 2.0 * jax.nn.sigmoid(z[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    comb = (z[:, 2 * hc :] * scale[2] + base[2 * hc :]).reshape(rows, hc, hc)
    return pre, post, sinkhorn(comb, iterations, eps)


def sinkhorn(logits: Array, iterations: int, eps: float) -> Array:
    """Nearly doubly stochastic [T, hc, hc]: softmax over k, then column and row normalizations, ending on a column."""
    m = jax.nn.softmax(logits, axis=-1) + eps
    m = m / (jnp.sum(m, axis=-2, keepdims=True) + eps)

    def step(_: int, m: Array) -> Array:
        m = m / (jnp.sum(m, axis=-1, keepdims=True) + eps)
        return m / (jnp.sum(m, axis=-2, keepdims=True) + eps)

    return lax.fori_loop(0, iterations - 1, step, m)


def collapse(streams: Array, pre: Array) -> Array:
    """sum_j pre_j X_j -> [T, D] in the streams' dtype."""
    return jnp.sum(pre[..., None] * streams.astype(jnp.float32), axis=-2).astype(streams.dtype)


def expand(y: Array, streams: Array, post: Array, comb: Array) -> Array:
    """post_k y + sum_j comb[j, k] X_j -> [T, hc, D] in the streams' dtype."""
    x = streams.astype(jnp.float32)
    out = post[..., None] * y.astype(jnp.float32)[:, None, :]
    for j in range(streams.shape[1]):
        out += comb[:, j, :, None] * x[:, j, None, :]
    # The streams have five readers: without the barrier XLA computes this sum again inside each of them.
    return lax.optimization_barrier(out.astype(streams.dtype))


def fused_site(
    layer: Array | int,
    y: Array | None,
    streams: Array,
    post: Array | None,
    comb: Array | None,
    pre: Array,
    fn: Array,
    base: Array,
    scale: Array,
    norm_weight: Array,
    *,
    iterations: int,
    eps: float,
    rms_eps: float,
) -> tuple[Array, Array, Array, Array, Array]:
    """`expand` of the sublayer before, `mixes` of this site, and `rms_norm` of what `collapse` gives."""
    if y is not None and post is not None and comb is not None:
        streams = expand(y, streams, post, comb)
    collapsed = collapse(streams, pre)
    mixed = mixes(streams, fn[layer], base[layer], scale[layer], iterations=iterations, eps=eps, rms_eps=rms_eps)
    return (streams, rms_norm(collapsed, norm_weight[layer], rms_eps).astype(streams.dtype), *mixed)
