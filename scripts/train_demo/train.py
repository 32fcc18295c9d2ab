"""Trains the demo model on one accelerator, in stretches of a few minutes that resume where the last one ended.

python -m scripts.train_demo.train --data build/train_demo --state /tmp/state --out out --minutes 9 --total-minutes 24

--state keeps an Orbax checkpoint with the optimizer, for the next stretch on the same machine. --out gets the weights
alone, in files of at most 15 MiB, the log as JSON lines and the curves as PNG: where there is no state, on another
machine, training goes on from these with a fresh optimizer. --weights or --checkpoint begin with the weights of another
training. Time is counted in minutes of training, compilation aside.

SIGINT (Ctrl-C) or SIGTERM end a stretch after the step that runs, with all of this saved. Nothing can be saved from a
SIGKILL: for it --state is kept every two minutes of training.

--stages names the curriculum: a stage ends when recall beyond the window has been learned, or after its minutes. The
indexer can only learn to select what attention looks at, so recall has to be learned with dense attention first.

--exact-every N lets every N-th step see the float32 masters as they are, all others what the checkpoint's formats hold
of them. Trained on quantized values alone, masters are no model by themselves: they ended 7% to 12% worse than their
export. A random part of the weights, quantized anew in each step, does the like in Fan et al. 2020, "Training with
Quantization Noise for Extreme Model Compression". The steps' masters are rounded once, to bfloat16, where they are
multiplied by.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from di_jax.model.config import ModelConfig
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from scripts import command_line
from scripts.train_demo.curriculum import LEARNED, Clock, Rate, Stage, curriculum, plan_of
from scripts.train_demo.dataset import Batches, Data
from scripts.train_demo.identity import tokenizer_mismatch
from scripts.train_demo.options import COUNT, POSITIVE, ROW_LENGTH, SEED, WEIGHT
from scripts.train_demo.parameters import Params, builder, from_checkpoint, initial, load_parts
from scripts.train_demo.state import State, cut_log, leave, travelled
from scripts.train_demo.step import compiled_step, optimizer
from scripts.train_demo.stopping import Stop, stopping
from scripts.train_demo.tasks import CLASSES, RECALL
from scripts.train_demo.train_report import kernel_table, plot

LOGGED_EVERY = 20  # steps
KEPT_EVERY = 120.0  # seconds of training between two savings of the state
PROFILED = (30, 3)  # steps before the trace and in it


def prefetch(batches: Iterator[Any], depth: int = 4) -> Generator[Any, None, None]:
    """`batches` made in a thread, on device before they are needed. The thread ends when the iterator is closed."""
    ready: queue.Queue[Any] = queue.Queue(depth)
    stop = threading.Event()

    def work() -> None:
        for batch in batches:
            item = jax.device_put((batch["tokens"], batch["classes"]))
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.5)
                    break
                except queue.Full:
                    continue
            if stop.is_set():
                return

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            yield ready.get()
    finally:
        stop.set()
        thread.join()  # a thread still inside JAX when the interpreter ends aborts the process


def by_kind(sums: np.ndarray) -> dict[str, dict[str, float]]:
    """fp32 [C, 3] sums of loss, hits and tokens by class -> mean loss, accuracy and tokens of every class that occurs,
    and of all recalled values beyond the window as `recall_far`."""
    rows = {name: sums[i] for i, name in enumerate(CLASSES)}
    rows["recall_far"] = sums[RECALL + 1 :].sum(axis=0)
    return {
        name: {"loss": round(float(loss / n), 4), "right": round(float(hits / n), 4), "tokens": int(n)}
        for name, (loss, hits, n) in rows.items()
        if n > 0
    }


def by_form(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean loss of the steps that saw quantized weights, and of those that saw the masters; of what there were."""
    found = {
        name: [float(report["loss"]) for report in reports if bool(report["exact"]) is exact]
        for name, exact in (("quantized", False), ("masters", True))
    }
    return {name: round(float(np.mean(losses)), 4) for name, losses in found.items() if losses}


class Stretch:
    """One call: trains until the plan, the schedule or the time is used up or it is stopped, and keeps the log.

    keep: saves weights and optimizer; called every KEPT_EVERY seconds of training.
    """

    def __init__(
        self,
        clock: Clock,
        rate: Rate,
        deadline: float,
        log_file: Path,
        profile: Path | None = None,
        exact_every: int = 0,
        stop: Stop | None = None,
        keep: Callable[[Params, Any], None] | None = None,
    ) -> None:
        self.clock, self.rate, self.deadline, self.log_file, self.profile = clock, rate, deadline, log_file, profile
        self.exact_every, self.keep = exact_every, keep
        self.stop = Stop() if stop is None else stop
        self.kept_s = clock.trained_s  # when the state was saved last

    def over(self) -> bool:
        return time.monotonic() > self.deadline or self.clock.trained_s >= 60 * self.rate.total

    def run(
        self, stage: Stage, seconds: float, step: Callable[..., Any], batches: Iterator[Any], params: Params, state: Any
    ) -> tuple[Params, Any]:
        """Steps of one stage until it has been learned, its seconds, the schedule or the time are used up, or it is
        stopped."""
        clock = self.clock
        clock.enter(stage)
        pending: list[dict[str, Any]] = []
        last: float | None = None
        done = 0
        with (
            self.log_file.open("a", encoding="utf-8") as log,
            tqdm(desc=stage.name, unit="step", disable=None, file=sys.stderr) as bar,
        ):
            for tokens, classes in batches:
                if self.profile is not None and done == PROFILED[0]:
                    params, state = self._profiled(stage, step, batches, params, state)
                    last = None  # its time is not training time
                rate = self._rate()
                params, state, report = self._step(step, params, state, tokens, classes)
                pending.append(report)
                done += 1
                stopped = bool(self.stop)  # as of this step, which is then logged
                if len(pending) < LOGGED_EVERY and last is not None and not stopped:
                    continue
                values = jax.device_get(pending)
                now = time.monotonic()
                elapsed = 0.0 if last is None else now - last
                speed = len(pending) * stage.batch * stage.length / elapsed if last is not None else 0.0
                pending, last = [], now
                clock.trained_s, clock.stage_s = clock.trained_s + elapsed, clock.stage_s + elapsed
                record = {
                    "step": clock.step,
                    "trained_s": round(clock.trained_s, 1),
                    "stage": stage.name,
                    "length": stage.length,
                    "rate": rate,
                    "loss": round(float(np.mean([v["loss"] for v in values])), 4),
                    "exact_every": self.exact_every,
                    "loss_of": by_form(values),
                    "kinds": by_kind(np.sum([v["classes"] for v in values], axis=0)),
                    **{
                        name: np.mean([v[name] for v in values], axis=0).astype(float).round(4).tolist()
                        for name in ("index", "covered", "covered_recall", "balance", "gradient")
                    },
                    "tokens_per_s": round(speed),
                }
                clock.recall = record["kinds"].get("recall_far", {"right": clock.recall})["right"]
                print(json.dumps(record), file=log, flush=True)
                bar.update(len(values))
                bar.set_postfix(loss=record["loss"], recall=clock.recall, tok_s=record["tokens_per_s"])
                if clock.stage_s >= seconds or (math.isfinite(seconds) and clock.recall >= LEARNED):
                    clock.stage_done = True
                    break
                if stopped or self.over():
                    break
                if self.keep is not None and clock.trained_s - self.kept_s >= KEPT_EVERY:
                    self.keep(params, state)
                    self.kept_s, last = clock.trained_s, time.monotonic()  # saving is not training time
        jax.block_until_ready(params)
        return params, state

    def _rate(self) -> float:
        """Of the step that comes."""
        return self.rate.at(self.clock.trained_s / 60, self.clock.optimizer_steps)

    def _step(
        self, step: Callable[..., Any], params: Params, state: Any, tokens: Array, classes: Array
    ) -> tuple[Params, Any, dict[str, Any]]:
        """One step, counted by the clock. Its report says as `exact` whether it saw the masters as they are."""
        clock = self.clock
        exact = self.exact_every > 0 and (clock.step + 1) % self.exact_every == 0
        params, state, report = step(params, state, tokens, classes, jnp.float32(self._rate()), jnp.bool_(exact))
        clock.step, clock.optimizer_steps = clock.step + 1, clock.optimizer_steps + 1
        return params, state, report | {"exact": exact}

    def _profiled(
        self, stage: Stage, step: Callable[..., Any], batches: Iterator[Any], params: Params, state: Any
    ) -> tuple[Params, Any]:
        """A few steps in a trace that ui.perfetto.dev reads: `trace-STAGE.json.gz`."""
        assert self.profile is not None
        with tempfile.TemporaryDirectory() as folder:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level, options.host_tracer_level = 0, 1
            jax.block_until_ready(params)
            jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)
            for _ in range(PROFILED[1]):
                params, state, _ = self._step(step, params, state, *next(batches))
            jax.block_until_ready(params)
            jax.profiler.stop_trace()
            self.profile.mkdir(parents=True, exist_ok=True)
            found = next(Path(folder).rglob("perfetto_trace.json.gz"))
            shutil.copy(found, self.profile / f"trace-{stage.name}.json.gz")
        (self.profile / f"kernels-{stage.name}.txt").write_text(
            kernel_table(self.profile / f"trace-{stage.name}.json.gz")
        )
        self.profile = None
        return params, state


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_demo.train", description="train the demo model, one stretch"
    )
    parser.add_argument("--data", type=Path, required=True, help="what scripts.train_demo.prepare made")
    parser.add_argument("--state", type=Path, required=True, help="checkpoint of the last stretch, with the optimizer")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, log and curves")
    parser.add_argument("--weights", type=Path, nargs="*", default=[], help="weight files to start from")
    parser.add_argument("--checkpoint", type=Path, help="an exported checkpoint to start from")
    parser.add_argument("--stages", nargs="+", default=["dense:5", "sparse:1.5", "long"], metavar="NAME[:MINUTES]")
    parser.add_argument("--minutes", type=POSITIVE, required=True, help="of this stretch, compilation included")
    parser.add_argument("--total-minutes", type=POSITIVE, required=True, help="of training in the whole schedule")
    parser.add_argument("--decay-from", type=WEIGHT, help="minute of training; by default at 60%% of the schedule")
    parser.add_argument("--peak", type=POSITIVE, default=2e-3, help="peak learning rate")
    parser.add_argument(
        "--exact-every", type=int, default=0, metavar="N", help="each N-th step sees the masters; 0: none"
    )
    parser.add_argument("--rows", type=COUNT, help="of a step, for a trial on a CPU; default: as the stage has them")
    parser.add_argument("--row-length", type=ROW_LENGTH, help="tokens of a row, likewise; a multiple of 128")
    parser.add_argument("--seed", type=SEED, default=0)
    parser.add_argument("--profile", type=Path, help="folder for a trace of the first stage")
    args = parser.parse_args(arguments)
    if args.exact_every < 0:
        parser.error(f"--exact-every {args.exact_every}: a number of steps, or 0 for quantized weights in all")
    if args.checkpoint and (why := tokenizer_mismatch(args.data, args.checkpoint)):
        parser.error(f"--checkpoint {args.checkpoint}: {why}")
    try:
        plan = plan_of(args.stages, args.rows, args.row_length)
    except ValueError as error:
        parser.error(str(error))
    with stopping() as stop:
        return train(args, plan, stop)


def train(args: argparse.Namespace, plan: list[tuple[Stage, float]], stop: Stop) -> int:
    """One stretch with the options of `main`; its status."""
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    config = ModelConfig.from_file(args.data / "config.json")
    tables = EngramTables.build(config, np.load(args.data / "token_map.npy"))
    _, shapes = builder(config, Numerics.training("bfloat16"), tables)
    opt = optimizer(args.peak)
    kept = State(args.state)
    template = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}
    if (found := kept.restore({"weights": template, "optimizer": jax.eval_shape(opt.init, template)})) is not None:
        (params, state), clock = found[0].values(), found[1]
    else:
        weights, clock = travelled(args.out, "weights") or (None, Clock())
        if weights is None and args.weights:
            weights = load_parts(args.weights)
        elif weights is None and args.checkpoint:
            weights = from_checkpoint(args.checkpoint, config)
        if weights is None:
            params = initial(config, shapes, args.seed)
        else:
            params = {path: jnp.asarray(value) for path, value in weights.items()}
        state = opt.init(params)

    def keep(params: Params, state: Any) -> None:
        kept.save({"weights": params, "optimizer": state}, clock)

    rate = Rate(
        args.peak, args.decay_from if args.decay_from is not None else 0.6 * args.total_minutes, args.total_minutes
    )
    deadline = began + args.minutes * 60 - 30  # the rest is for saving
    log_file = args.out / "log.jsonl"
    cut_log(log_file, clock.step)
    stretch = Stretch(clock, rate, deadline, log_file, args.profile, args.exact_every, stop, keep)
    data = Data(args.data)
    todo, start = clock.remaining(plan), clock.step
    if stop:
        return stop.status("before the first step, nothing to save")
    # Later stages compile while the first one trains.
    with ThreadPoolExecutor(max(1, len(todo))) as compiler:
        steps: list[Future[Callable[..., Any]]] = [
            compiler.submit(compiled_step, config, tables, stage, opt, params) for stage, _ in todo
        ]
        for (stage, seconds), future in zip(todo, steps, strict=True):
            if stretch.over() and clock.step > start:  # a call makes a step at least
                break
            while not stop and not future.done():
                wait([future], timeout=0.2)
            if stop:
                break
            mix = lambda _, stage=stage: curriculum(stage, clock.recall)  # noqa: E731
            made = Batches(data, args.seed, stage.batch, stage.length, mix, start=clock.step)
            with contextlib.closing(prefetch(iter(made))) as batches:
                params, state = stretch.run(stage, seconds, future.result(), batches, params, state)
        # All is on disk before what still compiles is waited for, which cannot be cancelled.
        if stop and clock.step == start:
            return stop.status("before the first step, nothing to save")
        clock.done = clock.trained_s >= 60 * args.total_minutes or not clock.remaining(plan)
        keep(params, state)
        leave(args.out, "weights", params, clock)
        status = stop.status(f"step {clock.step} is saved in {args.state} and {args.out}")
    plot(log_file, args.out / "loss.png")
    print(json.dumps(dataclasses.asdict(clock)))
    return status


if __name__ == "__main__":
    sys.exit(command_line.run(main))
