"""The device mesh of one replica and the rules that place every array on it (architecture 4).

The physical axes are factors of the world, dp x cp devices, and the logical names map onto them:

    d0 (data only) x d1 (data and expert) x c0 (context only) x c1 (context and expert)

so that the routed experts reuse the ranks of data and context parallelism. Rank r of the mesh is
((d0 * D1 + d1) * C0 + c0) * C1 + c1; context ranks of one data-parallel rank are neighbours.

jax is imported where arrays are placed and not before: the config checks its sizes here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from di_jax.errors import ConfigError

if TYPE_CHECKING:
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

AXES = ("d0", "d1", "c0", "c1")

# What each logical name of a parameter or state array maps to; names that are not here are replicated.
RULES: Mapping[str, tuple[str, ...]] = {
    "batch": ("d0", "d1"),  # ranks with requests of their own
    "sequence": ("c0", "c1"),  # ranks that share a prompt
    "expert": ("d1", "c1"),  # owners of the routed experts
    "engram_rows": AXES,  # owners of the Engram tables' rows
}
# Every device has pages and state slots of its own (architecture 7.6): not a matter of rules.
_OWN = ("blocks", "slots")


@dataclasses.dataclass(frozen=True)
class DeviceMesh:
    """Sizes and rules of a mesh; no devices yet. rules: changes to `RULES`, by logical name.

    Raises ConfigError, naming key and numbers, for sizes that do not factor and for rules that the step cannot run.
    """

    dp: int = 1
    cp: int = 1
    ep: int = 1
    rules: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        if self.world % self.ep:
            fits = [n for n in range(1, self.world + 1) if self.world % n == 0]
            raise ConfigError(
                f"mesh.ep: {self.ep} does not divide mesh.dp x mesh.cp = {self.dp} x {self.cp} = {self.world}; "
                f"give one of {', '.join(map(str, fits))}"
            )
        for name, axes in self.rules:
            if name not in RULES:
                raise ConfigError(f"mesh.rules.{name}: no such logical name; there are {', '.join(RULES)}")
            for axis in axes:
                if axis not in AXES:
                    raise ConfigError(f"mesh.rules.{name}: no such axis {axis!r}; there are {', '.join(AXES)}")
            if len(set(axes)) < len(axes):
                raise ConfigError(f"mesh.rules.{name}: {', '.join(axes)} names an axis twice")
        requests = self.axes("batch") + self.axes("sequence")
        if sorted(requests) != sorted(AXES):
            raise ConfigError(
                f"mesh.rules: batch and sequence together must name each of {', '.join(AXES)} once, they name "
                f"{', '.join(requests) or 'none'}"
            )
        for name, size, key in (("batch", self.dp, "dp"), ("sequence", self.cp, "cp"), ("expert", self.ep, "ep")):
            if self.size(name) != size:
                sizes = " x ".join(f"{axis} {self.axis_sizes[axis]}" for axis in self.axes(name)) or "no axis"
                raise ConfigError(
                    f"mesh.rules.{name}: {sizes} = {self.size(name)} ranks, mesh.{key} is {size}; the axes of "
                    f"dp {self.dp}, cp {self.cp}, ep {self.ep} are "
                    + ", ".join(f"{axis} {count}" for axis, count in self.axis_sizes.items())
                )

    @property
    def world(self) -> int:
        """Devices of the mesh."""
        return self.dp * self.cp

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        """Size of each physical axis. Expert groups take context ranks first: they are the nearest neighbours."""
        c1 = math.gcd(self.ep, self.cp)
        d1 = self.ep // c1  # divides dp, since ep divides dp x cp
        return {"d0": self.dp // d1, "d1": d1, "c0": self.cp // c1, "c1": c1}

    def axes(self, name: str | None) -> tuple[str, ...]:
        """The physical axes that a logical name maps to; none for names without a rule."""
        if name in _OWN:
            return self.axes("batch") + self.axes("sequence")
        return dict(self.rules).get(name or "", RULES.get(name or "", ()))

    def size(self, name: str) -> int:
        """Parts that an array axis of that name is cut into."""
        return math.prod(self.axis_sizes[axis] for axis in self.axes(name))

    def spec(self, logical: Sequence[str | None]) -> PartitionSpec:
        """The PartitionSpec of an array whose axes have these logical names. Axes of size 1 are left out."""
        from jax.sharding import PartitionSpec

        parts: list[str | tuple[str, ...] | None] = []
        for name in logical:
            axes = tuple(axis for axis in self.axes(name) if self.axis_sizes[axis] > 1)
            parts.append(None if not axes else axes[0] if len(axes) == 1 else axes)
        return PartitionSpec(*parts)

    @property
    def rank_axes(self) -> tuple[str, ...]:
        """The axes of an array with one row per rank, in the order of ranks as requests see them: the cp ranks of a
        data-parallel rank side by side."""
        return self.axes("blocks")

    def check_devices(self, present: int, kind: str, processes: int = 1) -> None:
        """Raises ConfigError unless the mesh can be laid over `present` devices of `processes` processes."""
        asked = f"mesh.dp x mesh.cp: {self.dp} x {self.cp} = {self.world} devices"
        if present < self.world:
            raise ConfigError(
                f"{asked} asked, {present} present ({kind}): lower mesh.dp or mesh.cp, or set "
                f"mesh.simulate_devices: {self.world} to run on virtual CPU devices; `plan` needs none"
            )
        if present > self.world and processes > 1:
            raise ConfigError(
                f"{asked}, but the {processes} processes have {present}: every device of every process must have a "
                "rank of the mesh; raise mesh.dp or start fewer processes"
            )

    def build(self, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
        """The jax mesh on the first `world` devices. Raises ConfigError when they do not suffice."""
        import jax
        import numpy as np

        devices = jax.devices() if devices is None else devices
        self.check_devices(len(devices), devices[0].device_kind, jax.process_count())
        grid = np.array(devices[: self.world]).reshape(tuple(self.axis_sizes[axis] for axis in AXES))
        return jax.sharding.Mesh(grid, AXES)

    def check_experts(self, experts: int, extra: int, what: str = "n_routed_experts") -> None:
        """Raises ConfigError unless the expert slots, experts and redundant ones, divide by ep."""
        if (experts + extra) % self.ep:
            raise ConfigError(
                f"mesh.ep: {self.ep} does not divide {what} + redundant experts = {experts} + {extra} = "
                f"{experts + extra}; set eplb.extra_per_rank or another mesh.ep"
            )


def padded(count: int, parts: int) -> int:
    """`count` rounded up to a multiple of `parts`."""
    return -(-count // parts) * parts


def rows_of_ranks(ranks: NamedSharding, local: np.ndarray) -> jax.Array | np.ndarray:
    """Rows [local ranks, ...] of this process as an argument of a program over the mesh, [world, ...].

    ranks: the sharding of the first axis over all devices. local: not to be written to any more. On a mesh of one
    device the array is its own global value, which a program takes in 8 us; making it one first takes 60.
    """
    import jax

    if ranks.mesh.size == 1:
        return local
    return jax.make_array_from_process_local_data(ranks, local, (ranks.mesh.size, *local.shape[1:]))


def shardings(
    mesh: jax.sharding.Mesh, plan: DeviceMesh, logical: Mapping[str, Sequence[str | None]]
) -> dict[str, NamedSharding]:
    """Where each array lives, by its name, from the logical names of its axes."""
    from jax.sharding import NamedSharding

    return {name: NamedSharding(mesh, plan.spec(axes)) for name, axes in logical.items()}


@dataclasses.dataclass(frozen=True)
class Parallel:
    """What the model's modules know of the mesh they run on. The default is one device.

    extra_experts: redundant expert slots of the backbone beyond its experts. balanced: whether EPLB is on, so that
    rows find their experts by a table and a step returns the rows of every slot. force: "balanced" or "imbalanced"
    routes by lot instead of by score, "none" does not. dispatch_capacity: rows that a round of the expert exchange
    carries per pair of ranks, over the mean. engram_placement: "device" spreads the Engram tables over the mesh, "host"
    leaves them out of the model's weights.
    """

    mesh: DeviceMesh = DeviceMesh()
    extra_experts: int = 0
    balanced: bool = False
    force: str = "none"
    dispatch_capacity: float = 1.25
    engram_placement: str = "device"

    def __post_init__(self) -> None:
        if self.extra_experts and not self.balanced:
            raise ValueError(f"{self.extra_experts} redundant experts are never reached without EPLB")

    @property
    def draws_lots(self) -> bool:
        """Whether rows need a hash of their own to find their slots."""
        return self.balanced or self.force != "none"


ONE_DEVICE = Parallel()
