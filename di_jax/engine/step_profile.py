"""What decode steps with drafts take on this machine, measured when the engine starts (dspark 3.5).

A step is three programs, and its time is taken as the sum of three curves:

    seconds(R requests, T rows) = forward(T) + sampling(R) + drafting(R)

Accepting takes longer the more rows it looks at: what it takes beyond a step that verifies nothing is in `forward`.

To time a program of a step the host waits for it, which an engine that is one step ahead does not: on an H200 that
makes 12.9 ms of a step of 7.7. So short steps are also timed as a chain, and the times of the programs are scaled to
add up to a step of the chain.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from di_jax.engine import launch_thread
from di_jax.engine.extra_sampling import NEUTRAL, OF_REQUEST
from di_jax.engine.runner import ModelRunner
from di_jax.engine.sampling_programs import NO_SLOT
from di_jax.engine.slot_table import idle_plan
from di_jax.engine.speculative_programs import DRAFT_COLUMNS
from di_jax.engine.step_plan import (
    DEVICE_LENGTH,
    DEVICE_TOKEN,
    FREE_TOKEN,
    Bucket,
    BucketLadder,
    Chunk,
    StepPlan,
    build_plan,
)
from di_jax.engine.verification import fill
from di_jax.parallel import processes

RUNS = 5  # of every shape, after WARM_UP that do not count: the first may compile, the last tells how long chains are
WARM_UP = 2
TIMES = 5  # verify, accept, draft, and the plain steps without and with context
CHAIN_S, LONGEST_CHAIN = 0.06, 8  # seconds and steps of a chain
FASTEST = 3  # of them count: what disturbs a run only makes it slower


@dataclass(frozen=True)
class StepProfile:
    """Seconds, the same in all processes: of the slowest one."""

    forward: dict[int, float]  # by rows of a decode shape
    sampling: dict[int, float]  # by requests: accepting where nothing is verified
    drafting: dict[int, float]  # by requests
    plain: dict[int, float]  # by requests: the one program of a step without a draft, as in a long pause of drafting
    context: dict[int, float]  # by requests: the same, that also leaves the draft its context


def measure(
    runner: ModelRunner, ladder: BucketLadder, *, clock: Callable[[], float] = time.perf_counter
) -> StepProfile:
    """Times verify, accept and draft of every decode shape of `ladder` over its shortest contexts, and the plain steps.
    Collective.

    Every shape decodes as many sequences as it holds and there are slots for, from empty caches on. The shapes take
    turns, so that a machine that is slow for a while is so to all of them. Leaves the state empty
    (`ModelRunner.resets`). To be called when nothing is in the caches and all shapes are compiled. clock: seconds.
    """
    shapes = [
        ladder.bucket(True, rows, ladder.context_blocks[0], requests=requests)
        for requests in ladder.decode_rows
        for rows in ladder.verify_rows(requests)
    ]
    positions = ladder.context_blocks[0] * runner.layout.block_size

    def slowest(own: np.ndarray) -> np.ndarray:
        return processes.current().gather(own.reshape(-1), "the times of decode steps").max(axis=0).reshape(own.shape)

    try:
        with tqdm(
            total=(WARM_UP + RUNS) * len(shapes), desc="timing decode steps", unit="step", disable=None, file=sys.stderr
        ) as bar:

            def turn(steps: Sequence[int]) -> list[list[float]]:
                found = []
                for bucket, count in zip(shapes, steps, strict=True):
                    found.append(_time(runner, bucket, count, clock))
                    bar.update()
                return found

            for _ in range(WARM_UP):
                known = slowest(np.array(turn([1] * len(shapes)), np.float64))
            steps = [chain_steps(each, positions // (ladder.drafts + 1)) for each in known[:, :3].sum(axis=1)]
            runs = np.array([turn(steps) for _ in range(RUNS)], np.float64)
    finally:
        runner.reset()
    return profile_of(shapes, slowest(typical(runs)))


def chain_steps(seconds: float, room: int) -> int:
    """Steps of a chain of steps that take so long; `room` of them are within the context, one of which comes before."""
    return max(1, min(LONGEST_CHAIN, room - 1, int(CHAIN_S / max(seconds, 1e-9))))


def typical(runs: np.ndarray) -> np.ndarray:
    """Of float64 [runs, ...] the mean of the fastest."""
    fastest: np.ndarray = np.sort(runs, axis=0)[:FASTEST].mean(axis=0)
    return fastest


def profile_of(shapes: Sequence[Bucket], seconds: np.ndarray) -> StepProfile:
    """From the TIMES float64 [shapes, 5] of each shape.

    Shapes of as many rows share the longest of their times; drafting does not depend on the rows, and the mean counts.
    """
    forward: dict[int, float] = {}
    sampling: dict[int, float] = {}
    plain: dict[int, float] = {}
    context: dict[int, float] = {}
    drafting: dict[int, list[float]] = {}
    for bucket, (_, accept, draft, bare, with_context) in sorted(
        zip(shapes, seconds.tolist()), key=lambda x: x[0].rows
    ):
        sampling.setdefault(bucket.requests, accept)
        plain.setdefault(bucket.requests, bare)
        context.setdefault(bucket.requests, with_context)
        drafting.setdefault(bucket.requests, []).append(draft)
    for bucket, (verify, accept, *_) in zip(shapes, seconds.tolist(), strict=True):
        whole = verify + max(0.0, accept - sampling[bucket.requests])
        forward[bucket.rows] = max(whole, forward.get(bucket.rows, 0.0))
    return StepProfile(
        dict(sorted(forward.items())),
        dict(sorted(sampling.items())),
        {requests: sum(each) / len(each) for requests, each in sorted(drafting.items())},
        dict(sorted(plain.items())),
        dict(sorted(context.items())),
    )


def _time(runner: ModelRunner, bucket: Bucket, steps: int, clock: Callable[[], float]) -> list[float]:
    """TIMES in seconds, scaled to a chain of `steps` steps if these are several: of one step, which begins with drafts,
    so that there is what to verify; and of the plain steps of as many requests, with the shape of fewest rows.
    """
    runner.reset()  # lengths begin at 0: no shape gets to the end of its context
    ranks, layout = len(runner.local_ranks), runner.layout
    requests = min(bucket.requests, layout.num_slots)
    plans = [_plan(bucket, requests, layout.num_blocks, layout.block_size)] * ranks
    rows = [_draft_rows(bucket.requests, requests)] * ranks

    def done(result: Any) -> float:
        jax.block_until_ready((launch_thread.done(result), runner.state))  # in this order: the first tells of failures
        return clock()

    done(None)
    began = clock()
    drafted = done(runner.draft(rows))
    verification = runner.verify(plans)
    verified = done(verification)
    accepted = done(runner.accept(verification))
    times = [verified - drafted, accepted - verified, drafted - began, 0.0, 0.0]
    if steps > 1:
        start = clock()
        for _ in range(steps):
            runner.draft(rows)
            output = runner.accept(runner.verify(plans))
        chained = (done(output) - start) / steps
        times = [each * chained / (accepted - began) for each in times]
    if bucket.rows == bucket.requests:
        for at, bare in ((3, True), (4, False)):
            alone = [_plain_plan(bucket, requests, layout.num_blocks, bare)] * ranks
            start = clock()
            for _ in range(steps):
                answer = runner.execute(alone)
            times[at] = (done(answer) - start) / steps
    return times


def _plain_plan(bucket: Bucket, requests: int, num_blocks: int, bare: bool) -> StepPlan:
    """The plain step of the sequences of `_plan`."""
    width = bucket.context_blocks
    chunks = [
        Chunk((DEVICE_TOKEN,), DEVICE_LENGTH, slot, [(slot * width + n) % num_blocks for n in range(width)])
        for slot in range(requests)
    ]
    return build_plan(Bucket(True, bucket.requests, width, history=bucket.history, bare=bare), chunks)


def _plan(bucket: Bucket, requests: int, num_blocks: int, block_size: int) -> StepPlan:
    """A step that verifies as many drafts of the first slots as it has rows for. Sequences may share blocks: what is
    computed does not matter."""
    plan = idle_plan(bucket)
    view = bucket.unpack(plan.buffer)
    own = slice(0, requests)
    view["cap"][own] = bucket.drafts
    view["budget"][:] = fill(bucket.rows, view["cap"][own])
    view["slot"][own] = view["seed_low"][own] = np.arange(requests)
    view["capacity"][own] = bucket.context_blocks * block_size
    view["temperature"].view(np.float32)[own] = 1.0
    view["forced"][:] = FREE_TOKEN
    view["block_table"][own] = np.arange(requests * bucket.context_blocks).reshape(requests, -1) % num_blocks
    return plan


def _draft_rows(rows: int, requests: int) -> np.ndarray:
    """int32 [columns, rows]: drafts for the sequences of `_plan`."""
    made = np.zeros((len(DRAFT_COLUMNS), rows), np.int32)
    column = dict(zip(DRAFT_COLUMNS, made, strict=True))
    column["slot"][:] = NO_SLOT
    column["slot"][:requests] = column["seed_low"][:requests] = np.arange(requests)
    column["temperature"].view(np.float32)[:requests] = 1.0
    for name in OF_REQUEST:
        if name in column:
            column[name][:] = NEUTRAL[OF_REQUEST.index(name)]
    return made
