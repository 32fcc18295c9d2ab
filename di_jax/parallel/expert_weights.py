"""Moves the routed experts of one layer to new slots, on device and in place (engine 7.5)."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from di_jax.parallel.exchange import exchange
from di_jax.parallel.expert_moves import DUPLICATE, REMOTE
from di_jax.parallel.mesh import DeviceMesh


def move_layer(plan: DeviceMesh, experts: Any, layer: Array, action: Array, source: Array) -> Any:
    """One rank's part of a layer's move, inside `shard_map`: the rank's stacks [L, local slots, ...] with the layer's
    slots replaced.

    layer int32 []; action int8 [P] and source int32 [P]: the layer's row of a `MovePlan`. Each expert that a rank
    lacks crosses once, in rounds of one expert per pair of ranks.
    """
    ranks, axes = plan.size("expert"), plan.axes("expert")
    local = jax.tree.leaves(experts)[0].shape[1]
    first = lax.axis_index(axes) * local if ranks > 1 else 0
    action = lax.dynamic_slice_in_dim(action, first, local)
    source = lax.dynamic_slice_in_dim(source, first, local)
    remote, duplicate = action == REMOTE, action == DUPLICATE

    def moved(stack: Array) -> Array:
        old = stack[layer]
        new = old[source % local]

        def stored(slots: Array, valid: Array) -> Array:
            return bytes_of(old)[slots]

        if ranks > 1:
            fetched = exchange(
                lambda slot: source[slot] % local,
                jnp.where(remote, source // local, ranks),
                stored,
                axes=axes,
                ranks=ranks,
                capacity=1,
            )
            new = jnp.where(_over(remote, new), like(fetched, old), new)
        # Copies on one rank come from the slot that was filled first.
        new = jnp.where(_over(duplicate, new), new[source % local], new)
        return stack.at[layer].set(new)

    return jax.tree.map(moved, experts)


def bytes_of(stored: Array) -> Array:
    """The same numbers as bits: not every backend has collectives of float8."""
    return lax.bitcast_convert_type(stored, jnp.uint8) if stored.dtype.itemsize == 1 else stored


def like(moved: Array, stored: Array) -> Array:
    """Undoes `bytes_of`."""
    return lax.bitcast_convert_type(moved, stored.dtype) if stored.dtype.itemsize == 1 else moved


def _over(mask: Array, of: Array) -> Array:
    return mask.reshape(-1, *(1,) * (of.ndim - 1))


def move_program(mesh: jax.sharding.Mesh, plan: DeviceMesh, specs: Any) -> Any:
    """The jitted program (expert stacks, donated; layer; action; source) -> expert stacks."""
    nowhere = PartitionSpec()
    body = jax.shard_map(
        partial(move_layer, plan),
        mesh=mesh,
        in_specs=(specs, nowhere, nowhere, nowhere),
        out_specs=specs,
        check_vma=False,  # the number of rounds is agreed by pmax, which it cannot prove
    )
    return jax.jit(body, donate_argnums=0)
