"""Perplexity of the bundled checkpoint on two short held-out texts, kept by platform: tests/perplexity/baselines.json.

python -m scripts.perplexity_baselines             # prints what this platform has
python -m scripts.perplexity_baselines --update    # and keeps it, after a change of the weights or of the numerics

The texts are in tests/perplexity: two chapters of the King James Version (public domain) and a module of the Python
standard library (PSF-2.0, with its notice), both held out of the training.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import jax
import numpy as np

from di_jax.config import Config, load_config
from di_jax.engine.setup import build_engine_parts
from scripts.train_demo.evaluate import perplexity

FOLDER = Path(__file__).parent.parent / "tests" / "perplexity"
BASELINES = FOLDER / "baselines.json"
WORKLOADS, DTYPES = ("english", "python"), ("float32", "bfloat16")


def baseline_config(dtype: str) -> Config:
    """One step shape, one row of 1,024 tokens at a time, and caches for no more; logits are all that is asked for.

    XLA does not choose products by trial: another choice rounds otherwise, other cached codes flip, and the same
    engine's bfloat16 perplexity moved by 0.7% from one process to another (H200).
    """
    return load_config(
        "quickstart",
        [
            "command=score",
            f"model.dtype={dtype}",
            "engine.max_num_seqs=1",
            "engine.max_num_batched_tokens=512",
            "engine.prefill_buckets=[512]",
            "engine.decode_buckets=[1]",
            "engine.max_model_len=1024",
            "engine.num_blocks=8",
            "engine.context_buckets=[1024]",
            "engine.warmup=false",
            "cache.compile_dir=null",
            "platform.compiler_options={xla_gpu_autotune_level: 0}",
        ],
    )


def measure(dtype: str) -> dict[str, float]:
    """Perplexity of each workload."""
    parts = build_engine_parts(baseline_config(dtype))
    texts = {name: (FOLDER / f"{name}.txt").read_text(encoding="utf-8") for name in WORKLOADS}
    return {name: perplexity(parts, np.array(parts.tokenizer.encode(text))) for name, text in texts.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="perplexity baselines of the bundled checkpoint")
    parser.add_argument("--update", action="store_true", help="keep what is measured as this platform's baselines")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="of the engine; default: both")
    args = parser.parse_args(arguments)
    found = {dtype: {name: round(value, 4) for name, value in measure(dtype).items()} for dtype in args.dtypes}
    platform = jax.default_backend()
    print(json.dumps({platform: found}))
    if args.update:
        kept = json.loads(BASELINES.read_text(encoding="utf-8")) if BASELINES.is_file() else {}
        kept[platform] = {**kept.get(platform, {}), **found}
        BASELINES.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
