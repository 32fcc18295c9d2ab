"""The collectives of a traced step: what is sent along which mesh axes, and how often (architecture 4).

Read from the program as traced (its jaxpr), where a collective still names its axes and its operands have the
program's own types; a compiler may merge or widen them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from di_jax.parallel.mesh import AXES
from di_jax.platforms.accelerators import Accelerator


@dataclasses.dataclass(frozen=True, order=True)
class Collective:
    """Calls of one kind. bytes: what one device sends in a call; per_step: calls in a step of one device."""

    op: str
    axes: tuple[str, ...]
    bytes: int
    per_step: int


# Bytes that one of n devices sends for an operand of one byte: reductions as reduce-scatter and all-gather.
SENT = {
    "all_to_all": lambda n: (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "ppermute": lambda n: 1,
    "psum": lambda n: 2 * (n - 1) / n,
    "pmax": lambda n: 2 * (n - 1) / n,
    "pmin": lambda n: 2 * (n - 1) / n,
}


def collectives(jaxpr: Any, axis_sizes: Mapping[str, int]) -> tuple[Collective, ...]:
    """All collectives of a step traced over a mesh of these axes, the most bytes first.

    Scans count their trips. A loop whose trips are known only as it runs counts one: the exchange of expert rows and
    table rows is one round when no rank gets more than its capacity. Axes of size 1 are left out, and with them the
    collectives that then reach nobody.
    """
    calls: Counter[tuple[str, tuple[str, ...], int]] = Counter()
    for op, axes, nbytes, count in _calls(jaxpr, 1):
        wide = tuple(axis for axis in axes if axis_sizes[axis] > 1)
        if wide:
            ranks = math.prod(axis_sizes[axis] for axis in wide)
            calls[op, wide, math.ceil(nbytes * SENT[op](ranks))] += count
    found = [Collective(op, axes, nbytes, count) for (op, axes, nbytes), count in calls.items()]
    return tuple(sorted(found, key=lambda c: (-c.bytes * c.per_step, c)))


def _calls(jaxpr: Any, trips: int) -> Iterator[tuple[str, tuple[str, ...], int, int]]:
    """(primitive, axes, bytes of its operands, calls) of a jaxpr and everything in it."""
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name in SENT:
            axes = params["axes"] if "axes" in params else params["axis_name"]
            nbytes = sum(v.aval.size * v.aval.dtype.itemsize for v in equation.invars)
            yield name, (axes,) if isinstance(axes, str) else tuple(axes), nbytes, trips
        inner = trips * params["length"] if name == "scan" else trips
        for part in subprograms(equation):
            yield from _calls(part, inner)


def subprograms(equation: Any) -> Iterator[Any]:
    """The jaxprs inside an equation: bodies of loops, branches, called functions."""
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield part


def network_seconds(found: tuple[Collective, ...], axis_sizes: Mapping[str, int], device: Accelerator) -> float:
    """The least time that a step's collectives take on the wires: bytes over bandwidth, latency not counted.

    Devices fill domains in mesh order. A call sends to each peer alike; what stays inside the domain and what leaves
    it travel at once, each at its own rate.
    """
    total = 0.0
    for call in found:
        inside, outside = _peers(call.axes, axis_sizes, device.domain)
        share = call.bytes / (inside + outside)
        seconds = max(inside * share / device.link_bytes_per_s, outside * share / device.network_bytes_per_s)
        total += seconds * call.per_step
    return total


def _peers(axes: tuple[str, ...], axis_sizes: Mapping[str, int], domain: int) -> tuple[int, int]:
    """Peers of a device along `axes` inside its domain and beyond it, for the device with most of them beyond."""
    sizes = [axis_sizes[axis] for axis in AXES]
    domains = np.arange(math.prod(sizes)).reshape(sizes) // domain
    along = [index for index, axis in enumerate(AXES) if axis in axes]
    groups = np.moveaxis(domains, along, range(len(along)))
    groups = groups.reshape(math.prod(sizes[index] for index in along), -1)
    inside = min(int(np.sum(group == group[i])) - 1 for group, i in itertools.product(groups.T, range(len(groups))))
    return inside, len(groups) - 1 - inside
