"""Draws what `eval --json` printed: a bar for the score of each task, one colour per file, and a line at its gate.

python scripts/plot_eval.py FILE.json [MORE.json] [--output FILE.png]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="a file's name is its label")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="default: beside the first file, as .png")
    args = parser.parse_args(argv)
    runs: dict[str, dict[str, Any]] = {}
    for file in args.files:
        try:
            runs[file.stem if file.stem not in runs else str(file)] = read_tasks(file)
        except (OSError, ValueError) as error:
            print(f"error: {file}: {error}", file=sys.stderr)
            return 2
    picture = args.output or args.files[0].with_suffix(".png")
    try:
        draw(runs, picture)
    except (OSError, ValueError) as error:  # ValueError: a kind of picture that matplotlib does not write
        print(f"error: {picture}: {error}", file=sys.stderr)
        return 2
    print(picture)
    return 0


def read_tasks(path: Path) -> dict[str, Any]:
    """{task: {"n", "score", "metric"}} of one object (cli-contract, eval), also where the table stands before it.

    Raises ValueError when there is none, OSError when the file cannot be read.
    """
    text = path.read_text(encoding="utf-8").strip()
    try:
        results = json.loads(text)
    except ValueError:
        results = json.loads(text.splitlines()[-1] if text else "")
    tasks = results.get("tasks") if isinstance(results, dict) else None
    if not tasks or not isinstance(tasks, dict):
        raise ValueError("not the result of eval --json: tasks missing")
    for task, result in tasks.items():
        if not isinstance(result, dict) or not {"n", "score", "metric"} <= set(result):
            raise ValueError(f"not the result of eval --json: task {task} lacks n, score or metric")
    return tasks


def draw(runs: dict[str, dict[str, Any]], picture: Path) -> None:
    """Bars of every run beside one another; a task that a run lacks has no bar."""
    tasks = list(dict.fromkeys(task for run in runs.values() for task in run))
    width = 0.8 / len(runs)
    figure, axis = plt.subplots(figsize=(max(4.0, 1.0 + 0.6 * len(tasks) * len(runs) ** 0.5), 4), layout="constrained")
    for place, (label, run) in enumerate(runs.items()):
        there = [task for task in tasks if task in run]
        at = [tasks.index(task) + width * (place - (len(runs) - 1) / 2) for task in there]
        bars = axis.bar(at, [run[task]["score"] for task in there], width, label=label)
        axis.bar_label(bars, [f"{run[task]['score']:.2f}" for task in there], fontsize=7)
    for place, task in enumerate(tasks):
        for gate in {run[task].get("gate") for run in runs.values() if task in run} - {None}:
            axis.plot([place - 0.45, place + 0.45], [gate, gate], color="tab:red")
    items = [max(run[task]["n"] for run in runs.values() if task in run) for task in tasks]
    names = [f"{task}\n(n={n})" for task, n in zip(tasks, items, strict=True)]
    axis.set_xticks(range(len(tasks)), names, fontsize=8, rotation=45 if len(tasks) > 6 else 0)
    metrics = dict.fromkeys(str(result["metric"]) for run in runs.values() for result in run.values())
    axis.set(ylim=(0, 1.08), ylabel=", ".join(metrics))
    if len(runs) > 1:
        axis.legend(fontsize=7)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
