"""Trains the three DSpark stages on the frozen demo model (dspark 1.5): cross entropy, total variation, confidence.

python -m scripts.train_demo.train_draft --data DATA --target weights-?.npz --state STATE --out OUT --minutes 9

At anchors all over a text the draft sees what it would see while decoding: the target's taps before the anchor, the
anchor, and noise. Its five rows are compared with the target's own distributions, teacher-forced on the text. Blocks
that begin in a prompt and drafts behind an end token do not count: decoding makes none.

By default the losses are the published ones. --soft takes the cross entropy to the target's distribution, and --length
adds the expected number of accepted drafts itself. --drawn lets the target write a share of the text anew: it knows
the training text by heart, so that its entropy there is 2.89 nats and 3.17 on held-out text; with 10% and 30% of the
tokens drawn it is 3.01 and 3.24. The weights that are saved, and judged on held-out rows, are an average over steps.

--state keeps weights, average and optimizer for the next stretch on the same machine; where there is none, on another
machine, training goes on from what --out holds, and the log counts up its `stretch`: the optimizer is fresh.
--total-minutes is the whole schedule's, by default one stretch. SIGINT (Ctrl-C) or SIGTERM end a stretch after the step
that runs, with all of this saved; so it is at each judgement, for the case of a SIGKILL.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from tqdm import tqdm

from di_jax.model.config import ModelConfig
from di_jax.model.dspark import LEAF_PREFIX, DraftContext, DraftModel
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from di_jax.model.transformer import Transformer
from scripts import command_line
from scripts.train_demo.curriculum import Clock, Rate
from scripts.train_demo.dataset import Batches, Data
from scripts.train_demo.forward import forward
from scripts.train_demo.options import COUNT, POSITIVE, ROW_LENGTH, SHARE, WEIGHT
from scripts.train_demo.parameters import (
    TRAINING_KERNELS,
    Build,
    Params,
    build_from,
    builder,
    from_checkpoint,
    initial,
    load_parts,
)
from scripts.train_demo.state import State, cut_log, leave, travelled
from scripts.train_demo.step import optimizer
from scripts.train_demo.stopping import Stop, stopping
from scripts.train_demo.tasks import IGNORE, PROMPT, TEXT
from scripts.train_demo.tokenizer import EOS_ID
from scripts.train_demo.train import LOGGED_EVERY, prefetch

CROSS_ENTROPY, TOTAL_VARIATION, CONFIDENCE = 0.1, 0.9, 1.0  # weights of the losses, dspark 1.5
BATCH, LENGTH = 32, 1024
STRIDE = 8  # an anchor every so many tokens: the frozen pass costs most, so that each is used for many
AVERAGED = 0.998  # of the averaged weights that a step keeps: they span some 500 steps
RESERVE_S = 20  # of the minutes, for the last judgement and for saving
HELD_OUT_SEED = 3  # of the rows that training is judged by; the evaluation's are others


def draft_builder(config: ModelConfig, numerics: Numerics) -> tuple[Build[DraftModel], dict[str, tuple[int, ...]]]:
    """`build_from` for the draft; paths are without the checkpoint's prefix."""
    return build_from(lambda config: DraftModel(config, numerics, TRAINING_KERNELS), config)


def anchors(length: int, block: int, offset: Array, stride: int = STRIDE) -> Array:
    """Positions int32 [A] of the anchors of a row of `length` tokens: `stride` apart, from `offset` + 1 on."""
    return offset + 1 + stride * jnp.arange((length - block - stride) // stride, dtype=jnp.int32)


def counted(tokens: Array, classes: Array, block: int, offset: Array, stride: int = STRIDE) -> tuple[Array, Array]:
    """(which drafts of the A anchors of all rows decoding would make, bool [A, block]; class of the first, uint8 [A]).

    tokens int32 [B, T + 1], classes uint8 [B, T] of the predicted ones. No draft of a block that begins with a token of
    a prompt, and none behind an end token.
    """
    start = anchors(classes.shape[1], block, offset, stride)
    first = classes[:, start].reshape(-1)
    drafted = tokens[:, start[:, None] + 1 + jnp.arange(block)].reshape(-1, block)
    ended = jnp.cumsum(drafted == EOS_ID, axis=1) - (drafted == EOS_ID) > 0
    return ((first != PROMPT) & (first != IGNORE))[:, None] & ~ended, first


def blocks(
    draft: DraftModel,
    target: Transformer,
    tokens: Array,
    hidden: Array,
    taps: Array,
    offset: Array,
    stride: int = STRIDE,
) -> dict[str, Array]:
    """Draft and target at every anchor, teacher-forced. tokens [B, T + 1]; hidden [B * T, D] and taps of the target.

    Returns log_q, log_p fp32 [A, 5, V], next int32 [A, 5] and score fp32 [A, 5] for the A anchors of all rows.
    """
    c, block = draft.config, draft.config.draft_block
    batch, length = tokens.shape[0], tokens.shape[1] - 1
    in_row = anchors(length, block, offset, stride)
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


def overlaps(found: dict[str, Array]) -> Array:
    """1 - TV of draft and target, fp32 [A, k]: the chance that a draft is accepted if all before it are."""
    return 1.0 - 0.5 * jnp.sum(jnp.abs(jnp.exp(found["log_q"]) - jnp.exp(found["log_p"])), axis=-1)


def losses(
    found: dict[str, Array], which: Array, *, soft: bool = False, length_weight: float = 0.0
) -> tuple[Array, dict[str, Array]]:
    """The loss over the drafts `which` bool [A, k] (`counted`), and its parts.

    The published one, and `length_weight` times the share of a block that is expected to be accepted, negated. soft:
    cross entropy to the target's distribution instead of the text. In the report `accepted` is the mean number of
    accepted drafts of the blocks that count, sum of the survivals.
    """
    block = found["score"].shape[1]
    mask = which.astype(jnp.float32)
    drafts, blocks = jnp.maximum(jnp.sum(mask, axis=0), 1.0), jnp.maximum(jnp.sum(mask[:, 0]), 1.0)

    def mean(values: Array) -> Array:
        """Of each position, fp32 [k]."""
        return jnp.sum(values * mask, axis=0) / drafts

    acceptance = overlaps(found)
    if soft:
        entropy = -jnp.sum(jnp.exp(found["log_p"]) * found["log_q"], axis=-1)
    else:
        entropy = -jnp.take_along_axis(found["log_q"], found["next"][..., None], axis=-1)[..., 0]
    confidence = optax.sigmoid_binary_cross_entropy(found["score"], lax.stop_gradient(acceptance))
    accepted = jnp.sum(jnp.cumprod(acceptance, axis=1) * mask) / blocks
    each = CROSS_ENTROPY * entropy + TOTAL_VARIATION * (1.0 - acceptance) + CONFIDENCE * confidence
    total = jnp.mean(jnp.exp(-jnp.arange(block) / block) * mean(each)) - length_weight * accepted / block
    report = {
        "entropy": jnp.mean(mean(entropy)),
        "variation": mean(1.0 - acceptance),
        "confidence": jnp.mean(mean(confidence)),
        "accepted": accepted,
    }
    return total, report


def redrawn(tokens: Array, classes: Array, drawn: Array, share: float, key: Array) -> Array:
    """The rows int32 [B, T + 1] with `share` of the text replaced by drawn [B, T], the target's own next tokens."""
    chosen = jax.random.bernoulli(key, share, classes.shape) & (classes == TEXT)
    return tokens.at[:, 1:].set(jnp.where(chosen, drawn.astype(tokens.dtype), tokens[:, 1:]))


class HeldOut:
    """Mean accepted drafts over fixed held-out rows, by what is drafted: all, text, answers. `judge`: as in `main`."""

    def __init__(self, judge: Callable[..., Any], folder: Path, rows: int, batch: int, length: int) -> None:
        made = Batches(Data(folder, "eval"), HELD_OUT_SEED, batch, length)
        self.judge = judge
        self.batches = [made.at(step) for step in range(max(1, rows // batch))]

    def __call__(self, params: Params, frozen: Params) -> dict[str, float]:
        sums = jax.device_get([self.judge(params, frozen, b["tokens"], b["classes"]) for b in self.batches])
        (text, answers) = np.sum(sums, axis=0)  # each: accepted drafts, blocks
        found = {"all": text + answers, "text": text, "answers": answers}
        return {name: round(float(drafts / max(count, 1)), 4) for name, (drafts, count) in found.items()}


def make_steps(config: ModelConfig, tables: EngramTables, opt: optax.GradientTransformation, args: Any) -> Any:
    """(jitted step, jitted judge) for the options `dtype`, `stride`, `soft`, `length` and `drawn` of the command.

    step: (params, average, optimizer state, frozen, tokens [B, T + 1], classes [B, T], offset, number, rate) -> the
    first three, a report, and the rows partly drawn anew. judge: (params, frozen, tokens, classes) -> fp32 [2, 2].
    """
    numerics = Numerics.training(args.dtype)
    build_target, _ = builder(config, numerics, tables)
    build_draft, _ = draft_builder(config, numerics)

    def compared(
        params: Params, frozen: Params, tokens: Array, offset: Array
    ) -> tuple[dict[str, Array], Transformer, Array]:
        """(the blocks, the target and its hidden rows [B * T, D])."""
        target = build_target(frozen)
        out = forward(target, tokens[:, :-1], None)
        hidden, taps = lax.stop_gradient((out.hidden, out.taps))
        return blocks(build_draft(params), target, tokens, hidden, taps, offset, args.stride), target, hidden

    def loss(params: Params, frozen: Params, tokens: Array, classes: Array, offset: Array, key: Array) -> Any:
        found, target, hidden = compared(params, frozen, tokens, offset)
        which, _ = counted(tokens, classes, config.draft_block, offset, args.stride)
        total, report = losses(found, which, soft=args.soft, length_weight=args.length)
        report["loss"] = total
        if not args.drawn:
            return total, (report, tokens)
        keys = jax.random.split(key)
        drawn = jax.random.categorical(keys[0], target.logits(hidden)).reshape(classes.shape)
        return total, (report, redrawn(tokens, classes, drawn, args.drawn, keys[1]))

    def step(
        params: Params,
        average: Params,
        state: Any,
        frozen: Params,
        tokens: Array,
        classes: Array,
        offset: Array,
        number: Array,
        rate: Array,
    ) -> Any:
        key = jax.random.fold_in(jax.random.key(2), number)
        (_, found), grads = jax.value_and_grad(loss, has_aux=True)(params, frozen, tokens, classes, offset, key)
        state.hyperparams["learning_rate"] = rate
        updates, state = opt.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        kept = jnp.minimum(AVERAGED, number / (number + 10))  # the first steps' weights soon go
        average = jax.tree.map(lambda a, p: kept * a + (1 - kept) * p, average, params)
        return params, average, state, *found

    def judge(params: Params, frozen: Params, tokens: Array, classes: Array) -> Array:
        """fp32 [2, 2]: accepted drafts and blocks, of text and of answers."""
        offset = jnp.int32(0)
        found, _, _ = compared(params, frozen, tokens, offset)
        which, first = counted(tokens, classes, config.draft_block, offset, args.stride)
        accepted = jnp.sum(jnp.cumprod(overlaps(found), axis=1) * which, axis=1)
        both = jnp.stack([accepted, which[:, 0].astype(jnp.float32)], axis=1)
        text = (first == TEXT)[:, None]
        return jnp.stack([jnp.sum(jnp.where(text, both, 0), axis=0), jnp.sum(jnp.where(text, 0, both), axis=0)])

    return jax.jit(step, donate_argnums=(0, 1, 2)), jax.jit(judge)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_demo.train_draft", description="train the draft of the demo model, one stretch"
    )
    parser.add_argument("--data", type=Path, required=True)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--target", type=Path, nargs="+", help="weight files of the trained model")
    target.add_argument("--checkpoint", type=Path, help="an exported checkpoint of it; its draft is where to start")
    parser.add_argument("--draft", type=Path, nargs="*", default=[], help="weight files of a draft to start from")
    parser.add_argument("--state", type=Path, required=True, help="what the last stretch left, with the optimizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=POSITIVE, required=True, help="of this stretch, compilation included")
    parser.add_argument(
        "--total-minutes", type=POSITIVE, help="of training in the whole schedule; default: this stretch"
    )
    parser.add_argument("--steps", type=COUNT, help="steps at most, in all stretches")
    parser.add_argument("--peak", type=POSITIVE, default=2e-3, help="peak learning rate")
    parser.add_argument("--batch", type=COUNT, default=BATCH, help="rows of a step; few on a CPU")
    parser.add_argument("--row-length", type=ROW_LENGTH, default=LENGTH, help="tokens of a row, a multiple of 128")
    parser.add_argument("--stride", type=COUNT, default=STRIDE, help="tokens from one anchor to the next")
    parser.add_argument("--soft", action="store_true", help="cross entropy to the target's distribution")
    parser.add_argument("--length", type=WEIGHT, default=0.0, help="weight of the expected accepted share of a block")
    parser.add_argument("--drawn", type=SHARE, default=0.0, help="share of the text drawn anew, in every second batch")
    parser.add_argument("--held-out-rows", type=COUNT, default=64, help="rows that training is judged by")
    parser.add_argument("--held-out-every", type=COUNT, default=500, help="steps between two judgements; each saves")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    args = parser.parse_args(arguments)
    config = ModelConfig.from_file(args.data / "config.json")
    if args.row_length < config.draft_block + 2 * args.stride:
        parser.error(f"--stride {args.stride}: no anchor fits into rows of {args.row_length} tokens")
    with stopping() as stop:
        return train(args, config, stop)


def train(args: argparse.Namespace, config: ModelConfig, stop: Stop) -> int:
    """One stretch with the options of `main`; its status."""
    began, limit = time.monotonic(), args.minutes * 60 - RESERVE_S
    args.out.mkdir(parents=True, exist_ok=True)
    tables = EngramTables.build(config, np.load(args.data / "token_map.npy"))
    _, shapes = draft_builder(config, Numerics.training(args.dtype))

    def loaded(found: Mapping[str, np.ndarray], prefix: str = "") -> Params:
        return {path.removeprefix(prefix): jnp.asarray(value) for path, value in found.items()}

    if args.checkpoint:
        frozen = loaded(from_checkpoint(args.checkpoint, config))
    else:
        frozen = loaded(load_parts(args.target))
    opt = optimizer(args.peak)
    kept = State(args.state)
    template = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}
    templates = {"weights": template, "average": template, "optimizer": jax.eval_shape(opt.init, template)}
    if (found := kept.restore(templates)) is not None:
        (params, average, state), clock = found[0].values(), found[1]
    else:
        weights, clock = travelled(args.out, "draft") or (None, Clock())
        if weights is not None:
            params = loaded(weights, LEAF_PREFIX)
        elif args.draft:
            params = loaded(load_parts(args.draft), LEAF_PREFIX)
        elif args.checkpoint:
            params = loaded(from_checkpoint(args.checkpoint, config, draft=True), LEAF_PREFIX)
        else:
            params = initial(config, shapes, seed=1)
        state, average = opt.init(params), jax.tree.map(jnp.copy, params)

    def keep() -> None:
        kept.save({"weights": params, "average": average, "optimizer": state}, clock)

    log_file = args.out / "draft_log.jsonl"
    cut_log(log_file, clock.step)
    run, judge = make_steps(config, tables, opt, args)
    held_out = HeldOut(judge, args.data, args.held_out_rows, args.batch, args.row_length)
    if stop:
        return stop.status("before the first step, nothing to save")
    last: float | None = None  # time of the last record of this stretch
    reports: list[Any] = []
    # With rows drawn anew every batch serves two steps.
    batches = prefetch(
        iter(
            Batches(args.data, 7, args.batch, args.row_length, start=-(-clock.step // 2) if args.drawn else clock.step)
        )
    )
    again: Array | None = None
    record: dict[str, Any] = {}
    total = args.total_minutes or args.minutes
    over = False
    with (
        log_file.open("a", encoding="utf-8") as log,
        tqdm(desc="draft", unit="step", disable=None, file=sys.stderr) as bar,
    ):
        while not over:
            if again is not None and clock.step % 2:
                tokens = again
            else:
                tokens, classes = next(batches)
            rate = Rate(args.peak, 0.4 * total, total).at(clock.trained_s / 60, clock.optimizer_steps)
            offset = jnp.int32(np.random.default_rng([2, clock.step]).integers(0, args.stride))
            params, average, state, report, again = run(
                params, average, state, frozen, tokens, classes, offset, jnp.int32(clock.step), jnp.float32(rate)
            )
            again = again if args.drawn else None
            clock.step, clock.optimizer_steps = clock.step + 1, clock.optimizer_steps + 1
            reports.append(report)
            stopped = bool(stop)  # as of this step, which is then logged
            used_up = args.steps is not None and clock.step >= args.steps
            if len(reports) < LOGGED_EVERY and last is not None and not used_up and not stopped:
                continue
            values = jax.device_get(reports)
            now = time.monotonic()
            if last is not None:
                clock.trained_s += now - last
            elif not args.total_minutes:  # what compilation has left of this stretch is the schedule
                total = clock.trained_s / 60 + (began + limit - now) / 60
            last = now
            clock.done = clock.trained_s >= 60 * total or used_up
            over = clock.done or now > began + limit or stopped
            record = {
                "step": clock.step,
                "stretch": clock.stretch,
                "seconds": round(clock.trained_s, 1),
                "rate": rate,
                **{k: np.mean([v[k] for v in values], axis=0).astype(float).round(4).tolist() for k in values[0]},
            }
            if over or clock.step == 1 or clock.step % args.held_out_every < len(values):
                if not stopped:  # who stops a training does not wait for a judgement
                    record["held_out"] = held_out(average, frozen)
                    print(json.dumps(record), file=sys.stderr, flush=True)
                saving = time.monotonic()
                keep()
                leave(args.out, "draft", {LEAF_PREFIX + path: value for path, value in average.items()}, clock)
                last += time.monotonic() - saving  # which is not training time
            reports = []
            print(json.dumps(record), file=log, flush=True)
            bar.update(len(values))
            bar.set_postfix(accepted=record["accepted"])
    batches.close()
    print(json.dumps({"steps": clock.step, "accepted": record["accepted"], "held_out": record.get("held_out")}))
    return stop.status(f"step {clock.step} is saved in {args.state} and {args.out}")


if __name__ == "__main__":
    sys.exit(command_line.run(main))
