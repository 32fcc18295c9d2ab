"""Draws committed benchmark results: tokens/s of every row, prefill beside decode, one colour per date.

Of kind host: the microseconds of a decode step and what they are spent on, with drafts and without. Of kind slice:
tokens/s of a GPU over tokens/s of a user, a curve for each label of the kernels and number of expert ranks, and what
the fullest step is spent on.

python scripts/plot_bench.py scripts/results/engine-cpu.json [more.json] [--output FILE.png]
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

REQUIRED = ("kind", "device", "date", "rows")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="default: beside each file, as .png")
    args = parser.parse_args(argv)
    if args.output is not None and len(args.files) > 1:
        parser.error("--output names one picture; give one results file")
    for file in args.files:
        try:
            picture = draw(json.loads(file.read_text(encoding="utf-8")), args.output or file.with_suffix(".png"))
        except (OSError, ValueError, KeyError) as error:
            print(f"error: {file}: {error}", file=sys.stderr)
            return 2
        print(picture)
    return 0


def draw(results: dict[str, Any], picture: Path) -> Path:
    """Draws one results object (cli-contract, committed form). Raises ValueError when it is not one."""
    missing = [name for name in REQUIRED if name not in results]
    if missing or not results["rows"]:
        raise ValueError(f"not a results file: {', '.join(missing) or 'rows'} missing")
    figure = {"host": _draw_host, "slice": _draw_slice}.get(results["kind"], _draw_speed)(results["rows"])
    figure.suptitle(f"{results['kind']} on {results['device']}")
    figure.savefig(picture, dpi=120)
    plt.close(figure)
    return picture


def _draw_speed(rows: list[dict[str, Any]]) -> Figure:
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    figure, axes = plt.subplots(1, len(phases), figsize=(4.5 * len(phases), 3.6), squeeze=False, layout="constrained")
    for axis, phase in zip(axes[0], phases, strict=True):
        of_phase = [row for row in rows if row["phase"] == phase]
        dates = sorted({row["date"] for row in of_phase})
        batches = sorted({row["batch"] for row in of_phase})
        width = 0.8 / len(dates)
        for d, date in enumerate(dates):
            # Of several runs on one day the last one counts.
            latest = {row["batch"]: row for row in of_phase if row["date"] == date}
            at = [batches.index(batch) + width * (d - (len(dates) - 1) / 2) for batch in latest]
            bars = axis.bar(at, [row["tokens_per_s"] for row in latest.values()], width, label=date)
            axis.bar_label(bars, [_label(row) for row in latest.values()], fontsize=7)
        axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axis.set(title=phase, xlabel="requests at once", ylabel="tokens/s")
        axis.margins(y=0.15)
        axis.legend(fontsize=7)
    return figure


def _draw_host(rows: list[dict[str, Any]]) -> Figure:
    """Of the last date, a picture for each number of drafts and maximum length. One y axis for those with as many
    drafts."""
    rows = [row for row in rows if row["phase"] == "decode" and row["date"] == max(row["date"] for row in rows)]
    latest: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
    for row in rows:
        latest.setdefault((row.get("num_draft_tokens", 0), row["max_model_len"]), {})[row["batch"]] = row
    drafts, lengths = (sorted(set(each)) for each in zip(*latest, strict=True))
    figure, axes = plt.subplots(
        len(drafts),
        len(lengths),
        figsize=(4.5 * len(lengths), 3.6 * len(drafts)),
        squeeze=False,
        sharey="row",
        layout="constrained",
    )
    for axis, key in zip(axes.flat, itertools.product(drafts, lengths), strict=True):
        if (of := latest.get(key)) is None:
            axis.axis("off")
            continue
        names, bottom = [str(batch) for batch in of], [0.0] * len(of)
        for part in ("schedule", "post", "launch"):
            heights = [row[f"{part}_us"] for row in of.values()]
            bars = axis.bar(names, heights, 0.6, bottom=bottom, label=part)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axis.bar_label(bars, [f"{total:.0f}" for total in bottom], fontsize=7)
        axis.axhline(rows[0]["budget_us"], ls="--", lw=0.8, color="gray", label="budget of schedule + post")
        title = f"up to {key[1]:,} tokens" + f", {key[0]} drafts" * bool(key[0])
        axis.set(title=title, xlabel="requests at once", ylabel="us a decode step, median")
        axis.legend(fontsize=7)
    return figure


def _draw_slice(rows: list[dict[str, Any]]) -> Figure:
    """The trade of a user's speed for a GPU's, the prefill speed, and the parts of a step. Of rows with the same label,
    ranks and size the last one counts; the first label is the baseline."""
    labels = list(dict.fromkeys(row["label"] for row in rows))
    latest = {(row["phase"], row["label"], row["ep"], row["batch"], row["rows"]): row for row in rows if row["fits"]}
    curves: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for key in sorted(latest, key=lambda key: (labels.index(key[1]), -key[2], key[3], key[4])):
        curves.setdefault(key[:3], []).append(latest[key])
    figure, (trade, prefill, parts) = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    colours = {label: f"C{number % 10}" for number, label in enumerate(labels)}
    for (phase, label, ep), points in curves.items():
        style: dict[str, Any] = {"color": colours[label], "ls": {64: "-", 8: "--"}.get(ep, ":"), "marker": "o", "ms": 3}
        name, wire = f"EP{ep}, {label}", [point["with_communication"] for point in points]
        if phase == "decode":
            trade.plot(*_trade(points), label=name, **style)
            trade.plot(*_trade(wire), **{**style, "alpha": 0.35})
            for point in points:
                at = point["tokens_per_s_per_user"], point["tokens_per_s"]
                trade.annotate(str(point["batch"]), at, textcoords="offset points", xytext=(3, 3), fontsize=6)
            if label == labels[0]:
                users, gpus = _trade(points)
                least = [point["roofline_fraction"] for point in points]
                users, gpus = [u / f for u, f in zip(users, least)], [g / f for g, f in zip(gpus, least)]
                trade.plot(users, gpus, color="gray", ls=style["ls"], lw=0.8, label=f"EP{ep}, floors")
        else:
            prefill.plot([p["rows"] for p in points], [p["tokens_per_s"] for p in points], label=name, **style)
            prefill.plot([p["rows"] for p in points], [w["tokens_per_s"] for w in wire], **{**style, "alpha": 0.35})
    trade.set(title="decode, by requests of a GPU", xlabel="tokens/s of a user", ylabel="tokens/s of a GPU")
    prefill.set(title="prefill", xlabel="rows of the chunk", ylabel="tokens/s of a GPU")
    for axis in (trade, prefill):
        if axis.lines:
            axis.set(xscale="log", yscale="log")
            axis.grid(which="both", lw=0.3)
            # Floors lie to the upper right of decode steps, and prefill steps rise with their rows.
            axis.legend(fontsize=6, loc="upper left" if axis is trade else "lower right")
    if sizes := sorted({row["rows"] for (phase, *_), points in curves.items() if phase != "decode" for row in points}):
        prefill.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=7)
        prefill.set_xticks([], minor=True)
    _draw_parts(parts, [points[-1] for (phase, *_), points in curves.items() if phase == "decode"])
    figure.supxlabel("pale: with the two-GPU figures of every collective added", fontsize=7)
    return figure


def _trade(points: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    return [p["tokens_per_s_per_user"] for p in points], [p["tokens_per_s"] for p in points]


def _draw_parts(axis: Any, rows: list[dict[str, Any]]) -> None:
    """What each step is spent on, in ms, with the sum of the floors as a line across its bar."""
    # The draft, a program of its own, is timed in every run.
    rows = [row for row in rows if sum(part["ms"] is not None for part in row["parts"].values()) > 1]
    names = [f"{row['label']}\nEP{row['ep']}, {row['batch']}" for row in rows]
    bottom = [0.0] * len(rows)
    for number, part in enumerate(dict.fromkeys(name for row in rows for name in row["parts"])):
        heights = [(row["parts"].get(part) or {}).get("ms") or 0.0 for row in rows]
        axis.bar(names, heights, 0.6, bottom=bottom, label=part, color=plt.get_cmap("tab20")(number % 20))
        bottom = [low + height for low, height in zip(bottom, heights)]
    for at, row in enumerate(rows):
        axis.hlines(row["roofline_ms"], at - 0.4, at + 0.4, color="black", lw=0.8)
        axis.plot(at, row["step_ms"], "_", color="red", ms=12)
    axis.set(title="parts of the fullest decode step", ylabel="ms; line: floors, red: the whole step")
    axis.tick_params(axis="x", labelsize=7)
    if rows:
        axis.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))


def _label(row: dict[str, Any]) -> str:
    fraction = row.get("roofline_fraction")
    speed = f"{row['tokens_per_s']:.0f}"
    return speed if fraction is None else f"{speed}\n{fraction:.1%} of roofline"


if __name__ == "__main__":
    sys.exit(main())
