"""Where every array of the released model lives, and the picture of it: arithmetic alone, nothing is compiled."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import jax.numpy as jnp
import pytest
from flax import nnx

from di_jax.model.cache import CacheLayout
from di_jax.model.config import ModelConfig
from di_jax.model.linear import Numerics
from di_jax.model.transformer import abstract_model
from di_jax.parallel.layout_picture import layout_svg
from di_jax.parallel.mesh import DeviceMesh, Parallel
from di_jax.parallel.placement import (
    ENGRAM,
    EXPERTS,
    REPLICATED,
    STATE,
    PlacedArray,
    parts_of_devices,
    place_state,
    place_weights,
)

# Bytes of the checkpoint's parts (spec checkpoint 3).
ROUTED, ENGRAM_TABLES, DENSE, EMBED = 288_777_830_400, 202_758_032_400, 8_522_921_408, 1_323_827_200


@pytest.fixture(scope="module")
def released(golden: Path) -> ModelConfig:
    return ModelConfig.from_file(golden / "config_real.json")


def weights(config: ModelConfig, plan: DeviceMesh, extra: int = 0) -> list[PlacedArray]:
    model = abstract_model(config, Numerics.create("bfloat16"), parallel=Parallel(plan, extra, balanced=extra > 0))
    return place_weights(nnx.split(model)[1], plan)


def state(config: ModelConfig, plan: DeviceMesh) -> list[PlacedArray]:
    return place_state(CacheLayout(config, Numerics.create("bfloat16").formats, 100, 5), plan)


@pytest.mark.parametrize(
    ("plan", "extra"),
    [
        (DeviceMesh(64, 1, 64), 64),
        (DeviceMesh(4, 1, 4), 32),
        (DeviceMesh(8, 1, 8), 0),
        (DeviceMesh(8, 1, 2), 0),
        (DeviceMesh(4, 2, 4), 0),
        (DeviceMesh(), 0),
    ],
)
def test_weights_of_a_device(released: ModelConfig, plan: DeviceMesh, extra: int) -> None:
    arrays = weights(released, plan, extra)
    routed = ROUTED * (384 + extra) / 384 / plan.ep
    expected = routed + ENGRAM_TABLES / plan.world + DENSE + EMBED
    assert sum(array.bytes_per_device for array in arrays) == pytest.approx(expected, rel=0.01)
    assert sum(a.bytes_per_device for a in arrays if a.kind == EXPERTS) == pytest.approx(routed, rel=1e-6)
    assert sum(a.bytes_per_device for a in arrays if a.kind == ENGRAM) == (
        pytest.approx(ENGRAM_TABLES / plan.world, rel=1e-6)
    )


def test_caches_of_a_device_do_not_depend_on_the_mesh(released: ModelConfig) -> None:
    alone, many = state(released, DeviceMesh()), state(released, DeviceMesh(8, 2, 4))
    assert [a.bytes_per_device for a in alone] == [a.bytes_per_device for a in many]
    blocks = {a.name: a for a in many}["state.compressed"]
    assert blocks.shape[0] == 1600 and blocks.bytes_per_device == 100 * 320 * 288


@pytest.mark.parametrize("plan", [DeviceMesh(64, 1, 64), DeviceMesh(8, 1, 2), DeviceMesh(4, 2, 4), DeviceMesh(2, 4, 8)])
def test_parts_cover_the_axis_and_copies_are_equal(released: ModelConfig, plan: DeviceMesh) -> None:
    for array in weights(released, plan) + state(released, plan):
        spans = parts_of_devices(array, plan)
        cut = next((axis for axis, names in enumerate(array.spec) if names is not None), 0)
        parts = sorted(set(spans))
        if array.shape:
            assert parts[0][0] == 0 and parts[-1][1] == array.shape[cut]
        assert all(left[1] == right[0] for left, right in itertools.pairwise(parts))
        assert array.bytes_per_device * len(parts) == math.prod(array.shape) * jnp.dtype(array.dtype).itemsize
        assert len(parts) == {EXPERTS: plan.ep, ENGRAM: plan.world, STATE: plan.world, REPLICATED: 1}[array.kind]


def test_parts_are_those_of_jax() -> None:
    """Against NamedSharding, on eight devices of a process of its own."""
    script = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
from jax.sharding import NamedSharding
from di_jax.parallel.mesh import DeviceMesh
from di_jax.parallel.placement import parts_of_devices, place
for plan in (DeviceMesh(4, 2, 4), DeviceMesh(8, 1, 2), DeviceMesh(2, 4, 8), DeviceMesh(2, 4, 2), DeviceMesh(1, 8, 4)):
    mesh = plan.build()
    for name in ("expert", "engram_rows", "slots", "batch", "sequence", None):
        array = place("a", np.zeros((3, 16, 2)), (None, name, None), plan)
        indices = NamedSharding(mesh, array.spec).devices_indices_map(array.shape)
        axis = 0 if plan.spec((name,))[0] is None else 1
        expected = [indices[device][axis].indices(array.shape[axis])[:2] for device in mesh.devices.flat]
        assert parts_of_devices(array, plan) == expected, (plan, name)
print("same")
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "same", result.stderr


def test_the_picture_has_every_device_and_its_parts(released: ModelConfig) -> None:
    plan = DeviceMesh(8, 2, 4)
    svg = layout_svg("a <title> & more", weights(released, plan, 16) + state(released, plan), plan, domain=8)
    root = ElementTree.fromstring(svg)
    name = "{http://www.w3.org/2000/svg}"
    texts = [element.text or "" for element in root.iter(f"{name}text")]
    assert texts[0] == "a <title> & more"
    cells = [group.get("id") for group in root.iter(f"{name}g")]
    assert cells == [f"device-{rank}" for rank in range(16)]
    experts = [text for text in texts if text.startswith("experts ") and "slots" not in text]
    assert len(experts) == 16 and set(experts) == {f"experts {i * 100}-{i * 100 + 99}" for i in range(4)}
    assert "d0=1 d1=1 c1=1" in texts and "device 15, node 1" in texts
    assert sum(text == "others all" for text in texts) == 16
