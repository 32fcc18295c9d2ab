"""Measures a demo checkpoint on the held-out sets, through the engine, greedy; writes JSON and a bar chart.

python -m scripts.train_demo.evaluate --data build/train_demo --checkpoint FOLDER --out scripts/results/demo-eval.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from di_jax.config import load_config
from di_jax.engine.scorer import Scorer
from di_jax.engine.setup import build_engine_parts
from di_jax.evaluation.judges import judge_by_rule
from di_jax.evaluation.tasks import load_items
from di_jax.llm import LLM
from di_jax.sampling_params import SamplingParams

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


def english_perplexity(config: Any, text: np.ndarray) -> float:
    """exp(mean negative log-likelihood) of the held-out text, in rows whose beginnings are context."""
    scorer = Scorer(build_engine_parts(config))
    begins = range(0, max(1, len(text) - CONTEXT), ROW - CONTEXT)
    rows = [(str(b), text[b : b + ROW].tolist()) for b in begins if len(text[b : b + ROW]) > CONTEXT]
    total, count = 0.0, 0
    for score in tqdm(scorer.run(rows), total=len(rows), desc="perplexity", disable=None, file=sys.stderr):
        losses = score.negative_log_likelihood()[0 if score.request_id == "0" else CONTEXT - 1 :]
        total, count = total + float(losses.sum()), count + len(losses)
    return math.exp(total / count)


def chart(result: dict[str, Any], picture: Path) -> None:
    """A bar for each set, with its gate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(result["tasks"])
    figure, axes = plt.subplots(figsize=(9, 4))
    axes.bar(names, [result["tasks"][n]["score"] for n in names], color="tab:blue")
    for i, name in enumerate(names):
        gate = result["tasks"][name]["gate"]
        if gate is not None:
            axes.plot([i - 0.4, i + 0.4], [gate, gate], color="tab:red", label=None if i else "gate")
    axes.set(ylim=(0, 1.02), ylabel="exact answers, held-out, greedy")
    axes.tick_params(axis="x", rotation=45)
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="evaluate a demo checkpoint")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit", type=int, default=100, help="items of each set")
    parser.add_argument("--text-tokens", type=int, default=40_000, help="held-out English tokens for the perplexity")
    parser.add_argument("--compile-dir", default=None)
    args = parser.parse_args(arguments)
    config = engine_config(args.checkpoint, args.dtype, args.compile_dir)
    text = np.load(args.data / "english_eval.npy")[: args.text_tokens]
    baseline = json.loads((args.data / "ngram_baseline.json").read_text(encoding="utf-8"))
    perplexity = english_perplexity(config, text)
    print(
        f"english perplexity {perplexity:.2f}, 5-gram baseline {baseline['perplexity']:.2f}",
        file=sys.stderr,
        flush=True,
    )
    with LLM(config) as llm:
        tasks = exact_rates(llm, args.data, args.limit)
    result = {
        "kind": "demo-eval",
        "device": "cpu",
        "dtype": args.dtype,
        "date": datetime.date.today().isoformat(),
        "command": "python -m scripts.train_demo.evaluate --data build/train_demo --checkpoint FOLDER --out FILE",
        "perplexity": {"english": perplexity, "tokens": len(text), "five_gram_kneser_ney": baseline["perplexity"]},
        "tasks": tasks,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    chart(result, args.out.with_suffix(".png"))
    print(json.dumps({"perplexity": perplexity, "tasks": {n: t["score"] for n, t in tasks.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
