"""EPLB in the running engine: the demo checkpoint on a mesh of virtual CPU devices, balance and step times.

python -m scripts.eplb_engine      writes scripts/results/eplb-engine-cpu.json and .png in about three minutes

The demo model decodes on 8 ranks that share its experts, one redundant slot each. Rearrangements come every 64 steps;
their layers move one between two steps. Reported: the busiest rank's rows over the mean rank's, of the routing that was
recorded before the first move and after the last, and what a step with a move costs beside one without.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
import jax
import matplotlib.pyplot as plt
import numpy as np
from tqdm import tqdm

from di_jax.config import load_config
from di_jax.engine.engine import Engine
from di_jax.engine.setup import build_engine_parts
from di_jax.engine.step_policy import DECODE
from di_jax.parallel.eplb import initial_slots, moe_lb, rank_loads
from di_jax.parallel.expert_statistics import expert_tokens
from di_jax.prompts import PromptEncoder
from di_jax.sampling_params import SamplingParams

RESULTS = Path(__file__).parent / "results" / "eplb-engine-cpu.json"
RANKS, REQUESTS, STEPS = 8, 64, 260
INTERVAL = 64
SETTINGS = (
    f"mesh.dp={RANKS}",
    f"mesh.ep={RANKS}",
    f"mesh.simulate_devices={RANKS}",
    "eplb.extra_per_rank=1",
    f"eplb.window={INTERVAL}",
    f"eplb.interval={INTERVAL}",
    f"engine.max_num_seqs={REQUESTS // RANKS}",
    f"engine.decode_buckets=[{REQUESTS // RANKS}]",
    "engine.max_num_batched_tokens=256",
    "engine.prefill_buckets=[256]",
    "engine.max_model_len=512",
)


def run(steps: int) -> dict[str, Any]:
    """Decodes for `steps` steps; returns the recorded loads, slots and times."""
    config = load_config("quickstart", SETTINGS)
    parts = build_engine_parts(config)
    engine = Engine(parts, config.engine)
    balancer = engine.balancer
    assert balancer is not None
    prompts = PromptEncoder(parts.folder, parts.tokenizer)
    texts = config.generate.prompts or ()
    for number in range(REQUESTS):
        sampling = SamplingParams(temperature=1.0, max_tokens=400, seq_seed=number, ignore_eos=True)
        engine.add_request(prompts.encode(texts[number % len(texts)])[1], sampling)
    loads: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    times: list[tuple[float, bool]] = []
    record = balancer.window.record

    def recording(tokens: np.ndarray, held: np.ndarray) -> None:
        loads.append(tokens)
        slots.append(held.copy())
        record(tokens, held)

    balancer.window.record = recording  # type: ignore[method-assign,assignment]
    with tqdm(total=steps, desc="decoding", unit="step", disable=None, file=sys.stderr) as bar:
        while len(times) < steps:
            before = balancer.slot_experts.copy()
            began = time.perf_counter()
            report = engine.step()
            jax.block_until_ready(parts.runner.params)  # a move is launched at the end of its step
            seconds = time.perf_counter() - began
            assert report is not None
            if report.kind != DECODE:
                loads.pop(), slots.pop()
                continue
            times.append((seconds, bool((balancer.slot_experts != before).any())))
            bar.update()
    return {
        "loads": np.stack(loads),
        "slots": np.stack(slots),
        "times": times,
        "rearrangements": balancer.rearrangements,
        "experts": parts.model_config.n_routed_experts,
    }


def summary(recorded: dict[str, Any]) -> dict[str, Any]:
    """Balance of the recorded routing under the first slots and under those in force, and times."""
    loads, slots, experts = recorded["loads"], recorded["slots"], recorded["experts"]
    counts = np.stack([expert_tokens(tokens, held, experts) for tokens, held in zip(loads, slots, strict=True)])
    first = initial_slots(loads.shape[1], experts, loads.shape[2])
    moved = np.flatnonzero([move for _, move in recorded["times"]])
    tail = slice(int(moved[-1]) + 1, None)
    plain = [seconds for seconds, move in recorded["times"] if not move]
    moving = [seconds for seconds, move in recorded["times"] if move]

    def expected(slots: np.ndarray) -> float:
        return moe_lb(rank_loads(counts[tail].sum(axis=0, keepdims=True), slots, RANKS))

    def of_steps(loads: np.ndarray) -> float:
        return moe_lb(loads.reshape(*loads.shape[:2], RANKS, -1).sum(axis=-1))

    return {
        "rearrangements": recorded["rearrangements"],
        "layers_moved": len(moved),
        "moe_lb_expected_before": expected(first),
        "moe_lb_expected_after": expected(slots[-1]),
        "moe_lb_steps_before": of_steps(loads[: int(moved[0])]),
        "moe_lb_steps_after": of_steps(loads[tail]),
        "step_ms": 1e3 * median(plain),
        "step_with_move_ms": 1e3 * median(moving),
        "slowest_step_with_move_ms": 1e3 * max(moving),
        "slowest_over_step": max(moving) / median(plain),
    }


def draw(recorded: dict[str, Any], picture: Path) -> None:
    loads = recorded["loads"].reshape(*recorded["loads"].shape[:2], RANKS, -1).sum(axis=-1)
    balance = loads.max(axis=-1).sum(axis=1) / loads.mean(axis=-1).sum(axis=1)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 5.5), sharex=True)
    top.plot(balance, lw=0.6, color="tab:gray", label="step")
    top.plot(np.convolve(balance, np.ones(16) / 16, mode="valid"), color="tab:blue", label="mean of 16")
    top.set(ylabel="busiest rank / mean", title=f"demo checkpoint, {RANKS} ranks, one redundant expert each")
    top.legend()
    for move, name, colour in ((False, "step", "tab:gray"), (True, "step with a move", "tab:red")):
        at = [i for i, (_, moved) in enumerate(recorded["times"]) if moved is move]
        bottom.plot(at, [1e3 * recorded["times"][i][0] for i in at], ".", ms=4, color=colour, label=name)
    bottom.set(ylabel="ms", xlabel="decode step", ylim=(0, None))
    bottom.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="EPLB in the running engine")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    recorded = run(args.steps)
    row = summary(recorded)
    result = {
        "kind": "eplb-engine",
        "device": "cpu",
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__},
        "command": "python -m scripts.eplb_engine",
        "date": datetime.date.today().isoformat(),
        "settings": list(SETTINGS),
        "rows": [row],
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(recorded, args.output.with_suffix(".png"))
    print(json.dumps(row, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
