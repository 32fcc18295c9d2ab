"""The training step of the demo model: optimizer, loss with the indexer's own, router bias, and its executable."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from di_jax.model.config import ModelConfig
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from scripts.train_demo.curriculum import Stage
from scripts.train_demo.dataset import loss_weights
from scripts.train_demo.forward import cross_entropy, forward
from scripts.train_demo.parameters import Params, builder
from scripts.train_demo.tasks import RECALL

BIAS_STEP = 0.001  # router bias: towards the mean load, by this much a step
INDEX_WEIGHT = 1.0
TRACING = threading.Lock()  # Python traces one step after the other, the first stage's first; XLA compiles side by side


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


def sample_positions(classes: Array, stride: int) -> Array:
    """The queries of the index loss, int32 [B, T / stride]: half of them spaced evenly, half where a value is recalled.

    classes [B, T] of the predicted tokens. Rows without recall are sampled at arbitrary positions instead.
    """
    batch, length = classes.shape
    half = length // stride // 2
    even = jnp.broadcast_to(jnp.arange(2 * stride - 1, length, 2 * stride, dtype=jnp.int32), (batch, half))
    spread = (jnp.arange(length) * 0.6180339887) % 1.0  # an order that favours no part of the row
    _, chosen = lax.top_k((classes >= RECALL) + spread, half)
    return jnp.concatenate([even, chosen.astype(jnp.int32)], axis=1)


def balanced(bias: Array, load: Array) -> Array:
    """The router's bias fp32 [L, E] after a step that gave load [L, E] rows to the experts: down by BIAS_STEP where
    that is more than the layer's mean, up where it is less."""
    return bias + BIAS_STEP * jnp.sign(jnp.mean(load, -1, keepdims=True) - load)


def make_step(config: ModelConfig, tables: EngramTables, stage: Stage, opt: optax.GradientTransformation) -> Any:
    """The jitted training step of a stage: (params, optimizer state, tokens [B, T+1], classes [B, T], rate, exact).

    exact: bool scalar, whether the loss is that of the masters as they are.
    """
    build, _ = builder(config, Numerics.training("bfloat16"), tables, dense=stage.dense)
    weights = jnp.asarray(loss_weights())

    def loss(params: Params, tokens: Array, classes: Array, exact: Array) -> tuple[Array, dict[str, Array]]:
        model = build(params, exact)
        sample = sample_positions(classes, stage.stride)
        out = forward(model, tokens[:, :-1], sample)
        ce, sums = cross_entropy(model, out.hidden, tokens[:, 1:].reshape(-1), classes.reshape(-1), weights)
        recalls = jnp.take_along_axis(classes, sample, axis=1) >= RECALL
        mean = jnp.mean(out.load, axis=-1, keepdims=True)
        report = {
            "loss": ce,
            "classes": sums,
            "index": out.index_loss,
            "covered": jnp.mean(out.covered, axis=(1, 2)),
            "covered_recall": jnp.sum(out.covered * recalls, axis=(1, 2)) / jnp.maximum(jnp.sum(recalls), 1),
            "load": out.load,
            "balance": jnp.max(out.load / mean),
        }
        return ce + INDEX_WEIGHT * jnp.mean(out.index_loss), report

    def step(params: Params, state: Any, tokens: Array, classes: Array, rate: Array, exact: Array) -> Any:
        (_, report), grads = jax.value_and_grad(loss, has_aux=True)(params, tokens, classes, exact)
        state.hyperparams["learning_rate"] = rate
        updates, state = opt.update(grads, state, params)
        updated = optax.apply_updates(params, updates)
        load = report.pop("load")
        bias = balanced(params["layers.ffn.gate.bias"], load)
        updated["layers.ffn.gate.bias"] = bias
        updated["layers.ffn.gate.bias_vl"] = bias  # no images here: they would route as text does
        report["gradient"] = optax.global_norm(grads)
        return updated, state, report

    return jax.jit(step, donate_argnums=(0, 1))


def compiled_step(
    config: ModelConfig, tables: EngramTables, stage: Stage, opt: optax.GradientTransformation, params: Params
) -> Callable[..., Any]:
    """The executable of a stage's step."""
    began = time.monotonic()
    state = jax.eval_shape(opt.init, params)
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), (params, state))
    tokens = jax.ShapeDtypeStruct((stage.batch, stage.length + 1), jnp.int32)
    classes = jax.ShapeDtypeStruct((stage.batch, stage.length), jnp.uint8)
    rate, exact = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.bool_)
    with TRACING:
        lowered = make_step(config, tables, stage, opt).lower(*abstract, tokens, classes, rate, exact)
    executable = lowered.compile()
    memory = executable.memory_analysis().temp_size_in_bytes / 2**30
    took = time.monotonic() - began
    print(f"{stage.name}: compiled in {took:.0f} s, {memory:.1f} GiB of temporaries", file=sys.stderr, flush=True)
    return executable
