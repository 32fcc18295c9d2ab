"""Averages the weights that the stretches of a training ended with, and cools the logits.

python -m scripts.train_demo.average --data build/train_demo --ends FIRST SECOND THIRD --out build/averaged

The last stretch learns recall while it goes over the texts for the twentieth time: it knows them by heart, and a text
that is held out surprises it (perplexity 96 on 6,000 validation tokens, which a 5-gram model gives 46). What it
has learnt of recall lives in attention, indexers and hyper-connections; the rest may go half the way back. Averages of
weights along one training are known to generalise better than any of them (Izmailov et al. 2018, Wortsman et al. 2022).
What is left of the overconfidence is one number, by which all logits are divided: greedy answers stay the same.

Shares were chosen on held-out documents after the first 100,000 tokens and on questions of other seeds. The temperature
is the one by which the average is least surprised (Guo et al. 2017) by the end of the held-out texts. The evaluation
uses none of these. `--temperature` sets it: the bundled weights have 1.4.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from di_jax.model.config import ModelConfig
from di_jax.model.dspark import LEAF_PREFIX
from di_jax.model.engram_tables import EngramTables
from scripts import command_line
from scripts.train_demo.parameters import from_checkpoint, load_parts, save_parts
from scripts.train_demo.perplexity import ROW, measure

Weights = Mapping[str, np.ndarray]
LOOKING = ("layers.attn", "layers.hc_", "indexers.")  # paths of what finds and moves a recalled value, norms included
LOOKING_SHARES = (0.0, 0.15, 0.85)  # of the ends, in the order of training
OTHER_SHARES = (0.25, 0.25, 0.5)
TEMPERATURE = 1.4  # of the bundled weights
LEAST, MOST, PRECISION = 1.0, 2.5, 0.01  # temperatures that are looked among
CHOSEN = "temperature.json"  # beside the averaged weights
FITTED = 20_000  # held-out tokens of a text that it is fitted on, at the end: the evaluation has the first 60,000


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


def fit_temperature(surprise: Callable[[float], float], least: float = LEAST, most: float = MOST) -> float:
    """The temperature in [least, most] of the least `surprise` (mean negative log-likelihood), to about `PRECISION`.

    It is convex in the inverse temperature, which a golden-section search halves its way through (Kiefer 1953).
    """
    ratio = (math.sqrt(5) - 1) / 2
    low, high = 1 / most, 1 / least
    inner = [high - ratio * (high - low), low + ratio * (high - low)]
    found = [surprise(1 / inverse) for inverse in inner]
    while 1 / low - 1 / high > PRECISION:
        if found[0] < found[1]:
            high, inner, found = inner[1], [0.0, inner[0]], [0.0, found[0]]
            inner[0] = high - ratio * (high - low)
            found[0] = surprise(1 / inner[0])
        else:
            low, inner, found = inner[0], [inner[1], 0.0], [found[1], 0.0]
            inner[1] = low + ratio * (high - low)
            found[1] = surprise(1 / inner[1])
    return round(2 / (low + high), 2)


def surprise_by_texts(
    data: Path, config: ModelConfig, weights: Weights, tokens: int, row: int
) -> Callable[[float], float]:
    """Of `weights` whose logits are divided by a temperature: the mean over English and Python, of each the last
    `tokens` held-out ones; the evaluation uses the first. Raises ValueError for a text that has none."""
    tables = EngramTables.build(config, np.load(data / "token_map.npy"))
    texts = {}
    for name in ("english", "python"):
        texts[name] = np.load(data / f"{name}_eval.npy")[-tokens:]
        if len(texts[name]) < 2:
            raise ValueError(
                f"{data / f'{name}_eval.npy'}: no text to fit a temperature on; name one with --temperature"
            )
    perplexity = measure(config, tables, row, row // 4)

    def surprise(temperature: float) -> float:
        cooled = cool(weights, temperature)
        return float(np.mean([math.log(perplexity(cooled, text)) for text in texts.values()]))

    return surprise


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
    parser.add_argument(
        "--temperature", type=float, help="by which logits are divided; default: fitted on held-out text"
    )
    parser.add_argument("--text-tokens", type=int, default=FITTED, help="of a text, to fit it on (%(default)s)")
    parser.add_argument("--row-length", type=int, default=ROW, help="tokens of a row, a multiple of 128")
    args = parser.parse_args(arguments)
    if args.temperature is not None and not 0 < args.temperature < math.inf:
        parser.error(f"--temperature {args.temperature:g}: a positive number")
    if args.text_tokens < 2:
        parser.error(f"--text-tokens {args.text_tokens}: at least 2")
    if args.row_length < 128 or args.row_length % 128:
        parser.error(f"--row-length {args.row_length}: not a multiple of 128")
    config = ModelConfig.from_file(args.data / "config.json")
    args.out.mkdir(parents=True, exist_ok=True)
    weights = average([read_end(folder, config) for folder in args.ends])
    temperature = args.temperature
    if temperature is None:
        temperature = fit_temperature(surprise_by_texts(args.data, config, weights, args.text_tokens, args.row_length))
    (args.out / CHOSEN).write_text(json.dumps({"temperature": temperature}) + "\n", encoding="utf-8")
    made = {"weights": cool(weights, temperature)}
    if args.draft:
        made["draft"] = cool(load_parts(args.draft), temperature)
    for name, parts in made.items():
        for file in save_parts(args.out, {path: jnp.asarray(value) for path, value in parts.items()}, name):
            print(f"{file}: {file.stat().st_size:,} bytes")
    print(f"temperature {temperature:g}")
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run(main))
