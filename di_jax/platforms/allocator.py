"""Which allocator NVIDIA devices have (`platform.allocator`), and how much memory there is where it does not tell."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from typing import Any

import jax

from di_jax.config import Config
from di_jax.errors import ConfigError

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
VMM = "vmm"
# Of a device's memory, what XLA takes unless it is told otherwise.
DEFAULT_FRACTION = 0.75


def choose_allocator(config: Config) -> None:
    """Tells jax; before anything touches a device. Raises ConfigError for a named one where none of NVIDIA is used."""
    allocator, name = config.platform.allocator, config.platform.name
    nvidia = any(importlib.util.find_spec(plugin) for plugin in PLUGINS)
    if config.mesh.simulate_devices or name not in (None, "auto", "gpu") or not nvidia:
        if allocator != "auto":
            raise ConfigError(f"platform.allocator: {allocator} is for NVIDIA devices, of which none is used; set auto")
        return
    if allocator == "auto":
        # A step with drafts is several programs. With bfc the temporaries of each are somewhere else every time, and
        # XLA writes the new addresses into the graph first: 8 ms for 900 commands, more than the step takes on the
        # device (64 requests on an H200: 15 ms a step with bfc, 8 ms with vmm). Steps of one program take as long with
        # either, and bfc keeps account of its memory. What jax itself was told stays.
        if not config.drafting.enabled or "XLA_PYTHON_CLIENT_ALLOCATOR" in os.environ:
            return
        allocator = VMM
    jax.config.update("jax_pjrt_client_create_options", {**client_options(), "allocator": allocator})


def client_options() -> dict[str, Any]:
    """What jax is to give to the clients of plugins so far."""
    options: str | dict[str, Any] | None = jax.config.jax_pjrt_client_create_options
    if isinstance(options, str):
        return dict(part.split(":", 1) for part in options.split(";") if part)
    return options or {}


def keeps_temporaries(device: jax.Device) -> bool:
    """Whether the allocator of this device is vmm, under which the temporaries of a program stay where they are. What
    jax was told does not reach a client that is there already; that of bfc keeps account of its memory."""
    return client_options().get("allocator") == VMM and "bytes_limit" not in (device.memory_stats() or {})


def untold_memory(device: jax.Device) -> tuple[int, int] | None:
    """(limit, in use) in bytes of an NVIDIA device whose allocator keeps no account, as vmm; None where the driver does
    not answer. In use: by arrays that are alive."""
    total = total_memory(device.local_hardware_id or 0)
    if total is None:
        return None
    told = os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    fraction = float(client_options().get("memory_fraction", told or DEFAULT_FRACTION))
    shards = (shard for array in jax.live_arrays() for shard in array.addressable_shards)
    return int(total * fraction), sum(shard.data.nbytes for shard in shards if shard.device == device)


def total_memory(ordinal: int) -> int | None:
    """Bytes of the CUDA device with this number among those that the process sees; None without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, size = ctypes.c_int(), ctypes.c_size_t()
    calls = (
        lambda: cuda.cuInit(0),
        lambda: cuda.cuDeviceGet(ctypes.byref(device), ordinal),
        lambda: cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device),
    )
    return None if any(call() for call in calls) else size.value
