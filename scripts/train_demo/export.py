"""Writes trained weights as a checkpoint in the released, quantized format.

python -m scripts.train_demo.export --data build/train_demo --weights build/trained/*.npz --out FOLDER

--unquantized writes the same weights as bfloat16, to measure what quantization costs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from di_jax.checkpoint.mapping import all_sources
from di_jax.checkpoint.writer import write_checkpoint
from di_jax.model.config import ModelConfig
from scripts.train_demo.parameters import load_parts

SHARD_BYTES = 12 * 2**20  # two shards: the index is exercised by whoever uses the demo


def tensors(
    config: ModelConfig, params: Mapping[str, np.ndarray], *, draft: bool = True
) -> Iterator[tuple[str, np.ndarray]]:
    """(checkpoint tensor name, fp32 values) of every parameter. Scales are the writer's to make."""
    for path, sources in all_sources(config, draft=draft).items():
        if path.endswith(".scale") and path.removesuffix(".scale") + ".weight" in params:
            continue
        for index, name in sources:
            yield name, np.asarray(params[path][index], np.float32)


def export(
    data: Path, params: Mapping[str, np.ndarray], folder: Path, *, quantized: bool = True, draft: bool = True
) -> None:
    """Writes fp32 parameters of the model, and with `draft` of its draft, over what `folder` held.

    data: the prepared folder that config and tokenizer come from. Raises CheckpointError.
    """
    raw = json.loads((data / "config.json").read_text(encoding="utf-8"))
    if not quantized:
        del raw["quantization_config"]
    write_checkpoint(
        folder,
        raw,
        tensors(ModelConfig.from_dict(raw), params, draft=draft),
        max_shard_bytes=SHARD_BYTES,
        tokenizer_files={name: data / name for name in ("tokenizer.json", "tokenizer_config.json")},
        include_mtp=draft,
        overwrite=True,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="export the demo model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, nargs="+", required=True, help="files of the model and of its draft")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--unquantized", action="store_true", help="bfloat16 weights instead of the released formats")
    args = parser.parse_args(arguments)
    export(args.data, load_parts(args.weights), args.out, quantized=not args.unquantized)
    size = sum(f.stat().st_size for f in args.out.iterdir())
    print(f"{args.out}: {size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
