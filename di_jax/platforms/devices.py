"""What the PJRT backend offers: which devices, and how much memory is left on them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import jax

from di_jax.config import Config
from di_jax.errors import ConfigError

logger = logging.getLogger(__name__)


def configure_jax(config: Config) -> None:
    """Applies `platform.name` and `cache.compile_dir`; call before anything touches a device."""
    if config.platform.name not in (None, "auto"):
        jax.config.update("jax_platforms", config.platform.name)
    if config.cache.compile_dir is not None:
        folder = Path(config.cache.compile_dir).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # The defaults leave out programs that compile in under a second: a warm start would compile them again.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", -1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def require_devices(config: Config) -> None:
    """Raises ConfigError when the mesh asks for more devices than there are, or for more than one at all."""
    try:
        present = jax.devices()
    except RuntimeError as error:  # jax's message names the backends that it tried
        raise ConfigError(f"platform.name: {config.platform.name!r} cannot be used here: {error}") from error
    asked = config.mesh.world
    if asked > len(present):
        raise ConfigError(
            f"mesh.dp x mesh.cp = {config.mesh.dp} x {config.mesh.cp} = {asked} devices asked, {len(present)} present "
            f"({present[0].device_kind}): use `plan`, or `mesh.simulate_devices: {asked}`, or a mesh that fits"
        )
    if asked > 1:
        raise ConfigError(
            f"mesh.dp x mesh.cp = {asked}: a mesh of more than one device is not available yet; "
            "set mesh.dp, mesh.cp and mesh.ep to 1"
        )


def free_memory(device: jax.Device, utilization: float) -> int | None:
    """Bytes that may still be allocated on `device` under `engine.memory_utilization`; None when it does not say.

    A CPU device has the machine's memory, shared with everybody else on it, so what is available counts.
    """
    if device.platform == "cpu":
        try:
            return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * utilization)
        except (ValueError, OSError):
            return None
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return None if limit is None else int(limit * utilization) - stats.get("bytes_in_use", 0)
