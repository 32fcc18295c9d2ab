"""Safetensors files taken apart and put together, independent of the package's own reader; decoded weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from di_jax.checkpoint.inventory import scale_name
from di_jax.checkpoint.quantize import dequantize_fp4_rows, dequantize_fp8_block, dequantize_fp8_rows
from di_jax.checkpoint.reader import CheckpointReader

Parts = dict[str, tuple[dict[str, Any], bytes]]  # name -> (header entry, payload)


def split_file(file: Path) -> Parts:
    """A safetensors file taken apart, independent of the package's own reader."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    payload = raw[8 + length :]
    return {name: (entry, payload[slice(*entry["data_offsets"])]) for name, entry in header.items()}


def join_file(file: Path, parts: Parts) -> None:
    header, position = {}, 0
    for name, (entry, data) in parts.items():
        header[name] = {**entry, "data_offsets": [position, position + len(data)]}
        position += len(data)
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(data for _, data in parts.values()))


def decoded(reader: CheckpointReader, name: str) -> np.ndarray:
    """float32 values of a weight."""
    weight = reader.read(name)
    storage = reader.inventory[name].storage
    if storage == "plain":
        return weight.astype(np.float32)
    decode = {
        "fp8_block": dequantize_fp8_block,
        "fp8_rows": dequantize_fp8_rows,
        "fp4_rows": dequantize_fp4_rows,
    }[storage]
    return decode(weight, reader.read(scale_name(name)))


def weights(reader: CheckpointReader) -> list[str]:
    return [name for name, spec in reader.inventory.items() if spec.storage != "scale"]
