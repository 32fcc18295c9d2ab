"""What is seen of a training: the curves of its log, and where a step's time went.

python -m scripts.train_demo.train_report FIRST/log.jsonl SECOND/log.jsonl --out scripts/results/demo-training-log.jsonl

joins the logs of stretches that began with fresh optimizers, and draws their curves beside the result. Logs of the
draft's training (`draft_log.jsonl`) are told from the model's by what they hold.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.train_demo.tasks import ANSWER, CALC, CLASSES, RECALL, TEXT


def join(logs: Sequence[Sequence[dict[str, Any]]], every: int = 1) -> list[dict[str, Any]]:
    """One log of several: steps and seconds go on, every record names its `stretch`, from 1 on.

    every: of so many records one is kept, and the last of each stretch. A record without a stage is given its length.
    """
    joined: list[dict[str, Any]] = []
    step, seconds = 0, 0.0
    for stretch, records in enumerate(logs, start=1):
        kept = [r for i, r in enumerate(records) if i % every == 0 or i == len(records) - 1]
        for record in kept:
            moved = {"stretch": stretch, "stage": f"{record['length']} tokens", **record}
            moved["step"], moved["trained_s"] = step + record["step"], round(seconds + record["trained_s"], 1)
            joined.append(moved)
        step, seconds = joined[-1]["step"], joined[-1]["trained_s"]
    return joined


def join_drafts(logs: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One log of several of the draft's: every record names its `stretch`; steps and seconds are the log's own.

    A log that names stretches already, joined before or of a training whose optimizer was fresh on another machine, is
    taken to hold so many of them.
    """
    joined: list[dict[str, Any]] = []
    done = 0
    for records in logs:
        joined += [{**record, "stretch": done + record.get("stretch", 1)} for record in records]
        done = joined[-1]["stretch"]
    return joined


def plot_drafts(log_file: Path, picture: Path) -> None:
    """The draft's losses and the accepted drafts over the steps, in training and on held-out rows; stretches marked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in log_file.read_text(encoding="utf-8").splitlines()]
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(8, 9), sharex=True)
    steps: list[float] = []
    rows: list[dict[str, Any]] = []  # the records, and an empty one between two stretches, where the curves break
    begun = 0.0
    for record in records:
        if rows and record.get("stretch", 1) != rows[-1].get("stretch", 1):
            for axes in (top, middle, bottom):
                axes.axvline(steps[-1], color="0.8", zorder=0)
            if record["step"] <= rows[-1]["step"]:  # another log; where only the optimizer is fresh, steps go on
                begun = steps[-1]
            rows.append({})
            steps.append(steps[-1])
        rows.append(record)
        steps.append(begun + record["step"])
    block = len(records[0]["variation"])

    def curve(axes: Any, values: Sequence[float | None], label: str, style: str, **more: Any) -> None:
        axes.plot(steps, [math.nan if v is None else v for v in values], style, label=label, ms=3, lw=1.2, **more)

    curve(top, [r.get("entropy") for r in rows], "cross entropy, nats", "-")
    for place in range(block):
        variation = [r["variation"][place] if r else None for r in rows]
        curve(middle, variation, f"total variation, draft {place + 1}", "-")
    curve(middle, [r.get("confidence") for r in rows], "confidence, nats", "--", color="0.4")
    curve(bottom, [r.get("accepted") for r in rows], "training rows", "-", color="0.6")
    judged = [(step, r["held_out"]) for step, r in zip(steps, rows, strict=True) if "held_out" in r]
    for name in ("all", "text", "answers") if judged else ():
        at, values = zip(*((step, held_out[name]) for step, held_out in judged), strict=True)
        bottom.plot(at, values, "o-", label=f"held-out rows, {name}", ms=3, lw=1.2)
    top.set(ylabel="loss")
    middle.set(ylabel="loss")
    bottom.set(ylabel="accepted of five drafts", xlabel="steps", ylim=(0, None))
    for axes in (top, middle, bottom):
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def plot(log_file: Path, picture: Path) -> None:
    """Loss, accuracy by kind of token and the indexer's loss over the minutes of training, with the stages marked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in log_file.read_text(encoding="utf-8").splitlines()]
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(8, 9), sharex=True)

    def curve(axes: Any, values: list[Any], **style: Any) -> None:
        found = [(r["trained_s"] / 60, v) for r, v in zip(records, values, strict=True) if v is not None]
        if found:
            axes.plot(*zip(*found, strict=True), **style)

    def kinds(name: str, field: str) -> list[Any]:
        return [r.get("kinds", {}).get(name, {}).get(field) for r in records]

    def mean(name: str) -> list[Any]:
        return [float(np.mean(r[name])) if name in r else None for r in records]

    def era(record: dict[str, Any]) -> tuple[int, str]:
        return record.get("stretch", 1), record["stage"]

    curve(top, [r["loss"] for r in records], label="weighted, all")
    curve(top, kinds(CLASSES[TEXT], "loss"), label="text")
    for token_class in (*range(RECALL, len(CLASSES)), CALC, ANSWER):
        curve(middle, kinds(CLASSES[token_class], "right"), label=CLASSES[token_class])
    curve(bottom, mean("index"), color="tab:green", label="KL, nats")
    curve(bottom, mean("covered_recall"), label="mass selected, recall")
    curve(bottom, mean("covered"), label="mass selected, all")
    for before, after in itertools.pairwise(records):
        if era(before) != era(after):
            for axes in (top, middle, bottom):
                axes.axvline(after["trained_s"] / 60, color="0.8", zorder=0)
            top.text(after["trained_s"] / 60, top.get_ylim()[1], after["stage"], va="top", fontsize=7, rotation=90)
    top.set(ylabel="loss, nats")
    middle.set(ylabel="right tokens", ylim=(0, 1.02))
    bottom.set(ylabel="indexer", xlabel="minutes of training")
    for axes in (top, middle, bottom):
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def kernel_table(trace: Path, most: int = 60) -> str:
    """Milliseconds and launches of the kernels that take the longest, of all streams of a trace together."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    streams = {
        (e["pid"], e["tid"])
        for e in events
        if e.get("name") == "thread_name" and e["args"]["name"].startswith("Stream")  # not the groupings beside them
    }
    spent: dict[str, list[float]] = {}
    for event in events:
        if event.get("ph") == "X" and (event["pid"], event["tid"]) in streams:
            spent.setdefault(event["name"], []).append(event.get("dur", 0.0) / 1000)
    ordered = sorted(spent.items(), key=lambda item: -sum(item[1]))
    total = sum(map(sum, spent.values()))
    lines = [f"{total:10.2f} ms {sum(map(len, spent.values())):7d} in all"]
    return "\n".join(lines + [f"{sum(t):10.2f} ms {len(t):7d} {name}" for name, t in ordered[:most]]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="join the logs of the stretches of a training and draw them")
    parser.add_argument("logs", type=Path, nargs="+", help="log.jsonl of each stretch, in the order of training")
    parser.add_argument("--out", type=Path, required=True, help="the joined log; the curves go beside it as .png")
    parser.add_argument("--every", type=int, default=2, help="keep one record of so many of the model's")
    args = parser.parse_args(arguments)
    logs = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in args.logs]
    drafts = "variation" in logs[0][0]
    joined = join_drafts(logs) if drafts else join(logs, args.every)
    args.out.write_text("".join(json.dumps(record) + "\n" for record in joined), encoding="utf-8")
    picture = args.out.with_suffix(".png")
    (plot_drafts if drafts else plot)(args.out, picture)
    print(f"{args.out}: {len(joined)} records; {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
