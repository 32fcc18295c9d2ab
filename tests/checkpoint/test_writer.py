"""Written checkpoints: the released format, exact where values are representable, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import decoded, split_file, weights
from safetensors.numpy import load_file

from di_jax.checkpoint.errors import CheckpointError
from di_jax.checkpoint.reader import open_checkpoint
from di_jax.checkpoint.writer import random_tensors, select_families, write_checkpoint
from di_jax.model.config import ModelConfig


@pytest.fixture
def raw(tiny: Path) -> dict[str, Any]:
    return json.loads((tiny / "config.json").read_text())


@pytest.fixture
def values(tiny: Path) -> Iterator[dict[str, np.ndarray]]:
    """float32 weights of the golden checkpoint."""
    with open_checkpoint(tiny) as reader:
        yield {name: decoded(reader, name) for name in weights(reader)}


@pytest.mark.parametrize("max_shard_bytes", [None, 500_000])
def test_golden_round_trips_exactly(
    raw: dict[str, Any], values: dict[str, np.ndarray], tmp_path: Path, max_shard_bytes: int | None
) -> None:
    folder = write_checkpoint(tmp_path / "out", raw, values.items(), max_shard_bytes=max_shard_bytes)
    with open_checkpoint(folder) as reader:
        assert set(weights(reader)) == set(values)
        for name, expected in values.items():
            assert np.array_equal(decoded(reader, name), expected), name
        assert len(reader.headers) == (1 if max_shard_bytes is None else 11)
        assert json.loads((folder / "config.json").read_text()) == raw


def test_order_of_tensors_does_not_matter(raw: dict[str, Any], values: dict[str, np.ndarray], tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path / "one", raw, values.items(), max_shard_bytes=700_000)
    two = write_checkpoint(tmp_path / "two", raw, reversed(values.items()), max_shard_bytes=700_000)
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes()


def test_shards_and_index_in_the_common_layout(
    raw: dict[str, Any], values: dict[str, np.ndarray], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "out", raw, values.items(), max_shard_bytes=500_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        parts = split_file(file)
        assert sum(len(data) for _, data in parts.values()) <= 500_000
        found |= dict.fromkeys(parts, file.name)
        for name in parts:  # a weight and its scale share a shard
            assert name.replace(".weight", ".scale") in parts or not name.endswith("experts.0.w1.weight")
    assert found == index["weight_map"]
    assert index["metadata"]["total_size"] == 4_855_044
    assert sorted(set(found.values()))[0] == "model-00001-of-00011.safetensors"


def test_unquantized_files_open_with_the_public_library(
    raw: dict[str, Any], values: dict[str, np.ndarray], tmp_path: Path
) -> None:
    del raw["quantization_config"]
    folder = write_checkpoint(tmp_path / "out", raw, values.items())
    public = load_file(folder / "model.safetensors")
    assert set(public) == set(values)
    assert {str(array.dtype) for array in public.values()} == {"bfloat16", "float32"}
    for name, expected in values.items():
        assert np.array_equal(public[name].astype(np.float32), expected), name


def test_tensors_are_aligned_to_their_items(raw: dict[str, Any], values: dict[str, np.ndarray], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "out", raw, values.items())
    with open_checkpoint(folder) as reader:
        for entry in reader.entries.values():
            assert entry.offset % {"F32": 4, "BF16": 2}.get(entry.dtype, 1) == 0


def test_large_tensors_are_quantized_in_pieces(
    raw: dict[str, Any], values: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_checkpoint(tmp_path / "whole", raw, values.items())
    monkeypatch.setattr("di_jax.checkpoint.writer._PIECE_VALUES", 4096)
    pieces = write_checkpoint(tmp_path / "pieces", raw, values.items())
    assert (whole / "model.safetensors").read_bytes() == (pieces / "model.safetensors").read_bytes()


def test_tokenizer_files_are_copied(raw: dict[str, Any], tiny: Path, tmp_path: Path) -> None:
    files: dict[str, bytes | Path] = {"tokenizer.json": tiny / "tokenizer.json", "extra.json": b"{}"}
    tensors = random_tensors(ModelConfig.from_dict(raw), 0)
    folder = write_checkpoint(tmp_path / "out", raw, tensors, tokenizer_files=files)
    assert (folder / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    assert (folder / "extra.json").read_bytes() == b"{}"


class TestRefusals:
    """Each names the tensor; the folder does not appear, and nothing is left behind."""

    @pytest.fixture(autouse=True)
    def nothing_is_left(self, tmp_path: Path) -> Iterator[None]:
        yield
        assert list(tmp_path.iterdir()) == []

    def refuse(self, tmp_path: Path, raw: dict[str, Any], tensors: Any, match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            write_checkpoint(tmp_path / "out", raw, tensors)

    def test_missing(self, tmp_path: Path, raw: dict[str, Any], values: dict[str, np.ndarray]) -> None:
        del values["layers.2.attn.wkv.weight"]
        self.refuse(tmp_path, raw, values.items(), r"'layers\.2\.attn\.wkv\.weight' was not given")

    def test_unknown(self, tmp_path: Path, raw: dict[str, Any], values: dict[str, np.ndarray]) -> None:
        values["layers.2.other"] = np.zeros(1, np.float32)
        self.refuse(tmp_path, raw, values.items(), r"'layers\.2\.other': not of this model")

    def test_twice(self, tmp_path: Path, raw: dict[str, Any], values: dict[str, np.ndarray]) -> None:
        self.refuse(tmp_path, raw, [*values.items(), ("norm.weight", values["norm.weight"])], "given twice")

    def test_scale(self, tmp_path: Path, raw: dict[str, Any], values: dict[str, np.ndarray]) -> None:
        self.refuse(tmp_path, raw, [("layers.0.attn.wkv.scale", np.zeros((2, 4), np.float32))], "made here")

    def test_shape(self, tmp_path: Path, raw: dict[str, Any], values: dict[str, np.ndarray]) -> None:
        values["norm.weight"] = np.ones(127, np.float32)
        self.refuse(tmp_path, raw, values.items(), r"'norm\.weight': shape \[127\], expected \[128\]")

    def test_dtype(self, tmp_path: Path, raw: dict[str, Any], values: dict[str, np.ndarray]) -> None:
        values["norm.weight"] = np.ones(128, np.float64)
        self.refuse(tmp_path, raw, values.items(), r"'norm\.weight': dtype float64")

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
    def test_value(self, tmp_path: Path, raw: dict[str, Any], values: dict[str, np.ndarray], value: float) -> None:
        name = "layers.5.ffn.experts.3.w1.weight"
        values[name] = values[name].copy()
        values[name][1, 1] = value
        self.refuse(tmp_path, raw, values.items(), rf"'{name}': holds a value")

    def test_interrupt(self, tmp_path: Path, raw: dict[str, Any], values: dict[str, np.ndarray]) -> None:
        def interrupted() -> Iterator[tuple[str, np.ndarray]]:
            yield from list(values.items())[:100]
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(tmp_path / "out", raw, interrupted())

    def test_config(self, tmp_path: Path, raw: dict[str, Any], values: dict[str, np.ndarray]) -> None:
        self.refuse(tmp_path, {**raw, "architectures": ["Other"]}, values.items(), "'Other'")


def test_existing_folder_is_kept_unless_told(raw: dict[str, Any], tmp_path: Path) -> None:
    config = ModelConfig.from_dict(raw)
    folder = write_checkpoint(tmp_path / "out", raw, random_tensors(config, 1))
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="exists already"):
        write_checkpoint(folder, raw, random_tensors(config, 2))
    assert (folder / "model.safetensors").read_bytes() == before
    write_checkpoint(folder, raw, random_tensors(config, 2), overwrite=True)
    assert (folder / "model.safetensors").read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_random_tensors_are_a_function_of_seed_and_name(raw: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(raw)
    first, again = dict(random_tensors(config, 3)), dict(random_tensors(config, 3))
    other, bare = dict(random_tensors(config, 4)), dict(random_tensors(config, 3, include_mtp=False))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["embed.weight"], other["embed.weight"])
    assert not np.array_equal(first["embed.weight"], first["head.weight"])
    assert set(bare) == {name for name in first if not name.startswith("mtp.")}
    assert all(np.array_equal(first[name], bare[name]) for name in bare)


def test_random_tensors_keep_activations_sane(raw: dict[str, Any]) -> None:
    tensors = dict(random_tensors(ModelConfig.from_dict(raw), 0))
    assert abs(tensors["layers.0.attn_norm.weight"] - 1).max() < 0.2
    assert 0.9 < tensors["embed.weight"].std() < 1.1
    assert 0.9 < tensors["layers.0.attn.wq_a.weight"].std() * 128**0.5 < 1.1
    assert not tensors["layers.0.hc_attn_base"].any()
    assert abs(tensors["layers.0.attn.attn_sink"]).max() < 0.2
    assert abs(tensors["layers.0.ffn.gate.bias"]).max() < 0.2


@pytest.mark.parametrize("include_mtp", [True, False])
@pytest.mark.parametrize("include_vision", [True, False])
def test_optional_families(raw: dict[str, Any], tmp_path: Path, include_mtp: bool, include_vision: bool) -> None:
    raw["vision_config"] = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 96,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 64,
        "min_pixels": 3136,
        "max_wh_ratio": None,
    }
    config = ModelConfig.from_dict(raw)
    tensors = random_tensors(config, 0, include_mtp=include_mtp, include_vision=include_vision)
    folder = write_checkpoint(tmp_path / "out", raw, tensors, include_mtp=include_mtp, include_vision=include_vision)
    with open_checkpoint(folder) as reader:
        assert (reader.has_draft, reader.has_vision) == (include_mtp, include_vision)
        assert reader.inventory == select_families(config, include_mtp=include_mtp, include_vision=include_vision)
