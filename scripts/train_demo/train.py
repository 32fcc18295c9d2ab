"""Trains the demo model on one accelerator, in stretches of a few minutes that resume where the last one ended.

python -m scripts.train_demo.train --data build/train_demo --state /tmp/state --out out --minutes 9 --total-minutes 24

--state keeps an Orbax checkpoint with the optimizer, for the next stretch on the same machine. --out gets the weights
alone, in files of at most 15 MiB, the log as JSON lines and the loss curve as PNG; --weights starts from such files on
another machine, with a fresh optimizer. Progress through the schedule is measured in minutes of training.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import Array
from tqdm import tqdm

from di_jax.model.config import ModelConfig
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from scripts.train_demo.dataset import Batches
from scripts.train_demo.forward import cross_entropy, forward
from scripts.train_demo.parameters import Params, builder, from_checkpoint, initial, load_parts, save_parts

BIAS_STEP = 0.001  # router bias: towards the mean load, by this much a step
INDEX_WEIGHT = 1.0


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the schedule: from `begin` of the progress on, batches of one shape.

    stride: one query in that many has an index loss.
    """

    begin: float
    batch: int
    length: int
    stride: int


STAGES = (
    Stage(0.0, 32, 1024, 16),
    Stage(0.5, 8, 4608, 32),  # recall over 4,096 tokens fits
)
DENSE_UNTIL = 0.2  # of the progress: dense attention, so that the indexer learns from all of the mass


def learning_rate(progress: Array, peak: float) -> Array:
    """Warm-up over 1% of the schedule, constant, then linear to 5% over the last 40%."""
    warm = jnp.minimum(progress / 0.01, 1.0)
    decay = jnp.clip((1.0 - progress) / 0.4, 0.05, 1.0)
    return peak * warm * decay


def optimizer(peak: float) -> optax.GradientTransformation:
    """AdamW on matrices, Adam on the rest; the rate is injected every step."""

    def decays(params: Params) -> dict[str, bool]:
        return {
            p: v.ndim >= 2 and not p.endswith(("norm.weight", "bias", "bias_vl", "base", "scale"))
            for p, v in params.items()
        }

    return optax.inject_hyperparams(
        lambda learning_rate: optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(learning_rate, b1=0.9, b2=0.98, eps=1e-10, weight_decay=0.02, mask=decays),
        )
    )(learning_rate=peak)


def make_step(
    config: ModelConfig, tables: EngramTables, stage: Stage, opt: optax.GradientTransformation, peak: float
) -> Any:
    """The jitted training step of a stage: (params, optimizer state, tokens [B, T+1], weights [B, T], progress)."""
    build, _ = builder(config, Numerics.training("bfloat16"), tables)

    def loss(params: Params, tokens: Array, weights: Array, dense: Array) -> tuple[Array, dict[str, Array]]:
        model = build(params, dense)
        out = forward(model, tokens[:, :-1], stage.stride)
        ce = cross_entropy(model, out.hidden, tokens[:, 1:].reshape(-1), weights.reshape(-1))
        mean = jnp.mean(out.load, axis=-1, keepdims=True)
        report = {"loss": ce, "index": out.index_loss, "load": out.load, "balance": jnp.max(out.load / mean)}
        return ce + INDEX_WEIGHT * jnp.mean(out.index_loss), report

    def step(params: Params, state: Any, tokens: Array, weights: Array, progress: Array) -> Any:
        (_, report), grads = jax.value_and_grad(loss, has_aux=True)(params, tokens, weights, progress < DENSE_UNTIL)
        state.hyperparams["learning_rate"] = learning_rate(progress, peak)
        updates, state = opt.update(grads, state, params)
        updated = optax.apply_updates(params, updates)
        load = report.pop("load")
        bias = params["layers.ffn.gate.bias"] + BIAS_STEP * jnp.sign(jnp.mean(load, -1, keepdims=True) - load)
        updated["layers.ffn.gate.bias"] = bias
        updated["layers.ffn.gate.bias_vl"] = bias  # no images here: they would route as text does
        report["gradient"] = optax.global_norm(grads)
        return updated, state, report

    return jax.jit(step, donate_argnums=(0, 1))


def compiled_step(
    config: ModelConfig,
    tables: EngramTables,
    stage: Stage,
    opt: optax.GradientTransformation,
    peak: float,
    params: Params,
    state: Any,
) -> Callable[..., Any]:
    """The executable of a stage's step."""
    began = time.monotonic()
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), (params, state))
    tokens = jax.ShapeDtypeStruct((stage.batch, stage.length + 1), jnp.int32)
    weights = jax.ShapeDtypeStruct((stage.batch, stage.length), jnp.float32)
    progress = jax.ShapeDtypeStruct((), jnp.float32)
    executable = make_step(config, tables, stage, opt, peak).lower(*abstract, tokens, weights, progress).compile()
    print(f"{stage}: compiled in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return executable


def prefetch(batches: Iterator[Any], depth: int = 4) -> Iterator[Any]:
    """`batches` made in a thread, on device before they are needed."""
    ready: queue.Queue[Any] = queue.Queue(depth)
    stop = threading.Event()

    def work() -> None:
        for batch in batches:
            item = jax.device_put((batch["tokens"], batch["weights"]))
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.5)
                    break
                except queue.Full:
                    continue
            if stop.is_set():
                return

    threading.Thread(target=work, daemon=True).start()
    try:
        while True:
            yield ready.get()
    finally:
        stop.set()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="train the demo model, one stretch")
    parser.add_argument("--data", type=Path, required=True, help="what scripts.train_demo.prepare made")
    parser.add_argument("--state", type=Path, required=True, help="checkpoint of the last stretch, with the optimizer")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, log and loss curve")
    parser.add_argument("--weights", type=Path, nargs="*", default=[], help="weight files to start from")
    parser.add_argument("--checkpoint", type=Path, help="an exported checkpoint to start from")
    parser.add_argument("--minutes", type=float, required=True, help="of this stretch, compilation included")
    parser.add_argument("--total-minutes", type=float, required=True, help="of training in the whole schedule")
    parser.add_argument("--start-progress", type=float, default=0.0, help="progress already made by the weights")
    parser.add_argument("--peak", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    config = ModelConfig.from_file(args.data / "config.json")
    tables = EngramTables.build(config, np.load(args.data / "token_map.npy"))
    _, shapes = builder(config, Numerics.training("bfloat16"), tables)
    opt = optimizer(args.peak)
    params = initial(config, shapes, args.seed)
    if args.weights:
        params = {path: jnp.asarray(value) for path, value in load_parts(args.weights).items()}
    if args.checkpoint:
        params = {path: jnp.asarray(value) for path, value in from_checkpoint(args.checkpoint, config).items()}
    state = opt.init(params)
    clock = {"step": 0, "trained_s": args.start_progress * args.total_minutes * 60}
    manager = ocp.CheckpointManager(args.state.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=1))
    if manager.latest_step() is not None:
        restored = manager.restore(
            manager.latest_step(), args=ocp.args.StandardRestore({"params": params, "state": state, "clock": clock})
        )
        params, state, clock = restored["params"], restored["state"], restored["clock"]
        clock = {"step": int(clock["step"]), "trained_s": float(clock["trained_s"])}
    log_file = args.out / "log.jsonl"
    total = args.total_minutes * 60
    deadline = began + args.minutes * 60 - 30  # the rest is for saving
    with (
        log_file.open("a", encoding="utf-8") as log,
        tqdm(total=round(total), initial=round(clock["trained_s"]), unit="s", disable=None, file=sys.stderr) as bar,
    ):
        ends = [stage.begin for stage in STAGES[1:]] + [1.0]
        todo = [(stage, end) for stage, end in zip(STAGES, ends, strict=True) if clock["trained_s"] < end * total]
        # Later stages compile while the first one trains.
        compiler = ThreadPoolExecutor(len(STAGES))
        steps = [
            compiler.submit(compiled_step, config, tables, stage, opt, args.peak, params, state) for stage, _ in todo
        ]
        for (stage, end), future in zip(todo, steps, strict=True):
            if time.monotonic() > deadline:
                break
            step = future.result()
            batches = Batches(args.data, args.seed, stage.batch, stage.length, start=clock["step"])
            params, state = run_stage(
                step, stage, prefetch(iter(batches)), params, state, clock, end * total, total, deadline, log, bar
            )
    manager.save(clock["step"], args=ocp.args.StandardSave({"params": params, "state": state, "clock": clock}))
    manager.wait_until_finished()
    save_parts(args.out, params, "weights")
    (args.out / "progress.json").write_text(json.dumps({**clock, "progress": clock["trained_s"] / total}) + "\n")
    plot(log_file, args.out / "loss.png")
    print(json.dumps(clock))
    return 0


def run_stage(
    step: Callable[..., Any],
    stage: Stage,
    batches: Iterator[Any],
    params: Params,
    state: Any,
    clock: dict[str, Any],
    end: float,
    total: float,
    deadline: float,
    log: Any,
    bar: tqdm,
) -> tuple[Params, Any]:
    """Steps of one stage until its share of the schedule or the stretch's time is used up, compilation not counted."""
    pending: list[tuple[int, dict[str, Array]]] = []
    last: float | None = None
    for tokens, weights in batches:
        progress = min(clock["trained_s"] / total, 1.0)
        params, state, report = step(params, state, tokens, weights, jnp.float32(progress))
        pending.append((clock["step"], report))
        clock["step"] += 1
        if len(pending) == 20 or last is None:
            values = [(n, jax.device_get(r)) for n, r in pending]
            pending = []
            now = time.monotonic()
            if last is not None:
                clock["trained_s"] += now - last
                bar.update(round(now - last, 2))
            speed = 0.0 if last is None else len(values) * stage.batch * stage.length / (now - last)
            last = now
            record = {
                "step": clock["step"],
                "trained_s": round(clock["trained_s"], 1),
                "length": stage.length,
                "loss": float(np.mean([v["loss"] for _, v in values])),
                "index": np.mean([v["index"] for _, v in values], axis=0).round(4).tolist(),
                "balance": float(np.mean([v["balance"] for _, v in values])),
                "gradient": float(np.mean([v["gradient"] for _, v in values])),
                "tokens_per_s": round(speed),
            }
            print(json.dumps(record), file=log, flush=True)
            bar.set_postfix(loss=f"{record['loss']:.3f}", tok_s=record["tokens_per_s"])
            if clock["trained_s"] >= end or now > deadline:
                break
    jax.block_until_ready(params)
    return params, state


def plot(log_file: Path, picture: Path) -> None:
    """The loss curve with the stages' lengths."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in log_file.read_text(encoding="utf-8").splitlines()]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 2))
    for length in sorted({r["length"] for r in records}):
        part = [r for r in records if r["length"] == length]
        top.plot([r["trained_s"] / 60 for r in part], [r["loss"] for r in part], label=f"{length} tokens")
    bottom.plot([r["trained_s"] / 60 for r in records], [np.mean(r["index"]) for r in records], color="tab:green")
    top.set(ylabel="weighted loss, nats")
    top.legend()
    bottom.set(ylabel="index KL, nats", xlabel="minutes of training")
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
