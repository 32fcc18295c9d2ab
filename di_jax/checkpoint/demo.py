"""The demo checkpoint: a small model in the released format, made on this machine at first use.

The package carries its config and tokenizer (`demo_data/`). The weights are random but fixed by a seed, and quantized
as the release is (fp8 blocks, packed fp4 experts, fp8 Engram rows), over several shards with an index. It is written
once to the user's cache and found there afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from importlib import resources
from pathlib import Path

from tqdm import tqdm

from di_jax.checkpoint.errors import CheckpointError
from di_jax.checkpoint.writer import random_tensors, select_families, write_checkpoint
from di_jax.model.config import ModelConfig

DATA_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
GENERATOR_VERSION = 1  # raise it whenever the same data would give other weights: caches are keyed by it
SEED = 20260910
SHARD_BYTES = 2 * 2**20  # several shards, so that the index is read as in the release


def demo_data() -> dict[str, bytes]:
    """The bundled files, by name."""
    folder = resources.files("di_jax.checkpoint") / "demo_data"
    return {name: (folder / name).read_bytes() for name in DATA_FILES}


def default_cache_dir() -> Path:
    """The user's cache folder for this package (XDG base directories)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative values ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "di_jax"


def demo_key(data: dict[str, bytes]) -> str:
    """16 hex digits that change whenever the checkpoint would."""
    digest = hashlib.sha256(f"{GENERATOR_VERSION} {SEED} {SHARD_BYTES}".encode())
    for name in sorted(data):
        digest.update(f"\0{name}\0{len(data[name])}\0".encode() + data[name])
    return digest.hexdigest()[:16]


def demo_checkpoint(cache_dir: Path | None = None) -> Path:
    """Folder of the demo checkpoint, made first where it is missing or incomplete (seconds, with a progress bar).

    cache_dir: default `default_cache_dir()`. Several processes may call at once: each writes its own copy aside and
    the first to finish renames it into place. Raises CheckpointError when the cache cannot be written.
    """
    cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir)
    data = demo_data()
    folder = cache_dir / f"demo-{demo_key(data)}"
    if _complete(folder):
        return folder
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache_dir))
    except OSError as error:
        raise CheckpointError(
            f"{cache_dir}: the demo checkpoint cannot be written there ({error.strerror}); "
            "set XDG_CACHE_HOME to a folder that can be"
        ) from error
    try:
        _write(aside / "new", data)
        return _publish(aside, folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: the demo checkpoint could not be written ({error})") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write(folder: Path, data: dict[str, bytes]) -> None:
    config_json = json.loads(data["config.json"])
    config = ModelConfig.from_dict(config_json, source="demo config.json")
    specs = select_families(config, include_mtp=True, include_vision=False).values()
    tensors = tqdm(
        random_tensors(config, SEED),
        total=sum(spec.storage != "scale" for spec in specs),
        desc="making the demo checkpoint",
        unit="tensor",
        disable=None,
    )
    tokenizer_files = {name: content for name, content in data.items() if name != "config.json"}
    write_checkpoint(folder, config_json, tensors, max_shard_bytes=SHARD_BYTES, tokenizer_files=tokenizer_files)


def _publish(aside: Path, folder: Path) -> Path:
    """Renames `aside/new` to `folder` in one step; a complete folder that another process put there wins."""
    for _ in range(2):
        try:
            (aside / "new").rename(folder)
            return folder
        except OSError:
            if _complete(folder):
                return folder
            # Files were lost from it: out of the way, then once more. Another process may be doing the same.
            with contextlib.suppress(FileNotFoundError):
                folder.rename(aside / "old")
    raise CheckpointError(f"{folder}: is in the way of the demo checkpoint; remove it")


def _complete(folder: Path) -> bool:
    """Whether every bundled file and every shard that the index names is there."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        names = {*index["weight_map"].values(), *DATA_FILES}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False
    return all((folder / name).is_file() for name in names)
