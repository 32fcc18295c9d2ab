"""Thousands of short requests with aborts at any moment through a real engine: does anything stay behind?

python -m scripts.soak      writes scripts/results/soak-cpu.json in about a quarter of an hour

Prompts of which a third begin alike, one to three answers each, one request in six aborted within its first twelve
steps; a pool so small that answers are preempted and cached prefixes evicted. Reported: blocks and slots that are not
free afterwards, steps compiled after warm-up, and the slope of the process's resident memory over the second half.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from di_jax.config import Config, load_config
from di_jax.engine.engine import Engine
from di_jax.engine.setup import build_engine_parts
from di_jax.sampling_params import SamplingParams

RESULTS = Path(__file__).parent / "results" / "soak-cpu.json"
CHECKPOINT = Path(__file__).parent.parent / "tests" / "golden" / "tiny-v41-fp8"
SEED = 20260915
REQUESTS, SLOTS, WAITING = 20_000, 16, 8
SHARED = 140  # tokens of the longest beginning that prompts have in common: a block and a little
LONGEST_PROMPT, LONGEST_ANSWER = 40, 16
ABORTED, ABORT_STEPS = 1 / 6, 12
SAMPLE_STEPS = 50  # between two looks at the memory


def settings(checkpoint: Path) -> Config:
    """The engine, with the default replay and prefix cache."""
    values: dict[str, Any] = {
        "model.path": str(checkpoint),
        "engine.max_num_seqs": SLOTS,
        "engine.max_num_batched_tokens": 128,
        "engine.prefill_buckets": [64, 128],
        "engine.decode_buckets": [SLOTS],
        "engine.max_model_len": 256,
        "engine.num_blocks": SLOTS // 2 + 2,
        "engine.state_cache_bytes": 2**20,
        "engine.log_interval": 0,
    }
    return load_config("quickstart").with_values(values)


def resident() -> int:
    """Bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def slope(points: list[tuple[int, int]]) -> float:
    """Bytes a request over the second half of (requests, bytes), by least squares."""
    requests, size = np.array(points[len(points) // 2 :], float).T
    return float(np.polyfit(requests, size, 1)[0])


def soak(engine: Engine, total: int) -> dict[str, Any]:
    """One row of the results."""
    random = np.random.default_rng(SEED)
    vocabulary = engine.parts.model_config.vocab_size
    beginnings = [random.integers(3, vocabulary, size).tolist() for size in (20, 100, 112, SHARED)]
    sent = steps = answered = aborted = tokens = 0
    due: dict[int, list[str]] = {}
    memory: list[tuple[int, int]] = []
    held = Counter[str]()
    began = time.perf_counter()

    def send() -> None:
        prompt = beginnings[random.integers(4)] if random.random() < 1 / 3 else []
        prompt = prompt + random.integers(3, vocabulary, random.integers(1, LONGEST_PROMPT)).tolist()
        sampling = SamplingParams(
            temperature=float(random.choice([0.0, 1.0])),
            max_tokens=int(random.integers(1, LONGEST_ANSWER)),
            n=int(random.choice([1, 1, 1, 2, 3])),
            seq_seed=sent,
            priority=int(random.choice([0, 0, 1])),
            stop="zz" if random.random() < 0.2 else None,
        )
        request = engine.add_request(prompt, sampling)
        if random.random() < ABORTED:
            due.setdefault(steps + int(random.integers(ABORT_STEPS)), []).append(request.request_id)

    with tqdm(total=total, desc="answering", unit="request", disable=None, file=sys.stderr) as bar:
        while sent < total or engine.has_unfinished:
            while sent < total and engine.scheduler.num_waiting < WAITING:
                send()
                sent += 1
            for request_id in due.pop(steps, ()):
                aborted += request_id in engine.requests
                engine.abort(request_id)
            report = engine.step()
            steps += 1
            for request in report.requests if report is not None else ():
                if request.finished:
                    bar.update()
                    tokens += request.num_output_tokens
                    answered += all(sequence.finish_reason in ("stop", "length") for sequence in request.sequences)
            if steps % SAMPLE_STEPS == 0:
                engine.scheduler.check()
                memory.append((sent, resident()))
    engine.scheduler.check()
    for ledger in engine.scheduler.ledgers:
        held["blocks"] += ledger.num_blocks - ledger.num_available
        held["slots"] += ledger.num_slots - ledger.num_free_slots
    middle, (_, last) = memory[len(memory) // 2][1], memory[-1]
    return {
        "requests": total,
        "answered": answered,
        "aborted": aborted,
        "neither": total - answered - aborted,
        "tokens": tokens,
        "steps": engine.num_steps,
        "seconds": time.perf_counter() - began,
        "preemptions": engine.scheduler.preemptions,
        "prefix_hit_tokens": engine.metrics.prefix_hits,
        "evicted_blocks": sum(ledger.evictions for ledger in engine.scheduler.ledgers),
        "evicted_window_states": engine.snapshots.evictions,
        "blocks_not_free": held["blocks"],
        "slots_not_free": held["slots"],
        "compiled_after_warmup": engine.compiles_after_warmup,
        "resident_mb": {"start": memory[0][1] / 2**20, "middle": middle / 2**20, "end": last / 2**20},
        "resident_bytes_per_request": slope(memory),
        "memory": [[count, size] for count, size in memory[:: max(1, len(memory) // 100)]],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="short requests with random aborts: what stays behind")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    config = settings(args.checkpoint)
    row = soak(Engine(build_engine_parts(config), config.engine), args.requests)
    curve = row.pop("memory")
    result = {
        "kind": "soak",
        "device": jax.devices()[0].device_kind,
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__},
        "command": f"python -m scripts.soak --requests {args.requests}",
        "date": datetime.date.today().isoformat(),
        "settings": {
            "checkpoint": args.checkpoint.name,
            "cpu_cores": os.cpu_count(),
            "max_num_seqs": config.engine.max_num_seqs,
            "num_blocks": config.engine.num_blocks,
            "state_cache_bytes": config.engine.state_cache_bytes,
        },
        "rows": [row],
        "resident_by_requests": curve,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(row, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
