"""Engram tables on the host: any rows as the files hold them, 64-bit offsets, and errors that wait to be asked for."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.checkpoint import host_tables
from di_jax.checkpoint.errors import CheckpointError
from di_jax.checkpoint.host_tables import HostTables
from di_jax.checkpoint.reader import open_checkpoint
from di_jax.checkpoint.safetensors_file import TensorEntry

WIDTH, SCALES = 64, 2


def entries(file: Path, rows: int, offset: int = 0) -> tuple[TensorEntry, TensorEntry]:
    """A quantized table of `rows` rows at `offset` of a file, its scales behind it."""
    weight = TensorEntry(file, "F8_E4M3", (rows, WIDTH), offset, rows * WIDTH)
    return weight, TensorEntry(file, "F8_E8M0", (rows, SCALES), offset + weight.nbytes, rows * SCALES)


def write(file: Path, *rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """A file of tables of that many rows; their bytes."""
    random = np.random.default_rng(len(rows))
    tables = [(random.integers(0, 256, (n, WIDTH)), random.integers(1, 255, (n, SCALES))) for n in rows]
    tables = [(weight.astype(np.uint8), scale.astype(np.uint8)) for weight, scale in tables]
    file.write_bytes(b"".join(part.tobytes() for table in tables for part in table))
    return tables


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tables.safetensors"


def make(file: Path, *rows: int) -> HostTables:
    tables, offset = [], 0
    for count in rows:
        tables.append(entries(file, count, offset))
        offset += count * (WIDTH + SCALES)
    return HostTables(tables)


def ask(tables: HostTables, row: np.ndarray, valid: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """A look-up that must succeed."""
    answer = tables(row, np.ones(row.shape[1], bool) if valid is None else valid)
    tables.raise_failure()
    return answer


@given(data=st.data())
def test_any_rows_are_those_of_the_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever is asked, in one piece or by threads; other rows come back as zeros."""
    file = tmp_path_factory.mktemp("tables") / "tables"
    counts = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    expected, tables = write(file, *counts), make(file, *counts)
    tokens, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
    random = np.random.default_rng(data.draw(st.integers(0, 9)))
    row = np.stack([random.integers(0, n, (tokens, columns), dtype=np.int32) for n in counts])
    row[:, ~valid] = -7  # nobody may look these up
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_tables, "TASK_ROWS", data.draw(st.sampled_from([1, 3, 4096])))
        answer = ask(tables, row, valid)
    assert [part.dtype for part in answer] == [np.uint8] * 2
    for ordinal, table in enumerate(expected):
        for stored, found in zip(table, answer, strict=True):
            np.testing.assert_array_equal(found[ordinal][valid], stored[row[ordinal][valid]])
            assert not found[ordinal][~valid].any()


def test_the_tables_of_a_checkpoint(golden: Path) -> None:
    """By ordinal of the Engram layers; the reader is closed by then."""
    with open_checkpoint(golden / "tiny-v41-fp8") as reader:
        names = [f"layers.{layer}.engram.embed" for layer in reader.config.engram_layer_ids]
        stored = [[reader.read(f"{name}.{part}").copy() for part in ("weight", "scale")] for name in names]
        tables = HostTables.of(reader)
    assert len(names) > 1 and tables.nbytes == sum(part.nbytes for table in stored for part in table)
    last = np.array([[[len(weight) - 1, 3]] for weight, _ in stored], np.int32)
    weight, scale = ask(tables, last)
    for ordinal, (values, scales) in enumerate(stored):
        np.testing.assert_array_equal(weight[ordinal, 0], values.view(np.uint8)[last[ordinal, 0]])
        np.testing.assert_array_equal(scale[ordinal, 0], scales[last[ordinal, 0]])


def test_unquantized_rows_are_bytes_wherever_they_lie(file: Path) -> None:
    values = np.arange(6 * WIDTH, dtype=np.uint16).reshape(6, WIDTH)
    file.write_bytes(b"x" + values.tobytes())
    tables = HostTables([(TensorEntry(file, "BF16", values.shape, 1, values.nbytes), None)])
    (found,) = ask(tables, np.array([[[5], [0]]], np.int32))
    np.testing.assert_array_equal(found.view(np.uint16)[0, :, 0], values[[5, 0]])


def test_offsets_beyond_32_bits(file: Path) -> None:
    """A sparse file of 9 GB: rows behind 2^31 and 2^32 bytes, not those at the offset less 2^32."""
    count = 140_000_000
    weight, scale = entries(file, count)
    rows = np.array([1, 2**31 // WIDTH + 5, 2**32 // WIDTH + 7, 2**33 // WIDTH + 9, count - 1], np.int32)
    with file.open("wb") as stream:
        for number, row in enumerate(rows.tolist()):
            for low in {row, (row * WIDTH % 2**32) // WIDTH}:  # where 32-bit arithmetic would read
                stream.seek(low * WIDTH)
                stream.write(bytes([100 + number if low == row else 99]) * WIDTH)
            stream.seek(scale.offset + row * SCALES)
            stream.write(bytes([120 + number]) * SCALES)
    assert file.stat().st_size == weight.nbytes + scale.nbytes > 2**33
    found, scales = ask(HostTables([(weight, scale)]), rows.reshape(1, -1, 1))
    assert (found[0, :, 0] == 100 + np.arange(5)[:, None]).all()
    assert (scales[0, :, 0] == 120 + np.arange(5)[:, None]).all()


def fails(tables: HostTables, words: str, row: int = 0, error: type[Exception] = CheckpointError) -> None:
    """A look-up answers zeros and has its error raised once, when asked."""
    answer = tables(np.full((1, 2, 3), row, np.int32), np.ones(2, bool))
    assert [part.shape for part in answer] == [(1, 2, 3, WIDTH), (1, 2, 3, SCALES)]
    assert not any(part.any() for part in answer)
    with pytest.raises(error, match=words):
        tables.raise_failure()
    tables.raise_failure()


def test_a_truncated_file_is_named(file: Path) -> None:
    """Pages behind its end would end the process by a signal."""
    write(file, 20_000)
    tables = make(file, 20_000)
    ask(tables, np.zeros((1, 2, 3), np.int32))
    os.truncate(file, 5_000)
    fails(tables, rf"{file}: truncated while in use, from 1320000 to 5000 bytes", row=19_999)
    fails(tables, "truncated while in use")


def test_a_file_that_was_written_over_is_named(file: Path) -> None:
    write(file, 5)
    tables = make(file, 5)
    with file.open("r+b") as stream:
        stream.write(b"other")
    os.utime(file, ns=(0, 1))  # a write within the clock's grain would be missed
    fails(tables, rf"{file}: changed while in use")


def test_a_replaced_file_keeps_its_rows(file: Path) -> None:
    """A new file under the old name, as downloads make it, is not ours."""
    ((weight, _),), tables = write(file, 5), make(file, 5)
    other = file.with_name("other")
    other.write_bytes(b"short")
    other.rename(file)
    np.testing.assert_array_equal(ask(tables, np.array([[[4]]], np.int32))[0].ravel(), weight[4])


@pytest.mark.parametrize("bad", [0, 255])
def test_a_scale_that_does_not_decode_is_named(file: Path, bad: int) -> None:
    weight, scale = entries(file, 3)
    file.write_bytes(bytes(weight.nbytes) + bytes([7] * (scale.nbytes - 1) + [bad]))
    tables = HostTables([(weight, scale)])
    fails(tables, rf"{file}: the scales of Engram table 0 hold the ue8m0 byte {bad}, valid are 1..254", row=2)
    ask(tables, np.ones((1, 1, 1), np.int32))


@pytest.mark.parametrize("row", [-1, 5])
def test_rows_outside_of_the_table_are_refused(file: Path, row: int) -> None:
    write(file, 5)
    fails(make(file, 5), rf"Engram rows {row} to {row} of table 0 of 5 rows", row, IndexError)


def test_the_first_of_several_failures_is_raised(file: Path) -> None:
    write(file, 5)
    tables = make(file, 5)
    for row in (6, 7):
        tables(np.full((1, 1, 1), row, np.int32), np.ones(1, bool))
    with pytest.raises(IndexError, match="rows 6 to 6"):
        tables.raise_failure()
    tables.raise_failure()


def test_files_that_cannot_be_opened(file: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{file}: cannot be mapped"):
        make(file, 5)
    write(file, 5)
    with pytest.raises(CheckpointError, match=rf"{file}: truncated since its header was read"):
        make(file, 6)


def test_files_are_closed_with_the_tables(file: Path) -> None:
    write(file, 5)

    def open_files() -> int:
        return sum(os.path.realpath(f"/proc/self/fd/{n}") == str(file.resolve()) for n in os.listdir("/proc/self/fd"))

    tables = make(file, 5)
    assert open_files() > 0
    del tables
    assert open_files() == 0
