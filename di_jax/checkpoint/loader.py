"""Checkpoint tensors straight into device arrays, in their stored formats, with little host memory (checkpoint 9).

A leaf whose local shards fit one slab is built by `jax.make_array_from_callback`. A larger one gets a zeroed buffer on
every local device, which slabs fill through a jitted, donated `dynamic_update_slice`; a slab gathers many small
tensors (experts) or cuts one large tensor along its rows. So a leaf costs one compiled shape, and the host holds two
slabs at a time whatever the size of the leaf: file bytes are mapped, never copied whole.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Container, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from tqdm import tqdm

from di_jax.checkpoint.errors import CheckpointError
from di_jax.checkpoint.mapping import LeafSpec, Sources, all_sources, leaf_specs
from di_jax.checkpoint.reader import CheckpointReader
from di_jax.model.config import ModelConfig
from di_jax.parallel.mesh import ONE_DEVICE, Parallel

# Two slabs and the runtime's staging copy of each stay under half of the 256 MB that loading may use; larger slabs do
# not load faster (32 MB is over a millisecond of PCIe transfer, far above the cost of a launch).
SLAB_BYTES = 32 * 2**20

_LOCAL = "local_devices"


@dataclasses.dataclass(frozen=True)
class SlabPlan:
    """How a shard is filled: boxes of one shape, each a range of `axis` under fixed positions of the axes before it."""

    shape: tuple[int, ...]  # of the shard
    axis: int
    count: int  # rows of `axis` in one slab

    @property
    def slab_shape(self) -> tuple[int, ...]:
        return (1,) * self.axis + (self.count,) + self.shape[self.axis + 1 :]

    def starts(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """(lowest corner of the slab, rows of it not covered before). The last slab of a range reaches back instead
        of being shorter: a second shape would compile a second program."""
        size, tail = self.shape[self.axis], (0,) * (len(self.shape) - self.axis - 1)
        for prefix in itertools.product(*(range(n) for n in self.shape[: self.axis])):
            for begin in range(0, size, self.count):
                fresh = min(self.count, size - begin)
                yield (*prefix, begin + fresh - self.count, *tail), fresh


def plan_slabs(shape: tuple[int, ...], itemsize: int, limit: int) -> SlabPlan:
    """The largest slab of at most `limit` bytes that covers whole trailing axes (one row of the last axis at least)."""
    for axis in range(len(shape)):
        row = math.prod(shape[axis + 1 :]) * itemsize
        if row <= limit or axis == len(shape) - 1:
            return SlabPlan(shape, axis, max(1, min(shape[axis], limit // max(row, 1))))
    raise ValueError("a leaf has at least one axis")


def load_leaves(
    reader: CheckpointReader,
    config: ModelConfig,
    shardings: Mapping[str, Sharding] | None,
    *,
    slab_bytes: int = SLAB_BYTES,
    draft: bool = False,
    parallel: Parallel = ONE_DEVICE,
    only: Container[str] | None = None,
) -> dict[str, jax.Array]:
    """Every leaf of `mapping.leaf_specs` as a global array; of a multi-process mesh only local shards are read.

    shardings: by leaf path, None for all on the first device. draft: the leaves of the draft model as well. only: paths
    of those to load, None for all. Host memory beyond the device shards: at most four slabs. Raises CheckpointError
    (bad scale byte, file changed, no draft there), ValueError for a leaf without sharding.
    """
    if draft and config.num_nextn_predict_layers and not reader.has_draft:
        raise CheckpointError(f"{reader.folder}: holds no draft (mtp.* tensors), which config.json announces")
    specs = leaf_specs(config, draft=draft, parallel=parallel)
    specs = {path: spec for path, spec in specs.items() if only is None or path in only}
    sources = all_sources(config, draft=draft, parallel=parallel)
    if shardings is None:
        shardings = dict.fromkeys(specs, SingleDeviceSharding(jax.local_devices()[0]))
    if unplaced := [path for path in specs if path not in shardings]:
        raise ValueError(f"no sharding for parameter {unplaced[0]!r} ({len(unplaced)} in all)")
    leaves = {path: _Leaf(reader, path, specs[path], sources[path], shardings[path]) for path in specs}
    total = sum(leaf.local_bytes for leaf in leaves.values())
    with tqdm(total=total, desc="loading weights", unit="B", unit_scale=True, disable=None) as bar:
        return {path: leaf.load(slab_bytes, bar.update) for path, leaf in leaves.items()}


class _Leaf:
    """One leaf on this process's devices. Devices that hold the same box (replicas) share every slab."""

    def __init__(
        self, reader: CheckpointReader, path: str, spec: LeafSpec, sources: Sources, sharding: Sharding
    ) -> None:
        self.reader, self.path, self.spec, self.sharding = reader, path, spec, sharding
        self.names = dict(sources)
        self.stack_axes = len(sources[0][0])
        self.corners: dict[jax.Device, tuple[int, ...]] = {
            device: tuple(s.indices(n)[0] for s, n in zip(index, spec.shape, strict=True))
            for device, index in sharding.addressable_devices_indices_map(spec.shape).items()
            if index is not None
        }
        self.shard_shape = tuple(sharding.shard_shape(spec.shape))
        self.shard_bytes = math.prod(self.shard_shape) * spec.dtype.itemsize
        self.local_bytes = len(set(self.corners.values())) * self.shard_bytes

    def load(self, slab_bytes: int, progress: Callable[[int], object]) -> jax.Array:
        if self.shard_bytes * len(self.corners) <= slab_bytes:
            array = self._load_whole()
            progress(self.local_bytes)
            return array
        return self._load_slabs(slab_bytes, progress)

    def _load_whole(self) -> jax.Array:
        def box(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            bounds = [s.indices(n) for s, n in zip(index, self.spec.shape, strict=True)]
            low, shape = tuple(b[0] for b in bounds), tuple(b[1] - b[0] for b in bounds)
            data = self._read(low, shape)
            # The CPU runtime aliases host memory: over the mapped file, a rewritten file would change the weights.
            return data if data.flags.owndata else data.copy()

        return jax.make_array_from_callback(self.spec.shape, self.sharding, box)

    def _load_slabs(self, slab_bytes: int, progress: Callable[[int], object]) -> jax.Array:
        devices = list(self.corners)
        distinct = sorted(set(self.corners.values()))
        plan = plan_slabs(self.shard_shape, self.spec.dtype.itemsize, slab_bytes // len(distinct))
        row_bytes = math.prod(plan.slab_shape) // plan.count * self.spec.dtype.itemsize
        # All local buffers as one array split on its first axis: one program fills them all, compiled once.
        mesh = jax.sharding.Mesh(np.array(devices), (_LOCAL,))
        split = NamedSharding(mesh, PartitionSpec(_LOCAL))
        update = _make_update(mesh)
        as_bytes = devices[0].platform == "cpu" and self.spec.dtype.itemsize == 1
        # XLA's CPU compiler does float8 in float16: each update would convert the whole buffer (1.4 s against 2 ms
        # for 320 MB), so there the buffer is bytes until it is full.
        dtype = np.dtype(np.uint8) if as_bytes else self.spec.dtype
        buffer = jnp.zeros(_joined(self.shard_shape, len(devices)), dtype, device=split)
        for start, fresh in plan.starts():
            boxes = {
                corner: self._read(tuple(np.add(corner, start).tolist()), plan.slab_shape).view(dtype)
                for corner in distinct
            }
            # The slab before this one must have left the host before this one is sent: two slabs live at most.
            buffer.block_until_ready()
            slab = jax.make_array_from_single_device_arrays(
                _joined(plan.slab_shape, len(devices)),
                split,
                [jax.device_put(boxes[self.corners[device]], device) for device in devices],
            )
            buffer = update(buffer, slab, np.asarray(start, np.int32))
            progress(fresh * row_bytes * len(distinct))
        buffer.block_until_ready()
        shards = [shard.data for shard in buffer.addressable_shards]
        if as_bytes:  # another name for the same memory: a CPU array is host memory, aligned as XLA wants it
            shards = [
                jax.device_put(np.asarray(shard).view(self.spec.dtype), shard.device, may_alias=True)
                for shard in shards
            ]
        return jax.make_array_from_single_device_arrays(self.spec.shape, self.sharding, shards)

    def _read(self, low: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        """The box of the global leaf at corner `low`: a view of the file when it lies in one tensor, else gathered."""
        stack, box = self.stack_axes, tuple(slice(a, a + n) for a, n in zip(low, shape, strict=True))[self.stack_axes :]
        if math.prod(shape[:stack]) == 1:
            view = self.reader.read(self.names[low[:stack]], box)
            if view.size < math.prod(shape):  # rows that pad the leaf to equal shards
                view = np.pad(view, [(0, n - m) for n, m in zip(shape[stack:], view.shape, strict=True)])
            return np.require(view.reshape(shape), requirements=("C", "A"))
        gathered = np.empty(shape, self.spec.dtype)
        for offset in np.ndindex(*shape[:stack]):
            position = tuple(a + b for a, b in zip(low[:stack], offset, strict=True))
            gathered[offset] = self.reader.read(self.names[position], box)
        return gathered


def _joined(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    return (count * shape[0], *shape[1:])


@functools.lru_cache(maxsize=4)  # leaves of equal shape then share one compiled program
def _make_update(mesh: jax.sharding.Mesh) -> Callable[[jax.Array, jax.Array, np.ndarray], jax.Array]:
    """(buffer, donated; slab; start) -> buffer with the slab written at `start` of every device's own part."""

    def write(buffer: jax.Array, slab: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(buffer, slab, tuple(start[axis] for axis in range(buffer.ndim)))

    split = PartitionSpec(_LOCAL)
    mapped = jax.shard_map(write, mesh=mesh, in_specs=(split, split, PartitionSpec()), out_specs=split)
    return jax.jit(mapped, donate_argnums=0)
