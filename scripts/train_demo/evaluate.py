"""Measures a demo checkpoint on the held-out sets, through the engine, greedy; writes JSON.

python -m scripts.train_demo.evaluate --data build/demo_data --checkpoint demo --out demo-eval.json

--masters names an export without quantization, to say what quantization costs in perplexity. scripts/plot_eval.py draws
the JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import shlex
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from di_jax.checkpoint.hub import resolve_checkpoint
from di_jax.config import load_config
from di_jax.engine.scorer import Scorer
from di_jax.engine.setup import EngineParts, build_engine_parts
from di_jax.evaluation.judges import judge_by_rule
from di_jax.evaluation.tasks import load_items
from di_jax.llm import LLM
from di_jax.sampling_params import SamplingParams
from scripts import command_line
from scripts.train_demo import ngram_baseline
from scripts.train_demo.dataset import check_prepared
from scripts.train_demo.identity import data_digest, tokenizer_mismatch, weights_digest

TASKS = ("copy", "reverse", "sort", "calc", "fact", "json", "chat", "tool")
DISTANCES = (256, 512, 1024, 2048, 4096)
SETS = (*TASKS, *(f"recall_{distance}" for distance in DISTANCES))
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


def exact_rate(llm: LLM, data: Path, name: str, limit: int) -> dict[str, Any]:
    """Share of right answers of a set, judged by the rule that its items name."""
    items = load_items(data / "eval" / f"{name}.jsonl")[:limit]
    prompts = [{"prompt_token_ids": list(item.prompt_token_ids or ())} for item in items]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=64, skip_special_tokens=True))
    right = [judge_by_rule(item, out.outputs[0].text).correct for item, out in zip(items, outputs, strict=True)]
    return {"n": len(items), "score": float(np.mean(right)), "metric": "exact", "gate": GATES.get(name)}


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


class Findings:
    """What has been measured, kept in a file after every measurement: a later call for the same goes on from it.

    what: the options that results depend on. Raises ValueError for a file that is none of its own.
    """

    def __init__(self, file: Path, what: dict[str, Any], deadline: float) -> None:
        self.file, self.what, self.deadline = file, what, deadline
        self.found: dict[str, dict[str, Any]] = {"perplexity": {}, "tasks": {}}
        try:
            kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            if kept.get("what") == what:
                self.found = {kind: dict(kept["found"][kind]) for kind in self.found}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: damaged ({error!r}); delete it, all is measured anew") from error

    def missing(self, kind: str, names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in self.found[kind]]

    def over(self) -> bool:
        return time.monotonic() > self.deadline

    def keep(self, kind: str, name: str, value: Any) -> None:
        self.found[kind][name] = value
        self.file.write_text(json.dumps({"what": self.what, "found": self.found}) + "\n", encoding="utf-8")
        shown = value["score"] if isinstance(value, dict) else value
        print(f"{kind} {name}: {shown}", file=sys.stderr, flush=True)


def measure(findings: Findings, args: argparse.Namespace) -> bool:
    """Measures what is missing until the time is over; whether nothing is missing any more."""
    texts = {name: np.load(args.data / f"{name}_eval.npy")[: args.text_tokens] for name in ("english", "python")}
    if findings.missing("perplexity", ["english_five_gram_kneser_ney"]):
        baseline = ngram_baseline.perplexity(np.load(args.data / "english_train.npy"), texts["english"])
        findings.keep("perplexity", "english_five_gram_kneser_ney", round(baseline, 4))
    folders = {"": args.checkpoint, **({"_masters": args.masters} if args.masters else {})}
    for suffix, folder in folders.items():
        names = findings.missing("perplexity", (name + suffix for name in texts))
        if not names or findings.over():
            continue
        parts = build_engine_parts(engine_config(folder, args.dtype, args.compile_dir))
        for name in names:
            if not findings.over():
                text = texts[name.removesuffix("_masters")]
                findings.keep("perplexity", name, round(perplexity(parts, text), 4))
        del parts
    names = findings.missing("tasks", args.sets)
    if names and not findings.over():
        with LLM(engine_config(args.checkpoint, args.dtype, args.compile_dir)) as llm:
            for name in names:
                if not findings.over():
                    findings.keep("tasks", name, exact_rate(llm, args.data, name, args.limit))
    lengths = {name: len(text) for name, text in texts.items()}
    findings.found["perplexity"] = {"tokens": lengths, **findings.found["perplexity"]}
    everything = [name + suffix for suffix in folders for name in texts]
    return not findings.missing("perplexity", everything) and not findings.missing("tasks", args.sets)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="evaluate a demo checkpoint")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--checkpoint", required=True, help="as model.path: a folder, a hub id or demo")
    parser.add_argument("--masters", type=Path, help="the same weights, exported with --unquantized")
    parser.add_argument("--out", type=Path, required=True, help="JSON; FILE.partial while something is missing")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no measurement after so many")
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS, metavar="SET", help=f"of {', '.join(SETS)}")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit", type=int, default=100, help="items of each set")
    parser.add_argument("--text-tokens", type=int, default=60_000, help="held-out tokens of a text for its perplexity")
    parser.add_argument("--compile-dir", default=None)
    args = parser.parse_args(arguments)
    if args.limit < 1:
        parser.error(f"--limit {args.limit}: at least 1")
    if args.text_tokens <= CONTEXT:
        parser.error(f"--text-tokens {args.text_tokens}: more than {CONTEXT}, which are context only")
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: its folder does not exist")
    check_prepared(args.data)
    shown, args.checkpoint = args.checkpoint, resolve_checkpoint(args.checkpoint)
    if why := tokenizer_mismatch(args.data, args.checkpoint):
        parser.error(f"--checkpoint {shown}: {why}")
    partial = args.out.with_name(f"{args.out.name}.partial")
    sizes = {name: str(getattr(args, name)) for name in ("dtype", "limit", "text_tokens")}
    # Not their folders: other weights may be exported there meanwhile.
    digests = {"weights_sha256": weights_digest(args.checkpoint), "data_sha256": data_digest(args.data)}
    masters = {"masters_sha256": weights_digest(args.masters)} if args.masters else {}
    what = {**sizes, **digests, **masters}
    findings = Findings(partial, what, time.monotonic() + 60 * args.minutes)
    if not measure(findings, args):
        print(f"{partial}: something is missing yet; call again")
        return 0
    result = {
        "kind": "demo-eval",
        "device": jax.devices()[0].device_kind,
        "dtype": args.dtype,
        "versions": {"python": platform.python_version(), **{n: version(n) for n in ("jax", "numpy")}},
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "scripts.train_demo.evaluate", *(arguments or sys.argv[1:])]),
        **digests,
        **findings.found,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.unlink(missing_ok=True)
    tasks = {name: task["score"] for name, task in findings.found["tasks"].items()}
    print(json.dumps({"perplexity": findings.found["perplexity"], "tasks": tasks}))
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run(main))
