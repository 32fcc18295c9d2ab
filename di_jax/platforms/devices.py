"""What the PJRT backend offers: which devices, and how much memory is left on them."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax

from di_jax.config import Config
from di_jax.errors import ConfigError

logger = logging.getLogger(__name__)

# What brings the backend of a `platform.name`: an extra of this package.
_EXTRAS = {"gpu": "cuda13", "tpu": "tpu"}


def configure_jax(config: Config) -> None:
    """Applies `platform.name` and `cache.compile_dir`; call before anything touches a device.

    Raises ConfigError when that folder cannot be made or written.
    """
    if config.platform.name not in (None, "auto"):
        jax.config.update("jax_platforms", config.platform.name)
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


def require_devices(config: Config) -> None:
    """Raises ConfigError when the platform has no device, or the mesh asks for more than there are or than one."""
    try:
        present = jax.devices()
    except RuntimeError as error:
        raise ConfigError(_no_backend(config.platform.name, error)) from error
    asked = config.mesh.world
    if asked > len(present):
        raise ConfigError(
            f"mesh.dp x mesh.cp = {config.mesh.dp} x {config.mesh.cp} = {asked} devices asked, {len(present)} present "
            f"({present[0].device_kind}): set mesh.dp, mesh.cp and mesh.ep to 1, which runs on one device today; "
            f"`plan` and `mesh.simulate_devices: {asked}`, for a mesh that is not here, come with the sharded mesh"
        )
    if asked > 1:
        raise ConfigError(
            f"mesh.dp x mesh.cp = {asked}: a mesh of more than one device is not available yet; "
            "set mesh.dp, mesh.cp and mesh.ep to 1"
        )


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


def free_memory(device: jax.Device, utilization: float) -> int | None:
    """Bytes that may still be allocated on `device` under `engine.memory_utilization`; None when it does not say."""
    if device.platform == "cpu":
        available = available_memory()
        return None if available is None else int(available * utilization)
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return None if limit is None else int(limit * utilization) - stats.get("bytes_in_use", 0)


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
