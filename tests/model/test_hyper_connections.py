"""Mixes, Sinkhorn, collapse and write-back of the residual streams (numerics 10)."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hyper_connections_oracle import oracle
from hypothesis import given
from hypothesis import strategies as st

from kernels_pallas.hyper_connections import api, reference

ROWS, HC, DIM = 5, 4, 32
CONSTANTS: dict[str, Any] = {"iterations": 20, "eps": 1e-6, "rms_eps": 1e-20}
mixes = jax.jit(partial(reference.mixes, **CONSTANTS))


def case(seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        "streams": generator.normal(size=(ROWS, HC, DIM)).astype(np.float32),
        "fn": generator.normal(size=((2 + HC) * HC, HC * DIM)).astype(np.float32),
        "base": generator.normal(size=(2 + HC) * HC).astype(np.float32),
        "scale": generator.normal(size=3).astype(np.float32),
    }


def test_sinkhorn_vector() -> None:
    """Numerics 17: the matrix holds the logits."""
    logits = jnp.asarray([[[2, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, -1], [0.5, 0, 0, 0]]], jnp.float32)
    m = np.asarray(reference.sinkhorn(logits, 20, 1e-6))[0]
    np.testing.assert_allclose(m[0], [0.529360, 0.113675, 0.154619, 0.202346], rtol=0, atol=1e-6)
    np.testing.assert_allclose(m[3], [0.200621, 0.193076, 0.262619, 0.343683], rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.concatenate([m.sum(0), m.sum(1)]), 0.999999, rtol=0, atol=1.5e-6)


def test_sinkhorn_ends_on_a_column() -> None:
    """With few iterations on a steep matrix columns sum to one, rows do not yet."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 4)) * 8, jnp.float32)
    m = np.asarray(reference.sinkhorn(logits, 2, 1e-6))[0]
    np.testing.assert_allclose(m.sum(axis=0), 1, atol=1e-5)
    assert np.abs(m.sum(axis=1) - 1).max() > 1e-3


@given(st.integers(0, 1000))
def test_mixes(seed: int) -> None:
    inputs = case(seed)
    for mine, expected in zip(mixes(**inputs), oracle(**inputs), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-5)


def test_pre_has_the_epsilon_and_post_has_not() -> None:
    """Where the sigmoid vanishes pre is 1e-6 and post is 0: no logit shows either."""
    inputs = case()
    inputs["fn"][:], inputs["base"][:] = 0, -80
    pre, post, _ = mixes(**inputs)
    np.testing.assert_array_equal(pre, np.float32(1e-6))
    assert 0 <= np.asarray(post).max() < 1e-30
    inputs["base"][:] = 80
    pre, post, _ = mixes(**inputs)
    np.testing.assert_array_equal(pre, np.float32(1) + np.float32(1e-6))
    np.testing.assert_array_equal(post, 2)


def test_one_statistic_over_all_streams() -> None:
    """Scaling the whole row changes nothing, scaling one stream of it does."""
    inputs = case()
    plain = mixes(**inputs)
    whole = mixes(**inputs | {"streams": inputs["streams"] * 64})
    part = inputs["streams"].copy()
    part[:, 1] *= 64
    single = mixes(**inputs | {"streams": part})
    np.testing.assert_allclose(whole[0], plain[0], rtol=0, atol=1e-6)
    assert np.abs(np.asarray(single[0]) - np.asarray(plain[0])).max() > 1e-2


def test_rows_of_zeros_are_finite() -> None:
    inputs = case()
    inputs["streams"][2] = 0
    assert all(np.isfinite(a).all() for a in mixes(**inputs))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_collapse_and_expand(dtype: jnp.dtype) -> None:
    generator = np.random.default_rng(3)
    streams = jnp.asarray(generator.normal(size=(ROWS, HC, DIM)), dtype)
    y = jnp.asarray(generator.normal(size=(ROWS, DIM)), dtype)
    pre, post = (generator.uniform(size=(ROWS, HC)).astype(np.float32) for _ in range(2))
    comb = generator.uniform(size=(ROWS, HC, HC)).astype(np.float32)
    x, value = np.asarray(streams, np.float64), np.asarray(y, np.float64)
    collapsed = np.einsum("tj,tjd->td", pre, x)
    expanded = post[:, :, None] * value[:, None] + np.einsum("tjk,tjd->tkd", comb, x)
    bar = 1e-5 if dtype == jnp.float32 else 2.0**-8 * 8
    mine = api.collapse(streams, jnp.asarray(pre)), api.expand(y, streams, jnp.asarray(post), jnp.asarray(comb))
    for result, expected in zip(mine, (collapsed, expanded), strict=True):
        assert result.dtype == dtype
        np.testing.assert_allclose(np.asarray(result, np.float64), expected, rtol=0, atol=bar)


def test_comb_moves_stream_j_into_stream_k() -> None:
    streams = jnp.asarray(np.random.default_rng(4).normal(size=(1, HC, DIM)), jnp.float32)
    comb = jnp.zeros((1, HC, HC)).at[0, 0, 3].set(1)  # stream 0 into stream 3
    out = api.expand(jnp.zeros((1, DIM)), streams, jnp.zeros((1, HC)), comb)
    np.testing.assert_array_equal(out[0, 3], streams[0, 0])
    assert not np.asarray(out[0, :3]).any()


def test_a_site_collapses_with_the_mix_of_the_site_before() -> None:
    inputs = {name: jnp.asarray(a) for name, a in case().items()}
    before = jnp.asarray(np.random.default_rng(5).uniform(size=(ROWS, HC)), jnp.float32)
    x, pre, post, comb = api.site(inputs["streams"], before, inputs["fn"], inputs["base"], inputs["scale"], **CONSTANTS)
    np.testing.assert_array_equal(x, reference.collapse(inputs["streams"], before))
    for mine, expected in zip((pre, post, comb), mixes(**inputs), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-6)
    assert np.abs(np.asarray(reference.collapse(inputs["streams"], pre) - x)).max() > 0.1
