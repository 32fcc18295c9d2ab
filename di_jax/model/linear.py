"""Stacks of linear layers and norms in their stored formats, with logical axes; called with the layer's ordinal."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax import Array

from di_jax.model.config import ModelConfig
from di_jax.model.quantization import (
    CacheFormats,
    expand_weight,
    matmul,
    quantize_activation,
)

Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The precision contract of one run (numerics 2; architecture 7.1).

    float32 rounds nothing and quantizes no activation; bfloat16 has the rounding points of numerics 2.5 and MXFP8
    inputs for fp8 and fp4 weights. The cache quantizers belong to the function in both.
    """

    dtype: jnp.dtype
    formats: CacheFormats
    quantize_activations: bool
    quantize_wo_a_input: bool

    @classmethod
    def training(cls, dtype: str = "float32") -> Numerics:
        """Caches that pass gradients, activations as they are."""
        return cls(jnp.dtype(dtype), CacheFormats.straight_through(), False, False)

    @classmethod
    def create(
        cls,
        dtype: str = "float32",
        *,
        quantize_caches: bool = True,
        quantize_activations: bool | str = "auto",
        wo_a_input: str | None = None,
    ) -> Numerics:
        """From the `model.*` keys; "auto" and None mean what the dtype says."""
        compute = jnp.dtype(dtype)
        activations = compute == jnp.bfloat16 if quantize_activations == "auto" else bool(quantize_activations)
        return cls(
            dtype=compute,
            formats=CacheFormats.quantized() if quantize_caches else CacheFormats.plain(compute),
            quantize_activations=activations,
            quantize_wo_a_input=activations if wo_a_input is None else wo_a_input == "quantized",
        )


def parameter(shape: tuple[int, ...], dtype: jnp.dtype | type, axes: Axes) -> nnx.Param:
    """A weight of the stored `dtype`; `axes` names each dimension for the mesh rules (None = never sharded)."""
    if len(shape) != len(axes):
        raise ValueError(f"parameter of shape {shape} has {len(axes)} axis names: {axes}")
    return nnx.Param(jnp.zeros(shape, dtype), logical_axes=axes)


class Linear(nnx.Module):
    """y = x W^T for a stack of weights [*stack, out, in], kept in the stored format and expanded in the step.

    storage: "fp8" (e4m3 + 32 x 32 ue8m0), "fp4" (packed e2m1 + ue8m0 per row and 32 columns) or "bf16". An
    unquantized checkpoint stores all three as bf16, without scales.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        stack: tuple[int, ...],
        out_features: int,
        in_features: int,
        *,
        storage: str,
        axes: Axes,
    ) -> None:
        storage = storage if config.quantization else "bf16"
        self.numerics = numerics
        self.quantized = storage != "bf16"
        self.storage = storage
        self.scale: nnx.Param | None
        if storage == "fp8":
            self.weight = parameter((*stack, out_features, in_features), jnp.float8_e4m3fn, axes)
            self.scale = parameter((*stack, -(-out_features // 32), -(-in_features // 32)), jnp.uint8, axes)
        elif storage == "fp4":
            self.weight = parameter((*stack, out_features, in_features // 2), jnp.uint8, axes)
            self.scale = parameter((*stack, out_features, -(-in_features // 32)), jnp.uint8, axes)
        else:
            self.weight = parameter((*stack, out_features, in_features), jnp.bfloat16, axes)
            self.scale = None

    def expanded(self, *index: Array | int, dtype: jnp.dtype | None = None) -> Array:
        """The exact weight [out, in] of one member of the stack, or of a part of the stack."""
        scale = None if self.scale is None else self.scale[index]
        return expand_weight(self.weight[index], scale, dtype or self.numerics.dtype)

    def __call__(
        self, x: Array, *index: Array | int, quantize: bool | None = None, out_dtype: jnp.dtype | None = None
    ) -> Array:
        """x [..., in] -> [..., out]. The input is MXFP8-quantized for quantized weights unless `quantize` says no."""
        if quantize is None:
            quantize = self.numerics.quantize_activations
        x = quantize_activation(x) if quantize and self.quantized else x
        return matmul(x, self.expanded(*index), out_dtype or self.numerics.dtype)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """w * x * rsqrt(mean(x^2) + eps) over the last axis, fp32: whoever rounds does it once, after it (numerics 5.1)."""
    x = x.astype(jnp.float32)
    scale = jnp.reciprocal(jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps))
    return weight.astype(jnp.float32) * x * scale


class RMSNorm(nnx.Module):
    """A stack of `rms_norm`, rounded to the model's dtype."""

    def __init__(self, config: ModelConfig, numerics: Numerics, stack: tuple[int, ...], features: int) -> None:
        self.eps, self.dtype = config.rms_norm_eps, numerics.dtype
        self.weight = parameter((*stack, features), jnp.bfloat16, ("layers",) * len(stack) + (None,))

    def __call__(self, x: Array, *index: Array | int) -> Array:
        return rms_norm(x, self.weight[index], self.eps).astype(self.dtype)
