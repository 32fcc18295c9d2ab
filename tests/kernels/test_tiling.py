"""Buffers that loops write into: zeros that are not there before their loop."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from di_jax.parallel.collectives import subprograms
from di_jax.parallel.exchange import exchange
from di_jax.parallel.mesh import DeviceMesh
from kernels_pallas import tiling
from kernels_pallas.expert_ffn import reference
from kernels_pallas.tiling import zeros_after


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.uint8, jnp.float8_e4m3fn, jnp.int32])
@pytest.mark.parametrize("count", [0, 1, 2**31 - 1])
def test_they_are_zeros(count: int, dtype: Any) -> None:
    made = jax.jit(zeros_after, static_argnums=(1, 2))(jnp.int32(count), (3, 5), dtype)
    assert made.dtype == dtype and made.shape == (3, 5) and not np.asarray(made).astype(np.float32).any()


def constant_buffers(jaxpr: Any) -> Iterator[Any]:
    """The matrices that enter a loop and come from no input of the program."""
    derived = {*jaxpr.invars, *jaxpr.constvars}
    for equation in jaxpr.eqns:
        given = [not isinstance(atom, Literal) and atom in derived for atom in equation.invars]
        if equation.primitive.name in ("while", "scan"):
            yield from (a.aval for a, known in zip(equation.invars, given) if a.aval.ndim >= 2 and not known)
        if any(given):
            derived.update(equation.outvars)
        for inner in subprograms(equation):
            yield from constant_buffers(inner)


def answers(rows: jax.Array, destination: jax.Array) -> jax.Array:
    mesh = DeviceMesh(1, 1, 1)
    serve = lambda sent, _: sent  # noqa: E731
    send = partial(exchange, serve=serve, axes=mesh.axes("expert"), ranks=1, capacity=8)
    body = lambda rows, destination: send(lambda item: rows[item], destination)  # noqa: E731
    spec = PartitionSpec()
    mapped = jax.shard_map(body, mesh=mesh.build(), in_specs=(spec, spec), out_specs=spec, check_vma=False)
    return mapped(rows, destination)


def experts(x: jax.Array, expert: jax.Array) -> jax.Array:
    up, down = (jnp.broadcast_to(x[0, 0], (1, 4, *shape)) for shape in ((32, 64), (64, 32)))
    weight = jnp.broadcast_to(x[0, 0], expert.shape).astype(jnp.float32)
    return reference.expert_ffn(x, expert, weight, (up, None), (up, None), (down, None), 0, limit=10.0, quantize=False)


def mapped(rows: jax.Array, _: jax.Array) -> jax.Array:
    with mock.patch.object(tiling, "TEMPORARY_BYTES", 2):
        return tiling.map_tiles(lambda row: 2 * row, rows, 1)


def constant(rows: jax.Array, number: jax.Array) -> jax.Array:
    return lax.fori_loop(0, number[0, 0], lambda i, out: out + rows, jnp.zeros(rows.shape, rows.dtype))


@pytest.mark.parametrize(("loop", "found"), [(answers, 0), (experts, 0), (mapped, 0), (constant, 1)])
def test_loops_of_a_layer_get_none_that_a_step_could_make_before(loop: Any, found: int) -> None:
    """constant: the control."""
    rows, number = jnp.ones((16, 64), jnp.bfloat16), jnp.zeros((16, 2) if loop is not answers else 16, jnp.int32)
    jaxpr = jax.make_jaxpr(loop)(rows, number).jaxpr
    assert len([*constant_buffers(jaxpr)]) == found
