"""Opening good checkpoints, and refusing bad ones by file and tensor name."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import Parts, join_file, split_file
from safetensors import safe_open

from di_jax.checkpoint.errors import CheckpointError
from di_jax.checkpoint.reader import open_checkpoint
from di_jax.errors import UserError
from di_jax.model.config import ModelConfig

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NAME = "layers.3.attn.wq_a.weight"
SCALE = "layers.3.ffn.experts.7.w2.scale"
Damage = Callable[[Callable[[Parts], None]], Path]


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    return str(caught.value)


def test_golden_opens_with_full_coverage(tiny: Path) -> None:
    with open_checkpoint(tiny) as reader:
        with safe_open(tiny / SINGLE, "numpy") as file:
            assert set(reader.entries) == set(file.keys()) == set(reader.inventory)
        assert reader.has_draft and not reader.has_vision
        assert reader.payload_bytes(reader.inventory) == 4_855_044


def test_bytes_are_read_as_stored(tiny: Path) -> None:
    raw = split_file(tiny / SINGLE)
    with open_checkpoint(tiny) as reader:
        for name in reader.inventory:
            assert reader.read(name).tobytes() == raw[name][1]
        assert reader.read(NAME).dtype == ml_dtypes.float8_e4m3fn
        assert reader.read(SCALE).dtype == np.uint8
        assert reader.read("layers.3.ffn.experts.7.w2.weight").dtype == np.uint8
        assert reader.read("embed.weight").dtype == ml_dtypes.bfloat16
        box = reader.read("embed.weight", (slice(3, 5), slice(1, 9)))
        assert np.array_equal(box, reader.read("embed.weight")[3:5, 1:9])
        assert not box.flags.writeable


def test_shards_and_index(sharded: Path, tiny: Path) -> None:
    with open_checkpoint(sharded) as reader, open_checkpoint(tiny) as single:
        assert len(reader.headers) == 3
        assert all(reader.read(n).tobytes() == single.read(n).tobytes() for n in single.inventory)


def test_model_prefix_is_optional(damage: Damage) -> None:
    def prefix(parts: Parts) -> None:
        for name in list(parts):
            parts[f"model.{name}"] = parts.pop(name)

    assert len(open_checkpoint(damage(prefix)).inventory) == 1464


def test_prefix_must_not_make_names_collide(damage: Damage) -> None:
    folder = damage(lambda parts: parts.update({"model.norm.weight": parts["norm.weight"]}))
    assert "'model.norm.weight'" in refusal(folder)


def test_draft_may_be_absent_as_a_whole_only(damage: Damage) -> None:
    def drop(parts: Parts) -> None:
        for name in [n for n in parts if n.startswith("mtp.")]:
            del parts[name]

    with open_checkpoint(damage(drop)) as reader:
        assert not reader.has_draft
        assert not any(name.startswith("mtp.") for name in reader.inventory)


def test_half_a_draft_is_refused(damage: Damage) -> None:
    folder = damage(lambda parts: parts.pop("mtp.1.norm.weight"))
    assert "missing tensor 'mtp.1.norm.weight'" in refusal(folder)


def test_vision_may_be_absent(copy: Path, golden: Path) -> None:
    vision = json.loads((golden / "config_real.json").read_text())["vision_config"]
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**raw, "vision_config": vision}))
    with open_checkpoint(copy) as reader:
        assert reader.config.vision is not None and not reader.has_vision


def test_missing_tensor(damage: Damage) -> None:
    message = refusal(damage(lambda parts: parts.pop(NAME)))
    assert SINGLE in message and f"missing tensor {NAME!r}" in message


def test_extra_tensor(damage: Damage) -> None:
    message = refusal(damage(lambda parts: parts.update({"layers.3.attn.extra": parts["norm.weight"]})))
    assert SINGLE in message and "unexpected tensor 'layers.3.attn.extra'" in message


def test_wrong_dtype(damage: Damage) -> None:
    message = refusal(damage(lambda parts: parts[NAME][0].update(dtype="F8_E5M2")))
    assert SINGLE in message and repr(NAME) in message and "F8_E5M2" in message and "F8_E4M3" in message


def test_wrong_shape(damage: Damage) -> None:
    message = refusal(damage(lambda parts: parts[NAME][0].update(shape=[128, 64])))
    assert SINGLE in message and repr(NAME) in message and "[128, 64]" in message and "[64, 128]" in message


def test_formats_mixed_up_get_a_hint(copy: Path) -> None:
    raw = json.loads((copy / "config.json").read_text())
    del raw["quantization_config"]
    (copy / "config.json").write_text(json.dumps(raw))
    message = refusal(copy)
    assert ".scale'" in message and "no quantization_config" in message


@pytest.mark.parametrize("keep", [4, 100, 200_000, 5_000_251])
def test_truncated_file(copy: Path, keep: int) -> None:
    file = copy / SINGLE
    file.write_bytes(file.read_bytes()[:keep])
    message = refusal(copy)
    assert str(file) in message and ("truncated" in message or "corrupt header" in message)
    if keep > 200_000 - 1:
        assert "tensor '" in message


def test_truncated_shard_names_the_shard(sharded: Path) -> None:
    file = sharded / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    message = refusal(sharded)
    assert str(file) in message and "truncated" in message and "tensor '" in message


def test_file_shrunk_after_opening(copy: Path) -> None:
    with open_checkpoint(copy) as reader:
        file = copy / SINGLE
        file.write_bytes(file.read_bytes()[:300_000])
        with pytest.raises(CheckpointError, match="truncated while in use"):
            for name in reader.inventory:
                reader.read(name)


@pytest.mark.parametrize(
    "header",
    [
        b"\xff" * 8,
        struct.pack("<Q", 12) + b"not a header",
        struct.pack("<Q", 4) + b"[1] ",
        struct.pack("<Q", 12) + b'{"norm.w":3}',
        struct.pack("<Q", 9) + b'{"a":"\xff"}',
        struct.pack("<Q", 5006) + b'{"a":' + b"1" * 5000 + b"}",
        struct.pack("<Q", 200_000) + b"[" * 200_000,
    ],
)
def test_corrupt_header(copy: Path, header: bytes) -> None:
    file = copy / SINGLE
    file.write_bytes(header)
    message = refusal(copy)
    assert str(file) in message and "corrupt header" in message


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "BF16", "shape": [128], "data_offsets": [0, 255]},
        {"dtype": "BF16", "shape": [-128], "data_offsets": [0, 256]},
        {"dtype": "BF17", "shape": [128], "data_offsets": [0, 256]},
        {"dtype": "BF16", "shape": [128], "data_offsets": [8, 264]},
        {"dtype": "BF16", "shape": [128]},
        {"dtype": [], "shape": [128], "data_offsets": [0, 256]},
        {"dtype": {}, "shape": [128], "data_offsets": [0, 256]},
        {"dtype": None, "shape": "128", "data_offsets": "00"},
        {"dtype": ["x" * 1000] * 1000, "shape": [128], "data_offsets": [0, 256]},
    ],
)
def test_corrupt_header_entry_names_the_tensor(copy: Path, entry: dict[str, object]) -> None:
    raw = json.dumps({"norm.weight": entry}).encode()
    (copy / SINGLE).write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(264))
    message = refusal(copy)
    assert str(copy / SINGLE) in message and "'norm.weight'" in message and len(message) < 1000


def test_a_header_entry_nested_too_deep_to_show(copy: Path) -> None:
    raw = b'{"norm.weight":{"dtype":' + b"[" * 5000 + b"]" * 5000 + b"}}"
    (copy / SINGLE).write_bytes(struct.pack("<Q", len(raw)) + raw)
    assert f"{copy / SINGLE}: corrupt header" in refusal(copy)


def test_stray_bytes_after_the_payload(copy: Path) -> None:
    with (copy / SINGLE).open("ab") as file:
        file.write(b"\0")
    assert "1 stray bytes" in refusal(copy)


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00003-of-00003.safetensors").unlink()
    message = refusal(sharded)
    assert "model-00003-of-00003.safetensors" in message and "missing" in message and "tensor '" in message


def change_index(folder: Path, change: Callable[[dict], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_index_places_a_tensor_elsewhere(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    actual = index["weight_map"][NAME]
    other = next(name for name in sorted(set(index["weight_map"].values())) if name != actual)
    change_index(sharded, lambda index: index["weight_map"].update({NAME: other}))
    message = refusal(sharded)
    assert repr(NAME) in message and other in message and actual in message


def test_shard_holds_what_the_index_does_not_know(sharded: Path) -> None:
    change_index(sharded, lambda index: index["weight_map"].pop(NAME))
    message = refusal(sharded)
    assert repr(NAME) in message and "does not place" in message


def test_index_total_size(sharded: Path) -> None:
    change_index(sharded, lambda index: index["metadata"].update(total_size=7))
    assert "total_size is 7" in refusal(sharded)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"norm.weight": "../x"}}'])
def test_corrupt_index(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    assert INDEX in refusal(sharded)


def test_folder_without_weights(copy: Path) -> None:
    (copy / SINGLE).unlink()
    assert str(copy) in refusal(copy) and INDEX in refusal(copy)


def test_folder_without_config_or_absent(copy: Path) -> None:
    (copy / "config.json").unlink()
    assert "config.json" in refusal(copy)
    assert "no such checkpoint folder" in refusal(copy / "nowhere")
    assert issubclass(CheckpointError, UserError)


@pytest.mark.parametrize("byte", [0, 255])
def test_scale_bytes_without_exact_decoding(damage: Damage, byte: int) -> None:
    def change(parts: Parts) -> None:
        entry, data = parts[SCALE]
        parts[SCALE] = (entry, data[:-1] + bytes([byte]))

    with open_checkpoint(damage(change)) as reader:
        with pytest.raises(CheckpointError) as caught:
            reader.read(SCALE)
        assert SINGLE in str(caught.value) and repr(SCALE) in str(caught.value) and f"byte {byte}" in str(caught.value)
        assert reader.read(SCALE, (slice(0, 1),)).size  # the rows before it are good


@pytest.mark.parametrize("byte", [1, 254])
def test_extreme_scale_bytes_are_good(damage: Damage, byte: int) -> None:
    def change(parts: Parts) -> None:
        entry, data = parts[SCALE]
        parts[SCALE] = (entry, bytes([byte]) * len(data))

    with open_checkpoint(damage(change)) as reader:
        assert set(reader.read(SCALE).ravel().tolist()) == {byte}


def test_unaligned_payload_is_readable(copy: Path) -> None:
    """Nothing in the format aligns tensors: an odd header shifts every one of them."""
    parts = split_file(copy / SINGLE)
    join_file(copy / SINGLE, parts)
    raw = (copy / SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    pad = 1 + length % 2
    (copy / SINGLE).write_bytes(struct.pack("<Q", length + pad) + raw[8 : 8 + length] + b" " * pad + raw[8 + length :])
    with open_checkpoint(copy) as reader:
        assert reader.entries["norm.weight"].offset % 2 == 1
        assert reader.read("norm.weight").tobytes() == parts["norm.weight"][1]


def test_given_config_decides(tiny: Path) -> None:
    config = dataclasses.replace(ModelConfig.from_file(tiny), n_routed_experts=15)
    with pytest.raises(CheckpointError, match=r"unexpected tensors? 'layers\.\d+\.ffn\.experts\.15"):
        open_checkpoint(tiny, config)
