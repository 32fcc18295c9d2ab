"""Compiles, times and reports the points of a slice."""

from __future__ import annotations

import contextlib
import gc
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from tqdm import tqdm

from di_jax.commands.bench_slice import deployment, floors, parts
from di_jax.commands.bench_slice.points import DECODE, PREFILL, DecodePoint, Point, PrefillPoint
from di_jax.commands.bench_slice.rank import Program, Rank
from di_jax.commands.plan import released_config
from di_jax.commands.roofline import Peaks, measure_peaks, published_peaks
from di_jax.config import Config
from di_jax.engine.compiling import compile_together
from di_jax.parallel.collectives import Collective, collectives
from di_jax.parallel.exchange import capacity_of
from di_jax.parallel.placement import place_state, place_weights
from di_jax.parallel.temporaries import temporary_bytes
from di_jax.platforms.devices import memory_room, require_devices

logger = logging.getLogger(__name__)

NOTE = (
    "one device as one rank of bench.slice.ep, random weights, balance forced by lot; communication is not in step_ms: "
    "the columns with_communication add the two-GPU figures of each collective that the traced step has, one after the "
    "other; floors: bytes / copy bandwidth or operations / matmul rate, whichever is more, summed over the parts"
)
CALLS, SHORT_S = 8, 0.02  # of a part that takes less, so many are launched at once to hide the launch

Row = dict[str, Any]
Emit = Callable[[Row], None]


def measure(config: Config, bar: partial[tqdm], emit: Emit) -> Row:
    """Gives `emit` a row for every point of `bench.slice`, each as soon as it is there; what their floors come from.

    Raises ConfigError for what a slice does not measure.
    """
    deployed = deployment.deployment(config)
    device = require_devices(config)[0]
    rank = Rank(deployed, released_config(config.model.path, config.model.revision), device)
    points = list(points_of(rank))
    peaks = published_peaks(device.device_kind) or measure_peaks(config.model.dtype)
    pieces = [parts.programs(point) if config.bench.slice.parts else {} for point in points]
    with compile_cache(config.cache.compile_dir):
        jobs: list[Callable[[], None]] = [program.compile for point in points for program in point.programs.values()]
        jobs += [partial(program.compile, again=False) for own in pieces for program in own.values()]
        compile_together(jobs)
    weights = None
    with bar(total=len(points)) as progress:
        for point, own in zip(points, pieces):
            row = describe(point, config)
            if row["fits"]:
                weights = weights or rank.make_weights()
                row |= run(point, own, weights, peaks, config)
            row["fits"] = "problem" not in row
            emit(row)
            progress.update()
    return {
        "note": NOTE,
        "copy_bytes_per_s": peaks.bytes_per_s,
        "matmul_flops_per_s": peaks.flops_per_s,
        "quantized_flops_per_s": peaks.quantized_flops_per_s,
    }


def points_of(rank: Rank) -> Iterator[Point]:
    """The sweep: decode steps first, the smallest first."""
    bench = rank.config.bench
    if bench.slice.phase != PREFILL:
        yield from (DecodePoint(rank, requests) for requests in bench.batch_sizes)
    if bench.slice.phase != DECODE:
        yield from (PrefillPoint(rank, rows) for rows in bench.slice.prefill_rows)


@contextlib.contextmanager
def compile_cache(folder: str | None) -> Iterator[None]:
    """A compilation cache while a slice compiles, so that it can do so again from it: by default a fresh one."""
    if folder is not None:
        yield
        return
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    with tempfile.TemporaryDirectory(prefix="di_jax-slice-") as fresh:
        try:
            for name, value in zip(names, (fresh, -1, -1)):
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()


def describe(point: Point, config: Config) -> Row:
    """What is known of a point before it runs: sizes, compilation, memory, and whether it fits."""
    rank, bucket = point.rank, point.bucket
    ep = config.bench.slice.ep
    kernels = {"implementation": config.kernels.implementation, **dict(config.kernels.overrides)}
    note = deployment.ENGRAM_NOTE.get(ep) if rank.model_config.engram_layer_ids else None
    row: Row = {
        "phase": point.phase,
        "label": config.bench.slice.label or ("XLA" if kernels == {"implementation": "reference"} else "auto"),
        "ep": ep,
        "local_slots": rank.local_slots,
        "batch": point.requests,
        "rows": bucket.rows,
        "kept_rows": bucket.kept_rows,
        "context": rank.context,
        "num_drafts": rank.settings.num_drafts,
        "tau": deployment.tokens_per_step(rank.settings.num_drafts, config.bench.slice.accept_rate),
        "kernels": kernels,
        "compile_s": {
            name: {"trace": p.trace_s, "cold": p.cold_s, "warm": p.warm_s} for name, p in point.programs.items()
        },
        "compile_cache": config.cache.compile_dir or "fresh",
        "expert_moves": "none: experts stay where they are, so no step collides with a move",
        **({"engram": note} if note else {}),
    }
    refused = [f"{p.name}: {p.problem}" for p in point.programs.values() if p.problem]
    if refused:
        return row | {"fits": False, "problem": f"does not fit, says the compiler: {'; '.join(refused)}"}
    memory = memory_of(point)
    row |= {"memory": memory, "plan": plan_of(point, memory["peak"])}
    room = memory_room([rank.mesh.devices.flat[0]], 1.0)
    if room is not None:
        # What an earlier point left on the device are the weights, which this one has too.
        free = room.limit - max(0, room.used - rank.weights_bytes)
        if memory["peak"] > free:
            problem = f"does not fit: {memory['peak'] / 1e9:.1f} GB by memory_analysis, {free / 1e9:.1f} GB free"
            return row | {"fits": False, "problem": problem}
    return row | {"fits": True}


def memory_of(point: Point) -> Row:
    """Bytes by the compiler's memory analysis; peak: of the program that needs most, with what the others leave."""
    programs = {name: program.memory() for name, program in point.programs.items()}
    fixed = point.rank.weights_bytes + point.state_bytes + point.extra_bytes
    # Programs share weights and caches, which each counts among its arguments as far as it uses them.
    peak = (
        fixed
        + max(p["temporaries"] + p["results"] for p in programs.values())
        + sum(p["code"] for p in programs.values())
    )
    return {
        "peak": peak,
        "weights": point.rank.weights_bytes,
        "caches": point.state_bytes,
        "sampling": point.extra_bytes,
        "programs": programs,
    }


def plan_of(point: Point, measured: int) -> Row:
    """What `plan` says of this step, from shapes and traced programs, beside the peak of the memory analysis."""
    rank, plan = point.rank, point.rank.parallel.mesh
    weights = sum(
        array.bytes_per_device for model in (rank.model, rank.draft) for array in place_weights(nnx.state(model), plan)
    )
    state = sum(array.bytes_per_device for array in place_state(point.layout, plan))
    waiting = point.bucket.rows * rank.model_config.hidden_size * rank.numerics.dtype.itemsize
    temporaries = max(temporary_bytes(traced.jaxpr.jaxpr) for traced in point.planned())
    temporaries += waiting if point.bucket.drafts else 0
    peak = weights + state + 4 * point.bucket.size + temporaries
    return {
        "weights": weights,
        "caches": state,
        "temporaries": temporaries,
        "peak": peak,
        "over_memory_analysis": peak / measured,
    }


def run(point: Point, pieces: Mapping[str, Program], weights: tuple[Any, Any], peaks: Peaks, config: Config) -> Row:
    """The measured half of a row. A point that runs out of memory all the same gives its problem."""
    try:
        point.begin(weights)
        steps = step_seconds(point, config.bench.repeats)
        if (fault := point.fault()) is not None:
            return {"problem": f"is no measurement: {fault}"}
        rounds = expert_rounds(point, point.load())
        own = program_seconds(point, config.bench.repeats)
        measured = part_seconds(point, pieces, config.bench.repeats)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"problem": f"ran out of memory: {' '.join(str(error).splitlines()[0].split())}"}
    finally:
        point.end()
        gc.collect()
    return results(point, steps, own, measured, peaks, config) | {"expert_rounds": rounds}


def results(
    point: Point,
    steps: Sequence[float],
    programs: Mapping[str, float],
    pieces: Mapping[str, float],
    peaks: Peaks,
    config: Config,
) -> Row:
    """Speeds, floors and communication, from seconds of steps, of their programs and of their parts."""
    step_s = median(steps)
    costs = floors.part_costs(point)
    measured = dict(pieces)
    if point.phase == DECODE:
        measured["draft"] = programs["draft"]
        if "head" in pieces:
            measured["sampling"] = max(0.0, programs["accept"] - pieces["head"])
    least = {name: cost.seconds(peaks) for name, cost in costs.items()}
    floor_s = sum(least.values())
    moved = exchanges(point)
    wire_s = sum(call.per_step * floors.exchange_seconds(call.op, call.bytes / floors.ROW_BYTES) for call in moved)
    return {
        "step_ms": step_s * 1e3,
        "steps": len(steps),
        "step_ms_least": min(steps) * 1e3,
        **speed(point, step_s, config),
        "roofline_ms": floor_s * 1e3,
        "roofline_fraction": floor_s / step_s,
        "programs_ms": {name: seconds * 1e3 for name, seconds in programs.items()},
        "parts": {
            name: {
                "ms": measured[name] * 1e3 if name in measured else None,
                "floor_ms": least[name] * 1e3,
                "bound": costs[name].bound(peaks),
                "fraction": least[name] / measured[name] if measured.get(name) else None,
            }
            for name in costs
        },
        "other_ms": (step_s - sum(measured.values())) * 1e3 if pieces else None,
        "with_communication": {
            "note": "not measured here: two-GPU NVLink figures (h200-baseline) for every collective of the step",
            "communication_ms": wire_s * 1e3,
            "collectives": sum(call.per_step for call in moved),
            "step_ms": (step_s + wire_s) * 1e3,
            **speed(point, step_s + wire_s, config),
        },
    }


def expert_rounds(point: Point, load: np.ndarray) -> float:
    """Rounds that the exchange of expert rows took in a layer, the mean: more than one where a rank was sent more rows
    than a round carries. load: int32 [L, slots]. In the deployment the fullest pair of all ranks decides."""
    ranks, parallel = point.rank.parallel.mesh.ep, point.rank.parallel
    per_rank = load.reshape(len(load), ranks, -1).sum(axis=2)
    rounds = 0
    for span in parts.layers_of_rows(point):
        pairs = span.rows * point.rank.model_config.num_experts_per_tok
        capacity = capacity_of(pairs, ranks, parallel.dispatch_capacity)
        rounds += int(np.sum(-(-per_rank[span.first : span.last].max(axis=1) // capacity)))
    return rounds / len(load)


def speed(point: Point, step_s: float, config: Config) -> dict[str, float]:
    """Tokens/s of a step that takes so long."""
    if point.phase == PREFILL:
        return deployment.prefill_speed(point.bucket.rows, step_s)
    rate = config.bench.slice.accept_rate
    return deployment.decode_speed(point.requests, point.rank.settings.num_drafts, rate, step_s)


def exchanges(point: Point) -> list[Collective]:
    """The collectives of a step, were its ranks those of the deployment."""
    sizes = point.rank.parallel.mesh.axis_sizes
    return [call for p in point.programs.values() for call in collectives(p.traced.jaxpr.jaxpr, sizes)]


# ---- clocks ----


def step_seconds(point: Point, repeats: int) -> list[float]:
    """Of `repeats` steps that follow one another, each launched while the one before it runs, after the point's
    `warm_up`. One more follows the last that counts: where launching takes as long as the step, as with loops whose
    length the host waits for, what is left of a step after the next one's launch is not its time."""
    running, last, seconds = point.step(), 0.0, []
    for number in range(point.warm_up + repeats):
        ahead = point.step()
        running.block_until_ready()
        now = time.perf_counter()
        if number >= point.warm_up:
            seconds.append(now - last)
        running, last = ahead, now
    return seconds


def program_seconds(point: Point, repeats: int) -> dict[str, float]:
    """Medians of each program of a step that has several, waited for one by one."""
    seconds: dict[str, list[float]] = {name: [] for name in point.programs}
    for _ in range(repeats if len(seconds) > 1 else 0):
        for name, taken in seconds.items():
            began = time.perf_counter()
            point.launch(name).block_until_ready()
            taken.append(time.perf_counter() - began)
    return {name: median(taken) for name, taken in seconds.items() if taken}


def part_seconds(point: Point, pieces: Mapping[str, Program], repeats: int) -> dict[str, float]:
    """Medians of each part; of a short one from CALLS calls launched at once, so that the launch is not in it."""
    if not pieces:
        return {}
    rows = parts.rows_program(point)(point.state, point.rank.put(point.plan_buffer))
    seed, found = jax.device_put(jnp.uint32(1), point.rank.sharding), {}

    def seconds(program: Program, calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            result = program.executable(point.weights, point.state, rows, seed)
            if program.name in parts.STORES:
                point.state, result = result
        jax.block_until_ready(result)
        return (time.perf_counter() - began) / calls

    for name, program in pieces.items():
        if program.problem is not None:
            logger.warning("%s: is not timed alone: %s", name, program.problem)
            continue
        seconds(program, 1)
        calls = CALLS if seconds(program, 1) < SHORT_S else 1
        found[name] = median(seconds(program, calls) for _ in range(repeats))
    return found


def table(rows: Sequence[Row]) -> str:
    """The rows for a person to read, each followed by its parts."""
    lines = [
        f"{'phase':8} {'ep':>3} {'slots':>5} {'batch':>5} {'rows':>6} {'ms/step':>9} {'tokens/s':>10} {'per user':>9} "
        f"{'floor ms':>9} {'of it':>7} {'with wire':>10} {'GB':>6}"
    ]
    for row in rows:
        head = f"{row['phase']:8} {row['ep']:3d} {row['local_slots']:5d} {row['batch']:5d} {row['rows']:6d} "
        if not row["fits"]:
            lines.append(head + row["problem"])
            continue
        user = f"{row['tokens_per_s_per_user']:9.1f}" if "tokens_per_s_per_user" in row else f"{'':9}"
        lines.append(
            f"{head}{row['step_ms']:9.2f} {row['tokens_per_s']:10.1f} {user} {row['roofline_ms']:9.3f} "
            f"{row['roofline_fraction']:7.2%} {row['with_communication']['tokens_per_s']:10.1f} "
            f"{row['memory']['peak'] / 1e9:6.1f}"
        )
        for name, part in row["parts"].items():
            if part["ms"] is not None:
                share = "" if part["fraction"] is None else f"{part['fraction']:7.2%} of the floor's rate"
                lines.append(f"    {name:18} {part['ms']:9.3f} ms, floor {part['floor_ms']:8.3f} ms {share}")
        if row["other_ms"] is not None:
            lines.append(f"    {'other':18} {row['other_ms']:9.3f} ms")
    return "\n".join(lines)
