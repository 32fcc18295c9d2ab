"""One layer of experts spread over ranks against the same layer on one device: no row is dropped, none changed."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from di_jax.engine.runner import parameter_specs
from di_jax.model.moe import SlotTable
from di_jax.model.transformer import assemble
from di_jax.parallel.mesh import DeviceMesh, Parallel
from tests.golden_model import TINY, tiny_leaves, tiny_numerics, tiny_tables

ROWS, LAYER, K = 24, 3, TINY.num_experts_per_tok
EXPERTS = TINY.n_routed_experts
MESHES = {
    "ep8": Parallel(DeviceMesh(8, 1, 8)),
    "ep4 of 8": Parallel(DeviceMesh(8, 1, 4)),
    "ep4 over cp": Parallel(DeviceMesh(4, 2, 4)),
    "copies": Parallel(DeviceMesh(8, 1, 8), extra_experts=8, balanced=True),
    "tight": Parallel(DeviceMesh(8, 1, 8), dispatch_capacity=0.1),  # many rounds
}


def layer_of(parallel: Parallel, skew: int | None = None) -> Any:
    """The experts of the tiny model; with `skew`, a bias makes that expert the first choice of every row."""
    leaves = dict(tiny_leaves())
    slots = np.arange(EXPERTS + parallel.extra_experts) % EXPERTS
    for name in list(leaves):
        if ".experts." in name:
            leaves[name] = leaves[name][:, slots]
    if skew is not None:
        leaves["layers.ffn.gate.bias"] = leaves["layers.ffn.gate.bias"].at[:, skew].set(1e3)
    rows = parallel.mesh.size("engram_rows")
    for name in list(leaves):
        if name.startswith("engram_tables"):
            leaves[name] = jnp.pad(leaves[name], ((0, -len(leaves[name]) % rows), (0, 0)))
    return assemble(TINY, tiny_numerics("nokvq"), leaves, tiny_tables(), parallel=parallel).layers.ffn


@functools.cache
def program(parallel: Parallel) -> tuple[Any, Any]:
    """(specs of the layer's weights, compiled layer over the mesh); one compilation for all weights."""
    plan = parallel.mesh
    graph, params = nnx.split(layer_of(parallel))
    specs, ranks = parameter_specs(params, plan), PartitionSpec(plan.rank_axes)

    def body(params: Any, x: jax.Array, valid: jax.Array, lot: jax.Array) -> Any:
        out = nnx.merge(graph, params)(LAYER, x[0], jnp.zeros(ROWS, bool), valid[0], lot[0])
        return jax.tree.map(lambda a: a[None], out)

    in_specs = (specs, ranks, ranks, ranks)
    mapped = jax.shard_map(body, mesh=plan.build(), in_specs=in_specs, out_specs=ranks, check_vma=False)
    return specs, jax.jit(mapped)


def spread(parallel: Parallel, ffn: Any, x: jax.Array, valid: jax.Array, lot: jax.Array) -> list[np.ndarray]:
    """(output, experts, slots) of every rank, [8, ROWS, ...]."""
    specs, run = program(parallel)
    mesh = parallel.mesh.build()
    params = nnx.state(ffn)
    placed = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), params, specs)
    return [np.asarray(a) for a in run(placed, x, valid, lot)]


@functools.cache
def alone() -> Any:
    """The layer on one device: (weights, x [N, D], valid [N]) -> (output, experts)."""
    graph, _ = nnx.split(layer_of(Parallel()))
    return jax.jit(lambda params, x, valid: nnx.merge(graph, params)(LAYER, x, jnp.zeros(len(x), bool), valid)[:2])


@pytest.fixture(scope="module")
def inputs() -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, ROWS, TINY.hidden_size)), jnp.float32)
    valid = jnp.asarray(rng.random((8, ROWS)) < 0.8).at[5].set(False)  # rank 5 is idle
    return x, valid, jnp.asarray(rng.integers(0, 2**32, (8, ROWS), np.uint32))


@pytest.mark.parametrize("skew", [None, 0, EXPERTS - 1])
@pytest.mark.parametrize("name", MESHES)
def test_equal_to_one_device(name: str, skew: int | None, inputs: tuple[jax.Array, ...]) -> None:
    """Also when one expert takes every row: the rounds go on until nothing is left."""
    x, valid, lot = inputs
    parallel = MESHES[name]
    one = nnx.state(layer_of(Parallel(), skew))
    flat, experts = map(np.asarray, alone()(one, x.reshape(8 * ROWS, -1), valid.reshape(-1)))
    out, chosen, slots = spread(parallel, layer_of(parallel, skew), x, valid, lot)
    live = np.asarray(valid)
    assert np.abs(out - flat.reshape(out.shape))[live].max() < 1e-5
    assert (chosen == experts.reshape(chosen.shape))[live].all()
    if skew is not None:
        assert (chosen[live][:, 0] == skew).all()
    assert (slots[live] % EXPERTS == chosen[live]).all(), "a slot that holds the expert"
    assert (slots[~live] == EXPERTS + parallel.extra_experts).all(), "padding routes nowhere"


def test_the_control_that_drops_rows_differs(inputs: tuple[jax.Array, ...]) -> None:
    """With its routed experts gone for one row, the output changes by far more than the bar."""
    x, valid, _ = inputs
    one = nnx.state(layer_of(Parallel()))
    rows, live = x.reshape(8 * ROWS, -1), valid.reshape(-1)
    first = int(np.argmax(np.asarray(live)))
    dropped = live.at[first].set(False)
    kept, lost = (np.asarray(alone()(one, rows, mask)[0]) for mask in (live, dropped))
    assert np.abs(kept - lost)[first].max() > 1e-3


def test_copies_share_an_experts_rows(inputs: tuple[jax.Array, ...]) -> None:
    """By the row's lot alone: the same row goes to the same copy whatever its place and rank."""
    x, valid, lot = inputs
    parallel = MESHES["copies"]
    ffn = layer_of(parallel)
    _, chosen, slots = spread(parallel, ffn, x, valid | True, lot)
    copied = chosen < parallel.extra_experts  # experts 0 to 7 have two slots at first
    assert set(np.unique(slots[copied] // EXPERTS)) == {0, 1}
    turned = [jnp.roll(a.reshape(8 * ROWS, -1), 7, axis=0).reshape(a.shape) for a in (x, valid | True, lot)]
    _, _, moved = spread(parallel, ffn, *turned)
    assert (np.roll(slots.reshape(8 * ROWS, K), 7, axis=0) == moved.reshape(8 * ROWS, K)).all()
    assert isinstance(ffn.replica_slots, SlotTable)


@pytest.mark.parametrize(("force", "low", "high"), [("balanced", 0.8, 1.25), ("imbalanced", 1.4, 2.3)])
def test_forced_routing(force: str, low: float, high: float, inputs: tuple[jax.Array, ...]) -> None:
    """Rows of rank 0 over the mean of the others: 1 when balanced, 1.8 when not; k different slots for every row."""
    parallel = Parallel(DeviceMesh(8, 1, 8), force=force)
    x, valid, _ = inputs
    ffn, load = layer_of(parallel), np.zeros(8)
    for lot in np.random.default_rng(2).integers(0, 2**32, (8, 8, ROWS), np.uint32):
        slots = spread(parallel, ffn, x, valid | True, jnp.asarray(lot))[2]
        assert (np.diff(np.sort(slots.reshape(-1, K), axis=-1), axis=-1) > 0).all()
        load += np.bincount(slots.reshape(-1) // (EXPERTS // 8), minlength=8)
    assert low < load[0] / load[1:].mean() < high
