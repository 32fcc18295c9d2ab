"""Opens a checkpoint folder and checks it whole, headers only, before any tensor is read (checkpoint 9, steps 2 and 3).

A folder holds `config.json` and either `model.safetensors.index.json` with its shards or one `model.safetensors`.
Names may carry a `model.` prefix. The draft (`mtp.*`) and the vision tower may be absent, each as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from di_jax.checkpoint.errors import CheckpointError
from di_jax.checkpoint.inventory import OPTIONAL_FAMILIES, TensorSpec, expected_inventory
from di_jax.checkpoint.safetensors_file import MappedFiles, SafetensorsHeader, TensorEntry, read_header
from di_jax.model.config import ModelConfig, ModelConfigError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_SHOWN = 3  # names listed in a message; the count tells the rest


class CheckpointReader:
    """A checked checkpoint.

    folder; config; inventory: specs of the tensors present, by name without prefix; entries: where each lies;
    headers: one per file; has_draft / has_vision; reads: tensor reads so far (a cache hit makes none).
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        inventory: dict[str, TensorSpec],
        entries: dict[str, TensorEntry],
        headers: list[SafetensorsHeader],
    ) -> None:
        self.folder = folder
        self.config = config
        self.inventory = inventory
        self.entries = entries
        self.headers = headers
        self.has_draft = any(name.startswith("mtp.") for name in inventory)
        self.has_vision = any(name.startswith("vision.") for name in inventory)
        self.reads = 0
        self._files = MappedFiles()

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """The tensor, or a box of it, as stored: a read-only view of mapped pages.

        e4m3 as float8_e4m3fn, ue8m0 and packed fp4 as uint8. Raises CheckpointError when a scale byte is 0 or 255
        (checkpoint 6.1: only 1..254 decode exactly by an exponent shift), KeyError for an unknown name.
        """
        view = self._files.view(self.entries[name])[index]
        self.reads += 1
        if self.inventory[name].storage == "scale" and view.size:
            for bad in (0, 255):
                if (view.min() if bad == 0 else view.max()) == bad:
                    raise CheckpointError(
                        f"{self.entries[name].file}: tensor {name!r} holds the ue8m0 byte {bad}, valid are 1..254; "
                        "the file is corrupt or was written by a faulty converter: fetch or convert it again"
                    )
        return view

    def payload_bytes(self, names: Iterable[str]) -> int:
        """File bytes of the named tensors, headers not counted."""
        return sum(self.entries[name].nbytes for name in names)

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(folder: str | Path, config: ModelConfig | None = None) -> CheckpointReader:
    """Opens and checks a folder; config: its `config.json` unless given. Raises CheckpointError."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint folder")
    if config is None:
        try:
            config = ModelConfig.from_file(folder)
        except ModelConfigError as error:
            raise CheckpointError(str(error)) from error
    source, headers = _read_headers(folder)
    entries = _merge(headers)
    inventory = _present_inventory(source, config, entries)
    for name, spec in inventory.items():
        _check_entry(name, spec, entries[name])
    return CheckpointReader(folder, config, inventory, entries, headers)


def _read_headers(folder: Path) -> tuple[Path, list[SafetensorsHeader]]:
    """All headers and the file that a coverage message names."""
    index_file, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if index_file.is_file():
        return index_file, _read_indexed(folder, index_file)
    if single.is_file():
        return single, [read_header(single)]
    shards = sorted(folder.glob("*.safetensors"))
    raise CheckpointError(
        f"{folder}: holds neither {INDEX_FILE} nor {SINGLE_FILE}"
        + (f" (found {shards[0].name}; copy the index beside the shards)" if shards else "; copy the weights there")
    )


def _read_indexed(folder: Path, index_file: Path) -> list[SafetensorsHeader]:
    """Every shard that the index names, agreeing with it in both directions and in total size."""
    try:
        index = json.loads(index_file.read_text(encoding="utf-8"))
        weight_map: dict[str, str] = index["weight_map"]
        wanted = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index_file}: not an index ({error!r}); download it again") from error
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index_file}: tensor {name!r} names {shard!r}, which is no file of this folder")
    headers = []
    for shard in wanted:
        if not (folder / shard).is_file():
            first = next(name for name, where in weight_map.items() if where == shard)
            raise CheckpointError(
                f"{folder / shard}: shard is missing, {INDEX_FILE} expects tensor {first!r} there; download it"
            )
        headers.append(read_header(folder / shard))
    found = {name: header.file.name for header in headers for name in header.entries}
    for name, shard in weight_map.items():
        if found.get(name) != shard:
            where = f"; it lies in {found[name]}" if name in found else ""
            raise CheckpointError(
                f"{folder / shard}: does not hold tensor {name!r}, which {INDEX_FILE} places there{where}; "
                "index and shards are from different versions, download both again"
            )
    for header in headers:
        for name in header.entries:
            if weight_map.get(name) != header.file.name:
                raise CheckpointError(
                    f"{header.file}: holds tensor {name!r}, which {INDEX_FILE} does not place there; "
                    "index and shards are from different versions, download both again"
                )
    metadata = index.get("metadata")
    declared = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    total = sum(entry.nbytes for header in headers for entry in header.entries.values())
    if declared is not None and declared != total:
        raise CheckpointError(
            f"{index_file}: metadata.total_size is {declared}, the shards hold {total} bytes; "
            "index and shards are from different versions, download both again"
        )
    return headers


def _merge(headers: list[SafetensorsHeader]) -> dict[str, TensorEntry]:
    """Entries of all files by name without the optional `model.` prefix."""
    entries: dict[str, TensorEntry] = {}
    for header in headers:
        for raw, entry in header.entries.items():
            name = raw.removeprefix("model.")
            if name in entries:
                raise CheckpointError(f"{entry.file}: tensor {raw!r} is also in {entries[name].file}; keep one of them")
            entries[name] = entry
    return entries


def _present_inventory(source: Path, config: ModelConfig, entries: Mapping[str, TensorEntry]) -> dict[str, TensorSpec]:
    """The expected inventory less the optional families that are absent as a whole; exact coverage demanded."""
    inventory = expected_inventory(config)
    for parts in OPTIONAL_FAMILIES.values():
        family = {name for name, spec in inventory.items() if spec.part in parts}
        if not any(name in entries for name in family):
            inventory = {name: spec for name, spec in inventory.items() if name not in family}
    missing = [name for name in inventory if name not in entries]
    extra = [name for name in entries if name not in inventory]
    hint = _format_hint(config, missing, extra)
    if missing:
        raise CheckpointError(f"{source}: {_listed('missing', missing)}; {hint or 'download the checkpoint again'}")
    if extra:
        file = entries[extra[0]].file
        raise CheckpointError(
            f"{file}: {_listed('unexpected', extra)}; {hint or 'config.json announces no such tensor'}"
        )
    return inventory


def _listed(kind: str, names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{kind} tensor{'s' if len(names) > 1 else ''} {shown}{more}"


def _format_hint(config: ModelConfig, missing: list[str], extra: list[str]) -> str:
    """The two formats mixed up is the likely cause when all that is wrong are scales."""
    if missing and config.quantization is not None and all(name.endswith(".scale") for name in missing):
        return "config.json has a quantization_config; remove it if the weights are bf16"
    if extra and config.quantization is None and all(name.endswith(".scale") for name in extra):
        return "config.json has no quantization_config; add it if the weights are fp8 and fp4"
    return ""


def _check_entry(name: str, spec: TensorSpec, entry: TensorEntry) -> None:
    if entry.dtype != spec.dtype:
        raise CheckpointError(
            f"{entry.file}: tensor {name!r} has dtype {entry.dtype}, expected {spec.dtype}; "
            "config.json (quantization_config) and weights must be of one version"
        )
    if entry.shape != spec.shape:
        raise CheckpointError(
            f"{entry.file}: tensor {name!r} has shape {list(entry.shape)}, expected {list(spec.shape)}; "
            "config.json and weights must be of one model"
        )
