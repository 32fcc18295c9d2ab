"""From a config to an engine's parts: what is wrong is said early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from golden_model import TINY

from di_jax.config import Config
from di_jax.engine import setup
from di_jax.engine.memory_sizing import StepMemory, block_bytes, slots_bytes
from di_jax.engine.setup import build_engine_parts, build_ladder, size_caches
from di_jax.errors import ConfigError
from di_jax.model.cache import CacheLayout
from di_jax.model.quantization import CacheFormats
from di_jax.parallel import processes
from di_jax.parallel.agreement import Agreement
from di_jax.platforms.devices import MemoryRoom


def test_buckets_are_checked_before_the_weights_are_loaded(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> Any:
        raise AssertionError("loading")

    monkeypatch.setattr("di_jax.engine.setup.load_or_convert", load)
    with pytest.raises(AssertionError, match="loading"):
        build_engine_parts(tiny_config)
    message = r"engine\.prefill_buckets: 20 is not a multiple of 16 rows, its tiles; give 32"
    with pytest.raises(ConfigError, match=message):
        build_engine_parts(tiny_config.with_values({"engine.prefill_buckets": [20, 128]}))


def test_decoder_replay_is_checked_before_the_weights_are_loaded(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it only hides rows; not where it is off, or nothing is replayed."""

    def load(*_: Any) -> Any:
        raise AssertionError("loading")

    monkeypatch.setattr("di_jax.engine.setup.load_or_convert", load)
    few = TINY.window_ring - 1
    for mode in ("mask", "compact"):
        config = tiny_config.with_values({"engine.replay.decoder": mode, "engine.replay.keep_tokens": few})
        with pytest.raises(
            ConfigError, match=rf"engine\.replay\.keep_tokens: {few} rows are fewer than .* = {few + 1}"
        ):
            build_engine_parts(config)
        for values in ({"engine.replay.keep_tokens": few + 1}, {"engine.replay.decoder": "off"}, {"command": "score"}):
            with pytest.raises(AssertionError, match="loading"):
                build_engine_parts(config.with_values(values))


def test_compact_replay_has_a_second_shape_of_large_prefills(tiny_config: Config) -> None:
    """Whose decoder layers run fewer rows; it holds what is kept of two prompts."""
    values = {
        "engine.max_num_batched_tokens": 4096,
        "engine.prefill_buckets": [512, 4096],
        "engine.max_model_len": 4096,
    }

    def kept(mode: str) -> list[tuple[int, int]]:
        ladder = build_ladder(tiny_config.with_values({**values, "engine.replay.decoder": mode}), look_back=5)
        assert all(bucket.history == 5 for bucket in ladder.buckets())
        return sorted({(b.rows, b.kept_rows) for b in ladder.buckets() if b.drops_rows})

    assert kept("off") == kept("mask") == []
    ((rows, fewer),) = kept("compact")
    assert rows == 4096 and 2 * 140 <= fewer <= 4096 // 4


def test_context_buckets_of_as_many_blocks_are_one(tiny_config: Config) -> None:
    ladder = build_ladder(tiny_config.with_values({"engine.context_buckets": [100, 128, 200, 384]}))
    assert ladder.context_blocks == (1, 2, 3)
    assert len(set(ladder.buckets())) == len(ladder.buckets())


# ---- the size of the caches; the decision itself is test_memory_sizing's ----

LAYOUT = CacheLayout(TINY, CacheFormats.quantized(), num_blocks=1, num_slots=8)
STEP = StepMemory("a step", temporaries=500_000, buffers=0, code=0)


def device(blocks: int) -> Any:
    """A device that has memory for so many blocks, were half of it to be used, with the rest of `tiny_config`."""
    need = 1000 + slots_bytes(LAYOUT) + STEP.total + blocks * block_bytes(LAYOUT)
    stats = {"bytes_limit": 2 * need, "bytes_in_use": 1000}
    return SimpleNamespace(platform="gpu", memory_stats=lambda: stats)


def test_the_device_with_the_least_memory_decides(tiny_config: Config, caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config.with_values({"engine.memory_utilization": 0.5})
    asked: list[CacheLayout] = []

    def measure(layout: CacheLayout) -> StepMemory:
        asked.append(layout)
        return STEP

    with caplog.at_level("INFO", "di_jax.engine.setup"):
        layout = size_caches(config, LAYOUT, [device(30), device(5), device(12)], measure)
    assert layout.num_blocks == 5
    assert [provisional.num_blocks for provisional in asked] == [3], "one request of 384 tokens"
    assert len(caplog.records) == 1 and "caches of a rank: 5 blocks" in caplog.text and "a step" in caplog.text
    with pytest.raises(ConfigError, match=r"engine\.max_model_len: the 3 blocks of one request of 384 tokens do not"):
        size_caches(config, LAYOUT, [device(30), device(2)], measure)
    with pytest.raises(ConfigError, match=r"engine\.num_blocks: 6 blocks do not fit: .*: 5 blocks of "):
        size_caches(config.with_values({"engine.num_blocks": 6}), LAYOUT, [device(5)], measure)


def test_the_process_with_the_least_memory_decides(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pair(Agreement):
        """With another process whose devices have memory for 4 blocks."""

        def gather(self, values: np.ndarray, what: str) -> np.ndarray:
            stats = device(4).memory_stats()
            return np.stack([values, np.array([stats["bytes_limit"], stats["bytes_in_use"], 0], values.dtype)])

    config = tiny_config.with_values({"engine.memory_utilization": 0.5})
    monkeypatch.setattr(processes, "_current", Pair())
    assert size_caches(config, LAYOUT, [device(30)], lambda _: STEP).num_blocks == 4
    assert size_caches(config, LAYOUT, [device(3)], lambda _: STEP).num_blocks == 3


def test_nothing_is_measured_where_memory_is_the_machines(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is enough for every slot at full length, or less memory than that."""

    def measure(layout: CacheLayout) -> StepMemory:
        raise AssertionError("compiled")

    for available, blocks in ((None, 24), (10**12, 24), (2 * (slots_bytes(LAYOUT) + 7 * block_bytes(LAYOUT)), 7)):
        monkeypatch.setattr("di_jax.platforms.devices.available_memory", lambda found=available: found)
        config = tiny_config.with_values({"engine.memory_utilization": 0.5})
        assert size_caches(config, LAYOUT, jax.devices()[:1], measure).num_blocks == blocks
    silent: Any = SimpleNamespace(platform="gpu", memory_stats=lambda: None)
    assert size_caches(tiny_config, LAYOUT, [silent], measure).num_blocks == 24


def test_an_engine_is_built_with_what_its_steps_leave(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that was loaded, its shapes, and the outputs that the command asks for are what is measured."""
    calls: list[tuple[Any, ...]] = []

    def fullest_step(*arguments: Any) -> StepMemory:
        calls.append(arguments)
        return STEP

    monkeypatch.setattr(setup, "fullest_step", fullest_step)
    monkeypatch.setattr(setup, "memory_room", lambda devices, utilization: MemoryRoom(10**9))
    for values, outputs in (
        ({}, "tokens"),
        ({"command": "score"}, "logits"),
        ({"command": "score", "score.trace": True}, "trace"),
    ):
        parts = build_engine_parts(tiny_config.with_values(values))
        model, mesh, ladder, found, layout = calls.pop()
        assert model.config == parts.model_config and ladder is parts.ladder and mesh is parts.runner.mesh
        assert found == outputs
        assert (layout.num_slots, parts.layout.num_blocks) == (8, 24)
    assert not calls
