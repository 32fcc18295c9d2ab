"""Every expert on every row, weighted by zero where it was not chosen: large products, and a gradient for training."""

from __future__ import annotations

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

    exact = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    share = jnp.sum(jnp.where(expert[..., None] == jnp.arange(experts), weight[..., None], 0.0), axis=1)
    h = quantize_activation(x) if quantize else x
    gate = jnp.einsum("td,efd->tef", h, stored(w1), **exact).astype(dtype)
    up = jnp.einsum("td,efd->tef", h, stored(w3), **exact).astype(dtype)
    a = (swiglu(gate, up, limit) * share[..., None]).astype(dtype)
    a = quantize_activation(a) if quantize else a
    return jnp.einsum("tef,edf->td", a, stored(w2), **exact)
