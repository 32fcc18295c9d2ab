"""Time of decode by how many blocks of threads share a row: `python -m kernels_pallas.sparse_attention.bench_splits`.

The arrays and programs of `bench`, with entries and with the window alone. A call is so short here that the host's
launches may take longer: `kernels_us` is the time of the GPU alone, by kernel, so that of `sparse_attention` and of
`sparse_attention_join` each. The choice goes to `split_tiles` in `tuned/`, as (rows up to which, tiles of a split).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.experimental.mosaic.gpu import profiler

from kernels_pallas.benchmark import seconds
from kernels_pallas.sparse_attention.bench import Workload, chain, inputs
from kernels_pallas.sparse_attention.config import tuned
from kernels_pallas.sparse_attention.mosaic_gpu_sm90 import KEYS, sparse_attention

ROWS, TILES = (8, 32, 64, 128), (10, 5, 4, 3, 2, 1)
ENTRIES = (512, 0)


def workloads(rows: tuple[int, ...]) -> tuple[Workload, ...]:
    return tuple(
        Workload(f"decode, {n} rows" + ("" if entries else ", window only"), n, entries=entries)
        for n in rows
        for entries in ENTRIES
    )


def measure(work: Workload, tiles: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """A result of each number of splits that one of `tiles` gives; of one split, the row is not split."""
    layout, rows, arrays = inputs(work)
    most = -(-layout.config.sliding_window // KEYS) + -(-work.entries // KEYS)
    base, seen = tuned(jax.devices()[0].device_kind), set()
    for each in sorted({min(n, most) for n in (*tiles, most)}, reverse=True):
        config = dataclasses.replace(base, split_tiles=((work.rows, each),))
        splits = config.splits(work.rows, most)
        if splits in seen:
            continue
        seen.add(splits)
        run = chain(partial(sparse_attention, config=config), layout, rows, work.calls)
        taken = seconds(run, (arrays,), work.calls)
        yield {
            "workload": work.name,
            "split_tiles": each,
            "splits": splits,
            "us": taken * 1e6,
            "kernels_us": kernels(run, arrays, work.calls),
        }


def kernels(run: Callable[..., Array], arrays: dict[str, Any], calls: int) -> dict[str, float]:
    """Microseconds of a call that the GPU spends in each kernel, by its name; those of the plan are of a program."""
    _, timings = profiler.measure(run, aggregate=False)(arrays)
    sums: dict[str, float] = defaultdict(float)
    for name, milliseconds in timings or ():
        sums[name] += milliseconds * 1e3 / calls
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--tiles", type=int, nargs="+", default=TILES, help="of 64 keys, the most that a split takes")
    options = parser.parse_args(arguments)
    for work in workloads(tuple(options.rows)):
        for row in measure(work, tuple(options.tiles)):
            if options.json:
                print(json.dumps({"device": jax.devices()[0].device_kind, **row}), flush=True)
                continue
            times = ", ".join(f"{name} {us:.1f}" for name, us in row["kernels_us"].items() if us >= 0.5)
            print(f"{row['workload']}, splits {row['splits']:2d}: {row['us']:7.1f} us; GPU alone: {times}", flush=True)


if __name__ == "__main__":
    main()
