"""Rotary frequencies to the bit, YaRN, adjacent pairs and the inverse."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from golden_model import REAL, TINY, golden_file
from hypothesis import given
from hypothesis import strategies as st
from jax import Array

from di_jax.model.rope import inverse_frequencies, rotate, rotation

NAMES = {False: "main_inv_freq", True: "compress_inv_freq"}


def angles(positions: list[int] | int, compressed: bool = True) -> tuple[Array, Array]:
    return rotation(REAL, compressed, jnp.asarray(positions, jnp.int32))


@pytest.mark.parametrize("compressed", [False, True])
def test_frequencies_equal_the_released_bits(compressed: bool) -> None:
    """One ulp would be an angle error of up to 0.06 at the last position (numerics 5.2)."""
    real, tiny = golden_file("real-constants"), golden_file("tiny-v41.tables")
    np.testing.assert_array_equal(inverse_frequencies(REAL, compressed), real[f"rope/{NAMES[compressed]}"])
    np.testing.assert_array_equal(inverse_frequencies(TINY, compressed), tiny[NAMES[compressed]])
    assert inverse_frequencies(REAL, compressed).dtype == np.float32


def test_frequencies_in_float64_throughout_are_seen() -> None:
    """Control: the exact power and reciprocal, rounded once, give other bits."""
    exact = (10000.0 ** -(np.arange(32) / 32)).astype(np.float32)
    assert (exact != golden_file("real-constants")["rope/main_inv_freq"]).any()


def test_cos_and_sin_up_to_the_last_position() -> None:
    real = golden_file("real-constants")
    assert real["rope/positions"].max() == 1_048_575
    cos, sin = angles(real["rope/positions"].tolist())
    np.testing.assert_allclose(cos, real["rope/compress_cos"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(sin, real["rope/compress_sin"], rtol=0, atol=1e-6)


def test_yarn_vector() -> None:
    """Numerics 17: pair 15 is the last one that YaRN leaves alone, from 25 on the factor is 16."""
    frequency = inverse_frequencies(REAL, True)
    expected = {15: 3.6355386e-3, 16: 2.265625e-3, 20: 2.9697778e-4, 24: 1.953125e-5, 31: 5.6805290e-7}
    for pair, value in expected.items():
        np.testing.assert_allclose(frequency[pair], value, rtol=2e-7)
    plain = (160000.0 ** -(np.arange(32) / 32)).astype(np.float32)
    np.testing.assert_allclose(frequency[:16], plain[:16], rtol=2e-7)
    np.testing.assert_allclose(frequency[25:], plain[25:] / 16, rtol=2e-7)


def test_adjacent_channels_turn_together() -> None:
    """Channel 448 + 2i is the real part, 448 + 2i + 1 the imaginary one; the first 448 stay."""
    cos, sin = angles(5)
    basis = jnp.eye(512)
    turned = np.asarray(rotate(basis, (cos[None], sin[None])))
    np.testing.assert_array_equal(turned[:448], np.eye(512)[:448])
    for pair in (0, 1, 15, 31):
        a, b = 448 + 2 * pair, 449 + 2 * pair
        real, imaginary = np.zeros(512, np.float32), np.zeros(512, np.float32)
        real[[a, b]] = cos[pair], sin[pair]
        imaginary[[a, b]] = -sin[pair], cos[pair]
        np.testing.assert_array_equal(turned[a], real)
        np.testing.assert_array_equal(turned[b], imaginary)


@given(st.integers(0, 2**20 - 1), st.booleans(), st.integers(0, 99))
def test_inverse_undoes_the_rotation(position: int, compressed: bool, seed: int) -> None:
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(3, 96)), jnp.float32)
    cos_sin = angles(position, compressed)
    back = rotate(rotate(x, cos_sin), cos_sin, inverse=True)
    np.testing.assert_allclose(back, x, rtol=0, atol=1e-6)


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000))
def test_products_depend_on_the_distance(query: int, key: int, shift: int) -> None:
    generator = np.random.default_rng(query)
    q, k = (jnp.asarray(generator.normal(size=64), jnp.float32) for _ in range(2))
    here = jnp.dot(rotate(q, angles(query)), rotate(k, angles(key)))
    there = jnp.dot(rotate(q, angles(query + shift)), rotate(k, angles(key + shift)))
    np.testing.assert_allclose(here, there, rtol=0, atol=0.02)


def test_position_zero_and_the_dtype_stay() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 80)), jnp.bfloat16)
    turned = rotate(x, angles(0))
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(turned, np.float32), np.asarray(x, np.float32))
