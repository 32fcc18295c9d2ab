"""What the PJRT backend offers: which devices, and how much memory is left on them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from di_jax.config import Config
from di_jax.errors import ConfigError
from di_jax.parallel import processes
from di_jax.platforms.allocator import choose_allocator, untold_memory

logger = logging.getLogger(__name__)

# What brings the backend of a `platform.name`: an extra of this package.
_EXTRAS = {"gpu": "cuda13", "tpu": "tpu"}


def configure_jax(config: Config) -> None:
    """Applies `platform.name`, `mesh.simulate_devices` and `cache.compile_dir`, and joins the other processes of the
    run; call before anything touches a device.

    Raises ConfigError when that folder cannot be made or written, and for processes that do not come together.
    """
    if config.mesh.simulate_devices:
        simulate_devices(config.mesh.simulate_devices)
    elif (name := config.platform.name) not in (None, "auto"):
        # Callbacks get their arguments on a CPU device, also from a TPU. The first name stays the default.
        calls_host = config.model.engram_placement == "host" and name != "cpu"
        names = f"{name},cpu" if calls_host else name
        # To jax "gpu" means cuda and rocm, and it fails where either is not installed: it is to find what there is.
        jax.config.update("jax_platforms", "" if name == "gpu" else names)
    choose_allocator(config)
    if config.cache.compile_dir is not None:
        folder = Path(os.path.expanduser(config.cache.compile_dir))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # jax only warns about a cache that it cannot write, once for every program.
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ConfigError(
                f"cache.compile_dir: {folder} cannot be written ({error.strerror}); give a folder you own, or null"
            ) from error
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # The defaults leave out programs that compile in under a second: a warm start would compile them again.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", -1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    processes.start(config)


def simulate_devices(count: int) -> None:
    """Makes this process run on `count` virtual CPU devices. Without effect once a device was touched, which
    `require_devices` notices."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)


def require_devices(config: Config) -> list[jax.Device]:
    """The devices of the platform. Raises ConfigError when there are none, or too few for the config."""
    try:
        present = jax.devices()
    except RuntimeError as error:
        raise ConfigError(_no_backend(config.platform.name, error)) from error
    if config.platform.name == "gpu" and present[0].platform != "gpu" and not config.mesh.simulate_devices:
        raise ConfigError(_no_backend("gpu", RuntimeError(f"jax found {present[0].platform}")))
    wanted = config.mesh.simulate_devices
    if wanted and (present[0].platform != "cpu" or jax.local_device_count() < wanted):
        raise ConfigError(
            f"mesh.simulate_devices: {wanted} asked, but this process already runs on {jax.local_device_count()} "
            f"{present[0].platform} devices: simulate in a fresh process"
        )
    config.mesh.plan.check_devices(len(present), present[0].device_kind, jax.process_count())
    return present


def _no_backend(platform: str | None, error: Exception) -> str:
    """jax's own message names the last backend that it tried (rocm, for a GPU) and a variable that we do not use."""
    detail = str(error).partition(" (set JAX_PLATFORMS")[0]
    if platform not in _EXTRAS:
        return f"platform.name: {platform!r} cannot be used here: {detail}"
    return (
        f"platform.name: {platform!r}: no {platform.upper()} backend is installed, or none that works here ({detail}); "
        f"install the extra `{_EXTRAS[platform]}` (pip install '.[{_EXTRAS[platform]}]' in the checkout), or set "
        "platform.name to cpu or auto"
    )


@dataclasses.dataclass(frozen=True)
class MemoryRoom:
    """Memory of a device in bytes: what there is for us, and what is in use of that. shared: it is the machine's, which
    everybody takes from, and `limit` is what is available of it now."""

    limit: int
    used: int = 0
    shared: bool = False

    def free(self, utilization: float) -> int:
        """Bytes that may still be allocated under `engine.memory_utilization`."""
        return int(self.limit * utilization) - self.used


def memory_room(devices: Sequence[jax.Device], utilization: float) -> MemoryRoom | None:
    """Of that one of `devices` with the least left under `utilization`, since all are to hold the same; None when none
    tells. CPU devices share what the machine has."""
    if devices[0].platform == "cpu":
        available = available_memory()
        return None if available is None else MemoryRoom(available // len(devices), shared=True)
    rooms = []
    for device in devices:
        stats = device.memory_stats() or {}
        if (limit := stats.get("bytes_limit")) is not None:
            rooms.append(MemoryRoom(limit, stats.get("bytes_in_use", 0)))
        elif device.platform == "gpu" and (told := untold_memory(device)) is not None:
            rooms.append(MemoryRoom(*told))
    return min(rooms, key=lambda room: room.free(utilization), default=None)


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take of the machine's memory, or of its control group's where that is less.

    A CPU device shares the machine's memory with everybody else on it, so what is available counts, not a limit. Free
    pages would be the wrong measure: files that were read (a checkpoint, say) fill them as cache, which the kernel
    gives up when asked, so that the pool would shrink with the files read before. Available memory counts that cache
    as free, and a pool depends on it only where memory really is short. root: where /proc and /sys are.
    """
    rooms = [*_machine_room(root), *_group_rooms(root)]
    return max(0, min(rooms)) if rooms else None


def _machine_room(root: Path) -> Iterator[int]:
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found:
        yield int(found[1]) * 1024
        return
    try:
        yield os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # free pages: better than nothing
    except (OSError, ValueError):
        return


def _group_rooms(root: Path) -> Iterator[int]:
    """What is left below the limit of each control group that this process is in, version 2 or 1.

    The limit of a parent binds too. Inside a container the path of /proc may be one of the host and not be there; the
    container's own group is then the mount itself, which ends the walk.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in [group, *group.parents][: len(group.relative_to(mount).parts) + 1]:
            yield from _group_room(folder, *names)


def _group_room(folder: Path, limit: str, usage: str, cache: str) -> Iterator[int]:
    """Limit - usage + file cache that can be dropped; nothing when there is no such group or no limit ("max")."""
    try:
        room = int((folder / limit).read_text()) - int((folder / usage).read_text())
        found = re.search(rf"^{cache} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return
    yield room + (int(found[1]) if found else 0)
