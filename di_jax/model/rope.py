"""Rotary position embedding: interleaved pairs on the last channels, two bases, YaRN, and its inverse (numerics 5)."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from di_jax.model.config import ModelConfig


def inverse_frequencies(config: ModelConfig, compressed: bool) -> np.ndarray:
    """fp32 [rope_dim / 2]. `compressed` selects the base and YaRN of layers that compress (numerics 5.2).

    The power is rounded once from fp64 and the reciprocal is fp32: one ulp of a frequency is an angle error of
    0.06 at position 1,048,575.
    """
    rope, dim = config.rope, config.qk_rope_head_dim
    base = rope.compress_theta if compressed else rope.theta
    exponent = (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)).astype(np.float64)
    freq = np.float32(1) / np.power(np.float64(base), exponent).astype(np.float32)
    if not compressed:
        return freq

    def correction(rotations: float) -> float:
        original = rope.original_max_position_embeddings
        return dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(base))

    low = max(math.floor(correction(rope.beta_fast)), 0)
    high = min(math.ceil(correction(rope.beta_slow)), dim - 1)
    span = np.float32(max(high - low, 1e-3))
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / span, 0, 1).astype(np.float32)
    return (freq / np.float32(rope.factor)) * ramp + freq * (np.float32(1) - ramp)


def rotation(config: ModelConfig, compressed: bool, positions: Array) -> tuple[Array, Array]:
    """cos and sin, fp32 [..., rope_dim / 2], of int32 positions [...]; the angle is an fp32 product (numerics 5.3)."""
    angle = positions.astype(jnp.float32)[..., None] * jnp.asarray(inverse_frequencies(config, compressed))
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, cos_sin: tuple[Array, Array], *, inverse: bool = False) -> Array:
    """Rotates the last 2 * n channels of x [..., d] in fp32 by cos, sin [..., n] (broadcast); returns x's dtype.

    Channels pair up adjacently: (a, b) -> (a cos - b sin, a sin + b cos). `inverse` rotates by the negative angle.
    """
    cos, sin = cos_sin
    sin = -sin if inverse else sin
    n = cos.shape[-1]
    plain, tail = x[..., : -2 * n], x[..., -2 * n :].astype(jnp.float32)
    pairs = tail.reshape(*tail.shape[:-1], n, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(tail.shape)
    return jnp.concatenate([plain, rotated.astype(x.dtype)], axis=-1)
