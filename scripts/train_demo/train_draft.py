"""Trains the three DSpark stages on the frozen demo model (dspark 1.5): cross entropy, total variation, confidence.

python -m scripts.train_demo.train_draft --data build/train_demo --target out/weights-*.npz --out out --minutes 5

At anchors all over a text the draft sees what it would see while decoding: the target's taps before the anchor, the
anchor, and noise. Its five rows are compared with the target's own distributions, teacher-forced on the text.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array, lax
from tqdm import tqdm

from di_jax.model.config import ModelConfig
from di_jax.model.dspark import LEAF_PREFIX, DraftContext, DraftModel
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from di_jax.model.transformer import Transformer
from scripts.train_demo.curriculum import Rate
from scripts.train_demo.dataset import Batches
from scripts.train_demo.forward import forward
from scripts.train_demo.parameters import (
    TRAINING_KERNELS,
    Params,
    builder,
    from_checkpoint,
    initial,
    load_parts,
    save_parts,
)
from scripts.train_demo.train import optimizer, prefetch

CROSS_ENTROPY, TOTAL_VARIATION, CONFIDENCE = 0.1, 0.9, 1.0  # weights of the losses, dspark 1.5
BATCH, LENGTH = 32, 1024
STRIDE = 8  # an anchor every so many tokens: the frozen pass costs most, so that each is used for many


def draft_builder(config: ModelConfig, numerics: Numerics) -> tuple[Callable[[Params], DraftModel], dict[str, Any]]:
    """(function from parameters, without the checkpoint's prefix, to the draft; shapes by path)."""
    model = nnx.eval_shape(lambda: DraftModel(config, numerics, TRAINING_KERNELS))
    graph = nnx.graphdef(model)
    flat = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}

    def build(params: Params) -> DraftModel:
        return nnx.merge(graph, nnx.from_flat_state({p: leaf.replace(params[n]) for n, (p, leaf) in flat.items()}))

    return build, {name: leaf.get_value().shape for name, (_, leaf) in flat.items()}


def anchors(length: int, block: int, offset: Array) -> Array:
    """Positions int32 [A] of the anchors of a row of `length` tokens: STRIDE apart, from `offset` + 1 on."""
    return offset + 1 + STRIDE * jnp.arange((length - block - STRIDE) // STRIDE, dtype=jnp.int32)


def blocks(
    draft: DraftModel, target: Transformer, tokens: Array, hidden: Array, taps: Array, offset: Array
) -> dict[str, Array]:
    """Draft and target at every anchor, teacher-forced. tokens [B, T + 1]; hidden [B * T, D] and taps of the target.

    Returns log_q, log_p fp32 [A, 5, V], next int32 [A, 5] and score fp32 [A, 5] for the A anchors of all rows.
    """
    c, block = draft.config, draft.config.draft_block
    batch, length = tokens.shape[0], tokens.shape[1] - 1
    in_row = anchors(length, block, offset)
    start = jnp.tile(in_row, batch)
    row = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), len(in_row))
    position = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
    kv = draft.context_kv(taps, position).reshape(c.num_nextn_predict_layers, batch, length, -1)
    window = start[:, None] - c.sliding_window + jnp.arange(c.sliding_window, dtype=jnp.int32)
    keys = kv[:, row[:, None], jnp.maximum(window, 0)]
    context = DraftContext(jnp.where((window >= 0)[..., None], keys, 0), window >= 0)
    ahead = start[:, None] + jnp.arange(block, dtype=jnp.int32)
    previous, following = tokens[row[:, None], ahead], tokens[row[:, None], ahead + 1]
    h = draft.hidden(target, previous[:, 0], start, context)
    embedded = draft.markov_head.embedding(previous)
    logits = draft.base_logits(target, h) + draft.markov_head.bias(embedded)
    seen = hidden.reshape(batch, length, -1)[row[:, None], ahead]
    own = target.logits(seen.reshape(-1, seen.shape[-1])).reshape(logits.shape)
    return {
        "log_q": jax.nn.log_softmax(logits),
        "log_p": lax.stop_gradient(jax.nn.log_softmax(own)),
        "next": following,
        "score": draft.confidence_head(h, embedded),
    }


def losses(found: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
    """The published loss and its parts; `accepted` is the mean number of accepted drafts, sum of the survivals."""
    block = found["score"].shape[1]
    weight = jnp.exp(-jnp.arange(block) / block)
    variation = 0.5 * jnp.sum(jnp.abs(jnp.exp(found["log_q"]) - jnp.exp(found["log_p"])), axis=-1)
    entropy = -jnp.take_along_axis(found["log_q"], found["next"][..., None], axis=-1)[..., 0]
    acceptance = lax.stop_gradient(1.0 - variation)
    confidence = optax.sigmoid_binary_cross_entropy(found["score"], acceptance)
    total = jnp.mean(weight * (CROSS_ENTROPY * entropy + TOTAL_VARIATION * variation + CONFIDENCE * confidence))
    report = {
        "entropy": jnp.mean(entropy),
        "variation": jnp.mean(variation, axis=0),
        "confidence": jnp.mean(confidence),
        "accepted": jnp.mean(jnp.sum(jnp.cumprod(acceptance, axis=1), axis=1)),
    }
    return total, report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="train the draft of the demo model")
    parser.add_argument("--data", type=Path, required=True)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--target", type=Path, nargs="+", help="weight files of the trained model")
    target.add_argument("--checkpoint", type=Path, help="an exported checkpoint of it; its draft is where to start")
    parser.add_argument("--draft", type=Path, nargs="*", default=[], help="weight files of a draft to start from")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True, help="compilation included")
    parser.add_argument("--peak", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=BATCH, help="rows of a step; few on a CPU")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    args = parser.parse_args(arguments)
    began, limit = time.monotonic(), args.minutes * 60 - 20
    config = ModelConfig.from_file(args.data / "config.json")
    tables = EngramTables.build(config, np.load(args.data / "token_map.npy"))
    numerics = Numerics.training(args.dtype)
    build_target, _ = builder(config, numerics, tables)
    build_draft, shapes = draft_builder(config, numerics)

    def loaded(found: dict[str, np.ndarray], prefix: str = "") -> Params:
        return {path.removeprefix(prefix): jnp.asarray(value) for path, value in found.items()}

    if args.checkpoint:
        frozen = loaded(from_checkpoint(args.checkpoint, config))
        params = loaded(from_checkpoint(args.checkpoint, config, draft=True), LEAF_PREFIX)
    else:
        frozen, params = loaded(load_parts(args.target)), initial(config, shapes, seed=1)
    if args.draft:
        params = loaded(load_parts(args.draft), LEAF_PREFIX)
    opt = optimizer(args.peak)
    state = opt.init(params)

    def loss(params: Params, frozen: Params, tokens: Array, offset: Array) -> tuple[Array, dict[str, Array]]:
        target = build_target(frozen)
        out = forward(target, tokens[:, :-1], None)
        hidden, taps = lax.stop_gradient((out.hidden, out.taps))
        return losses(blocks(build_draft(params), target, tokens, hidden, taps, offset))

    def step(params: Params, state: Any, frozen: Params, tokens: Array, offset: Array, rate: Array) -> Any:
        (_, report), grads = jax.value_and_grad(loss, has_aux=True)(params, frozen, tokens, offset)
        state.hyperparams["learning_rate"] = rate
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state, report

    run = jax.jit(step, donate_argnums=(0, 1))
    rng = np.random.default_rng(2)
    first: float | None = None
    number, reports = 0, []
    with (
        (args.out / "draft_log.jsonl").open("a", encoding="utf-8") as log,
        tqdm(unit="step", disable=None, file=sys.stderr) as bar,
    ):
        for tokens, _ in prefetch(iter(Batches(args.data, 7, args.batch, LENGTH))):
            now = time.monotonic()
            minutes = 0.0 if first is None else (now - first) / 60
            total = args.minutes if first is None else (began + limit - first) / 60
            rate = Rate(args.peak, 0.4 * total, total).at(minutes, number)
            offset = jnp.int32(rng.integers(0, STRIDE))
            params, state, report = run(params, state, frozen, tokens, offset, jnp.float32(rate))
            number += 1
            reports.append(report)
            if len(reports) == 20 or first is None:
                values = jax.device_get(reports)
                reports = []
                first = time.monotonic() if first is None else first
                record = {
                    "step": number,
                    "seconds": round(time.monotonic() - first, 1),
                    **{k: np.mean([v[k] for v in values], axis=0).round(4).tolist() for k in values[0]},
                }
                print(json.dumps(record), file=log, flush=True)
                bar.update(len(values))
                bar.set_postfix(accepted=record["accepted"])
                if time.monotonic() > began + limit:
                    break
    save_parts(args.out, {LEAF_PREFIX + path: value for path, value in params.items()}, "draft")
    print(json.dumps({"steps": number, "accepted": record["accepted"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
