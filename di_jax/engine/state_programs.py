"""Maintenance of the state between steps: copies for forks, snapshots of window rings and their way back.

Small programs over the mesh, each of one shape, so that nothing compiles once they are warm. A rank only touches its
own pages and slots; nothing is communicated. Whatever changes the state is donated it and takes what it writes from
arrays of its own: a program that read and wrote the same pool could be given a second one by the compiler.

A snapshot is taken at a block's end and holds window rings alone. The compressor rings need none: every ratio divides
the block, so no group is open there (`check_closed_groups`). Nor does the Engram's history: its look-back comes with
the plan of the prefill that goes on from there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from di_jax.model.cache import CacheLayout, EngineState
from di_jax.parallel.mesh import DeviceMesh, rows_of_ranks
from di_jax.platforms.compiler import XLA_DEFAULTS, Compiler

PAIRS = 8  # block copies and slot copies of one launch
NOTHING = -1  # a slot or block that is none
# What a fork does not take over: it samples a first token of its own, and drafts what follows that.
_OWN = ("last_token", "draft_token", "draft_confidence", "draft_logits", "draft_norm")

Pairs = Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class StateCopies:
    """What one rank copies inside its caches, as (source, target) pairs: all pages of blocks, and all of slots but
    their last token and its drafts. A target is nobody else's target, nor anybody's source."""

    blocks: Pairs = ()
    slots: Pairs = ()

    @property
    def launches(self) -> int:
        return -(-max(len(self.blocks), len(self.slots)) // PAIRS)

    def check(self, layout: CacheLayout) -> None:
        """Raises ValueError for pairs that are out of range or depend on the order in which they are copied."""
        for what, pairs, count in (("block", self.blocks, layout.num_blocks), ("slot", self.slots, layout.num_slots)):
            sources, targets = {source for source, _ in pairs}, {target for _, target in pairs}
            if len(targets) < len(pairs) or sources & targets:
                raise ValueError(f"copies of {what}s {list(pairs)}: a target is named twice, or is a source too")
            if not all(0 <= number < count for number in sources | targets):
                raise ValueError(f"copies of {what}s {list(pairs)}: there are {count}, counted from 0")

    def packed(self, launch: int) -> np.ndarray:
        """int32 [2, 2, PAIRS]: blocks and slots, their sources and targets, of one launch; `NOTHING` where no more."""
        buffer = np.full((2, 2, PAIRS), NOTHING, np.int32)
        for row, pairs in zip(buffer, (self.blocks, self.slots)):
            part = pairs[launch * PAIRS : (launch + 1) * PAIRS]
            if part:
                row[:, : len(part)] = np.array(part, np.int32).T
        return buffer


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Window rings on their way to the host, one array [1, layers, window_ring, record] for each rank of this process
    or None for ranks that gave nothing."""

    rings: Sequence[Array | None]

    def host(self) -> list[np.ndarray | None]:
        """Waits for them: [layers, window_ring, record] of each rank, as stored, for reading only."""
        return [None if ring is None else np.asarray(ring)[0] for ring in self.rings]


class StatePrograms:
    """The programs over one mesh and layout. Each is compiled at first use, or by `warm_up`.

    Every process of a run calls the same ones in the same order, with one entry for each rank that it hosts.
    """

    def __init__(
        self, mesh: jax.sharding.Mesh, plan: DeviceMesh, layout: CacheLayout, compiler: Compiler = XLA_DEFAULTS
    ) -> None:
        self.mesh, self.plan, self.layout = mesh, plan, layout
        self._compiler = compiler
        self._ranks = NamedSharding(mesh, PartitionSpec(plan.rank_axes))
        self._compiled: dict[tuple[str, int], Any] = {}

    def warm_up(self, snapshot_layers: int | None) -> None:
        """Compiles all that may be asked for. snapshot_layers: of snapshots; None when there will be none."""
        names = [("take", 0), ("put", 0)]
        if snapshot_layers is not None:
            names += [("snapshot", snapshot_layers), ("restore", snapshot_layers)]
        for name, layers in names:
            self.compiled(name, layers)

    def compiled(self, name: str, layers: int = 0) -> Any:
        """The executable of `take`, `put`, `snapshot` or `restore`, the last two for the first `layers` layers."""
        executable = self._compiled.get((name, layers))
        if executable is None:
            executable = self._compiled[name, layers] = self._compiler(self._lower(name, layers))
        return executable

    def copy(self, state: EngineState, copies: Sequence[StateCopies], launches: int) -> EngineState:
        """The state after `copies`. launches: the most that a rank of the mesh needs (`StateCopies.launches`)."""
        for own in copies:
            own.check(self.layout)
        need = max(own.launches for own in copies)
        if need > launches:
            raise ValueError(f"{launches} launches for copies that need {need}")
        for launch in range(launches):
            pairs = rows_of_ranks(self._ranks, np.stack([own.packed(launch) for own in copies]))
            staged = self.compiled("take")(state, pairs)
            state = self.compiled("put")(state, staged, pairs)
        return state

    def snapshot(self, state: EngineState, slots: Sequence[int], layers: int) -> Snapshot:
        """Window rings of the first `layers` layers of a slot of each rank, or of none (`NOTHING`). Returns at once."""
        self._check_slots(slots)
        rings = self.compiled("snapshot", layers)(state, rows_of_ranks(self._ranks, np.array(slots, np.int32)))
        shards = sorted(rings.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        own = [None if slot == NOTHING else shard.data for slot, shard in zip(slots, shards, strict=True)]
        for ring in own:
            if ring is not None:
                ring.copy_to_host_async()
        return Snapshot(own)

    def restore(
        self, state: EngineState, slots: Sequence[int], rings: Sequence[np.ndarray | None], layers: int
    ) -> EngineState:
        """The state with `rings` of `Snapshot.host` in a slot of each rank, or as it was where that is `NOTHING`."""
        self._check_slots(slots)
        window = self.layout.abstract().window
        shape = (layers, *window.shape[2:])
        local = np.zeros((len(slots), *shape), window.dtype)
        for rank, (slot, ring) in enumerate(zip(slots, rings, strict=True)):
            if (slot == NOTHING) != (ring is None):
                raise ValueError(f"slots {list(slots)}: rings for some that are none, or none for others")
            if ring is not None:
                if ring.shape != shape or ring.dtype != window.dtype:
                    raise ValueError(
                        f"window rings {ring.dtype}{list(ring.shape)} for caches of {window.dtype}{list(shape)}"
                    )
                local[rank] = ring
        place = partial(rows_of_ranks, self._ranks)
        return self.compiled("restore", layers)(state, place(np.array(slots, np.int32)), place(local))

    def _check_slots(self, slots: Sequence[int]) -> None:
        if not all(slot == NOTHING or 0 <= slot < self.layout.num_slots for slot in slots):
            raise ValueError(f"slots {list(slots)}: there are {self.layout.num_slots}, counted from 0")

    def _lower(self, name: str, layers: int) -> Any:
        rings = self.layout.abstract().window
        if name in ("snapshot", "restore"):
            check_closed_groups(self.layout)
            if not 0 < layers <= len(rings):
                raise ValueError(f"a snapshot of {layers} layers: the caches have window rings of {len(rings)}")
        one = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        pairs, slot = one((1, 2, 2, PAIRS)), one((1,))
        # What a rank gets beside its state.
        bodies: dict[str, tuple[Callable[..., Any], Callable[[], list[Any]]]] = {
            "take": (take, lambda: [pairs]),
            "put": (put, lambda: [jax.eval_shape(take, self.layout.abstract(), pairs), pairs]),
            "snapshot": (partial(snapshot, layers), lambda: [slot]),
            "restore": (restore, lambda: [slot, jax.ShapeDtypeStruct((1, layers, *rings.shape[2:]), rings.dtype)]),
        }
        body, arguments = bodies[name]

        def over_ranks(a: Any) -> Any:
            return jax.ShapeDtypeStruct((self.plan.world, *a.shape[1:]), a.dtype, sharding=self._ranks)

        given = jax.tree.map(over_ranks, arguments())
        state = self.layout.global_abstract(self.mesh, self.plan)
        state_specs, ranks = jax.tree.map(lambda s: s.sharding.spec, state), self._ranks.spec
        changes = name in ("put", "restore")
        program = jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=(state_specs, *[ranks] * len(given)),
            out_specs=state_specs if changes else ranks,
            check_vma=False,  # the state's specs leave out axes of size 1, the ranks' do not
        )
        return jax.jit(program, donate_argnums=0 if changes else ()).lower(state, *given)


def check_closed_groups(layout: CacheLayout) -> None:
    """Raises ValueError unless every group of tokens that is compressed into one entry ends inside its block."""
    for layer, ratio in zip(layout.config.kv_source_layer_ids, layout.config.kv_source_ratios):
        if layout.block_size % ratio:
            raise ValueError(
                f"compress_ratios: {ratio} of layer {layer} does not divide blocks of {layout.block_size} tokens: a "
                "snapshot at a block's end would need the compressor rings too"
            )


# ---- one rank's part of each program, inside shard_map; arguments and results beside the state have a leading 1 ----


def take(state: EngineState, pairs: Array) -> dict[str, Array]:
    """What is to be copied, of each state array its [1, outer axes, PAIRS, ...]. pairs int32 [1, 2, 2, PAIRS]."""
    return {name: _rows(array, axis, source)[None] for name, array, axis, (source, _) in _copied(state, pairs[0])}


def put(state: EngineState, staged: dict[str, Array], pairs: Array) -> EngineState:
    """The state with what `take` took where it belongs."""
    changes = {
        name: _with_rows(array, axis, target, staged[name][0])
        for name, array, axis, (_, target) in _copied(state, pairs[0])
    }
    return state.replace(**changes)


def snapshot(layers: int, state: EngineState, slot: Array) -> Array:
    """[1, layers, window_ring, record]: rings of the slot, int32 [1]; anything when it is `NOTHING`."""
    return _rows(state.window, 1, slot, layers).swapaxes(0, 1)


def restore(state: EngineState, slot: Array, rings: Array) -> EngineState:
    """The state with rings [1, layers, window_ring, record] in the slot, int32 [1]."""
    return state.replace(window=_with_rows(state.window, 1, slot, rings.swapaxes(0, 1)))


def _copied(state: EngineState, pairs: Array) -> Iterator[tuple[str, Array, int, Array]]:
    """(name, array, its axis of blocks or slots, its int32 [2, PAIRS] of `pairs`) of everything that is copied."""
    for name, axes in CacheLayout.logical_axes().items():
        array = getattr(state, name)
        if name not in _OWN and array.size:
            yield (
                name,
                array,
                *((axes.index("blocks"), pairs[0]) if "blocks" in axes else (axes.index("slots"), pairs[1])),
            )


# Both work along one leading axis: along an inner one a compiler may lay the whole array out anew.


def _rows(array: Array, axis: int, numbers: Array, layers: int | None = None) -> Array:
    """array[:layers][..., numbers, ...] along `axis`, and any rows for `NOTHING`."""
    outer = array.shape[:axis] if layers is None else (layers,)
    rows = array.reshape(-1, *array.shape[axis + 1 :])[_flat(array, axis, math.prod(outer), jnp.maximum(numbers, 0))]
    return rows.reshape(*outer, len(numbers), *array.shape[axis + 1 :])


def _with_rows(array: Array, axis: int, numbers: Array, rows: Array) -> Array:
    """`array` with `rows`, as of `_rows`, but none where `NOTHING` stands."""
    flat = array.reshape(-1, *array.shape[axis + 1 :])
    number = _flat(array, axis, math.prod(rows.shape[:axis]), numbers)
    rows = rows.reshape(-1, *flat.shape[1:])
    return flat.at[number].set(rows, mode="drop").reshape(array.shape)


def _flat(array: Array, axis: int, outer: int, numbers: Array) -> Array:
    """int32 [outer * numbers] row numbers when the axes up to `axis` are one; out of bounds for `NOTHING`."""
    count = array.shape[axis]
    first = jnp.arange(outer, dtype=jnp.int32)[:, None] * count
    return jnp.where(numbers == NOTHING, math.prod(array.shape[: axis + 1]), first + numbers).reshape(-1)
