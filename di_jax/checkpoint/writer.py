"""Writes small checkpoints in the released layout: for tests, for the demo checkpoint, for export after training.

Values come as float32 under the released names, one tensor at a time; storage follows the config: e4m3, packed fp4,
Engram rows, bf16 and f32 with `quantization_config`, else bf16 and f32. Headers are laid out from the inventory before
the first byte, so that nothing but the tensor at hand is in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from di_jax.checkpoint.errors import CheckpointError
from di_jax.checkpoint.inventory import (
    BLOCK,
    OPTIONAL_FAMILIES,
    STORED_DTYPES,
    TensorSpec,
    expected_inventory,
    scale_name,
)
from di_jax.checkpoint.quantize import MAX_MAGNITUDE, quantize_fp4_rows, quantize_fp8_block, quantize_fp8_rows
from di_jax.checkpoint.reader import INDEX_FILE, SINGLE_FILE
from di_jax.model.config import ModelConfig, ModelConfigError

# Rows are quantized in pieces of about this many values, so that temporaries stay near 100 MB for any tensor.
_PIECE_VALUES = 4 * 2**20


def write_checkpoint(
    folder: str | Path,
    config_json: Mapping[str, Any],
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    max_shard_bytes: int | None = None,
    tokenizer_files: Mapping[str, bytes | Path] | None = None,
    include_mtp: bool = True,
    include_vision: bool = False,
    overwrite: bool = False,
) -> Path:
    """Writes `folder` and returns it: config.json, the weights, the tokenizer files.

    tensors: (name, float32 values of the logical shape), each weight of the inventory once, in any order; scales are
    made here. max_shard_bytes: payload per shard, with an index; None: one model.safetensors. include_*: whether the
    optional families belong to it. The folder appears whole or not at all. Raises CheckpointError naming the tensor
    for a name, shape or value that does not fit, for a missing one, and for a folder that is not empty.
    """
    folder = Path(folder)
    try:
        config = ModelConfig.from_dict(config_json)
    except ModelConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    inventory = select_families(config, include_mtp=include_mtp, include_vision=include_vision)
    if folder.exists() and not overwrite and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder}: exists already; delete it or write to another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.writing-", dir=folder.parent))
    try:
        work.chmod(0o755)
        (work / "config.json").write_text(json.dumps(config_json, indent=2) + "\n", encoding="utf-8")
        for name, content in (tokenizer_files or {}).items():
            (work / name).write_bytes(content if isinstance(content, bytes) else Path(content).read_bytes())
        _write_weights(work, inventory, tensors, max_shard_bytes)
        _replace_folder(work, folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return folder


def select_families(config: ModelConfig, *, include_mtp: bool, include_vision: bool) -> dict[str, TensorSpec]:
    """The inventory with or without the optional families."""
    dropped: set[str] = set()
    for family, wanted in (("mtp", include_mtp), ("vision", include_vision)):
        if not wanted:
            dropped |= OPTIONAL_FAMILIES[family]
    return {name: spec for name, spec in expected_inventory(config).items() if spec.part not in dropped}


def random_tensors(
    config: ModelConfig, seed: int, *, include_mtp: bool = True, include_vision: bool = False
) -> Iterator[tuple[str, np.ndarray]]:
    """Random weights for `write_checkpoint`: (name, float32 of the logical shape), equal for equal (seed, name).

    Sized so that activations stay near 1: norms and Engram gates about 1, projections 1/sqrt(fan_in), embedding 1,
    hyper-connection mixes and router biases small, sinks near 0.
    """
    for name, spec in select_families(config, include_mtp=include_mtp, include_vision=include_vision).items():
        if spec.storage == "scale":
            continue
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
        mean, deviation = _distribution(name, spec.logical_shape)
        values = generator.standard_normal(spec.logical_shape, np.float32)
        values *= np.float32(deviation)
        values += np.float32(mean)
        yield name, values


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """(mean, standard deviation) of a tensor's random values."""
    last = name.rsplit(".", 1)[-1]
    if "norm" in name or last in ("q_weight", "k_weight"):
        return 1.0, 0.02
    if last in ("hc_attn_base", "hc_ffn_base"):
        return 0.0, 0.0
    if last in ("hc_attn_scale", "hc_ffn_scale"):
        return 0.1, 0.0
    if last in ("attn_sink", "bias", "bias_vl"):
        return 0.0, 0.02
    if name == "embed.weight" or name.endswith("engram.embed.weight"):
        return 0.0, 1.0
    if last.startswith("image_"):
        return 0.0, 1.0
    return 0.0, 1.0 / math.sqrt(shape[-1])


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Where a tensor's bytes go."""

    shard: int
    offset: int  # from the start of the file


def _write_weights(
    work: Path,
    inventory: dict[str, TensorSpec],
    tensors: Iterable[tuple[str, np.ndarray]],
    max_shard_bytes: int | None,
) -> None:
    shards = _split(inventory, max_shard_bytes)
    single = max_shard_bytes is None
    names = [SINGLE_FILE]
    if not single:
        names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    slots: dict[str, _Slot] = {}
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((work / name).open("wb")) for name in names]
        for number, (file, shard) in enumerate(zip(files, shards, strict=True)):
            header, payload = _header(shard, inventory)
            file.write(header)
            for name, offset in payload.items():
                slots[name] = _Slot(number, len(header) + offset)
            file.truncate(len(header) + sum(inventory[name].nbytes for name in shard))  # tensors come in any order
        pending = {name for name, spec in inventory.items() if spec.storage != "scale"}
        for name, values in tensors:
            if name not in pending:
                spec = inventory.get(name)
                why = "not of this model" if spec is None else "made here" if spec.storage == "scale" else "given twice"
                raise CheckpointError(f"tensor {name!r}: {why}")
            pending.remove(name)
            _write_tensor(files, slots, name, inventory[name], values)
        if pending:
            first = min(pending)
            raise CheckpointError(f"tensor {first!r} was not given ({len(pending)} missing in all)")
    if not single:
        weight_map = {name: names[slots[name].shard] for name in sorted(inventory)}
        total = sum(spec.nbytes for spec in inventory.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (work / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _split(inventory: dict[str, TensorSpec], max_shard_bytes: int | None) -> list[list[str]]:
    """Names per shard, in inventory order; a weight and its scale stay together."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, spec in inventory.items():
        if spec.storage == "scale":
            continue
        group = [name, scale_name(name)] if spec.storage != "plain" else [name]
        size = sum(inventory[member].nbytes for member in group)
        if max_shard_bytes is not None and shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1] += group
        used += size
    return shards


def _header(shard: list[str], inventory: dict[str, TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """The header's bytes (length prefix included) and each tensor's payload offset. Wide items first, so that every
    tensor is aligned to its item size."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    position = 0
    for name in sorted(shard, key=lambda n: (-STORED_DTYPES[inventory[n].dtype].itemsize, n)):
        spec = inventory[name]
        offsets[name] = position
        entries[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.nbytes],
        }
        position += spec.nbytes
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw, offsets


def _write_tensor(
    files: Sequence[BinaryIO], slots: dict[str, _Slot], name: str, spec: TensorSpec, values: np.ndarray
) -> None:
    values = np.asarray(values)
    if values.shape != spec.logical_shape:
        raise CheckpointError(f"tensor {name!r}: shape {list(values.shape)}, expected {list(spec.logical_shape)}")
    if values.dtype != np.float32:
        raise CheckpointError(f"tensor {name!r}: dtype {values.dtype}, expected float32 values")

    def put(tensor: str, row_bytes: int, row: int, data: np.ndarray) -> None:
        slot = slots[tensor]
        file = files[slot.shard]
        file.seek(slot.offset + row * row_bytes)
        file.write(np.ascontiguousarray(data).tobytes())

    rows = values.shape[0]
    width = max(1, values[0].size) if rows else 1
    step = max(BLOCK, _PIECE_VALUES // width // BLOCK * BLOCK)  # whole 32-row blocks
    item = STORED_DTYPES[spec.dtype].itemsize
    for row in range(0, rows, step):
        piece = values[row : row + step]
        if not np.abs(piece).max(initial=0) < MAX_MAGNITUDE:  # false for NaN too
            raise CheckpointError(f"tensor {name!r}: holds a value that is not finite or beyond {MAX_MAGNITUDE:.3g}")
        if spec.storage == "plain":
            put(name, width * item, row, piece.astype(ml_dtypes.bfloat16) if spec.dtype == "BF16" else piece)
            continue
        scales = -(-width // BLOCK)
        if spec.storage == "fp8_block":
            codes, scale = quantize_fp8_block(piece)
            put(scale_name(name), scales, row // BLOCK, scale)
        else:
            codes, scale = (quantize_fp4_rows if spec.storage == "fp4_rows" else quantize_fp8_rows)(piece)
            put(scale_name(name), scales, row, scale)
        put(name, codes.shape[1], row, codes.view(np.uint8))


def _replace_folder(work: Path, folder: Path) -> None:
    """Renames `work` to `folder`, moving a non-empty one out of the way first."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        os.replace(work, folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old-", dir=folder.parent)) / folder.name
    os.replace(folder, old)
    os.replace(work, folder)
    shutil.rmtree(old.parent, ignore_errors=True)
