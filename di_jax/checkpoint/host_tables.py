"""Engram tables that stay on the host: rows gathered from the mapped checkpoint files when a step asks for them.

Nothing is copied at start. The kernel's page cache holds what was read, and every process of a machine shares it. Two
rules follow from how devices call the host:

- A look-up never raises. Where one device of a mesh stops inside a step the others wait for it in their next
  collective, until the runtime ends the process (40 s on CPU devices) or for good. So a look-up that fails answers
  zeros and keeps its error for `raise_failure`, which whoever waits for the step calls.
- Files are looked at before and after every look-up: a page behind the end of a file that was cut short would end the
  process by a signal, and bytes that were written over would be another model's.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from di_jax.checkpoint.errors import CheckpointError
from di_jax.checkpoint.mapping import leaf_sources
from di_jax.checkpoint.reader import CheckpointReader
from di_jax.checkpoint.safetensors_file import TensorEntry

# Rows of one task of a large look-up: about 1 ms of copying from the page cache.
TASK_ROWS = 4096
# Rows that are not in the page cache wait for the disk one page at a time, so that more threads than cores help.
WORKERS = 16


class HostTables:
    """The tables of all Engram layers. Equal only to itself, so that a compiled step can be made for it.

    nbytes: of all tables together. Raises CheckpointError for a file that cannot be mapped or is too short.
    """

    def __init__(self, tables: Sequence[tuple[TensorEntry, TensorEntry | None]]) -> None:
        """tables: (weight, scale) of each layer, by ordinal; scale None when unquantized."""
        entries = [entry for pair in tables for entry in pair if entry is not None]
        self.nbytes = sum(entry.nbytes for entry in entries)
        self._files = {file: _MappedFile(file) for file in dict.fromkeys(entry.file for entry in entries)}
        self._parts = [tuple(self._files[e.file].view(e) for e in pair if e is not None) for pair in tables]
        self._scale_files = [scale.file for _, scale in tables if scale is not None]
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(WORKERS, "engram-rows")

    @classmethod
    def of(cls, reader: CheckpointReader) -> HostTables:
        """The tables of a checkpoint; the reader may be closed afterwards."""

        def entry(ordinal: int, part: str) -> TensorEntry:
            ((_, name),) = leaf_sources(reader.config, f"engram_tables.{ordinal}.{part}")
            return reader.entries[name]

        scaled = reader.config.quantization is not None
        layers = range(len(reader.config.engram_layer_ids))
        return cls([(entry(n, "weight"), entry(n, "scale") if scaled else None) for n in layers])

    def __call__(self, row: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, ...]:
        """Stored bytes of rows of all layers, for `jax.pure_callback`: weight uint8 [G, T, columns, bytes of a row],
        and scale uint8 [G, T, columns, head_dim / 32] when quantized.

        row int32 [G, T, columns]; valid bool [T]: other rows are not looked up and come back as zeros. Never raises:
        see `raise_failure`.
        """
        row, valid = np.asarray(row), np.asarray(valid)
        try:
            return self._rows(row, valid)
        except Exception as error:
            with self._lock:
                self._failure = self._failure or error
            return self._empty(row.shape, np.zeros)

    def raise_failure(self) -> None:
        """Raises the first error of the look-ups since the last call, if any: their step computed with zeros."""
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _empty(self, shape: tuple[int, ...], make: Callable[..., np.ndarray]) -> tuple[np.ndarray, ...]:
        return tuple(make((*shape, part.shape[1]), np.uint8) for part in self._parts[0])

    def _rows(self, row: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, ...]:
        self._check_files()
        whole = bool(valid.all())
        wanted = row if whole else row[:, valid]
        found = self._empty(wanted.shape, np.empty)
        tasks = []
        for ordinal, parts in enumerate(self._parts):
            ids = wanted[ordinal].reshape(-1).astype(np.int64)  # byte offsets exceed 32 bits
            if ids.size and not 0 <= ids.min() <= ids.max() < len(parts[0]):
                raise IndexError(f"Engram rows {ids.min()} to {ids.max()} of table {ordinal} of {len(parts[0])} rows")
            for part, answer in zip(parts, found, strict=True):
                out = answer[ordinal].reshape(ids.size, part.shape[1])
                for at in range(0, ids.size, TASK_ROWS):
                    tasks.append((part, ids[at : at + TASK_ROWS], out[at : at + TASK_ROWS]))
        if wanted[0].size <= TASK_ROWS:  # threads would take longer to wake
            for task in tasks:
                _take(*task)
        else:
            list(self._pool.map(lambda task: _take(*task), tasks))
        self._check_files()
        if len(found) > 1:
            self._check_scales(found[1])
        if whole:
            return found
        padded = self._empty(row.shape, np.zeros)
        for part, values in zip(padded, found, strict=True):
            part[:, valid] = values
        return padded

    def _check_files(self) -> None:
        for file in self._files.values():
            file.check()

    def _check_scales(self, scales: np.ndarray) -> None:
        """As `CheckpointReader.read` does for tensors that are loaded: only 1..254 decode exactly."""
        for ordinal, file in enumerate(self._scale_files):
            low, high = scales[ordinal].min(initial=254), scales[ordinal].max(initial=1)
            if low == 0 or high == 255:
                bad = 0 if low == 0 else 255
                raise CheckpointError(
                    f"{file}: the scales of Engram table {ordinal} hold the ue8m0 byte {bad}, valid are 1..254; the "
                    "file is corrupt or was written by a faulty converter: fetch or convert it again"
                )


def _take(table: np.ndarray, ids: np.ndarray, out: np.ndarray) -> None:
    """out = table[ids], without the interpreter lock. mode: ids are checked, and `raise` would copy twice."""
    np.take(table, ids, axis=0, out=out, mode="clip")


@dataclasses.dataclass(frozen=True)
class _FileState:
    """What changes when somebody writes to a file in place. A file that is replaced keeps its bytes for us."""

    size: int
    modified_ns: int


class _MappedFile:
    """A mapping for reads at random: no read-ahead of 32 pages around each row."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self._descriptor = os.open(file, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
            self._state = self._look()
            self._map = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: cannot be mapped ({error})") from error
        if hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM)

    def _look(self) -> _FileState:
        status = os.fstat(self._descriptor)
        return _FileState(status.st_size, status.st_mtime_ns)

    def check(self) -> None:
        """Raises CheckpointError when the file was changed since it was opened."""
        now = self._look()
        if now.size < self._state.size:
            raise CheckpointError(
                f"{self.file}: truncated while in use, from {self._state.size} to {now.size} bytes; restore the file "
                "and start again"
            )
        if now != self._state:
            raise CheckpointError(f"{self.file}: changed while in use; restore the file and start again")

    def view(self, entry: TensorEntry) -> np.ndarray:
        """The bytes of a tensor [rows, ...] over mapped pages, uint8 [rows, bytes]. A matrix of bf16 might be
        misaligned, and NumPy would copy it whole before it takes rows of it."""
        if len(self._map) < entry.offset + entry.nbytes:
            raise CheckpointError(f"{self.file}: truncated since its header was read; download or copy the file again")
        shape = (entry.shape[0], entry.nbytes // max(entry.shape[0], 1))
        return np.ndarray(shape, np.uint8, buffer=self._map, offset=entry.offset)
