"""The device side of the engine: compiled steps over buckets, the donated state, and nothing of scheduling."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from tqdm import tqdm

from di_jax.engine.sampler import sample
from di_jax.engine.step_plan import Bucket, StepPlan
from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.rows import make_rows
from di_jax.model.transformer import LayerTrace, Transformer

logger = logging.getLogger(__name__)

TOKENS, LOGITS, TRACE = "tokens", "logits", "trace"
# XLA's lowering recurses deeper than the 8 MB default stack of a thread on large models.
COMPILE_STACK_BYTES = 64 * 2**20


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """Small results of a step, still on device; `host()` waits for them."""

    token: Array  # int32 [S]
    logprob: Array  # fp32 [S]
    logits: Array | None  # fp32 [T, V] when asked for
    trace: list[LayerTrace] | None

    def host(self) -> StepOutput:
        """The same with NumPy arrays."""
        return jax.device_get(self)


def step(
    graph: Any, layout: CacheLayout, bucket: Bucket, outputs: str, params: Any, state: EngineState, buffer: Array
) -> tuple[StepOutput, EngineState]:
    """One step of the model: forward, head and sampling. Traced once per (bucket, outputs)."""
    model: Transformer = nnx.merge(graph, params)
    plan = bucket.unpack(buffer)
    token, slot = plan["token"], plan["slot"]
    if bucket.decode:
        token = jnp.where(token < 0, state.last_token[slot], token)
    rows = make_rows(
        token,
        plan["tile_sequence"],
        plan["start"],
        plan["first_row"],
        plan["count"],
        slot,
        plan["block_table"],
        decode=bucket.decode,
    )
    hidden, state, trace = model(rows, state, layout, trace=outputs == TRACE)
    last = jnp.clip(plan["first_row"] + plan["count"] - 1, 0, bucket.rows - 1)
    logits = model.logits(hidden if outputs != TOKENS else hidden[last])
    chosen, logprob = sample(
        logits if outputs == TOKENS else logits[last],
        jax.lax.bitcast_convert_type(plan["temperature"], jnp.float32),
        plan["seed_low"],
        plan["seed_high"],
        plan["output_index"],
        plan["forced"],
    )
    # Sequences that are not sampled (chunks before the last, padding) leave their slot alone.
    target = jnp.where((plan["sample"] > 0) & (plan["count"] > 0), slot, layout.num_slots)
    state = state.replace(last_token=state.last_token.at[target].set(chosen, mode="drop"))
    return (
        StepOutput(chosen, logprob, None if outputs == TOKENS else logits, trace if outputs == TRACE else None),
        state,
    )


class ModelRunner:
    """Runs step plans. Owns the weights and the state; every step donates the state and replaces it.

    resets: how often the state was emptied because a step did not finish. Whoever sees it change has to give up the
    sequences that it had in the caches.
    """

    def __init__(self, model: Transformer, layout: CacheLayout) -> None:
        self.layout = layout
        self.graph, self.params = nnx.split(model)
        self.state = layout.allocate()
        self.resets = 0
        self._compiled: dict[tuple[Bucket, str], Any] = {}
        self._lock = threading.Lock()

    def lower(self, bucket: Bucket, outputs: str = TOKENS) -> Any:
        """The step of a bucket, lowered but not compiled."""

        def abstract(tree: Any) -> Any:
            return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)

        program = jax.jit(partial(step, self.graph, self.layout, bucket, outputs), donate_argnums=1)
        buffer = jax.ShapeDtypeStruct((bucket.size,), jnp.int32)
        return program.lower(abstract(self.params), abstract(self.state), buffer)

    def compiled(self, bucket: Bucket, outputs: str = TOKENS) -> Any:
        """The executable of a bucket, compiled at first use."""
        executable = self._compiled.get((bucket, outputs))
        if executable is None:
            executable = self.lower(bucket, outputs).compile()
            with self._lock:
                self._compiled[bucket, outputs] = executable
        return executable

    def warm_up(self, buckets: Iterable[Bucket], outputs: str = TOKENS, *, workers: int = 2) -> None:
        """Compiles every bucket ahead of time, in threads, with a progress bar.

        An error or an interrupt drops what no thread has begun and is raised at once; XLA cannot be stopped inside a
        compilation, so those in flight end in the background and keep the process until then.
        """
        todo = [b for b in buckets if (b, outputs) not in self._compiled]
        if not todo:
            return
        logger.info("compiling %d step shapes, %d at a time", len(todo), workers)
        previous = threading.stack_size(COMPILE_STACK_BYTES)
        pool = ThreadPoolExecutor(workers)
        try:
            with tqdm(total=len(todo), desc="compiling", unit="step", disable=None, file=sys.stderr) as bar:
                for future in as_completed([pool.submit(self.compiled, bucket, outputs) for bucket in todo]):
                    future.result()
                    bar.update()
        except BaseException:
            logger.warning("warm-up was cut short: the steps in flight (%d at most) are compiled to the end", workers)
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            threading.stack_size(previous)

    def execute(self, plan: StepPlan, outputs: str = TOKENS) -> StepOutput:
        """Launches a step and returns at once; its results are on device until `StepOutput.host`.

        When it is cut short after the state was donated, the error goes on up and the state is empty (`resets`).
        """
        executable = self.compiled(plan.bucket, outputs)
        try:
            output, self.state = executable(self.params, self.state, np.ascontiguousarray(plan.buffer))
        except BaseException:
            # An interrupt may fall between the donation and the assignment: the old state is gone, the new one lost.
            self.repair()
            raise
        return output

    def repair(self) -> None:
        """Empties the state if a step took it and gave none back."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
            self.reset()

    def reset(self) -> None:
        """Empties the state. For when it may hold the result of a failed step; nothing in it survives."""
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()  # before the new ones are made: the device need not hold both
        self.state = self.layout.allocate()
        self.resets += 1
