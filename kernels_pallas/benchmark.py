"""What the `bench.py` of the operations share: ceilings, timing, and the command line."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array, lax

import di_jax
from kernels_pallas import peers
from kernels_pallas.hopper import KERNEL, UnsupportedShape, unavailable

RELEASED = Path(di_jax.__file__).parent / "model" / "released" / "deepseek-v4.1-flash.json"
# Of an H200, the most that programs reach there: bytes copied, operations of bf16 and e4m3 products, each per second.
H200_BYTES, H200_FLOPS, H200_FP8_FLOPS = 4.3e12, 760e12, 1469e12
TIMES = 5


class Workload(Protocol):
    """bytes, flops: that one call needs, whatever runs it."""

    @property
    def name(self) -> str: ...

    @property
    def bytes(self) -> int: ...

    @property
    def flops(self) -> int: ...


def floor(work: Workload) -> float:
    """Seconds: bytes or operations, whichever takes longer."""
    return max(work.bytes / H200_BYTES, work.flops / H200_FLOPS)


def seconds(run: Callable[..., Any], arrays: Sequence[Any], calls: int) -> float:
    """Median time of one of the calls that run(*arrays) makes, compilation left out."""
    jax.block_until_ready(run(*arrays))
    times = []
    for _ in range(TIMES):
        start = time.perf_counter()
        jax.block_until_ready(run(*arrays))
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def need_kernels() -> None:
    """Raises UnsupportedShape where the kernels cannot run: for those that are called without their `api`."""
    if why := unavailable():
        raise UnsupportedShape(f"kernels: {KERNEL} cannot run here: {why}")


def measured(work: Workload, timed: Mapping[str, Callable[[], float]]) -> dict[str, Any]:
    """A row of results. timed: seconds of a call, by implementation; one that cannot run says why."""
    row: dict[str, Any] = {"workload": work.name, "floor_us": floor(work) * 1e6}
    for name, take in timed.items():
        try:
            taken = take()
        except UnsupportedShape as error:
            row[name] = str(error)
            continue
        row[name] = {
            "us": taken * 1e6,
            "gb_per_s": work.bytes / taken / 1e9,
            "tflop_per_s": work.flops / taken / 1e12,
            "roofline": floor(work) / taken,
        }
    return row


def jax_peer(
    name: str,
    omits: str,
    operation: Callable[..., Array],
    arrays: Callable[[], Sequence[Array]],
    error: Callable[[tuple[np.ndarray, ...]], float],
    bound: float,
    calls: int,
) -> peers.Peer:
    """A peer that JAX has: operation(*arrays()) gives what can be the first of the arrays in the call after it.

    error: of what one call gives. Its time is like that of the kernels.
    """

    def measure(_: Any) -> peers.Measured:
        if jax.default_backend() != "gpu":
            raise RuntimeError("it needs a GPU")
        first, *rest = arrays()
        found = np.asarray(jax.jit(operation)(first, *rest))

        @jax.jit
        def run(first: Array, *rest: Array) -> Array:
            return lax.fori_loop(0, calls, lambda _, x: operation(x, *rest), first)

        return peers.Measured(seconds(run, (first, *rest), calls), error((found,)))

    return peers.Peer(name, "jax", omits, measure, bound)


def main[W: Workload](
    description: str | None,
    workloads: Sequence[W],
    measure: Callable[[W], dict[str, Any]],
    peers_of: Callable[[W], Sequence[peers.Peer]] = lambda work: (),
    arguments: Sequence[str] | None = None,
    measure_tuning: Callable[[W, dict[str, Any]], dict[str, Any]] | None = None,
) -> None:
    """Prints the rows of `workloads` as they are measured, with `--peers` those of `peers_of` too.

    measure_tuning: of a workload and the fields of a tuning, the row of the kernel alone; with it there is `--tuning`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--peers", action="store_true", help="programs of other libraries too")
    if measure_tuning is not None:
        text = "the kernel alone by this choice instead of the tuned one, a JSON object; as often as there are choices"
        parser.add_argument("--tuning", type=json.loads, action="append", default=[], help=text)
    options = parser.parse_args(arguments)
    for work in (work for work in workloads if options.only in work.name):
        if measure_tuning is not None and options.tuning:
            for fields in options.tuning:
                _print({**measure_tuning(work, fields), "tuning": fields}, options.json)
            continue
        row = measure(work)
        if options.peers:
            row["peers"] = [peers.measured(peer, work.flops) for peer in peers_of(work)]
        _print(row, options.json)


def _print(row: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"device": jax.devices()[0].device_kind, **row}), flush=True)
        return
    beside = f", plan {row['plan_us']:.0f} us" if "plan_us" in row else ""
    beside += f", by {row['tuning']}" if "tuning" in row else ""
    print(f"{row['workload']}: floor {row['floor_us']:.0f} us{beside}")
    for name in (KERNEL, "reference"):
        if name in row:
            print(f"  {name:16s} {_words(row[name])}", flush=True)
    for peer in row.get("peers", ()):
        took = f"{peer['us']:9.1f} us, error {peer['error']:.1e}" if "us" in peer else peer["why"]
        print(f"  peer {took}  {peer['name']} {peer['version'] or ''}; it omits {peer['omits']}", flush=True)


def _words(found: str | dict[str, float]) -> str:
    if isinstance(found, str):
        return found
    rates = f"{found['gb_per_s']:7.0f} GB/s  {found['tflop_per_s']:6.1f} TFLOP/s"
    return f"{found['us']:9.1f} us  {rates}  {found['roofline']:6.1%} of the roofline"
