"""The allocator of NVIDIA devices: what jax is told, and the memory of a device whose allocator keeps no account."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from di_jax.config import Config
from di_jax.errors import ConfigError
from di_jax.platforms import allocator
from di_jax.platforms.allocator import choose_allocator, client_options, total_memory, untold_memory
from di_jax.platforms.devices import MemoryRoom, memory_room

OPTIONS = "jax_pjrt_client_create_options"
DRAFTS = {"speculative.enabled": True}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """jax's settings as far as they concern this; the plugin of NVIDIA is there, and nothing in the environment."""
    settings: dict[str, Any] = {OPTIONS: None}

    class Settings:
        update = staticmethod(settings.__setitem__)

        def __getattr__(self, name: str) -> Any:
            return settings[name]

    monkeypatch.setattr(allocator, "jax", SimpleNamespace(config=Settings(), live_arrays=jax.live_arrays))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "jax_cuda13_plugin" or None)
    for name in ("XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    return settings


@pytest.mark.parametrize(
    ("given", "before", "expected"),
    [
        (DRAFTS, None, {"allocator": "vmm"}),
        ({"platform.allocator": "vmm"}, None, {"allocator": "vmm"}),
        (
            {**DRAFTS, "platform.name": "gpu"},
            "memory_fraction:0.5;a:b",
            {"memory_fraction": "0.5", "a": "b", "allocator": "vmm"},
        ),
        ({"platform.allocator": "bfc"}, {"a": 1}, {"a": 1, "allocator": "bfc"}),
    ],
)
def test_jax_is_told(told: dict[str, Any], given: dict[str, Any], before: Any, expected: dict[str, Any]) -> None:
    told[OPTIONS] = before
    choose_allocator(Config().with_values(given))
    assert told[OPTIONS] == expected == client_options()


def test_what_jax_was_told_stays_unless_the_config_names_one(
    told: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async")
    choose_allocator(Config().with_values(DRAFTS))
    assert told[OPTIONS] is None
    choose_allocator(Config().with_values({"platform.allocator": "vmm"}))
    assert told[OPTIONS] == {"allocator": "vmm"}


def test_steps_of_one_program_need_no_other(told: dict[str, Any]) -> None:
    """Without drafts, and where each request ends with its first token."""
    choose_allocator(Config())
    choose_allocator(Config().with_values({**DRAFTS, "engine.type": "prompt"}))
    assert told[OPTIONS] is None


@pytest.mark.parametrize("given", [{"platform.name": "cpu"}, {"mesh.simulate_devices": 8}, {}])
def test_other_devices_have_none_to_choose(
    told: dict[str, Any], monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    if not given:  # the plugin is what is missing
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    choose_allocator(Config().with_values({**given, **DRAFTS}))
    assert told[OPTIONS] is None
    with pytest.raises(ConfigError, match=r"platform\.allocator: vmm is for NVIDIA devices"):
        choose_allocator(Config().with_values({**given, "platform.allocator": "vmm"}))


@pytest.mark.parametrize(
    ("options", "environment", "fraction"),
    [(None, None, 0.75), ("memory_fraction:0.5", None, 0.5), (None, "0.25", 0.25), ({"memory_fraction": 1}, "0.25", 1)],
)
def test_memory_that_the_allocator_does_not_tell(
    told: dict[str, Any], monkeypatch: pytest.MonkeyPatch, options: Any, environment: str | None, fraction: float
) -> None:
    told[OPTIONS] = options
    if environment is not None:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", environment)
    monkeypatch.setattr(allocator, "total_memory", lambda ordinal: 1000 + ordinal)
    device = jax.devices()[0]
    arrays = [jnp.arange(n, dtype=jnp.int32) for n in (1000, 10)]
    monkeypatch.setattr(allocator.jax, "live_arrays", lambda: arrays)
    limit = int(fraction * (1000 + (device.local_hardware_id or 0)))
    assert untold_memory(device) == (limit, 4040)
    other: Any = SimpleNamespace(local_hardware_id=3)  # none of whose arrays are alive
    assert untold_memory(other) == (int(fraction * 1003), 0)


def test_a_device_without_statistics_is_asked_elsewhere(told: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "total_memory", lambda ordinal: {0: 1000, 1: 800}.get(ordinal))
    silent: list[Any] = [
        SimpleNamespace(platform="gpu", local_hardware_id=n, memory_stats=lambda: None) for n in range(3)
    ]
    assert memory_room(silent[:2], 0.9) == MemoryRoom(600)
    assert memory_room(silent[2:], 0.9) is None  # nor does the driver answer


def test_no_driver_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(allocator.ctypes, "CDLL", missing)
    assert total_memory(0) is None


def test_the_driver_answers_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        failure = 0

        def cuInit(self, flags: int) -> int:
            return 0

        def cuDeviceGet(self, device: Any, ordinal: int) -> int:
            device._obj.value = ordinal + 40
            return self.failure

        def cuDeviceTotalMem_v2(self, size: Any, device: Any) -> int:
            size._obj.value = 2**37 + device.value
            return 0

    driver = Driver()
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: driver)
    assert total_memory(2) == 2**37 + 42
    driver.failure = 101  # no such device
    assert total_memory(2) is None
