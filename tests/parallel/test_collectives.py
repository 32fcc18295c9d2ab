"""Which collectives a traced step has, over which axes, how many bytes and how often."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from di_jax.parallel.collectives import Collective, collectives, network_seconds
from di_jax.parallel.mesh import AXES, DeviceMesh
from di_jax.platforms.accelerators import ACCELERATORS, Accelerator

PLAN = DeviceMesh(dp=4, cp=2, ep=4)  # d0 2, d1 2, c0 1, c1 2
DEVICE = Accelerator("test", 1, 1.0, 1.0, 1.0, domain=4, link_bytes_per_s=100.0, network_bytes_per_s=10.0)


def found(body: Callable[[Array], Array], dtype: jnp.dtype = jnp.float32, plan: DeviceMesh = PLAN) -> list[Collective]:
    """The collectives of a body whose argument is [8, 16] on each device."""
    sizes = tuple(plan.axis_sizes[axis] for axis in AXES)
    mesh = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * 4)
    spec = PartitionSpec(AXES)
    program = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    jaxpr = jax.make_jaxpr(program)(jax.ShapeDtypeStruct((8 * plan.world, 16), dtype))
    return list(collectives(jaxpr.jaxpr, plan.axis_sizes))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda x: lax.all_to_all(x, ("d1", "c1"), 0, 0, tiled=True), ("all_to_all", ("d1", "c1"), 512 * 3 // 4)),
        (lambda x: lax.all_gather(x, ("d0", "d1"), tiled=True)[:8], ("all_gather", ("d0", "d1"), 512 * 3)),
        (lambda x: lax.psum(x, "c1"), ("psum", ("c1",), 512)),
        (lambda x: lax.pmax(x, ("d0", "d1", "c1")), ("pmax", ("d0", "d1", "c1"), 512 * 2 * 7 // 8)),
        (lambda x: lax.ppermute(x, "d0", [(0, 1), (1, 0)]), ("ppermute", ("d0",), 512)),
    ],
)
def test_bytes_that_a_device_sends(body: Callable[[Array], Array], expected: tuple[str, tuple[str, ...], int]) -> None:
    assert found(body) == [Collective(*expected, per_step=1)]


def test_bytes_have_the_programs_own_type() -> None:
    call = found(lambda x: lax.psum(x, "c1"), jnp.bfloat16)[0]
    assert call.bytes == 256, "a compiler that widens bfloat16 would send 512"


def test_trips_of_scans_multiply_and_unknown_ones_count_once() -> None:
    def twice(x: Array) -> Array:
        return lax.fori_loop(0, 2, lambda _, y: lax.pmax(y, "c1"), x)

    assert [c.per_step for c in found(lambda x: lax.scan(lambda y, _: (twice(y), None), x, length=5)[0])] == [10]
    rounds = found(lambda x: lax.fori_loop(0, x[0, 0].astype(int), lambda _, y: lax.pmax(y, "c1"), x))
    assert [c.per_step for c in rounds] == [1]


def test_axes_of_one_rank_are_no_collective() -> None:
    assert found(lambda x: lax.psum(x, "c0")) == []
    assert found(lambda x: lax.psum(x, ("c0", "c1")))[0].axes == ("c1",)
    assert found(lambda x: x + 1) == []


def test_calls_of_the_same_kind_are_one_line_and_the_largest_comes_first() -> None:
    both = found(lambda x: lax.psum(lax.psum(x, "c1"), "c1") + lax.psum(x[:1, :1], "d0"))
    assert [(c.axes, c.per_step) for c in both] == [(("c1",), 2), (("d0",), 1)]


def test_time_inside_a_domain_and_beyond_it() -> None:
    # c1 pairs neighbours, which share a domain of four; d0 pairs devices 0 and 4, which do not.
    def seconds(axes: tuple[str, ...], device: Accelerator = DEVICE) -> float:
        return network_seconds((Collective("all_to_all", axes, 600, 2),), PLAN.axis_sizes, device)

    assert seconds(("c1",)) == pytest.approx(2 * 600 / 100)
    assert seconds(("d0",)) == pytest.approx(2 * 600 / 10)
    # Over all axes 3 of 7 peers are inside and 4 beyond; both travel at once and the slow part counts.
    assert seconds(("d0", "d1", "c1")) == pytest.approx(2 * 600 * 4 / 7 / 10)
    assert seconds(("d0",), dataclasses.replace(DEVICE, domain=8)) == pytest.approx(2 * 600 / 100)


@given(st.integers(1, 10**9), st.integers(1, 100), st.sampled_from(sorted(ACCELERATORS)))
def test_time_is_linear_in_bytes_and_calls_and_never_beats_the_fast_link(nbytes: int, calls: int, name: str) -> None:
    device = ACCELERATORS[name]
    once = network_seconds((Collective("psum", ("d0", "c1"), nbytes, 1),), PLAN.axis_sizes, device)
    assert network_seconds((Collective("psum", ("d0", "c1"), nbytes, calls),), PLAN.axis_sizes, device) == (
        pytest.approx(calls * once)
    )
    # The fast part and the slow part go at once: together no faster than both rates added.
    assert once >= nbytes / (device.link_bytes_per_s + device.network_bytes_per_s)
