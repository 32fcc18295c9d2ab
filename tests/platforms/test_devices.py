"""Devices and memory: what cannot be used is said with its key, and memory is what is really left."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from di_jax.config import Config, load_config
from di_jax.errors import ConfigError
from di_jax.platforms.devices import MemoryRoom, available_memory, configure_jax, memory_room, require_devices

GB = 2**30
HUGE = 2**63 - 4096  # what version 1 says for no limit


@pytest.fixture(autouse=True)
def settings_kept(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Records what would be set in jax instead of setting it for the whole process."""
    seen: list[tuple[str, Any]] = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: seen.append((name, value)))
    return seen


@pytest.mark.parametrize("place", ["file/cache", "file"])
def test_a_compile_dir_that_cannot_be_written_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"cache\.compile_dir: .*{place} cannot be written \(.+\)"):
        configure_jax(Config().with_values({"cache.compile_dir": str(tmp_path / place)}))


def test_a_compile_dir_in_a_folder_that_takes_none_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cache\.compile_dir: /proc/zzz cannot be written"):
        configure_jax(Config().with_values({"cache.compile_dir": "/proc/zzz"}))


def test_a_compile_dir_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings_kept: list[tuple[str, Any]]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    configure_jax(Config().with_values({"cache.compile_dir": "~/a/b"}))
    assert (tmp_path / "a" / "b").is_dir() and not list((tmp_path / "a" / "b").iterdir())
    assert ("jax_compilation_cache_dir", str(tmp_path / "a" / "b")) in settings_kept


@pytest.mark.parametrize(("platform", "extra"), [("gpu", "cuda13"), ("tpu", "tpu")])
def test_a_platform_that_is_not_there(monkeypatch: pytest.MonkeyPatch, platform: str, extra: str) -> None:
    def none() -> list[jax.Device]:
        raise RuntimeError("Unable to initialize backend 'rocm': unknown (set JAX_PLATFORMS='' to choose)")

    monkeypatch.setattr(jax, "devices", none)
    with pytest.raises(ConfigError) as caught:
        require_devices(Config().with_values({"platform.name": platform}))
    message = str(caught.value)
    assert message.startswith(f"platform.name: '{platform}': no {platform.upper()} backend is installed")
    assert f"[{extra}]" in message and "'rocm'" in message and "JAX_PLATFORMS" not in message


def test_jax_is_not_asked_for_a_gpu_by_that_name(
    monkeypatch: pytest.MonkeyPatch, settings_kept: list[tuple[str, Any]]
) -> None:
    """It would want cuda and rocm both. What it finds by itself has to be one, though."""
    config = Config().with_values({"platform.name": "gpu"})
    configure_jax(config)
    assert ("jax_platforms", "") in settings_kept
    for found, ok in (("gpu", True), ("cpu", False)):
        device = SimpleNamespace(platform=found, device_kind="some kind")
        monkeypatch.setattr(jax, "devices", lambda device=device: [device])
        if ok:
            assert require_devices(config)
        else:
            with pytest.raises(ConfigError, match=r"platform\.name: 'gpu': no GPU backend .* found cpu"):
                require_devices(config)


def test_more_devices_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="abacus")])
    with pytest.raises(ConfigError) as caught:
        require_devices(load_config("ep64"))
    message = str(caught.value)
    assert "64 devices asked, 1 present (abacus)" in message
    assert "lower mesh.dp or mesh.cp" in message and "mesh.simulate_devices: 64" in message
    require_devices(Config())


def test_a_simulation_needs_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="cpu", device_kind="cpu")])
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"mesh\.simulate_devices: 8 asked, .* 1 cpu devices: .* fresh process"):
        require_devices(Config().with_values({"mesh.simulate_devices": 8}))


# ---- memory ----


def machine(root: Path, *, available: int | None, cgroup: str = "") -> Path:
    """A /proc of a machine whose free memory is a tenth of what is available."""
    (root / "proc/self").mkdir(parents=True)
    lines = ["MemTotal: 99999999 kB", f"MemFree: {(available or 0) // 10240} kB"]
    if available is not None:
        lines.append(f"MemAvailable:   {available // 1024} kB")
    (root / "proc/meminfo").write_text("\n".join(lines) + "\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def group(folder: Path, limit: object, used: int, cached: int, *, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        2: ("memory.max", "memory.current", "inactive_file"),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }[version]
    (folder / files[0]).write_text(f"{limit}\n")
    (folder / files[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{files[2]} {cached}\nother 7\n")


def test_file_cache_counts_as_available(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, available=10 * GB)) == 10 * GB


def test_an_old_kernel_tells_its_free_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    assert available_memory(machine(tmp_path, available=None)) == 4_096_000
    assert available_memory(tmp_path / "elsewhere") == 4_096_000


def test_where_nothing_is_told_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr("os.sysconf", unknown)
    assert available_memory(tmp_path) is None


@pytest.mark.parametrize(
    ("version", "lines", "mount"),
    [
        (2, "0::/user/job\n", "sys/fs/cgroup"),
        (1, "7:cpu,cpuacct:/\n4:memory:/user/job\n0::/\n", "sys/fs/cgroup/memory"),
    ],
)
def test_the_limit_of_a_control_group_binds_where_it_is_lower(
    tmp_path: Path, version: int, lines: str, mount: str
) -> None:
    root = machine(tmp_path, available=10 * GB, cgroup=lines)
    assert available_memory(root) == 10 * GB  # no such group: a version that is not mounted
    none: object = "max" if version == 2 else HUGE
    group(root / mount / "user/job", none, 3 * GB, GB, version=version)
    assert available_memory(root) == 10 * GB
    group(root / mount / "user/job", 8 * GB, 3 * GB, GB, version=version)
    assert available_memory(root) == 6 * GB
    group(root / mount / "user", 5 * GB, 4 * GB, 0, version=version)
    assert available_memory(root) == GB  # a parent's limit
    group(root / mount / "user", GB, 2 * GB, 0, version=version)
    assert available_memory(root) == 0
    # A container whose path is one of the host: its own group is the mount.
    (root / "proc/self/cgroup").write_text(lines.replace("/user/job", "/host/only/1234"))
    group(root / mount, 7 * GB, 3 * GB, 0, version=version)
    assert available_memory(root) == 4 * GB


def test_a_device_tells_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one with the least left counts, which need not be the smallest."""

    def device(**stats: int) -> Any:
        return SimpleNamespace(platform="gpu", local_hardware_id=0, memory_stats=lambda: stats or None)

    empty, full, small = (device(bytes_limit=n, bytes_in_use=used) for n, used in ((1000, 300), (1000, 400), (500, 0)))
    assert memory_room([empty], 0.5) == MemoryRoom(1000, 300)
    assert memory_room([empty, full, small], 0.5) == MemoryRoom(1000, 400)
    assert memory_room([empty, full, small], 0.9) == MemoryRoom(500, 0)
    assert MemoryRoom(1000, 400).free(0.5) == 100
    monkeypatch.setattr("di_jax.platforms.devices.untold_memory", lambda device: None)
    assert memory_room([device()], 0.5) is None
    monkeypatch.setattr("di_jax.platforms.devices.available_memory", lambda: 1000)
    cpu: Any = SimpleNamespace(platform="cpu")
    assert memory_room([cpu], 0.5) == MemoryRoom(1000, shared=True)
    assert memory_room([cpu] * 4, 0.5) == MemoryRoom(250, shared=True)
    monkeypatch.setattr("di_jax.platforms.devices.available_memory", lambda: None)
    assert memory_room([cpu], 0.5) is None
