"""One safetensors file: its header checked against the file's size, its bytes memory-mapped on demand.

Layout: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the payload,
row-major little-endian, without gaps. Mapped pages are file-backed: reading them costs no anonymous memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import mmap
import struct
from pathlib import Path
from reprlib import repr  # a broken entry may be huge, or nested deeper than a repr can follow
from typing import Any

import numpy as np

from di_jax.checkpoint.errors import CheckpointError
from di_jax.checkpoint.inventory import STORED_DTYPES

# A released header is at most 300 kB; a length beyond this is garbage, not a header.
MAX_HEADER_BYTES = 100_000_000
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
_AGAIN = "download or copy the file again"


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies. offset: from the start of the file; dtype: the header's name."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class SafetensorsHeader:
    """A checked header. digest: sha256 of its bytes, part of the cache key."""

    file: Path
    entries: dict[str, TensorEntry]
    digest: str


def read_header(file: Path) -> SafetensorsHeader:
    """Reads and checks one file's header; touches no payload. Raises CheckpointError naming the file and tensor."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise CheckpointError(f"{file}: corrupt header (length {length}); {_AGAIN}")
            if 8 + length > size:
                raise CheckpointError(
                    f"{file}: truncated inside the header ({size} bytes, header ends at {8 + length}); {_AGAIN}"
                )
            raw = stream.read(length)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: no such file; {_AGAIN}") from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number of many digits; nested too deep
        raise CheckpointError(f"{file}: corrupt header (not JSON: {error}); {_AGAIN}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: corrupt header (not a JSON object); {_AGAIN}")
    header.pop("__metadata__", None)
    entries = {name: _entry(file, name, value, 8 + length) for name, value in header.items()}
    _check_extents(file, entries, 8 + length, size)
    return SafetensorsHeader(file, entries, hashlib.sha256(raw).hexdigest())


def _entry(file: Path, name: str, value: Any, payload_start: int) -> TensorEntry:
    try:
        dtype, shape = value["dtype"], tuple(value["shape"])
        begin, end = value["data_offsets"]
        usable = dtype in _ITEM_BYTES and all(type(v) is int and v >= 0 for v in (*shape, begin, end))
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file}: corrupt header entry of tensor {name!r}: {repr(value)}; {_AGAIN}") from error
    if not usable:
        raise CheckpointError(f"{file}: unreadable header entry of tensor {name!r}: {repr(value)}; {_AGAIN}")
    nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if end - begin != nbytes:
        raise CheckpointError(
            f"{file}: tensor {name!r} ({dtype} {list(shape)}) needs {nbytes} bytes, its data_offsets give "
            f"{end - begin}; {_AGAIN}"
        )
    return TensorEntry(file, dtype, shape, payload_start + begin, nbytes)


def _check_extents(file: Path, entries: dict[str, TensorEntry], start: int, size: int) -> None:
    """Tensors tile the payload without gap or overlap, and the file ends where the last one does."""
    position = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != position:
            raise CheckpointError(
                f"{file}: corrupt header, tensor {name!r} starts at byte {entry.offset}, expected {position}; {_AGAIN}"
            )
        position += entry.nbytes
        if position > size:
            raise CheckpointError(
                f"{file}: truncated, tensor {name!r} ends at byte {position}, the file has {size}; {_AGAIN}"
            )
    if position != size:
        raise CheckpointError(f"{file}: {size - position} stray bytes after the last tensor; {_AGAIN}")


class MappedFiles:
    """Read-only memory maps, one per file, opened on first use."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def view(self, entry: TensorEntry) -> np.ndarray:
        """The tensor as a read-only array over mapped pages, in STORED_DTYPES; nothing is copied."""
        if entry.nbytes == 0:
            return np.empty(entry.shape, STORED_DTYPES[entry.dtype])
        mapped = self._maps.get(entry.file)
        if mapped is None:
            try:
                with entry.file.open("rb") as stream:
                    mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{entry.file}: cannot be mapped ({error})") from error
            self._maps[entry.file] = mapped
        if len(mapped) < entry.offset + entry.nbytes:  # shrunk since its header was read
            raise CheckpointError(f"{entry.file}: truncated while in use; {_AGAIN}")
        return np.ndarray(entry.shape, STORED_DTYPES[entry.dtype], buffer=mapped, offset=entry.offset)

    def close(self) -> None:
        """Drops the maps; pages go when the last array over them does."""
        self._maps.clear()
