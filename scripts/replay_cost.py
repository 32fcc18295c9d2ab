"""What decoder replay costs: perplexity after a prompt, and recall, for each value of `engine.replay.decoder`.

python -m scripts.replay_cost --data build/train_demo --checkpoint demo --out scripts/results/demo-replay-cost.json

Replay leaves out decoder rows of a prompt, so only what comes after one can differ: texts are continued by the tokens
that really follow (forced), and notes are asked for. A value that the config refuses is listed with what it said.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from di_jax.checkpoint.hub import resolve_checkpoint
from di_jax.config import Config
from di_jax.errors import ConfigError
from di_jax.evaluation.judges import judge_by_rule
from di_jax.evaluation.tasks import load_items
from di_jax.llm import LLM
from di_jax.sampling_params import SamplingParams
from scripts import command_line
from scripts.train_demo.dataset import check_prepared
from scripts.train_demo.evaluate import engine_config
from scripts.train_demo.identity import tokenizer_mismatch

MODES = ("off", "mask", "compact")
DISTANCES = (256, 1024, 4096)
PROMPT, FOLLOWING = 1024, 64  # tokens of a text that are read, and that are scored after it
MODE_KEY = "engine.replay.decoder"


def config_of(base: Config, mode: str) -> Config:
    """`base` with decoder replay in `mode`. Raises ConfigError when this engine does not have it."""
    return base.with_values({MODE_KEY: mode})


def forced_perplexity(llm: LLM, text: np.ndarray, count: int) -> float:
    """exp(mean negative log-likelihood) of FOLLOWING tokens after each of up to `count` prompts of PROMPT tokens."""
    pieces = [text[at : at + PROMPT + FOLLOWING].tolist() for at in range(0, len(text) - PROMPT - FOLLOWING, PROMPT)]
    pieces = pieces[:count]
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=FOLLOWING, ignore_eos=True, forced_token_ids=tuple(p[PROMPT:]))
        for p in pieces
    ]
    outputs = llm.generate([{"prompt_token_ids": p[:PROMPT]} for p in pieces], sampling)
    total = sum(output.outputs[0].cumulative_logprob for output in outputs)
    return math.exp(-total / (len(pieces) * FOLLOWING))


def recall(llm: LLM, folder: Path, distance: int, limit: int) -> float:
    """Share of held-out recall questions over `distance` tokens that are answered rightly."""
    items = load_items(folder / "eval" / f"recall_{distance}.jsonl")[:limit]
    prompts = [{"prompt_token_ids": list(item.prompt_token_ids or ())} for item in items]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8))
    return float(np.mean([judge_by_rule(i, o.outputs[0].text).correct for i, o in zip(items, outputs, strict=True)]))


def measure(config: Config, folder: Path, count: int, limit: int) -> dict[str, Any]:
    """The row of one mode."""
    texts = {name: np.load(folder / f"{name}_eval.npy") for name in ("english", "python")}
    with LLM(config) as llm:
        row: dict[str, Any] = {f"{n}_perplexity": round(forced_perplexity(llm, t, count), 4) for n, t in texts.items()}
        row |= {f"recall_{distance}": recall(llm, folder, distance, limit) for distance in DISTANCES}
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="what decoder replay costs in perplexity and recall")
    parser.add_argument("--data", type=Path, required=True, help="what scripts.train_demo.prepare made")
    parser.add_argument("--checkpoint", default="demo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=40, help="prompts of each text")
    parser.add_argument("--limit", type=int, default=30, help="recall questions of each distance")
    parser.add_argument("--compile-dir", default=None)
    args = parser.parse_args(arguments)
    for name, least in (("texts", 1), ("limit", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: at least {least}")
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: its folder does not exist")
    check_prepared(args.data)
    folder = resolve_checkpoint(args.checkpoint)
    if why := tokenizer_mismatch(args.data, folder):
        parser.error(f"--checkpoint {args.checkpoint}: {why}")
    base = engine_config(folder, "float32", args.compile_dir)
    rows = []
    for mode in MODES:
        try:
            config = config_of(base, mode)
        except ConfigError as error:
            rows.append({"replay_decoder": mode, "unavailable": str(error)})
        else:
            rows.append({"replay_decoder": mode, **measure(config, args.data, args.texts, args.limit)})
        print(json.dumps(rows[-1]), flush=True)
    result = {
        "kind": "replay-cost",
        "device": jax.devices()[0].device_kind,
        "versions": {"python": platform.python_version(), **{n: version(n) for n in ("jax", "numpy")}},
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "scripts.replay_cost", *(arguments or sys.argv[1:])]),
        "prompt_tokens": PROMPT,
        "scored_tokens": FOLLOWING,
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run(main))
