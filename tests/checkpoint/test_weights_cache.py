"""The Orbax cache: a second start reads no tensor, and damage never reaches the model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import Parts

from di_jax.checkpoint import cache
from di_jax.checkpoint.cache import load_or_convert
from di_jax.checkpoint.errors import CheckpointError
from di_jax.checkpoint.mapping import leaf_specs
from di_jax.checkpoint.reader import CheckpointReader, open_checkpoint
from di_jax.model.config import ModelConfig
from di_jax.parallel.mesh import DeviceMesh, Parallel


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of tensors read, in order."""
    names: list[str] = []
    original = CheckpointReader.read

    def read(self: CheckpointReader, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        names.append(name)
        return original(self, name, index)

    monkeypatch.setattr(CheckpointReader, "read", read)
    return names


class Start(Protocol):
    def __call__(self, *, draft: bool = False) -> dict[str, bytes]: ...


@pytest.fixture
def start(copy: Path, tmp_path: Path) -> Start:
    """start(): loads through the cache in tmp_path/cache; bytes of every leaf."""

    def run(*, draft: bool = False) -> dict[str, bytes]:
        leaves = load_or_convert(copy, ModelConfig.from_file(copy), tmp_path / "cache", None, draft=draft)
        return {path: np.asarray(array).tobytes() for path, array in leaves.items()}

    return run


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").iterdir())


def test_second_start_skips_conversion(start: Start, reads: list[str], tmp_path: Path) -> None:
    first = start()
    assert len(set(reads)) == 1464 - 163  # all but the draft
    reads.clear()
    assert start() == first
    assert reads == []
    assert [path.name[:8] for path in entries(tmp_path)] == ["weights-"]


def test_runs_with_drafts_and_without_share_the_backbone(start: Start, reads: list[str], tmp_path: Path) -> None:
    """The draft has an entry of its own, whichever run is first: no entry is invalidated by the other kind."""
    without = start()
    (backbone,) = entries(tmp_path)
    made = {file: file.stat().st_mtime_ns for file in backbone.rglob("*")}
    reads.clear()
    both = start(draft=True)
    assert reads and all(name.startswith("mtp.") for name in reads) and len(set(reads)) == 163
    assert {path: both[path] for path in without} == without
    assert {path.split(".")[0] for path in both.keys() - without.keys()} == {"draft"}
    assert len(entries(tmp_path)) == 2
    reads.clear()
    assert start(draft=True) == both and start() == without
    assert reads == [] and len(entries(tmp_path)) == 2
    assert {file: file.stat().st_mtime_ns for file in backbone.rglob("*")} == made
    shutil.rmtree(tmp_path / "cache")
    assert start(draft=True) == both  # the other order
    reads.clear()
    assert start() == without
    assert reads == [] and backbone in entries(tmp_path)


def test_a_damaged_draft_costs_the_draft_alone(start: Start, reads: list[str], tmp_path: Path) -> None:
    start()
    (backbone,) = entries(tmp_path)
    both = start(draft=True)
    (drafts,) = set(entries(tmp_path)) - {backbone}
    flip_a_byte(drafts)
    reads.clear()
    assert start(draft=True) == both
    assert reads and all(name.startswith("mtp.") for name in reads)


def test_the_draft_is_the_same_whatever_the_backbones_mesh(copy: Path, reads: list[str], tmp_path: Path) -> None:
    """Redundant expert slots are the backbone's alone: another number of them leaves the draft's entry."""
    config = ModelConfig.from_file(copy)
    for slots in (4, 8):
        parallel = Parallel(DeviceMesh(dp=4, ep=4), extra_experts=slots, balanced=True)
        reads.clear()
        load_or_convert(copy, config, tmp_path / "cache", None, parallel, draft=True)
        assert any(name.startswith("mtp.") for name in reads) == (slots == 4)
        assert any(name.startswith("layers.") for name in reads)
    assert len(entries(tmp_path)) == 3


def test_a_checkpoint_without_the_draft_it_announces(
    damage: Callable[[Callable[[Parts], None]], Path], tmp_path: Path
) -> None:
    def change(parts: Parts) -> None:
        for name in [name for name in parts if name.startswith("mtp.")]:
            del parts[name]

    bare = damage(change)
    config = ModelConfig.from_file(bare)
    for cache_dir in (None, tmp_path / "cache"):
        assert load_or_convert(bare, config, cache_dir, None)
        with pytest.raises(CheckpointError, match=rf"{bare}: holds no draft \(mtp\.\* tensors\)"):
            load_or_convert(bare, config, cache_dir, None, draft=True)


def test_stored_dtypes_round_trip(tiny: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_file(tiny)
    load_or_convert(tiny, config, tmp_path, None)
    restored = load_or_convert(tiny, config, tmp_path, None)
    dtypes = {array.dtype for array in restored.values()}
    assert dtypes == {np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, np.uint8, np.float32)}


def test_every_bit_pattern_round_trips(tmp_path: Path) -> None:
    """NaN codes and negative zeros included: TensorStore must not treat any chunk as absent or canonical."""
    codes = np.arange(256, dtype=np.uint8)
    leaves = {
        "a.weight": codes.view(ml_dtypes.float8_e4m3fn),
        "a.scale": codes,
        "b.x": np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16),
        "c": np.full(64, -0.0, np.float32),
        "d": np.zeros((4, 4), np.uint8),
    }
    arrays = {path: jax.device_put(value) for path, value in leaves.items()}
    cache._store(tmp_path / "entry", tmp_path / "aside", arrays)
    import orbax.checkpoint as ocp

    wanted = {path: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for path, a in arrays.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "entry", cache._nest(wanted))
    for path, value in leaves.items():
        assert np.asarray(cache._lookup(restored, path)).tobytes() == value.tobytes(), path


def largest_data_file(entry: Path) -> Path:
    return max((file for file in entry.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def truncate(entry: Path) -> None:
    file = largest_data_file(entry)
    file.write_bytes(file.read_bytes()[:-1])


def delete_data(entry: Path) -> None:
    largest_data_file(entry).unlink()


def delete_manifest(entry: Path) -> None:
    (entry / "manifest.ocdbt").unlink()


def flip_a_byte(entry: Path) -> None:
    file = largest_data_file(entry)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def delete_list(entry: Path) -> None:
    (entry / "di_jax_files_0.json").unlink()


def garble_list(entry: Path) -> None:
    (entry / "di_jax_files_0.json").write_text("[]")


def forge(entry: Path) -> None:
    """A lie that the list agrees with: only Orbax itself can notice."""
    file = entry / "manifest.ocdbt"
    file.write_bytes(b"x" * 50)
    sizes = cache._data_files(entry)
    sums = cache._checksums(entry, sizes, "")
    (entry / "di_jax_files_0.json").write_text(json.dumps({n: (size, sums[n]) for n, size in sizes.items()}))


@pytest.mark.parametrize(
    "damage", [truncate, delete_data, delete_manifest, flip_a_byte, delete_list, garble_list, forge]
)
def test_damage_is_logged_and_converted_anew(
    start: Start,
    reads: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    first = start()
    damage(entries(tmp_path)[0])
    reads.clear()
    assert start() == first
    assert reads
    assert "damaged" in caplog.text and str(entries(tmp_path)[0]) in caplog.text
    reads.clear()
    assert start() == first  # the new entry is good
    assert reads == []
    assert len(entries(tmp_path)) == 1


def test_an_interrupted_write_leaves_no_entry(
    start: Start, reads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> dict[str, int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_checksums", interrupt)
        with pytest.raises(KeyboardInterrupt):
            start()
    assert entries(tmp_path) == []
    reads.clear()
    start()
    assert reads


def test_an_unwritable_cache_is_logged_only(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert start()
    assert "could not be written" in caplog.text


def test_a_tilde_is_the_home(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    load_or_convert(copy, ModelConfig.from_file(copy), "~/weights", None)
    assert [p.name[:8] for p in (tmp_path / "home" / "weights").iterdir()] == ["weights-"]
    assert not (tmp_path / "~").exists()


def test_no_cache_dir(tiny: Path, reads: list[str]) -> None:
    for _ in range(2):
        reads.clear()
        load_or_convert(tiny, ModelConfig.from_file(tiny), None, None)
        assert reads


def touch(folder: Path) -> None:
    os.utime(folder / "model.safetensors", (1, 1))


def edit_config(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["transformers_version"] = "9"
    (folder / "config.json").write_text(json.dumps(raw))


def test_changes_make_a_new_key(
    start: Start, copy: Path, reads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    for change in (touch, edit_config):
        change(copy)
        reads.clear()
        start()
        assert reads, change
    monkeypatch.setattr(cache, "CONVERTER_VERSION", cache.CONVERTER_VERSION + 1)
    reads.clear()
    start()
    assert reads
    assert len(entries(tmp_path)) == 4


def test_same_content_elsewhere_has_the_same_key(copy: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(copy, tmp_path / "other", copy_function=shutil.copy2))
    with open_checkpoint(copy) as one, open_checkpoint(other) as two:
        specs = leaf_specs(one.config)
        assert cache.cache_key(one, specs) == cache.cache_key(two, specs)
        spread = leaf_specs(one.config, parallel=Parallel(DeviceMesh(dp=4, ep=4), extra_experts=4, balanced=True))
        assert cache.cache_key(one, specs) != cache.cache_key(one, spread), "more expert slots are other leaves"


def test_headers_are_checked_on_a_hit_too(start: Start, copy: Path) -> None:
    start()
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        start()
