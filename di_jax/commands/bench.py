"""`bench`: tokens/s of prefill and decode through the real engine (kind engine), its results file and table.

`bench_host` has the rows of kind host, `bench_slice` those of kind slice (cli-contract, bench).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import logging
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from flax import nnx
from tqdm import tqdm

from di_jax.commands import bench_host
from di_jax.commands.bench_slice import measuring as bench_slice
from di_jax.commands.records import print_result
from di_jax.commands.roofline import NOTE, Peaks, measure_peaks, step_cost
from di_jax.config import BenchGroup, Config
from di_jax.engine.engine import Engine
from di_jax.engine.metrics import StepReport
from di_jax.engine.setup import build_engine_parts
from di_jax.engine.step_plan import DEVICE_TOKEN, Bucket, Chunk, build_plan
from di_jax.engine.step_policy import DECODE, PREFILL
from di_jax.errors import UserError
from di_jax.parallel import processes
from di_jax.platforms.devices import configure_jax, require_devices
from di_jax.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

HOST, SLICE = "host", "slice"
SEED = 20260910
PACKAGES = ("jax", "jaxlib", "flax", "numpy")
# Steps launched one after the other, before the first one's end, to see what one takes without the host; and how often.
BACK_TO_BACK, TIMES = 16, 3
HOST_PARTS = ("schedule", "launch", "wait", "post")

Row = dict[str, Any]


def run(config: Config, args: argparse.Namespace) -> int:
    """Measures `bench.batch_sizes`, prints a table, and with --output adds the rows to a results file.

    Returns 0. Raises UserError when devices are missing, or the output cannot be written or belongs to another kind or
    device.
    """
    configure_jax(config)
    kind = config.bench.kind
    device = "cpu" if kind == HOST else require_devices(config)[0].device_kind
    output: Path | None = getattr(args, "output", None)
    history = [] if output is None else _history(output, kind, device)
    bar = partial(tqdm, desc="measuring", unit="run", disable=None, file=sys.stderr)
    today = datetime.date.today().isoformat()
    common = {"date": today, "model": config.model.path, "dtype": config.model.dtype, "cpu_cores": os.cpu_count()}
    result: Row = {
        "kind": kind,
        "device": device,
        "versions": {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in PACKAGES}},
    }
    rows: list[Row] = []

    def keep(measured: Sequence[Row]) -> None:
        """Adds rows, to the output too."""
        rows.extend({**row, **common} for row in measured)
        if output is not None and processes.current().is_first:
            committed = {**result, "command": _command(args), "date": today, "rows": history + rows}
            output.write_text(json.dumps(committed, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    if kind == HOST:
        measured, result["roofline"] = bench_host.measure(config, bar), {"note": bench_host.NOTE}
    elif kind == SLICE:
        # Each row at once: the next one may take minutes.
        measured, result["roofline"] = [], bench_slice.measure(config, bar, lambda row: keep([row]))
    else:
        measured, result["roofline"] = measure(config, bar)
    keep(measured)
    if not processes.current().is_first:
        return 0  # of several processes the first one reports; its rows count the tokens of all
    print_result({HOST: bench_host.table, SLICE: bench_slice.table}.get(kind, table)(rows))
    if output is not None:
        logger.info("wrote %d rows to %s, %d of them from before", len(history + rows), output, len(history))
    if args.json:
        print_result(json.dumps({**result, "rows": rows}))
    return 0


def measure(config: Config, bar: partial[tqdm]) -> tuple[list[Row], Row]:
    """The rows of all of `bench.batch_sizes`, and the rates that their rooflines come from."""
    parts = build_engine_parts(config)
    engine = Engine(parts, config.engine)
    peaks = measure_peaks(config.model.dtype)
    rows = []
    with bar(total=len(config.bench.batch_sizes) * (config.bench.repeats + 1)) as progress:
        for batch in config.bench.batch_sizes:
            rows += measure_batch(engine, config.bench, batch, peaks, progress)
    return rows, {"note": NOTE, "copy_bytes_per_s": peaks.bytes_per_s, "matmul_flops_per_s": peaks.flops_per_s}


def measure_batch(engine: Engine, bench: BenchGroup, batch: int, peaks: Peaks, bar: tqdm) -> list[Row]:
    """A prefill row and, when more than one token is asked, a decode row: medians over `bench.repeats` runs, after one
    that is not counted. All requests arrive at once; a run's decode steps count when all of them take part."""
    vocabulary = engine.parts.model_config.vocab_size
    prompts = np.random.default_rng(SEED).integers(0, vocabulary, (batch, bench.prompt_len)).tolist()
    runs = []
    for number in range(bench.repeats + 1):
        runs.append(_answer(engine, prompts, bench.output_len, f"{batch}/{number}"))
        bar.update()
    rows = [_row(engine, PREFILL, bench, batch, runs[1:], peaks)]
    if bench.output_len > 1:
        rows.append(_row(engine, DECODE, bench, batch, runs[1:], peaks))
    return rows


def _answer(engine: Engine, prompts: list[list[int]], output_len: int, salt: str) -> list[StepReport]:
    """The steps that answer all prompts with exactly `output_len` tokens each. salt: of the prefix cache, so that no
    run finds the prompts of another."""
    sampling = SamplingParams(
        temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False, cache_salt=salt
    )
    requests = [engine.add_request(prompt, sampling) for index, prompt in enumerate(prompts) if engine.serves(index)]
    steps = []
    try:
        while (report := engine.step()) is not None:
            steps.append(report)
    finally:
        for request in requests:
            engine.abort(request.request_id)
    return steps


def _row(engine: Engine, phase: str, bench: BenchGroup, batch: int, runs: list[list[StepReport]], peaks: Peaks) -> Row:
    """One row of the results. tokens_per_s counts tokens fed; step_ms is a step's mean time, from the end of the one
    before or its own launch. schedule_ms, launch_ms, wait_ms and post_ms are what the host does for one; with
    async_scheduling all but the wait overlaps with another step. Of decode steps, device_ms is what one takes when the
    host is not waited for (`device_step_s`), and idle_share how long the device waits between two."""
    counted = [[s for s in run if s.kind == phase and (phase == PREFILL or s.num_sequences == batch)] for run in runs]
    if not all(counted):
        raise UserError(
            f"bench.batch_sizes: {batch} requests of {bench.prompt_len + bench.output_len} tokens never ran together; "
            "raise engine.num_blocks"
        )

    def mean_s(name: str) -> float:
        return median(fmean(getattr(step, name) for step in steps) for steps in counted)

    step_s = mean_s("seconds")
    tokens_per_s = median(sum(s.num_tokens for s in steps) / sum(s.seconds for s in steps) for steps in counted)
    steps = counted[0]
    tokens, sequences = (round(sum(getattr(s, n) for s in steps) / len(steps)) for n in ("num_tokens", "num_sequences"))
    context = bench.prompt_len / 2 if phase == PREFILL else bench.prompt_len + bench.output_len / 2
    params = engine.parts.runner.params
    leaves = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(params)}
    cost = step_cost(leaves, engine.parts.layout, tokens=tokens, sequences=sequences, context=context)
    device: Row = {}
    if phase == DECODE:
        seconds = device_step_s(engine, steps[-1].bucket, batch, round(context))
        device = {"device_ms": seconds * 1e3, "idle_share": max(0.0, 1 - seconds / step_s)}
    return {
        "phase": phase,
        "batch": batch,
        "prompt_len": bench.prompt_len,
        "output_len": bench.output_len,
        "tokens_per_s": tokens_per_s,
        "step_ms": step_s * 1e3,
        **{f"{name}_ms": mean_s(f"{name}_s") * 1e3 for name in HOST_PARTS},
        **device,
        "async_scheduling": engine.config.async_scheduling,
        "steps": len(steps),
        "bucket_rows": steps[-1].bucket.rows,
        "repeats": bench.repeats,
        "roofline_ms": cost.seconds(peaks) * 1e3,
        "roofline_bound": cost.bound(peaks),
        "roofline_fraction": cost.seconds(peaks) / step_s,
    }


def device_step_s(engine: Engine, bucket: Bucket, batch: int, context: int) -> float:
    """Seconds of a decode step of `batch` sequences with `context` tokens before each when steps follow one another
    without the host: of TIMES runs of BACK_TO_BACK steps, all launched at once, the fastest. Where launching takes
    longer than the step it is the time of a launch. Collective.

    The engine must be idle. Its caches hold nothing sensible afterwards, so later prompts need salts of their own.
    """
    runner, layout = engine.runner, engine.parts.layout
    count = min(bucket.rows, -(-batch // runner.plan.world))
    width = context // layout.block_size + 1
    chunks = [
        Chunk((DEVICE_TOKEN,), context, slot, [(slot * width + at) % layout.num_blocks for at in range(width)])
        for slot in range(count)
    ]
    plans = [build_plan(bucket, chunks) for _ in runner.local_ranks]
    runner.execute(plans).host()
    seconds = []
    for _ in range(TIMES):
        began = time.perf_counter()
        for _ in range(BACK_TO_BACK):
            last = runner.execute(plans)
        last.host()
        seconds.append((time.perf_counter() - began) / BACK_TO_BACK)
    return min(seconds)


def table(rows: Sequence[Row]) -> str:
    """The rows for a person to read."""
    lines = [
        f"{'phase':8} {'batch':>5} {'tokens/s':>10} {'ms/step':>9} {'host ms':>8} {'idle':>6} {'least ms':>9} "
        f"{'of roofline':>11}"
    ]
    for row in rows:
        host = row["schedule_ms"] + row["launch_ms"] + row["post_ms"]
        idle = f"{row['idle_share']:6.1%}" if "idle_share" in row else f"{'':6}"
        lines.append(
            f"{row['phase']:8} {row['batch']:5d} {row['tokens_per_s']:10.1f} {row['step_ms']:9.2f} {host:8.2f} {idle} "
            f"{row['roofline_ms']:9.3f} {row['roofline_fraction']:11.2%}"
        )
    return "\n".join(lines)


def device_slug(kind: str) -> str:
    """A device kind as part of a file name: `NVIDIA H200` is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


def _history(path: Path, kind: str, device: str) -> list[Row]:
    """Rows that the results file holds already; opens it for writing, so that a bad path fails before the work."""
    try:
        with path.open("a+", encoding="utf-8") as file:
            file.seek(0)
            text = file.read()
        old = json.loads(text) if text else {"rows": []}
        rows = old["rows"]
        if text and (old["kind"], old["device"]) != (kind, device):
            raise UserError(
                f"output {path}: holds results of {old['kind']} on {old['device']}; write to "
                f"{kind}-{device_slug(device)}.json"
            )
    except OSError as error:
        raise UserError(f"output {path}: cannot be written: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"output {path}: is not a results file ({error!r}); give another path") from error
    return list(rows)


def _command(args: argparse.Namespace) -> str:
    """The command line that repeats this run."""
    words = ["python", "-m", "di_jax.run", "bench", "--config", str(args.config)]
    for assignment in args.set:
        words += ["--set", assignment]
    return shlex.join(words)
