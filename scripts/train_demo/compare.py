"""What the released formats cost: perplexity of float32 master weights, and of the checkpoint that they become.

python -m scripts.train_demo.compare --data build/train_demo --state build/state --out masters.json

--state is where `train` left its last stretch: there the masters are float32, as the optimizer has them; of the three
trainings of a model, in their order, it is their average, cooled, which `average` makes of what travels. --weights is
that: bfloat16, and e4m3 with a float32 scale for 32 weights of experts and tables. They are exported, read back, and
both run through one program in float32, over the same text: only the weights differ. Held-out text is the comparison;
`seen` is the beginning of what was trained on, where weights that know it by heart gain nothing by being disturbed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from di_jax.model.config import ModelConfig
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from scripts import command_line
from scripts.train_demo.average import LOOKING_SHARES, TEMPERATURE, average, cool
from scripts.train_demo.curriculum import Clock
from scripts.train_demo.export import export
from scripts.train_demo.parameters import builder, from_checkpoint, load_parts
from scripts.train_demo.perplexity import ROW, measure
from scripts.train_demo.state import State

Weights = Mapping[str, np.ndarray]


def masters(state: Path, config: ModelConfig, tables: EngramTables) -> tuple[dict[str, np.ndarray], Clock]:
    """(fp32 weights, clock) at the end of the last stretch of a training. Raises FileNotFoundError."""
    _, shapes = builder(config, Numerics.training("float32"), tables)
    template = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}
    try:
        found = State(state).restore({"weights": template}) if state.is_dir() else None
    except ValueError as error:
        raise ValueError(f"{state}: not of the model that --data describes ({str(error).splitlines()[0]})") from error
    if found is None:
        raise FileNotFoundError(f"{state}: no state of a training; masters are on the machine that trained, only")
    return {path: np.asarray(value) for path, value in found[0]["weights"].items()}, found[1]


def rounding(weights: Weights, exported: Weights) -> dict[str, float]:
    """RMS of what the export changed, relative to that of the weights: of experts (e2m1) and of all others.

    Small numbers would say that the masters lie next to values of the formats, as dequantized weights do.
    """
    sums = {name: np.zeros(2) for name in ("experts", "others")}
    for path, value in weights.items():
        of = sums["experts" if ".experts." in path else "others"]
        of += np.sum((exported[path] - value) ** 2, dtype=np.float64), np.sum(value**2, dtype=np.float64)
    return {name: float(np.sqrt(changed / whole)) for name, (changed, whole) in sums.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="compare float32 master weights with their quantized export")
    parser.add_argument("--data", type=Path, required=True)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--state", type=Path, nargs="+", help="of scripts.train_demo.train: of one training, or of the three to average"
    )
    source.add_argument("--weights", type=Path, nargs="+", help="weight files that a stretch left")
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    parser.add_argument(
        "--temperature", type=float, default=TEMPERATURE, help="by which an average's logits are divided (%(default)s)"
    )
    parser.add_argument("--text-tokens", type=int, default=60_000, help="held-out tokens of each text")
    parser.add_argument("--row-length", type=int, default=ROW, help="tokens of a row, a multiple of 128")
    args = parser.parse_args(arguments)
    if args.text_tokens < 1:
        parser.error(f"--text-tokens {args.text_tokens}: at least 1")
    if not 0 < args.temperature < math.inf:
        parser.error(f"--temperature {args.temperature:g}: a positive number")
    if args.row_length < 128 or args.row_length % 128:
        parser.error(f"--row-length {args.row_length}: not a multiple of 128")
    if args.state and len(args.state) not in (1, len(LOOKING_SHARES)):
        parser.error(f"--state: of one training or of {len(LOOKING_SHARES)}, given {len(args.state)}")
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: its folder does not exist")
    config = ModelConfig.from_file(args.data / "config.json")
    tables = EngramTables.build(config, np.load(args.data / "token_map.npy"))
    trained: dict[str, Any] = {}
    if args.weights:
        weights = load_parts(args.weights)
    else:
        ends, clocks = zip(*(masters(state, config, tables) for state in args.state))
        weights = cool(average(ends), args.temperature) if len(ends) > 1 else ends[0]
        steps, seconds = sum(clock.step for clock in clocks), sum(clock.trained_s for clock in clocks)
        counted = {"trainings": len(ends), "steps": steps, "seconds": round(seconds, 1)}
        trained = {"trained": counted | ({"temperature": args.temperature} if len(ends) > 1 else {})}
    with tempfile.TemporaryDirectory() as folder:
        export(args.data, weights, Path(folder), draft=False)
        exported = from_checkpoint(Path(folder), config)
    perplexity = measure(config, tables, args.row_length, args.row_length // 4)

    def compared(part: str) -> dict[str, Any]:
        texts = {name: np.load(args.data / f"{name}_{part}.npy")[: args.text_tokens] for name in ("english", "python")}
        found = {}
        for name, text in texts.items():
            both = {"masters": perplexity(weights, text), "quantized_export": perplexity(exported, text)}
            ratio = both["quantized_export"] / both["masters"]
            found[name] = {"tokens": len(text), **{k: round(v, 4) for k, v in both.items()}, "ratio": round(ratio, 5)}
        return found

    result = {
        "kind": "demo-masters",
        "device": jax.devices()[0].device_kind,
        "versions": {"python": platform.python_version(), **{n: version(n) for n in ("jax", "numpy")}},
        "date": datetime.date.today().isoformat(),
        "command": "python -m scripts.train_demo.compare --data build/train_demo "
        f"{'--weights FILES' if args.weights else ' '.join(['--state', *['FOLDER'] * len(args.state)])} --out FILE "
        f"--text-tokens {args.text_tokens} --row-length {args.row_length}",
        "masters": "travelled" if args.weights else "float32",
        **trained,
        "rounding": {name: round(value, 5) for name, value in rounding(weights, exported).items()},
        "perplexity": compared("eval"),
        "seen": compared("train"),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: result[name] for name in ("perplexity", "seen")}))
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run(main))
