"""Draws committed benchmark results: tokens/s of every row, prefill beside decode, one colour per date.

Of kind host: the microseconds of a decode step and what they are spent on.

python scripts/plot_bench.py scripts/results/engine-cpu.json [more.json] [--output FILE.png]
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
    figure = _draw_host(results["rows"]) if results["kind"] == "host" else _draw_speed(results["rows"])
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
    """Of the last date, a picture for each maximum length."""
    rows = [row for row in rows if row["phase"] == "decode" and row["date"] == max(row["date"] for row in rows)]
    lengths = sorted({row["max_model_len"] for row in rows})
    figure, axes = plt.subplots(
        1, len(lengths), figsize=(4.5 * len(lengths), 3.6), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, length in zip(axes[0], lengths, strict=True):
        latest = {row["batch"]: row for row in rows if row["max_model_len"] == length}
        names, bottom = [str(batch) for batch in latest], [0.0] * len(latest)
        for part in ("schedule", "post", "launch"):
            heights = [row[f"{part}_us"] for row in latest.values()]
            bars = axis.bar(names, heights, 0.6, bottom=bottom, label=part)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axis.bar_label(bars, [f"{total:.0f}" for total in bottom], fontsize=7)
        axis.axhline(rows[0]["budget_us"], ls="--", lw=0.8, color="gray", label="budget of schedule + post")
        axis.set(title=f"up to {length:,} tokens", xlabel="requests at once", ylabel="us a decode step, median")
        axis.legend(fontsize=7)
    return figure


def _label(row: dict[str, Any]) -> str:
    fraction = row.get("roofline_fraction")
    speed = f"{row['tokens_per_s']:.0f}"
    return speed if fraction is None else f"{speed}\n{fraction:.1%} of roofline"


if __name__ == "__main__":
    sys.exit(main())
