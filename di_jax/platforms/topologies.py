"""Devices that are not here but that a compiler on this machine can compile for."""

from __future__ import annotations

import importlib.util

import jax
from jax.experimental import topologies

# Name of the accelerator: (platform, package of its compiler, name of a topology, devices of each layout).
_KNOWN = {
    "tpu-v7x": (
        "tpu",
        "libtpu",
        "tpu7x:{}",
        {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8", 512: "4x8x8", 1024: "8x8x8"},
    ),
}


def compile_only_devices(name: str, count: int) -> list[jax.Device] | None:
    """`count` devices of an accelerator (`accelerators.ACCELERATORS`) to compile for, nothing runs on them.

    None when no compiler for it is installed (the extra `tpu` brings one for TPUs), or for a number of devices that no
    slice has: a program for a part of a slice is not the same program.
    """
    platform, package, pattern, layouts = _KNOWN.get(name, ("", "", "", {}))
    if count not in layouts or importlib.util.find_spec(package) is None:
        return None
    description = topologies.get_topology_desc(pattern.format(layouts[count]), platform)
    return list(description.devices)
