"""Measures a demo checkpoint on the held-out sets, through the engine, greedy; writes JSON.

python -m scripts.train_demo.evaluate --data build/train_demo --checkpoint FOLDER --out scripts/results/demo-eval.json

--masters names an export without quantization, to say what quantization costs in perplexity. scripts/plot_eval.py draws
the JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from di_jax.config import load_config
from di_jax.engine.scorer import Scorer
from di_jax.engine.setup import EngineParts, build_engine_parts
from di_jax.evaluation.judges import judge_by_rule
from di_jax.evaluation.tasks import load_items
from di_jax.llm import LLM
from di_jax.sampling_params import SamplingParams
from scripts.train_demo import ngram_baseline

TASKS = ("copy", "reverse", "sort", "calc", "fact", "json", "chat", "tool")
DISTANCES = (256, 512, 1024, 2048, 4096)
# The gates that the training aims at (held-out, greedy).
GATES = {
    "copy": 0.95,
    "sort": 0.90,
    "calc": 0.95,
    "json": 0.90,
    "recall_256": 0.95,
    "recall_2048": 0.90,
    "recall_4096": 0.90,
}
ROW, CONTEXT = 1024, 256  # perplexity: rows of tokens, of which the first are context only


def engine_config(checkpoint: Path, dtype: str, compile_dir: str | None) -> Any:
    """Few buckets: the sets have two lengths."""
    overrides = [
        f"model.path={checkpoint}",
        f"model.dtype={dtype}",
        "engine.max_model_len=4608",
        "engine.max_num_seqs=16",
        "engine.max_num_batched_tokens=2048",
        "engine.prefill_buckets=[512, 2048]",
        "engine.decode_buckets=[16]",
        "engine.context_buckets=[1280, 4608]",
        "engine.warmup=false",
        *([f"cache.compile_dir={compile_dir}"] if compile_dir else []),
    ]
    return load_config("quickstart", overrides)


def exact_rates(llm: LLM, data: Path, limit: int) -> dict[str, dict[str, Any]]:
    """Share of right answers of every set, judged by the rule that its items name."""
    results = {}
    for name in (*TASKS, *(f"recall_{d}" for d in DISTANCES)):
        items = load_items(data / "eval" / f"{name}.jsonl")[:limit]
        prompts = [{"prompt_token_ids": list(item.prompt_token_ids or ())} for item in items]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=64, skip_special_tokens=True))
        right = [judge_by_rule(item, out.outputs[0].text).correct for item, out in zip(items, outputs, strict=True)]
        results[name] = {"n": len(items), "score": float(np.mean(right)), "metric": "exact", "gate": GATES.get(name)}
        print(f"{name}: {results[name]['score']:.3f} of {len(items)}", file=sys.stderr, flush=True)
    return results


def perplexity(parts: EngineParts, text: np.ndarray) -> float:
    """exp(mean negative log-likelihood) of a text [N], in rows whose beginnings are context."""
    scorer = Scorer(parts)
    begins = range(0, max(1, len(text) - CONTEXT), ROW - CONTEXT)
    rows = [(str(b), text[b : b + ROW].tolist()) for b in begins if len(text[b : b + ROW]) > CONTEXT]
    total, count = 0.0, 0
    for score in tqdm(scorer.run(rows), total=len(rows), desc="perplexity", disable=None, file=sys.stderr):
        losses = score.negative_log_likelihood()[0 if score.request_id == "0" else CONTEXT - 1 :]
        total, count = total + float(losses.sum()), count + len(losses)
    return math.exp(total / count)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="evaluate a demo checkpoint")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--masters", type=Path, help="the same weights, exported with --unquantized")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit", type=int, default=100, help="items of each set")
    parser.add_argument("--text-tokens", type=int, default=60_000, help="held-out tokens of a text for its perplexity")
    parser.add_argument("--compile-dir", default=None)
    args = parser.parse_args(arguments)
    folders = {"": args.checkpoint, **({"_masters": args.masters} if args.masters else {})}
    texts = {name: np.load(args.data / f"{name}_eval.npy")[: args.text_tokens] for name in ("english", "python")}
    baseline = ngram_baseline.perplexity(np.load(args.data / "english_train.npy"), texts["english"])
    found: dict[str, Any] = {
        "tokens": {name: len(text) for name, text in texts.items()},
        "english_five_gram_kneser_ney": round(baseline, 4),
    }
    for suffix, folder in folders.items():
        parts = build_engine_parts(engine_config(folder, args.dtype, args.compile_dir))
        for name, text in texts.items():
            found[name + suffix] = round(perplexity(parts, text), 4)
            print(f"{name}{suffix}: perplexity {found[name + suffix]}", file=sys.stderr, flush=True)
        del parts
    with LLM(engine_config(args.checkpoint, args.dtype, args.compile_dir)) as llm:
        tasks = exact_rates(llm, args.data, args.limit)
    result = {
        "kind": "demo-eval",
        "device": "cpu",
        "dtype": args.dtype,
        "versions": {"python": platform.python_version(), **{n: version(n) for n in ("jax", "numpy")}},
        "date": datetime.date.today().isoformat(),
        "command": "python -m scripts.train_demo.evaluate --data build/train_demo --checkpoint FOLDER --out FILE",
        "perplexity": found,
        "tasks": tasks,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"perplexity": found, "tasks": {n: t["score"] for n, t in tasks.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
