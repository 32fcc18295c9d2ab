"""Averages the weights that the stretches of a training ended with, and cools the logits.

python -m scripts.train_demo.average --data build/train_demo --ends FIRST SECOND THIRD --out build/averaged

The last stretch learns recall while it goes over the texts for the twentieth time: it knows them by heart, and a text
that is held out surprises it (perplexity 96 on 6,000 validation tokens, which a 5-gram model gives 46). What it
has learnt of recall lives in attention, indexers and hyper-connections; the rest may go half the way back. Averages of
weights along one training are known to generalise better than any of them (Izmailov et al. 2018, Wortsman et al. 2022).
What is left of the overconfidence is one number, by which all logits are divided: greedy answers stay the same.

Shares and temperature were chosen on held-out documents after the first 100,000 tokens and on questions of other seeds;
the evaluation uses neither.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from di_jax.model.config import ModelConfig
from di_jax.model.dspark import LEAF_PREFIX
from scripts.train_demo.parameters import from_checkpoint, load_parts, save_parts

Weights = Mapping[str, np.ndarray]
LOOKING = ("layers.attn", "layers.hc_", "indexers.")  # paths of what finds and moves a recalled value, norms included
LOOKING_SHARES = (0.0, 0.15, 0.85)  # of the ends, in the order of training
OTHER_SHARES = (0.25, 0.25, 0.5)
TEMPERATURE = 1.4


def average(ends: Sequence[Weights]) -> dict[str, np.ndarray]:
    """One set of fp32 weights out of one for each share. Raises ValueError when they are not alike."""
    if len(ends) != len(OTHER_SHARES):
        raise ValueError(f"{len(OTHER_SHARES)} ends of training are needed, found {len(ends)}")
    for number, end in enumerate(ends[1:], start=2):
        shapes, expected = ({path: v.shape for path, v in weights.items()} for weights in (end, ends[0]))
        if shapes != expected:
            odd = sorted(p for p in {*shapes, *expected} if shapes.get(p) != expected.get(p))
            raise ValueError(f"end {number}: {odd[0]} is not as in the first ({len(odd)} weights in all)")
    return {
        path: sum(
            np.float32(share) * end[path]
            for share, end in zip(LOOKING_SHARES if path.startswith(LOOKING) else OTHER_SHARES, ends, strict=True)
        ).astype(np.float32)  # type: ignore[union-attr]
        for path in ends[0]
    }


def cool(weights: Weights, temperature: float = TEMPERATURE) -> dict[str, np.ndarray]:
    """The same model, or the same draft, with all logits divided by `temperature`."""
    scaled = ("norm.weight", f"{LEAF_PREFIX}norm.weight", f"{LEAF_PREFIX}markov_head.head.weight")
    return {path: value / np.float32(temperature) if path in scaled else value for path, value in weights.items()}


def read_end(folder: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """fp32 weights of the backbone, of an exported checkpoint or of what `train` left. Raises FileNotFoundError."""
    if (folder / "config.json").is_file():
        return from_checkpoint(folder, config)
    files = sorted(folder.glob("weights-*.npz"))
    if not files:
        raise FileNotFoundError(f"{folder}: neither a checkpoint nor weights-*.npz")
    return load_parts(files)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="average the ends of the stretches of a training")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--ends", type=Path, nargs="+", required=True, help="folders, in the order of training")
    parser.add_argument("--draft", type=Path, nargs="*", default=[], help="weight files of a draft, to be cooled alike")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    config = ModelConfig.from_file(args.data / "config.json")
    args.out.mkdir(parents=True, exist_ok=True)
    made = {"weights": cool(average([read_end(folder, config) for folder in args.ends]))}
    if args.draft:
        made["draft"] = cool(load_parts(args.draft))
    for name, weights in made.items():
        for file in save_parts(args.out, {path: jnp.asarray(value) for path, value in weights.items()}, name):
            print(f"{file}: {file.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
