"""Every expert on every row, weighted by zero where it was not chosen: large products, and a gradient for training."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from di_jax.model.quantization import expand_weight, quantize_activation
from kernels_pallas.expert_ffn.reference import Stored, swiglu


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
    """See `api.expert_ffn`. Costs experts / k times the flops of the routed rows."""
    experts, dtype = w1[0].shape[1], x.dtype

    def stored(w: Stored) -> Array:
        return expand_weight(w[0][layer], None if w[1] is None else w[1][layer], dtype)

    share = jnp.sum(jnp.where(expert[..., None] == jnp.arange(experts), weight[..., None], 0.0), axis=1)
    h = quantize_activation(x) if quantize else x
    return _experts(h, share, stored(w1), stored(w3), stored(w2), limit, quantize)


def _product(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _experts(h: Array, share: Array, w1: Array, w3: Array, w2: Array, limit: float, quantize: bool) -> Array:
    """h [T, D], share fp32 [T, E], w1 and w3 [E, F, D], w2 [E, D, F] -> fp32 [T, D].

    Its own gradient keeps gate and up alone, in h's dtype, and has all its products in that dtype.
    """
    return _forward(h, share, w1, w3, w2, limit, quantize)[0]


def _forward(
    h: Array, share: Array, w1: Array, w3: Array, w2: Array, limit: float, quantize: bool
) -> tuple[Array, tuple[Array, ...]]:
    gate = _product("td,efd->tef", h, w1).astype(h.dtype)
    up = _product("td,efd->tef", h, w3).astype(h.dtype)
    a = (swiglu(gate, up, limit) * share[..., None]).astype(h.dtype)
    a = quantize_activation(a) if quantize else a
    return _product("tef,edf->td", a, w2), (h, share, w1, w3, w2, gate, up)


def _backward(limit: float, quantize: bool, saved: tuple[Array, ...], g: Array) -> tuple[Array, ...]:
    h, share, w1, w3, w2, gate, up = saved
    g = g.astype(h.dtype)
    hidden, to_parts = jax.vjp(partial(swiglu, limit=limit), gate, up)
    toward = _product("td,edf->tef", g, w2).astype(h.dtype)
    d_w2 = _product("td,tef->edf", g, (hidden * share[..., None]).astype(h.dtype))
    d_share = jnp.sum(toward.astype(jnp.float32) * hidden, axis=-1)
    d_gate, d_up = to_parts(toward.astype(jnp.float32) * share[..., None])
    d_h = _product("tef,efd->td", d_gate, w1) + _product("tef,efd->td", d_up, w3)
    d_w1, d_w3 = _product("tef,td->efd", d_gate, h), _product("tef,td->efd", d_up, h)
    return d_h.astype(h.dtype), d_share, d_w1.astype(h.dtype), d_w3.astype(h.dtype), d_w2.astype(h.dtype)


_experts.defvjp(_forward, _backward)
