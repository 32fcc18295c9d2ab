"""Router and experts: the vector of numerics 17, the two biases, and both implementations against float64."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden_model import TINY, tiny_model, tiny_numerics
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax import Array

from di_jax.model.moe import Router
from di_jax.model.quantization import quantize_activation
from kernels_pallas.expert_ffn import api
from kernels_pallas.expert_ffn.reference import Stored, swiglu, tile_rows

IMPLEMENTATIONS = ("reference", "dense")
E, D, WIDTH, K, T, LIMIT = 6, 64, 32, 3, 11, 1.5


def identity_router(experts: int, chosen: int, scale: float = 1.5) -> Router:
    """A router whose logits are its input."""
    config = dataclasses.replace(
        TINY, n_routed_experts=experts, hidden_size=experts, num_experts_per_tok=chosen, routed_scaling_factor=scale
    )
    router = Router(config, 1)
    router.weight[...] = jnp.eye(experts, dtype=jnp.bfloat16)[None]
    return router


def route(router: Router, logits: list[list[float]], image: list[bool] | None = None) -> tuple[np.ndarray, np.ndarray]:
    x = jnp.asarray(logits, jnp.float32)
    expert, weight = router(0, x, jnp.zeros(len(x), bool) if image is None else jnp.asarray(image))
    return np.asarray(expert), np.asarray(weight)


def test_router_vector() -> None:
    expert, weight = route(identity_router(3, 3), [[2, 1, 0]])
    assert expert.tolist() == [[0, 1, 2]]
    score = np.sqrt(np.log1p(np.exp([2, 1, 0])))
    np.testing.assert_allclose(score, [1.458399, 1.145976, 0.832555], rtol=0, atol=1e-6)
    np.testing.assert_allclose(weight[0], [0.636498, 0.500145, 0.363357], rtol=0, atol=1e-6)


def test_large_logits_do_not_overflow() -> None:
    """softplus(v) = v there: sqrt(1e4) against sqrt(2.5e3)."""
    _, weight = route(identity_router(3, 2), [[1e4, 2.5e3, -1e4]])
    np.testing.assert_allclose(weight[0], [1.0, 0.5], rtol=1e-6)


def test_rows_of_vanishing_scores_are_finite() -> None:
    expert, weight = route(identity_router(4, 2), [[-1e4] * 4])
    assert expert.tolist() == [[0, 1]] and np.isfinite(weight).all()


def test_ties_take_the_lower_id() -> None:
    expert, weight = route(identity_router(8, 4), [[0.5] * 8, [0, 1, 0, 1, 1, 1, 1, 0]])
    assert expert.tolist() == [[0, 1, 2, 3], [1, 3, 4, 5]]
    np.testing.assert_allclose(weight, 1.5 / 4, rtol=1e-6)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    router = identity_router(4, 2)
    plain = route(router, [[3, 2, 1, 0]])
    router.bias[...] = jnp.asarray([[0, -100, 0, 100]], jnp.float32)
    expert, weight = route(router, [[3, 2, 1, 0]])
    assert plain[0].tolist() == [[0, 1]] and expert.tolist() == [[3, 0]], "best biased score first"
    score = np.sqrt(np.log1p(np.exp([0, 3])))
    np.testing.assert_allclose(weight[0], 1.5 * score / score.sum(), rtol=1e-6)


def test_the_image_bias_moves_image_rows_alone() -> None:
    router = identity_router(4, 1)
    router.bias_vl[...] = jnp.asarray([[0, 0, 50, 0]], jnp.float32)
    expert, _ = route(router, [[3, 2, 1, 0]] * 3, [False, True, False])
    assert expert[:, 0].tolist() == [0, 2, 0]


def test_swiglu_clamps_the_gate_from_above_only() -> None:
    """And the up projection on both sides (numerics 11.2)."""
    gate, up = jnp.asarray([20.0, -20.0, 1.0, 1.0, 1.0]), jnp.asarray([1.0, 1.0, 20.0, -20.0, 0.5])

    def silu(v: float) -> float:
        return v / (1 + np.exp(-v))

    expected = [silu(10), silu(-20), silu(1) * 10, -silu(1) * 10, silu(1) * 0.5]
    np.testing.assert_allclose(swiglu(gate, up, 10.0), expected, rtol=1e-6)


@dataclasses.dataclass
class Experts:
    """Random fp4 experts, stacked over two layers, and their exact values."""

    stored: list[Stored]
    values: list[np.ndarray]


@pytest.fixture(scope="module")
def experts() -> Experts:
    generator = np.random.default_rng(0)
    stored: list[Stored] = []
    values = []
    for out, inner in ((WIDTH, D), (WIDTH, D), (D, WIDTH)):
        codes = generator.integers(0, 16, (2, E, out, inner)).astype(np.uint8)
        scale = generator.integers(122, 125, (2, E, out, inner // 32)).astype(np.uint8)
        factor = np.repeat(np.ldexp(1.0, scale.astype(int) - 127), 32, axis=-1)
        stored.append((jnp.asarray(codes[..., ::2] | codes[..., 1::2] << 4), jnp.asarray(scale)))
        values.append(codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * factor)
    return Experts(stored, values)


@partial(jax.jit, static_argnames=("implementation", "quantize"))
def run(
    x: Array,
    expert: Array,
    weight: Array,
    stored: list[Stored],
    layer: int,
    implementation: str,
    quantize: bool = False,
) -> Array:
    w1, w3, w2 = stored
    return api.expert_ffn(
        x, expert, weight, w1, w3, w2, layer, limit=LIMIT, quantize=quantize, implementation=implementation
    )


def exact(x: np.ndarray, expert: np.ndarray, weight: np.ndarray, values: list[np.ndarray]) -> np.ndarray:
    """Dense float64 sum over each row's experts; E routes nowhere."""
    w1, w3, w2 = values
    out = np.zeros(x.shape)
    for t, k in np.ndindex(*expert.shape):
        e = expert[t, k]
        if e < E:
            gate, up = np.minimum(w1[e] @ x[t], LIMIT), np.clip(w3[e] @ x[t], -LIMIT, LIMIT)
            out[t] += w2[e] @ (weight[t, k] * gate / (1 + np.exp(-gate)) * up)
    return out


def compare(experts: Experts, x: np.ndarray, expert: np.ndarray, weight: np.ndarray, implementation: str) -> None:
    for layer in (0, 1):
        mine = run(x, expert.astype(np.int32), weight, experts.stored, layer, implementation)
        expected = exact(x.astype(np.float64), expert, weight, [w[layer] for w in experts.values])
        np.testing.assert_allclose(mine, expected, rtol=0, atol=2e-5)


def rows(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(count, D)).astype(np.float32), generator.uniform(size=(count, K)).astype(np.float32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("count", [1, T, 70])
@pytest.mark.parametrize("routing", ["even", "skewed", "nowhere", "one row"])
def test_experts(experts: Experts, count: int, routing: str, implementation: str) -> None:
    """Skewed: every row to the same experts, many tiles of one and none of others. 70 rows: several tiles each."""
    x, weight = rows(count)
    expert = np.stack([np.random.default_rng(t).permutation(E)[:K] for t in range(count)])
    if routing == "skewed":
        expert[:] = [4, 0, 5]
    elif routing == "nowhere":
        expert[:] = E
    elif routing == "one row":
        expert[: count - 1] = E
    compare(experts, x, expert, weight, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=25)
@given(expert=arrays(np.int32, (T, K), elements=st.integers(0, E)), seed=st.integers(0, 1000))
def test_any_routing(experts: Experts, expert: np.ndarray, seed: int, implementation: str) -> None:
    """An expert twice in a row included, which no router does."""
    x, weight = rows(T, seed)
    compare(experts, x, expert, weight, implementation)


def test_tiles_hold_the_mean_load() -> None:
    assert [tile_rows(pairs, 16) for pairs in (1, 128, 129, 1024, 10**6)] == [8, 8, 16, 64, 128]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_weight_comes_before_the_quantizer_of_w2(experts: Experts, implementation: str) -> None:
    """In float32 without a quantizer its place makes no difference, so only this test sees it (numerics 11.2)."""
    x, weight = rows(T)
    expert = np.arange(T * K).reshape(T, K) % E
    values = [w[0] for w in experts.values]

    def with_weight(before: bool) -> np.ndarray:
        h = np.asarray(quantize_activation(jnp.asarray(x)), np.float64)
        out = np.zeros((T, D))
        for t, k in np.ndindex(T, K):
            w1, w3, w2 = (w[expert[t, k]] for w in values)
            gate, up = np.minimum(w1 @ h[t], LIMIT), np.clip(w3 @ h[t], -LIMIT, LIMIT)
            a = gate / (1 + np.exp(-gate)) * up * (weight[t, k] if before else 1)
            a = np.asarray(quantize_activation(jnp.asarray(a, jnp.float32)), np.float64)
            out[t] += (1 if before else weight[t, k]) * (w2 @ a)
        return out

    mine = np.asarray(run(x, expert.astype(np.int32), weight, experts.stored, 0, implementation, quantize=True))
    # A value on a rounding edge of the quantizer may fall either way: medians, not maxima.
    right, wrong = (np.median(np.abs(mine - with_weight(before)), axis=-1) for before in (True, False))
    assert np.median(right) < 1e-5 and np.median(wrong) > 1e-3


def test_the_layer_ignores_padding_rows() -> None:
    """Routed and shared experts of the tiny model: rows that are not valid change nothing for the others."""
    ffn = tiny_model(tiny_numerics("nokvq")).layers.ffn
    x = jnp.asarray(np.random.default_rng(0).normal(size=(9, TINY.hidden_size)), jnp.float32)
    image = jnp.zeros(9, bool)
    valid = jnp.arange(9) % 3 != 1
    layer = jax.jit(lambda x, valid: ffn(2, x, image, valid)[0])
    some, everything = layer(x, valid), layer(jnp.where(valid[:, None], x, 1e3), valid | True)
    np.testing.assert_allclose(some[valid], layer(x, valid | True)[valid], rtol=0, atol=1e-5)
    np.testing.assert_allclose(some[valid], everything[valid], rtol=0, atol=1e-5)
