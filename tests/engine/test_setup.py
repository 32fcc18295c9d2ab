"""From a config to an engine's parts: what is wrong is said early."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from checkpoint.checkpoint_files import join_file, split_file
from flax import nnx
from golden_model import TINY

from di_jax.checkpoint.loader import load_leaves
from di_jax.checkpoint.mapping import leaf_specs
from di_jax.checkpoint.reader import open_checkpoint
from di_jax.config import Config
from di_jax.engine import setup
from di_jax.engine.memory_sizing import StepMemory, block_bytes, slots_bytes
from di_jax.engine.setup import build_engine_parts, build_ladder, draft_settings, size_caches
from di_jax.engine.speculative_programs import DraftSettings
from di_jax.errors import ConfigError
from di_jax.model.cache import CacheLayout
from di_jax.model.quantization import CacheFormats
from di_jax.parallel import processes
from di_jax.parallel.agreement import Agreement
from di_jax.platforms.devices import MemoryRoom


def test_buckets_are_checked_before_the_weights_are_loaded(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> Any:
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

    def load(*_: Any, **__: Any) -> Any:
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
    silent: Any = SimpleNamespace(platform="tpu", memory_stats=lambda: None)
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
        given = {**values, "platform.compiler_options": {"xla_cpu_enable_fast_math": False}}
        parts = build_engine_parts(tiny_config.with_values(given))
        model, mesh, ladder, found, drafting, compiler, layout = calls.pop()
        assert model.config == parts.model_config and ladder is parts.ladder and mesh is parts.runner.mesh
        assert found == outputs and drafting is None and compiler.options == {"xla_cpu_enable_fast_math": False}
        assert (layout.num_slots, parts.layout.num_blocks) == (8, 24)
    assert not calls


# ---- with drafts ----

DRAFTING = {"speculative.enabled": True, "speculative.num_draft_tokens": 3}


def test_the_parts_of_an_engine_that_drafts(tiny_config: Config) -> None:
    """Weights of the draft, caches and shapes for its drafts, and the settings of the config."""
    values = {"speculative.confidence_temperatures": [1.5, 1.25, 0.75], "speculative.draft_sampling": "one_hot"}
    parts = build_engine_parts(tiny_config.with_values({**DRAFTING, **values}))
    assert parts.speculative.enabled and parts.speculative.num_draft_tokens == 3
    assert parts.runner.speculates
    assert (parts.layout.draft_stages, parts.layout.num_drafts) == (TINY.num_nextn_predict_layers, 3)
    assert not parts.layout.keeps_proposal, "one-hot drafts are kept as ids alone"
    decodes = [b for b in parts.ladder.buckets() if b.decode]
    assert {b.rows for b in decodes if b.drafts} == {8, 16, 24, 32}
    assert all(b.drafts == 3 and b.requests == 8 for b in decodes if b.drafts)
    assert {b.rows for b in decodes if not b.drafts} == {8}, "steps that verify nothing are plain"
    (settings,) = (parts.runner._speculative.settings,) if parts.runner._speculative else (None,)
    assert settings == DraftSettings(3, "one_hot", (1.5, 1.25, 0.75))
    fixed = tiny_config.with_values({**DRAFTING, "speculative.varlen": False})
    assert {b.rows for b in build_ladder(fixed).buckets() if b.decode} == {32}


@pytest.mark.parametrize("values", [{}, {"command": "score"}, {"engine.type": "prompt"}])
def test_engines_that_draft_nothing_load_no_draft(
    tiny_config: Config, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded: list[set[str]] = []
    load = setup.load_or_convert

    def watched(*arguments: Any, **options: Any) -> Any:
        leaves = load(*arguments, **options)
        loaded.append({path.split(".")[0] for path in leaves})
        return leaves

    monkeypatch.setattr(setup, "load_or_convert", watched)
    config = tiny_config.with_values({**values, "speculative.enabled": bool(values)})
    with caplog.at_level("INFO", "di_jax.engine.setup"):
        parts = build_engine_parts(config)
    assert not parts.speculative.enabled and not parts.runner.speculates
    assert parts.layout.draft_stages == parts.layout.num_drafts == 0
    assert not any(b.drafts for b in parts.ladder.buckets())
    assert len(loaded) == 1 and "draft" not in loaded[0]
    assert ("nothing is drafted" in caplog.text) == ("engine.type" in values)
    loaded.clear()
    build_engine_parts(tiny_config.with_values(DRAFTING))
    assert "draft" in loaded[0], "control"


def without_draft(golden: Path, tmp_path: Path, *, announced: bool) -> Path:
    """The tiny checkpoint less its mtp.* tensors, with a config.json that announces them or does not."""
    folder = Path(shutil.copytree(golden / "tiny-v41-fp8", tmp_path / "bare"))
    tensors = split_file(folder / "model.safetensors")
    join_file(folder / "model.safetensors", {name: t for name, t in tensors.items() if not name.startswith("mtp.")})
    if not announced:
        raw = json.loads((folder / "config.json").read_text())
        text = raw["text_config"]
        del text["compress_ratios"][-text.pop("num_nextn_predict_layers") :]
        (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("announced", [True, False])
def test_a_checkpoint_without_a_draft(tiny_config: Config, golden: Path, tmp_path: Path, announced: bool) -> None:
    """Refused with drafts, before anything is loaded; else as good as any."""
    folder = without_draft(golden, tmp_path, announced=announced)
    config = tiny_config.with_values({"model.path": str(folder)})
    with pytest.raises(ConfigError) as refusal:
        build_engine_parts(config.with_values(DRAFTING))
    message = str(refusal.value)
    assert message.startswith("speculative.enabled: true, but") and str(folder) in message and "mtp.*" in message
    assert build_engine_parts(config).layout.num_drafts == 0
    assert build_engine_parts(config.with_values({**DRAFTING, "command": "score"})).layout.num_drafts == 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"speculative.num_draft_tokens": 6}, ["speculative.num_draft_tokens: 6", "5 drafts (dspark_block_size)"]),
        ({"mesh.dp": 16, "mesh.ep": 16}, ["mesh.ep: 16", "dspark_n_routed_experts = 8", "speculative.enabled"]),
    ],
)
def test_what_a_draft_cannot_do(tiny_config: Config, values: dict[str, Any], words: list[str]) -> None:
    config = tiny_config.with_values({"speculative.enabled": True, **values})
    with pytest.raises(ConfigError) as refusal:
        draft_settings(config, TINY)
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert draft_settings(config.with_values({"command": "score"}), TINY) is None


def test_the_draft_is_spread_over_the_mesh(tiny_config: Config, golden: Path) -> None:
    """Its experts over the expert ranks, the rest on each device; redundant slots are the backbone's alone."""
    mesh = {"mesh.dp": 4, "mesh.cp": 2, "mesh.ep": 4, "eplb.extra_per_rank": 1, "engine.max_num_seqs": 4}
    config = tiny_config.with_values({**DRAFTING, **mesh, "engine.decode_buckets": [4]})
    runner = build_engine_parts(config).runner
    assert runner._draft is not None
    weights = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(runner._draft[1])}
    with open_checkpoint(golden / "tiny-v41-fp8") as reader:
        drafts = [path for path in leaf_specs(TINY, draft=True) if path.startswith("draft.")]
        whole = load_leaves(reader, TINY, None, draft=True, only=drafts)
    assert {f"draft.{path}" for path in weights} == whole.keys()
    for path, array in weights.items():
        shared = ".ffn.experts." in path
        shape = tuple(array.sharding.shard_shape(array.shape))
        assert shape == ((2, 2, *array.shape[2:]) if shared else array.shape), path
        assert len(array.sharding.device_set) == 8
        assert np.asarray(array).tobytes() == np.asarray(whole[f"draft.{path}"]).tobytes(), path


def test_the_draft_is_part_of_what_is_measured(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def fullest_step(*arguments: Any) -> StepMemory:
        asked.append(arguments)
        return STEP

    monkeypatch.setattr(setup, "fullest_step", fullest_step)
    monkeypatch.setattr(setup, "memory_room", lambda devices, utilization: MemoryRoom(10**9))
    build_engine_parts(tiny_config.with_values(DRAFTING))
    ((*_, (draft, settings), _, layout),) = asked
    assert draft.config == TINY and settings.num_drafts == layout.num_drafts == 3
