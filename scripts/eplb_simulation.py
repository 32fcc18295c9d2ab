"""Simulates expert load and shows what rearranging experts does to the busiest rank, at the released model's sizes.

python -m scripts.eplb_simulation      writes scripts/results/eplb-simulation.json and .png in about three minutes

384 experts in 40 layers on 64 ranks, one redundant expert each. A step decodes 64 x 256 requests of 4 rows, whose six
experts are drawn without repetition in proportion to popularity; copies are chosen by the engine's hash. Popularity is
Zipf's law over shuffled experts; it rests, or its logarithm walks at random. `moe_lb` is the busiest rank's tokens over
the mean rank's. Expected loads are of two kinds: the popularity itself, and a row's chance to choose each expert.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from di_jax.parallel.eplb import (
    ExpertMap,
    expert_map,
    initial_slots,
    moe_lb,
    num_physical_slots,
    pool_window,
    rank_loads,
    rebalance_experts,
)
from di_jax.parallel.expert_moves import REMOTE, move_traffic, plan_moves
from di_jax.parallel.expert_statistics import ExpertWindow
from di_jax.parallel.replica_choice import replica_index, row_hash

RESULTS = Path(__file__).parent / "results" / "eplb-simulation.json"
SEED = 20261129
LAYERS, EXPERTS, RANKS, TOP_K = 40, 384, 64, 6
REQUESTS, ROWS_EACH = 64 * 256, 4
EXPONENTS = (0.8, 1.0)
EXTRA_PER_RANK, WINDOW, INTERVAL = 1, 1_000, 10_000  # the preset `decode`
DRIFTS = (0.03, 0.05, 0.1, 0.2)  # standard deviation that log popularity gains in an interval
NAMED_DRIFT = 0.1  # the one that the bar is for, and whose course is drawn
# What the results are to stay below; the first two by exponent.
EXPECTED_BAR = {0.8: 1.005, 1.0: 1.02}
STEP_BAR = {0.8: 1.035, 1.0: 1.045}
DRIFT_BAR = 1.09
POLICY_MS_BAR = 100

Row = dict[str, Any]


def zipf_popularity(rng: np.random.Generator, exponent: float, layers: int, experts: int) -> NDArray[np.float64]:
    """Popularity of every expert, [L, E], each layer in an order of its own and with sum 1."""
    ranked = np.arange(1, experts + 1) ** -exponent
    return np.stack([rng.permutation(ranked / ranked.sum()) for _ in range(layers)])


def choice_probability(popularity: NDArray[np.float64], top_k: int) -> NDArray[np.float64]:
    """A row's chance to choose each expert when `top_k` are drawn without repetition, [L, E] like the popularity.

    Drawing without repetition is a race of exponential clocks with popularity as rates. Expert e is chosen when fewer
    than top_k other clocks rang before its own: the integral over t of p exp(-p t) P(fewer than top_k others by t). The
    number of others is a sum of independent bits, of those before e and those after it.
    """
    layers, experts = popularity.shape
    log_t = np.linspace(np.log(1e-6), np.log(1e3), 200)
    rang = -np.expm1(-popularity[..., None] * np.exp(log_t))  # [L, E, t]

    def partial_counts(order: range) -> NDArray[np.float64]:
        counts = np.zeros((experts, layers, top_k, len(log_t)))
        so_far = np.zeros(counts.shape[1:])
        so_far[:, 0] = 1
        for expert in order:
            counts[expert] = so_far
            bit = rang[:, expert, None]
            shifted = np.concatenate([np.zeros_like(bit), so_far[:, :-1]], axis=1)
            so_far = so_far * (1 - bit) + shifted * bit
        return counts

    before, after = partial_counts(range(experts)), partial_counts(range(experts - 1, -1, -1))
    few_others = np.zeros(rang.shape)
    for k in range(top_k):
        few_others += (before[:, :, k] * after[:, :, : top_k - k].sum(axis=2)).transpose(1, 0, 2)
    rate = popularity[..., None] * np.exp(log_t)
    return (rate * np.exp(-rate) * few_others).sum(axis=2) * (log_t[1] - log_t[0])


def draw_experts(rng: np.random.Generator, popularity: NDArray[np.float64], rows: int, top_k: int) -> NDArray[np.intp]:
    """The experts of every row, [rows, top_k]: drawn one after another, repetitions drawn again."""
    bounds = np.cumsum(popularity)
    chosen = np.empty((rows, top_k), np.intp)
    for k in range(top_k):
        missing = np.arange(rows)
        while len(missing):
            drawn = np.searchsorted(bounds, rng.random(len(missing)) * bounds[-1], side="right")
            chosen[missing, k] = np.minimum(drawn, len(popularity) - 1)
            missing = missing[(chosen[missing, :k] == chosen[missing, k, None]).any(axis=1)]
    return chosen


def request_rows(rng: np.random.Generator, requests: int, rows_each: int) -> NDArray[np.uint32]:
    """Hashes of a decode step's rows: every request has a seed and consecutive positions."""
    seeds = rng.integers(0, 2**32, requests, dtype=np.uint32)
    first = rng.integers(0, 32_768, requests, dtype=np.uint32)
    positions = first[:, None] + np.arange(rows_each, dtype=np.uint32)
    return row_hash(seeds[:, None], positions).reshape(-1)


def step_loads(hashes: NDArray, chosen: NDArray, layer_map: ExpertMap, layer: int, ranks: int, slots: int) -> NDArray:
    """Tokens of every rank, [ranks], in one layer of one step: hashes uint32 [rows], chosen [rows, k]."""
    replica = replica_index(hashes[:, None], layer_map.num_replicas[layer][chosen])
    at = layer_map.replica_slots[layer][chosen, replica]
    return np.bincount(at.reshape(-1) // (slots // ranks), minlength=ranks)


def simulate_resting(rng: np.random.Generator, exponent: float, layers: int, steps: int, bar: tqdm) -> list[Row]:
    """Popularity that does not change: expected loads of all layers, single steps of some."""
    slots = num_physical_slots(EXPERTS, RANKS, EXTRA_PER_RANK)
    start = initial_slots(LAYERS, EXPERTS, slots)
    popularity = zipf_popularity(rng, exponent, LAYERS, EXPERTS)
    probability = choice_probability(popularity, TOP_K)
    common = {"part": "resting", "exponent": exponent}
    rows = []
    for loads, expected in (("popularity", popularity), ("top_6", probability)):
        found = rebalance_experts(expected[None], start, RANKS)
        rows.append(
            {
                **common,
                "measure": "expected",
                "loads": loads,
                "layers": LAYERS,
                "before": found.balance_before,
                "after": found.balance_after,
                "worst_layer": max(
                    moe_lb(rank_loads(expected[None, [i]], found.slot_experts[[i]], RANKS)) for i in range(LAYERS)
                ),
                "bar": EXPECTED_BAR[exponent],
            }
        )
    # What the policy sees is drawn as well: a window of steps, whose counts are binomial, pooled.
    tokens = rng.binomial(REQUESTS * ROWS_EACH, probability, (WINDOW, *probability.shape)).astype(np.int32)
    after = rebalance_experts(pool_window(tokens), start, RANKS).slot_experts
    maps = [expert_map(each, EXPERTS) for each in (start, after)]
    measured = np.empty((len(maps), steps, layers, RANKS))
    for step in range(steps):
        for layer in range(layers):
            hashes = request_rows(rng, REQUESTS, ROWS_EACH)
            chosen = draw_experts(rng, popularity[layer], len(hashes), TOP_K)
            for m, each in enumerate(maps):
                measured[m, step, layer] = step_loads(hashes, chosen, each, layer, RANKS, slots)
            bar.update()
    # The least that chance leaves: tokens that choose among the ranks evenly and independently.
    even = rng.multinomial(REQUESTS * ROWS_EACH * TOP_K, np.full(RANKS, 1 / RANKS), 2_000)
    before, after_loads = (np.sort(each[0, 0] / each[0, 0].mean())[::-1] for each in measured)
    rows.append(
        {
            **common,
            "measure": "per_step",
            "layers": layers,
            "steps": steps,
            "before": moe_lb(measured[0]),
            "after": moe_lb(measured[1]),
            "even_by_chance": moe_lb(even),
            "bar": STEP_BAR[exponent],
            "rank_loads_before": before.round(4).tolist(),
            "rank_loads_after": after_loads.round(4).tolist(),
        }
    )
    return rows


def simulate_drift(
    rng: np.random.Generator, exponent: float, drift: float, layers: int, intervals: int, every: int, bar: tqdm
) -> Row:
    """Popularity whose logarithm walks at random: the initial slots, those of the first rearrangement, and those of the
    preset, one step in `every` measured. The walk moves every 100 steps."""
    slots = num_physical_slots(EXPERTS, RANKS, EXTRA_PER_RANK)
    window = ExpertWindow(WINDOW, INTERVAL, layers, EXPERTS)
    one_slot_each = initial_slots(layers, EXPERTS, EXPERTS)
    initial = current = initial_slots(layers, EXPERTS, slots)
    once: NDArray[np.int32] | None = None
    maps = {"initial": expert_map(initial, EXPERTS)}
    log_popularity = np.log(zipf_popularity(rng, exponent, layers, EXPERTS))
    first_due = INTERVAL // 4
    tokens = np.zeros((layers, EXPERTS), np.int64)
    course: list[list[float]] = []
    measured: dict[str, list[NDArray]] = {"initial": [], "once": [], "preset": []}
    remote, busiest = [], []
    for step in range(first_due + intervals * INTERVAL):
        if step % 100 == 0:
            log_popularity += rng.normal(0, drift * (100 / INTERVAL) ** 0.5, log_popularity.shape)
            popularity = np.exp(log_popularity)
            popularity /= popularity.sum(axis=1, keepdims=True)
            in_window = (step - first_due) % INTERVAL >= INTERVAL - WINDOW
            probability = choice_probability(popularity, TOP_K) if in_window else None
        if probability is not None:
            tokens = rng.binomial(REQUESTS * ROWS_EACH, np.clip(probability, 0, 1))
        window.record(tokens, one_slot_each)
        if step % every == 0:
            loads = {name: np.empty((layers, RANKS)) for name in maps}
            for layer in range(layers):
                hashes = request_rows(rng, REQUESTS, ROWS_EACH)
                chosen = draw_experts(rng, popularity[layer], len(hashes), TOP_K)
                for name, routing in maps.items():
                    loads[name][layer] = step_loads(hashes, chosen, routing, layer, RANKS, slots)
            if once is not None:
                for name in loads:
                    measured[name].append(loads[name])
            course.append([step, *(round(moe_lb(loads[name]), 4) for name in maps)])
            bar.update()
        if window.due:
            new = rebalance_experts(window.take(), current, RANKS).slot_experts
            if once is None:
                once = new
                maps["once"] = expert_map(once, EXPERTS)
            else:
                plan = plan_moves(current, new, RANKS)
                remote.append(float((plan.action == REMOTE).mean()))
                busiest.append(int(move_traffic(plan, 1).busiest_rank.max()))
            current = new
            maps["preset"] = expert_map(current, EXPERTS)
    return {
        "part": "drift",
        "exponent": exponent,
        "drift": drift,
        "layers": layers,
        "measured_steps": len(measured["preset"]),
        **{name: moe_lb(np.stack(each)) for name, each in measured.items()},
        "moved_share": sum(remote) / len(remote),
        "busiest_rank_experts": max(busiest),
        "bar": DRIFT_BAR if drift <= NAMED_DRIFT else None,
        "course": course if drift == NAMED_DRIFT else None,
    }


def measure_policy(rng: np.random.Generator, extra_per_rank: int, repeats: int) -> Row:
    """Time of the policy and of the move plan for the whole group, in this thread."""
    slots = num_physical_slots(EXPERTS, RANKS, extra_per_rank)
    start = initial_slots(LAYERS, EXPERTS, slots)
    popularity = zipf_popularity(rng, 1.0, LAYERS, EXPERTS)
    counts = rng.poisson(popularity * 1e7, (16, LAYERS, EXPERTS))
    policy, plan = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        new = rebalance_experts(counts, start, RANKS).slot_experts
        decided = time.perf_counter()
        plan_moves(start, new, RANKS)
        policy.append((decided - began) * 1e3)
        plan.append((time.perf_counter() - decided) * 1e3)
    return {
        "part": "time",
        "intervals": len(counts),
        "layers": LAYERS,
        "experts": EXPERTS,
        "ranks": RANKS,
        "slots": slots,
        "extra_per_rank": extra_per_rank,
        "policy_ms": median(policy),
        "policy_ms_least": min(policy),
        "policy_ms_most": max(policy),
        "plan_ms": median(plan),
        "repeats": repeats,
        "bar": POLICY_MS_BAR,
    }


def draw(rows: list[Row], picture: Path) -> None:
    """Four plots: ranks of one step, moe_lb at rest, over the course of a drift, and by its speed."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    steps = [row for row in rows if row.get("measure") == "per_step"]
    expected = [row for row in rows if row.get("measure") == "expected"]
    drifts = [row for row in rows if row["part"] == "drift"]

    axis = axes[0, 0]
    for row, colour in zip(steps, ("C0", "C3"), strict=True):
        label = f"Zipf {row['exponent']}"
        axis.semilogy(row["rank_loads_before"], ":", color=colour, label=f"{label}, before: moe_lb {row['before']:.2f}")
        axis.semilogy(row["rank_loads_after"], color=colour, label=f"{label}, after: moe_lb {row['after']:.3f}")
    axis.set(title="Tokens of each rank in one step", xlabel="rank, busiest first", ylabel="mean rank = 1")
    axis.set_yticks(ticks := [0.2, 0.5, 1, 2, 5], [f"{tick:g}" for tick in ticks])
    axis.set_yticks([], minor=True)
    axis.legend(fontsize=8)

    axis = axes[0, 1]
    bars = [(f"Zipf {r['exponent']}\nexpected by\n{r['loads'].replace('_', ' ')}", r) for r in expected]
    bars += [(f"Zipf {r['exponent']}\nsingle steps", r) for r in steps]
    bars.sort(key=lambda each: each[1]["exponent"])
    for i, (_, row) in enumerate(bars):
        axis.bar(i, row["after"] - 1, bottom=1, color="C0" if row["exponent"] == EXPONENTS[0] else "C3")
        above = max(row["after"], row["bar"]) + 0.0005
        axis.text(i, above, f"{row['after']:.4f}\nbefore {row['before']:.2f}", fontsize=7, ha="center", va="bottom")
        axis.plot([i - 0.45, i + 0.45], [row["bar"]] * 2, "k--", label="to stay below" if i == 0 else None)
        if "even_by_chance" in row:
            once = "chance alone, load spread evenly" if i < len(bars) / 2 else None
            axis.plot([i - 0.45, i + 0.45], [row["even_by_chance"]] * 2, "k:", label=once)
    axis.set_xticks(range(len(bars)), [name for name, _ in bars], fontsize=7)
    axis.set(title="moe_lb after rearranging, popularity at rest", ylim=(1, 1.065))
    axis.legend(fontsize=8, loc="upper left")

    axis = axes[1, 0]
    row = next(r for r in drifts if r["course"] and r["exponent"] == EXPONENTS[-1])
    course = [each for each in row["course"] if len(each) == 4]
    axis.plot([c[0] for c in course], [c[2] for c in course], color="C7", label="rearranged once")
    axis.plot([c[0] for c in course], [c[3] for c in course], color="C3", label="preset decode")
    for i, due in enumerate(range(INTERVAL // 4, row["course"][-1][0] + 1, INTERVAL)):
        axis.axvline(due, color="k", lw=0.6, ls=":", label="rearranged" if i == 0 else None)
    walk = f"Zipf {row['exponent']}, log popularity walks by {row['drift']:.0%} in 10,000 steps"
    axis.set(title=walk, xlabel="step", ylabel=f"moe_lb of a step (initial slots: {row['initial']:.1f})")
    axis.legend(fontsize=8)

    axis = axes[1, 1]
    for exponent, colour in zip(EXPONENTS, ("C0", "C3"), strict=True):
        mine = [r for r in drifts if r["exponent"] == exponent]
        at = [r["drift"] for r in mine]
        axis.plot(at, [r["once"] for r in mine], "o:", color=colour, label=f"Zipf {exponent}, rearranged once")
        axis.plot(at, [r["preset"] for r in mine], "o-", color=colour, label=f"Zipf {exponent}, preset decode")
    axis.axhline(DRIFT_BAR, color="k", ls="--", label="to stay below")
    axis.set(title="moe_lb of single steps by speed of the walk", xlabel="standard deviation in 10,000 steps")
    axis.legend(fontsize=8)
    figure.suptitle(f"Expert load, simulated: {EXPERTS} experts, {RANKS} ranks, {EXTRA_PER_RANK} redundant expert each")
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def processor() -> str:
    """The processor's name where the system tells it."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS, help="results file; the plot goes beside it, as .png")
    parser.add_argument(
        "--layers", type=int, default=8, help="layers of which single steps are simulated (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=16, help="single steps with popularity at rest (%(default)s)")
    parser.add_argument("--intervals", type=int, default=4, help="intervals of drift after the first (%(default)s)")
    parser.add_argument("--every", type=int, default=1_000, help="of a drift, one step in so many (%(default)s)")
    args = parser.parse_args(arguments)
    rng = np.random.default_rng(SEED)
    rows = [measure_policy(rng, extra, repeats=21) for extra in (1, 4)]
    drift_steps = -(-(INTERVAL // 4 + args.intervals * INTERVAL) // args.every)
    total = len(EXPONENTS) * (args.layers * args.steps + len(DRIFTS) * drift_steps)
    with tqdm(total=total, desc="simulating", unit="step", disable=None, file=sys.stderr) as bar:
        for exponent in EXPONENTS:
            rows += simulate_resting(rng, exponent, args.layers, args.steps, bar)
        for exponent in EXPONENTS:
            for drift in DRIFTS:
                rows.append(simulate_drift(rng, exponent, drift, args.layers, args.intervals, args.every, bar))
    results = {
        "kind": "eplb-simulation",
        "device": "cpu",
        "processor": processor(),
        "cpu_cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "command": "python -m scripts.eplb_simulation",
        "date": datetime.date.today().isoformat(),
        "seed": SEED,
        "rows": rows,
    }
    args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(rows, args.output.with_suffix(".png"))
    for row in rows:
        shown = {name: value for name, value in row.items() if value is not None and not isinstance(value, list)}
        print(", ".join(f"{name} {v:.5g}" if isinstance(v, float) else f"{name} {v}" for name, v in shown.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
