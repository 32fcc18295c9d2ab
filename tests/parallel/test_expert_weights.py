"""Experts move on device as the plan says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from di_jax.parallel.eplb import initial_slots
from di_jax.parallel.expert_moves import apply_moves, plan_moves
from di_jax.parallel.expert_weights import move_program
from di_jax.parallel.mesh import DeviceMesh

LAYERS, EXPERTS, SLOTS = 3, 13, 16


@pytest.mark.parametrize("plan", [DeviceMesh(8, 1, 8), DeviceMesh(4, 2, 4), DeviceMesh(2, 4, 2)], ids=str)
def test_slots_hold_what_the_plan_says(plan: DeviceMesh) -> None:
    """All formats of stored weights; the other layers stay as they are; several rearrangements one after the other."""
    mesh, rng = plan.build(), np.random.default_rng(plan.ep)
    spec = plan.spec(("layers", "expert", None, None))
    data = rng.integers(0, 120, (LAYERS, EXPERTS, 4, 6)).astype(np.uint8)
    formats = {"packed": data, "fp8": data.view(jnp.float8_e4m3fn), "bf16": data.astype(jnp.bfloat16)}
    slots = initial_slots(LAYERS, EXPERTS, SLOTS)
    layers = np.arange(LAYERS)[:, None]
    sharding = NamedSharding(mesh, spec)
    stacks = {name: jax.device_put(whole[layers, slots], sharding) for name, whole in formats.items()}
    move = move_program(mesh, plan, dict.fromkeys(formats, spec))
    for _ in range(4):
        extra = rng.integers(0, EXPERTS, (LAYERS, SLOTS - EXPERTS))
        wanted = np.concatenate([np.tile(np.arange(EXPERTS), (LAYERS, 1)), extra], axis=1)
        wanted = rng.permuted(wanted, axis=1).astype(np.int32)
        moves = plan_moves(slots, wanted, plan.ep)
        for layer in range(LAYERS):
            before = np.asarray(stacks["packed"])
            stacks = move(stacks, np.int32(layer), moves.action[layer], moves.source[layer])
            slots[layer] = wanted[layer]
            for name, whole in formats.items():
                now = np.asarray(stacks[name])
                assert (now.view(np.uint8) == np.ascontiguousarray(whole[layers, slots]).view(np.uint8)).all()
            by_rank = before[layer].reshape(plan.ep, -1, 4, 6)
            assert (
                np.asarray(stacks["packed"])[layer].reshape(by_rank.shape) == apply_moves(moves, layer, by_rank)
            ).all()
    assert move._cache_size() == 1, "one program for all layers and plans"
