"""Items to the ranks that serve them and back: nothing is lost, whatever the routing."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array, lax
from jax.sharding import PartitionSpec

from di_jax.parallel.exchange import capacity_of, exchange
from di_jax.parallel.mesh import DeviceMesh

ITEMS = 24
MESHES = {"ep8": DeviceMesh(8, 1, 8), "ep4 of 8": DeviceMesh(8, 1, 4), "ep4 over cp": DeviceMesh(4, 2, 4)}


@partial(jax.jit, static_argnums=(0, 1))
def send(plan: DeviceMesh, capacity: int, values: Array, destination: Array) -> tuple[Array, Array]:
    """(answers, rows served) of every rank; a rank answers 100 * value + its number in the group."""
    axes, ranks = plan.axes("expert"), plan.size("expert")

    def body(values: Array, destination: Array) -> tuple[Array, Array]:
        mine = lax.axis_index(axes)

        def serve(sent: Array, valid: Array) -> tuple[Array, Array]:
            assert sent.shape == valid.shape == (ranks * capacity,)
            return 100 * sent + mine, jnp.where(valid, sent, -1)

        took = lambda item: values[0][item]  # noqa: E731
        answers, served = exchange(took, destination[0], serve, axes=axes, ranks=ranks, capacity=capacity)
        return answers[None], served[None]

    spread = PartitionSpec(plan.rank_axes)
    mapped = jax.shard_map(
        body, mesh=plan.build(), in_specs=(spread, spread), out_specs=(spread, spread), check_vma=False
    )
    return mapped(values, destination)


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("capacity", [1, 5, ITEMS])
def test_no_item_is_lost(name: str, capacity: int) -> None:
    plan = MESHES[name]
    ranks = plan.size("expert")
    values = np.arange(8 * ITEMS, dtype=np.int32).reshape(8, ITEMS)
    rng = np.random.default_rng(capacity)
    cases = [
        rng.integers(0, ranks + 1, (8, ITEMS)),  # spread, some go nowhere
        np.full((8, ITEMS), ranks - 1),  # all to one rank
        np.where(np.arange(8)[:, None] == 3, rng.integers(0, ranks, ITEMS), ranks),  # one rank alone has work
        np.full((8, ITEMS), ranks),  # nobody has
    ]
    for destination in cases:
        answers, served = map(np.asarray, send(plan, capacity, values, destination.astype(np.int32)))
        there = destination < ranks
        assert (answers == np.where(there, 100 * values + destination, 0)).all()
        assert (served == np.where(there, values, 0)).all(), "what is not valid is marked"


@given(st.lists(st.integers(0, 8), min_size=8 * ITEMS, max_size=8 * ITEMS))
@settings(max_examples=25)
def test_any_routing(destinations: list[int]) -> None:
    destination = np.array(destinations, np.int32).reshape(8, ITEMS)
    values = np.arange(8 * ITEMS, dtype=np.int32).reshape(8, ITEMS)
    answers, _ = send(MESHES["ep8"], 5, values, destination)
    assert (np.asarray(answers) == np.where(destination < 8, 100 * values + destination, 0)).all()


@given(st.integers(1, 10_000), st.integers(1, 64), st.floats(1.0, 4.0))
def test_capacity_carries_an_even_load_in_one_round(items: int, ranks: int, factor: float) -> None:
    capacity = capacity_of(items, ranks, factor)
    assert 1 <= capacity <= items and capacity >= min(items, int(-(-items // ranks) * factor))
    assert capacity == items or capacity % 8 == 0
