"""Draws committed benchmark results: tokens/s of every row, prefill beside decode, one colour per date.

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
    phases = list(dict.fromkeys(row["phase"] for row in results["rows"]))
    figure, axes = plt.subplots(1, len(phases), figsize=(4.5 * len(phases), 3.6), squeeze=False, layout="constrained")
    for axis, phase in zip(axes[0], phases, strict=True):
        rows = [row for row in results["rows"] if row["phase"] == phase]
        dates = sorted({row["date"] for row in rows})
        batches = sorted({row["batch"] for row in rows})
        width = 0.8 / len(dates)
        for d, date in enumerate(dates):
            # Of several runs on one day the last one counts.
            latest = {row["batch"]: row for row in rows if row["date"] == date}
            at = [batches.index(batch) + width * (d - (len(dates) - 1) / 2) for batch in latest]
            bars = axis.bar(at, [row["tokens_per_s"] for row in latest.values()], width, label=date)
            axis.bar_label(bars, [_label(row) for row in latest.values()], fontsize=7)
        axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axis.set(title=phase, xlabel="requests at once", ylabel="tokens/s")
        axis.margins(y=0.15)
        axis.legend(fontsize=7)
    figure.suptitle(f"{results['kind']} on {results['device']}")
    figure.savefig(picture, dpi=120)
    plt.close(figure)
    return picture


def _label(row: dict[str, Any]) -> str:
    fraction = row.get("roofline_fraction")
    speed = f"{row['tokens_per_s']:.0f}"
    return speed if fraction is None else f"{speed}\n{fraction:.1%} of roofline"


if __name__ == "__main__":
    sys.exit(main())
