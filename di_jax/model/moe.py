"""Mixture of experts: bias-corrected sqrt-softplus router, routed experts, one shared expert (numerics 11)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from di_jax.model.config import ROUTER_TEMPERATURE, ROUTER_WEIGHT_EPS, ModelConfig
from di_jax.model.linear import Linear, Numerics, parameter
from kernels_pallas.choice import KernelChoice
from kernels_pallas.expert_ffn import api
from kernels_pallas.expert_ffn.reference import swiglu


class Router(nnx.Module):
    """noaux_tc: the biases choose, the unbiased scores weigh. A stack [L, E]."""

    def __init__(self, config: ModelConfig, layers: int) -> None:
        c = self.config = config
        self.weight = parameter((layers, c.n_routed_experts, c.hidden_size), jnp.bfloat16, ("layers", None, None))
        self.bias = parameter((layers, c.n_routed_experts), jnp.float32, ("layers", None))
        self.bias_vl = parameter((layers, c.n_routed_experts), jnp.float32, ("layers", None))

    def __call__(self, layer: Array | int, x: Array, image: Array) -> tuple[Array, Array]:
        """x [T, D], image bool [T] -> expert ids int32 [T, k], best biased score first, and fp32 weights [T, k]."""
        logits = jnp.einsum(
            "ti,ei->te",
            x.astype(jnp.float32),
            self.weight[layer].astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )
        score = jnp.sqrt(jax.nn.softplus(logits / ROUTER_TEMPERATURE))
        bias = jnp.where(image[:, None], self.bias_vl[layer], self.bias[layer])
        _, expert = lax.top_k(score + bias, self.config.num_experts_per_tok)  # ties take the lower id
        weight = jnp.take_along_axis(score, expert, axis=-1)
        weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + ROUTER_WEIGHT_EPS)
        return expert.astype(jnp.int32), weight * self.config.routed_scaling_factor


class FeedForward(nnx.Module):
    """w2(swiglu(w1 x, w3 x)): the weights of a stack of experts; w1 is the gate, w3 the up projection."""

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        stack: tuple[int, ...],
        *,
        storage: str,
        axes: tuple[str | None, ...],
    ) -> None:
        width, dim = config.moe_intermediate_size, config.hidden_size
        self.limit = config.swiglu_limit
        self.dtype = numerics.dtype

        def linear(out_features: int, in_features: int) -> Linear:
            stacked = (*axes, None, None)
            return Linear(config, numerics, stack, out_features, in_features, storage=storage, axes=stacked)

        self.w1, self.w3, self.w2 = linear(width, dim), linear(width, dim), linear(dim, width)

    def __call__(self, x: Array, *index: Array | int) -> Array:
        """x [T, D] through one member of the stack."""
        hidden = swiglu(self.w1(x, *index), self.w3(x, *index), self.limit)
        return self.w2(hidden.astype(self.dtype), *index)


class MoE(nnx.Module):
    """A stack of expert layers [L]."""

    def __init__(self, config: ModelConfig, numerics: Numerics, kernels: KernelChoice, layers: int) -> None:
        self.config, self.numerics = config, numerics
        self.implementation = kernels.of("expert_ffn")
        self.gate = Router(config, layers)
        self.shared_experts = FeedForward(config, numerics, (layers,), storage="fp8", axes=("layers",))
        self.experts = FeedForward(
            config, numerics, (layers, config.n_routed_experts), storage="fp4", axes=("layers", "experts")
        )

    def __call__(self, layer: Array | int, x: Array, image: Array, valid: Array) -> tuple[Array, Array]:
        """x [T, D], image and valid bool [T] -> the sublayer's output [T, D] and the expert ids [T, k]."""
        expert, weight = self.gate(layer, x, image)
        nowhere = jnp.where(valid[:, None], expert, self.config.n_routed_experts)

        def stored(linear: Linear) -> tuple[Array, Array | None]:
            if self.numerics.master_weights:
                return linear.expanded(layer)[None], None
            return linear.weight[...], None if linear.scale is None else linear.scale[...]

        routed = api.expert_ffn(
            x,
            nowhere,
            weight,
            stored(self.experts.w1),
            stored(self.experts.w3),
            stored(self.experts.w2),
            0 if self.numerics.master_weights else layer,
            limit=self.config.swiglu_limit,
            quantize=self.numerics.quantize_activations and self.experts.w1.quantized,
            implementation=self.implementation,
        )
        shared = self.shared_experts(x, layer).astype(jnp.float32)
        return (routed + shared).astype(self.numerics.dtype), expert
