"""What belongs together: of data and weights the digests that results are kept by, and their tokenizers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from di_jax.checkpoint.reader import open_checkpoint

DRAFT_PREFIX = "mtp."


def data_digest(folder: Path) -> str:
    """SHA-256 of the digests of all files that `prepare` made, by name: the same wherever and whenever it ran."""
    made = json.loads((folder / "manifest.json").read_text(encoding="utf-8")).get("sha256", {})
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()


def weights_digest(checkpoint: Path) -> str:
    """SHA-256 of what a checkpoint folder answers with: every tensor but the draft's, by name as stored, and the
    tokenizer. Another draft changes no answer. Raises CheckpointError, and OSError without a tokenizer."""
    found = hashlib.sha256((checkpoint / "tokenizer.json").read_bytes())
    with open_checkpoint(checkpoint) as reader:
        for name in sorted(reader.inventory):
            if not name.startswith(DRAFT_PREFIX):
                value = reader.read(name)
                found.update(f"{name} {value.dtype} {value.shape}".encode())
                found.update(value.tobytes())
    return found.hexdigest()


def tokenizer_mismatch(data: Path, checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint whose tokens are not the data's, to which its weights would be noise."""
    files = [folder / "tokenizer.json" for folder in (data, checkpoint)]
    if missing := [file for file in files if not file.is_file()]:
        return f"{missing[0]}: no such file"
    mine, theirs = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    if mine["model"] == theirs["model"] and mine["added_tokens"] == theirs["added_tokens"]:
        return None
    return f"its tokenizer is not that of --data {data}: prepare data with --tokenizer {files[1]}"
