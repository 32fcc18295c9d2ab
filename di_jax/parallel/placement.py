"""Which part of every array lies on which device of a mesh: the layout that `plan` prints and draws."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from di_jax.model.cache import CacheLayout
from di_jax.parallel.mesh import AXES, DeviceMesh

EXPERTS, ENGRAM, STATE, REPLICATED = "routed experts", "Engram rows", "caches of own requests", "replicated weights"
KINDS = (EXPERTS, ENGRAM, STATE, REPLICATED)
HOST = "host memory"  # on no device, and so in no picture of devices
# What an array is for, by the logical name that spreads it (`mesh.RULES`).
_OWN = ("blocks", "slots")
_KIND_OF = {"expert": EXPERTS, "engram_rows": ENGRAM, **dict.fromkeys(_OWN, STATE)}


@dataclasses.dataclass(frozen=True)
class PlacedArray:
    """A weight or state array of the whole mesh. kind: one of `KINDS`, or `HOST` for what every host has whole;
    bytes_per_device: of one device's part."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    bytes_per_device: int
    kind: str

    def record(self) -> dict[str, Any]:
        """As `plan --json` gives it."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "kind"}
        return {**values, "shape": list(self.shape), "spec": HOST if self.kind == HOST else str(self.spec)}


def place(name: str, array: Any, logical: Sequence[str | None], plan: DeviceMesh) -> PlacedArray:
    """An array (anything with shape and dtype) whose axes have these logical names."""
    parts = math.prod(plan.size(axis) for axis in logical if axis is not None)
    nbytes = math.prod(array.shape) * array.dtype.itemsize // parts
    kinds = [_KIND_OF[axis] for axis in logical if axis in _KIND_OF]
    kind = kinds[0] if kinds else REPLICATED
    return PlacedArray(name, tuple(array.shape), str(array.dtype), plan.spec(logical), nbytes, kind)


def place_weights(params: nnx.State, plan: DeviceMesh) -> list[PlacedArray]:
    """Every weight and table of a model's state, by dotted path."""
    return [
        place(".".join(map(str, path)), leaf.get_value(), leaf.get_metadata().get("logical_axes") or (), plan)
        for path, leaf in nnx.to_flat_state(params)
    ]


def place_on_host(arrays: Mapping[str, Any]) -> list[PlacedArray]:
    """Arrays (anything with shape and dtype), by name, that stay in the memory of the hosts."""
    return [PlacedArray(n, tuple(a.shape), str(a.dtype), PartitionSpec(), 0, HOST) for n, a in arrays.items()]


def place_state(layout: CacheLayout, plan: DeviceMesh) -> list[PlacedArray]:
    """Every array of the state of all ranks."""
    arrays = []
    for name, axes in layout.logical_axes().items():
        own = getattr(layout.abstract(), name)
        if own is None:
            continue
        whole = tuple(n * (plan.world if axis in _OWN else 1) for n, axis in zip(own.shape, axes))
        arrays.append(place(f"state.{name}", jax.ShapeDtypeStruct(whole, own.dtype), axes, plan))
    return arrays


def parts_of_devices(array: PlacedArray, plan: DeviceMesh) -> list[tuple[int, int]]:
    """[first, last) along the axis that is cut, for each device in mesh order; axis 0 when none is."""
    cut = next((axis for axis, names in enumerate(array.spec) if names is not None), 0)
    names = array.spec[cut] if len(array.spec) else None
    axes = () if names is None else (names,) if isinstance(names, str) else tuple(names)
    sizes = tuple(plan.axis_sizes[axis] for axis in axes)
    length = math.prod(array.shape[cut : cut + 1]) // math.prod(sizes)  # 1 for a scalar
    spans = []
    for rank in range(plan.world):
        place = coordinates(rank, plan)
        part = 0
        for axis, size in zip(axes, sizes):
            part = part * size + place[axis]
        spans.append((part * length, (part + 1) * length))
    return spans


def coordinates(rank: int, plan: DeviceMesh) -> dict[str, int]:
    """Where a device of the mesh is along each physical axis."""
    places = {}
    for axis in reversed(AXES):
        rank, places[axis] = divmod(rank, plan.axis_sizes[axis])
    return {axis: places[axis] for axis in AXES}
