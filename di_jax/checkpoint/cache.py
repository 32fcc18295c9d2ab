"""Orbax cache of the loaded tree, so that a second start skips the conversion.

One entry is a folder `weights-<key>` under the cache folder; the draft model has one of its own. The key covers
everything the tree follows from: the config, the index, every shard's header, size and modification time, and the
version of our mapping. An entry is written aside and renamed when complete; lists of its files' sizes and checksums
show later damage. A damaged entry is logged and made anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Sharding, SingleDeviceSharding
from tqdm import tqdm

from di_jax.checkpoint.loader import load_leaves
from di_jax.checkpoint.mapping import LeafSpec, leaf_specs
from di_jax.checkpoint.reader import INDEX_FILE, CheckpointReader, open_checkpoint
from di_jax.model.config import ModelConfig
from di_jax.parallel.mesh import ONE_DEVICE, Parallel

# Raise whenever the mapping, a leaf's layout or the meaning of stored bytes changes: older entries are then not found.
CONVERTER_VERSION = 1
_FILE_LIST = "di_jax_files_{}.json"  # one per process that wrote the entry
# Chunks of a stored leaf: readers with another mesh then read what they own, and decode little at a time.
_CHUNK_BYTES = 64 * 2**20

logger = logging.getLogger(__name__)


def load_or_convert(
    folder: str | Path,
    config: ModelConfig,
    cache_dir: str | Path | None,
    shardings: Mapping[str, Sharding] | None,
    parallel: Parallel = ONE_DEVICE,
    *,
    draft: bool = False,
) -> dict[str, jax.Array]:
    """The leaves of `load_leaves`, from the cache when it holds this checkpoint, else converted and stored there.

    cache_dir: None for no cache; shared by all processes of a multi-process mesh. draft: the leaves of the draft model
    as well. The checkpoint's headers are checked either way. A cache that cannot be read or written is logged, never
    fatal. Raises CheckpointError.
    """
    with open_checkpoint(folder, config) as reader:
        if cache_dir is None:
            return load_leaves(reader, config, shardings, draft=draft, parallel=parallel)
        cache_dir = Path(os.path.expanduser(cache_dir)).absolute()
        specs = leaf_specs(config, parallel=parallel)
        leaves = _load_entry(reader, cache_dir, specs, shardings, parallel)
        everything = leaf_specs(config, draft=draft, parallel=parallel)
        # An entry of its own: runs with drafts and runs without share the backbone's.
        if drafts := {path: spec for path, spec in everything.items() if path not in specs}:
            leaves |= _load_entry(reader, cache_dir, drafts, shardings, parallel, draft=True)
        return leaves


def _load_entry(
    reader: CheckpointReader,
    cache_dir: Path,
    specs: Mapping[str, LeafSpec],
    shardings: Mapping[str, Sharding] | None,
    parallel: Parallel,
    draft: bool = False,
) -> dict[str, jax.Array]:
    """The leaves of `specs`, restored from their entry or loaded and stored as one. draft: they are the draft's."""
    entry, aside = _agree(reader, cache_dir, specs)
    if (leaves := _try_restore(entry, specs, shardings)) is not None:
        return leaves
    leaves = load_leaves(reader, reader.config, shardings, draft=draft, parallel=parallel, only=specs)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)  # fails here, not in a thread of Orbax
        _store(entry, aside, leaves)
    except Exception as error:  # a full disk must not keep the model from running
        logger.warning("weights cache %s could not be written (%s); continuing without", entry, _first_line(error))
    finally:
        if jax.process_index() == 0:
            shutil.rmtree(aside, ignore_errors=True)  # there only when the store did not finish
    return leaves


def cache_key(reader: CheckpointReader, specs: Mapping[str, LeafSpec]) -> str:
    """Hex key of the tree of these leaves that the checkpoint loads to."""
    digest = hashlib.sha256(f"{CONVERTER_VERSION}\n{reader.config!r}\n{specs!r}\n".encode())
    for name in ("config.json", INDEX_FILE):
        file = reader.folder / name
        digest.update(hashlib.sha256(file.read_bytes() if file.is_file() else b"").digest())
    for header in reader.headers:
        status = header.file.stat()
        digest.update(f"{header.file.name} {header.digest} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def _agree(reader: CheckpointReader, cache_dir: Path, specs: Mapping[str, LeafSpec]) -> tuple[Path, Path]:
    """(entry, folder to write a new one in), the same in all processes: Orbax calls are collective and modification
    times may differ between hosts, so process 0 decides."""
    key, nonce = cache_key(reader, specs), secrets.token_hex(4)
    if jax.process_count() > 1:
        message = np.frombuffer(f"{key}{nonce}".encode(), np.uint8)
        text = bytes(np.asarray(multihost_utils.broadcast_one_to_all(message)).astype(np.uint8)).decode()
        key, nonce = text[: len(key)], text[len(key) :]
    return cache_dir / f"weights-{key}", cache_dir / f".weights-{key}-{nonce}"


def _is_intact(entry: Path) -> bool:
    """Every listed file is there with its size and checksum, none besides; checked in shares by all processes.

    Nothing below would notice: TensorStore reads a missing chunk as zeros, and quantized weights do not compress, so
    that a changed byte decodes to a changed weight.
    """
    count, index = jax.process_count(), jax.process_index()
    try:
        listed: dict[str, list[int]] = {}
        for file in entry.glob(_FILE_LIST.format("*")):
            listed |= json.loads(file.read_text(encoding="utf-8"))
        files = _data_files(entry)
        intact = bool(files) and {name: size for name, (size, _) in listed.items()} == files
        if intact:
            share = sorted(files)[index::count]
            sums = _checksums(entry, {name: files[name] for name in share}, "checking weights cache")
            intact = all(sums[name] == listed[name][1] for name in share)
    except (OSError, ValueError, TypeError):
        intact = False
    return _everywhere(intact)


def _everywhere(good: bool) -> bool:
    """Whether it holds in all processes: what follows is collective, so they must decide alike."""
    if jax.process_count() == 1:
        return good
    return bool(np.all(multihost_utils.process_allgather(np.asarray(good))))


def _data_files(entry: Path) -> dict[str, int]:
    """Size of every file of an entry but the lists, by relative path."""
    return {
        str(file.relative_to(entry)): file.stat().st_size
        for file in entry.rglob("*")
        if file.is_file() and not file.match(_FILE_LIST.format("*"))
    }


def _checksums(entry: Path, files: Mapping[str, int], title: str) -> dict[str, int]:
    """CRC-32 per file, several at a time (the checksum runs without the interpreter lock)."""
    with tqdm(total=sum(files.values()), desc=title, unit="B", unit_scale=True, disable=None) as bar:

        def checksum(name: str) -> int:
            value = 0
            with (entry / name).open("rb") as stream:
                while piece := stream.read(2**20):
                    value = zlib.crc32(piece, value)
                    bar.update(len(piece))
            return value

        with ThreadPoolExecutor(max_workers=8) as pool:
            return dict(zip(files, pool.map(checksum, files), strict=True))


def _try_restore(
    entry: Path, specs: Mapping[str, LeafSpec], shardings: Mapping[str, Sharding] | None
) -> dict[str, jax.Array] | None:
    """The entry's leaves; None when there is none or it is damaged, in which case it is removed."""
    problem = "incomplete or damaged files" if entry.exists() else ""
    leaves = None
    if _is_intact(entry):
        try:
            leaves = _restore(entry, specs, shardings)
        except Exception as error:  # Orbax and TensorStore raise many kinds for damaged data
            problem = _first_line(error)
        if _everywhere(leaves is not None):
            logger.info("weights restored from cache %s", entry)
            return leaves
    if problem:
        logger.warning("weights cache %s is damaged (%s); converting again", entry, problem)
        if jax.process_index() == 0:
            shutil.rmtree(entry, ignore_errors=True)
    return None


def _restore(
    entry: Path, specs: Mapping[str, LeafSpec], shardings: Mapping[str, Sharding] | None
) -> dict[str, jax.Array]:
    default = SingleDeviceSharding(jax.local_devices()[0])
    wanted = {
        path: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=shardings[path] if shardings else default)
        for path, spec in specs.items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(entry, _nest(wanted))
    return {path: _lookup(restored, path) for path in wanted}


def _store(entry: Path, aside: Path, leaves: Mapping[str, jax.Array]) -> None:
    """Writes aside, lists the files, renames. float8_e4m3fn and bfloat16 are native TensorStore types: no views."""
    tree = _nest(leaves)
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(aside, args=ocp.args.StandardSave(tree, save_args))
    files = _data_files(aside)
    share = {name: files[name] for name in sorted(files)[jax.process_index() :: jax.process_count()]}
    sums = _checksums(aside, share, "sealing weights cache")
    listed = {name: (size, sums[name]) for name, size in share.items()}
    (aside / _FILE_LIST.format(jax.process_index())).write_text(json.dumps(listed), encoding="utf-8")
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"weights cache {aside.name}")
    if jax.process_index() == 0:
        try:
            os.rename(aside, entry)
        except OSError:
            if not entry.exists():  # else another run was faster; its entry has the same content
                raise


def _nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree


def _lookup(tree: Mapping[str, Any], path: str) -> Any:
    node: Any = tree
    for name in path.split("."):
        node = node[name]
    return node


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
