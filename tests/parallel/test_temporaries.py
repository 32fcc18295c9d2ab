"""The estimate of what a step's intermediate values take."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from di_jax.parallel.temporaries import temporary_bytes

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
SIZE = 64 * 64 * 4


def estimate(function: Callable[..., Any], *arguments: Any) -> int:
    return temporary_bytes(jax.make_jaxpr(function)(*arguments).jaxpr)


def test_elementwise_chains_take_nothing_but_their_result() -> None:
    assert estimate(lambda x: jnp.sin(x) * 2 + jnp.cos(x), X) == SIZE
    # A product works on arrays in memory: its operand is one more.
    assert estimate(lambda x: (jnp.sin(x) * 2 + jnp.cos(x)) @ x, X) == 2 * SIZE
    assert estimate(lambda x: jnp.sum(jnp.sin(x) * 2), X) == 4


def test_values_are_freed_after_their_last_use() -> None:
    def chain(x: Array) -> Array:
        for _ in range(10):
            x = x @ x
        return x

    def kept(x: Array) -> list[Array]:
        return [x := x @ x for _ in range(10)]

    assert estimate(chain, X) == 2 * SIZE
    assert estimate(kept, X) == 10 * SIZE


def test_types_are_those_of_the_program() -> None:
    half = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    assert estimate(lambda x: (x @ x) @ x, half) == SIZE, "operand and result of two bytes each"
    assert estimate(lambda x: x.astype(jnp.float32) @ x.astype(jnp.float32), half) == 3 * SIZE, "the program widens"


def test_updates_happen_in_place_unless_the_old_value_is_read_later() -> None:
    def update(x: Array, i: Array) -> Array:
        return x.reshape(-1).at[i].set(1.0).reshape(64, 64)

    index = jax.ShapeDtypeStruct((3,), jnp.int32)
    small = estimate(update, X, index)
    assert small < 1000
    assert estimate(lambda x, i: (update(x, i), x @ x), X, index) >= 2 * SIZE

    def weights_stay(x: Array, i: Array) -> Array:
        return lax.scan(lambda c, _: (c + jnp.sum(update(x, i)), None), 0.0, length=3)[0]

    assert SIZE <= estimate(weights_stay, X, index) < SIZE + 1000, "a loop's constant is copied before an update"

    def carried(x: Array, i: Array) -> Array:
        return lax.scan(lambda c, _: (update(c, i), None), x, length=3)[0]

    assert estimate(carried, X, index) < 1000


def test_a_kernel_that_stores_in_place_is_one_of_those_updates() -> None:
    def body(*_: Any) -> None: ...

    kernel: Any = plgpu.kernel(body, out_type=(X,), grid=(1,), grid_names=("block",))

    def stored(x: Array, pool: Array) -> tuple[Array, Array]:
        ref = jax.new_ref(pool)
        (made,) = kernel(x, ref)
        return made, jax.freeze(ref)

    pool = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    assert estimate(stored, X, pool) == SIZE

    def layers(x: Array, pool: Array) -> Any:
        return lax.scan(lambda carry, _: (stored(*carry), None), (x, pool), length=5)[0]

    assert estimate(layers, X, pool) <= 2 * SIZE
    assert estimate(lambda x, p: (*stored(x, p), p), X, pool) == SIZE + pool.size * 4, "the old pool is still wanted"


def test_a_loop_takes_its_body_once_and_keeps_what_it_stacks() -> None:
    def body(x: Array, _: None) -> tuple[Array, None]:
        return jnp.tanh(x @ x) @ x, None

    once = estimate(lambda x: body(x, None)[0], X)
    for length in (2, 50):
        assert once <= estimate(lambda x, n=length: lax.scan(body, x, length=n)[0], X) <= once + 2 * SIZE
    stacked = estimate(lambda x: lax.scan(lambda c, _: (c @ x, c), x, length=7)[1], X)
    assert stacked >= 7 * SIZE
    dynamic = estimate(lambda x: lax.fori_loop(0, x[0, 0].astype(int), lambda _, c: body(c, None)[0], x), X)
    assert once <= dynamic <= once + 2 * SIZE


def test_the_fullest_branch_counts() -> None:
    def choose(x: Array) -> Array:
        return lax.cond(x[0, 0] > 0, lambda x: x @ (x @ (x @ x)) + x @ x, lambda x: x @ x, x)

    lone = estimate(lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x @ x, x), X)
    assert estimate(choose, X) >= lone + SIZE


def test_called_functions_are_seen_through() -> None:
    inner = jax.jit(lambda x: jnp.sin(x) * 2)
    assert estimate(lambda x: inner(x) + 1, X) == SIZE
    assert estimate(lambda x: jax.nn.silu(x) + jax.nn.relu(x), X) == SIZE


def test_a_sort_needs_room_to_sort() -> None:
    assert estimate(lambda x: lax.top_k(x, 2), X) >= 2 * SIZE


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=6))
def test_between_the_largest_value_and_all_of_them(layers: list[tuple[int, bool]]) -> None:
    def network(x: Array, weights: list[Array]) -> Array:
        for weight, (_, bent) in zip(weights, layers):
            x = x @ weight
            x = jnp.tanh(x) if bent else x
        return x

    widths = [64, *(width for width, _ in layers)]
    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in itertools.pairwise(widths)]
    values = [64 * width * 4 for width in widths[1:]]
    assert max(values) <= estimate(network, X, weights) <= 2 * sum(values)


@pytest.mark.parametrize("depth", [1, 4])
def test_close_to_a_compiler_on_32_bit_values(depth: int) -> None:
    """In float32 the CPU's compiler widens nothing, so that its temporaries are comparable."""

    def network(x: Array, weights: Array) -> Array:
        def body(x: Array, weight: Array) -> tuple[Array, None]:
            hidden = jnp.einsum("td,df->tf", x, weight)
            return x + jnp.einsum("tf,df->td", jnp.tanh(hidden), weight), None

        return lax.scan(body, x, weights)[0]

    arguments = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((depth, 256, 1024), jnp.float32)
    compiled = jax.jit(network).trace(*arguments).lower().compile().memory_analysis()
    measured = compiled.temp_size_in_bytes + compiled.output_size_in_bytes
    assert 0.5 * measured <= estimate(network, *arguments) <= 2 * measured
