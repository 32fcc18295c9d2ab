"""Whole engines by `auto`, on one device and on meshes of two, beside an engine that defines them (`kernel_check`).

The definition computes in float32 by the reference, one token of a request a step, every row, and nothing twice: no
drafts, no prefixes, no launch ahead. It is made to say what an engine answered, so that each token is judged after the
same ones: by the log-probability that the engine told with it, and by how far it is behind the best. The worst of both
is counted in how far the definition itself moves at that token when the embeddings move by a unit in the last place:
where codes of the caches and selected entries are close calls, any other rounding moves it far.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from di_jax.commands.bench_slice.random_arrays import SEED, random_params, uniform, words
from di_jax.config import Config
from di_jax.engine import sequence
from di_jax.engine.compiling import compile_together, compile_workers
from di_jax.engine.engine import Engine
from di_jax.engine.launch_thread import LaunchThread
from di_jax.engine.runner import ModelRunner, parameter_specs
from di_jax.engine.setup import EngineParts, build_ladder, build_parallel, cache_layout, draft_settings
from di_jax.model.config import ModelConfig
from di_jax.model.dspark import abstract_draft
from di_jax.model.linear import Numerics
from di_jax.model.transformer import abstract_model
from di_jax.parallel.mesh import DeviceMesh
from di_jax.platforms.allocator import client_options
from di_jax.sampling_params import SamplingParams
from kernels_pallas import hopper
from kernels_pallas.choice import KernelChoice
from scripts import kernel_check_layers as layers

DEFINITION, REFERENCE = "float32", "reference"
MESHES = {"auto": DeviceMesh(), "dp=2": DeviceMesh(dp=2), "ep=2": DeviceMesh(dp=2, ep=2), "cp=2": DeviceMesh(cp=2)}
# Logits of random weights have a deviation of 1, of which bfloat16 takes or adds 0.1: often another token would be the
# likeliest, and no two engines would go on alike. So each row of the head has a share of the embedding of the token
# before it, by which it mostly is the likeliest after that one, at a chance that the context decides.
LINK = 2.5  # times ln V and the cosine of the last hidden row and the embedding, about 0.3: the share in a logit
HEAD_SEED = SEED - 1  # of no other weight
BARS = {"median": layers.FACTOR, "p90": layers.FACTOR, "worst_in_spreads": 2 * layers.FACTOR}  # times the reference's
EXACT = 1e-4  # nats of any token where engines are exact: measured 4e-6, 0.2 where a block of the caches was lost
MOVED = 8  # definitions with moved embeddings: a root mean square of so many is off by a quarter
MOVED_SEED = HEAD_SEED - MOVED  # the first of their seeds
COUNTS = ("num_cached_tokens", "verified", "accepted", "num_preemptions")  # of an answer
WRONG = 0.2  # of the drafts, the others are right
# A request: before which step it comes, number of a text, how many tokens of it begin the prompt, how many own follow.
Ask = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class EngineSizes:
    """A model with a draft, and what its engines are asked: greedy answers of `answer` tokens."""

    config: ModelConfig
    rows: int  # of the prefill bucket
    keep_tokens: int
    context: int
    asks: tuple[Ask, ...]
    answer: int
    running: int = 4  # at once, of more requests
    exact: bool = False  # all engines in float32 with caches of floats: only the order of sums differs

    def prompts(self) -> list[list[int]]:
        def text(seed: int, length: int) -> list[int]:
            return np.random.default_rng(seed).integers(3, self.config.vocab_size, length).tolist()

        return [text(number, shared) + text(100 + n, own) for n, (_, number, shared, own) in enumerate(self.asks)]

    def settings(self, name: str) -> Config:
        plain, mesh = name == DEFINITION, MESHES.get(name, DeviceMesh())
        values: dict[str, Any] = {
            "model.dtype": "float32" if plain or self.exact else "bfloat16",
            "model.quantize_caches": not self.exact,
            "model.quantize_activations": False,
            "kernels.implementation": "auto" if name in MESHES else "reference",
            "speculative.enabled": not plain,
            "speculative.varlen": False,  # one program to verify: all drafts
            "engine.max_num_seqs": self.running,
            "engine.max_num_batched_tokens": self.rows,
            "engine.max_model_len": self.context,
            "engine.num_blocks": len(self.asks) * -(-self.context // 128),
            "engine.prefill_buckets": [self.rows],
            "engine.decode_buckets": [self.running],
            "engine.context_buckets": [self.context],
            "engine.async_scheduling": not plain,
            "engine.prefix_caching": not plain,
            "engine.replay.decoder": "mask" if plain else "compact",  # mask computes all rows that compact leaves out
            "engine.replay.keep_tokens": self.keep_tokens,
        }
        return Config().with_values(values | {f"mesh.{axis}": getattr(mesh, axis) for axis in ("dp", "ep", "cp")})


def engine_sizes(sizes: layers.Sizes, rows: int, keep_tokens: int, context: int, *asks: Ask) -> EngineSizes:
    """The layers with three stages of a draft, which reads the last layer."""
    stages: dict[str, Any] = {"num_nextn_predict_layers": 3, "dspark_n_routed_experts": 6}
    stages |= {"dspark_num_experts_per_tok": 3, "dspark_target_layer_ids": (sizes.config.num_hidden_layers - 1,)}
    config = dataclasses.replace(sizes.config, **stages, dspark_noise_token_id=sizes.config.vocab_size - 1)
    return EngineSizes(config, rows, keep_tokens, context, asks, answer=32)


def released_engine() -> EngineSizes:
    """Prompts of up to three chunks and more entries than the 512 selected; the last two begin like others."""
    asks = (0, 0, 2400, 0), (0, 1, 0, 40), (2, 2, 1300, 0), (3, 3, 0, 700), (12, 2, 1280, 220), (16, 0, 2304, 400)
    return engine_sizes(layers.released_sizes(), 1152, 140, 3072, *asks)


def small_engine() -> EngineSizes:
    asks = (0, 0, 520, 0), (0, 1, 0, 40), (2, 2, 300, 0), (3, 3, 0, 150), (12, 2, 256, 60), (16, 0, 512, 40)
    return engine_sizes(layers.small_sizes(), 256, 22, 640, *asks)


def make_weights(config: ModelConfig) -> tuple[nnx.State, nnx.State]:
    """Of target and draft: random ones in their stored formats, on one device."""
    numerics = Numerics.create("float32", quantize_activations=False)
    sharding, size = NamedSharding(DeviceMesh().build(), PartitionSpec()), config.hidden_size
    target: Any = layers.random_weights(nnx.state(abstract_model(config, numerics)), config, sharding)
    embed, head = (target[name]["weight"].get_value() for name in ("embed", "head"))
    before = jnp.roll(embed, 1, axis=0).astype(jnp.float32)
    linked = uniform(head.shape, HEAD_SEED, size**-0.5, jnp.float32) + LINK * np.log(len(head)) / size * before
    target["head"]["weight"].set_value(jax.device_put(linked.astype(head.dtype), sharding))
    stages, drafter = config.draft_config, nnx.state(abstract_draft(config, numerics))
    return target, random_params(drafter, stages, sharding, stages.n_routed_experts)


def build(sizes: EngineSizes, name: str, weights: tuple[nnx.State, nnx.State]) -> EngineParts:
    """As `setup.build_engine_parts`, but without a checkpoint."""
    config, c = sizes.settings(name), sizes.config
    parallel, settings = build_parallel(config, c), draft_settings(config, c)
    numerics = Numerics.create(
        config.model.dtype, quantize_activations=False, quantize_caches=config.model.quantize_caches
    )
    mesh, kernels = parallel.mesh.build(), KernelChoice(config.kernels.implementation)

    def filled(model: nnx.Module, params: nnx.State) -> Any:
        specs = parameter_specs(params, parallel.mesh)
        placed = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), params, specs)
        return nnx.merge(nnx.graphdef(model), placed)

    model = filled(abstract_model(c, numerics, kernels, parallel), weights[0])
    draft = None if settings is None else filled(abstract_draft(c, numerics, kernels, parallel), weights[1])
    layout = cache_layout(c, numerics.formats, config.engine.num_blocks or 0, sizes.running, settings)
    thread = LaunchThread() if draft is not None and jax.default_backend() == "gpu" else None
    runner = ModelRunner(model, layout, mesh, draft, settings, layers.compiler(), thread)
    ladder, tokenizer = build_ladder(config, c.engram_look_back), cast(Any, None)  # no request has or wants text
    return EngineParts(c, Path(), tokenizer, runner, ladder, layout, config.eplb, config.drafting)


@contextmanager
def resolved() -> Iterator[set[tuple[str, str, str]]]:
    """(mesh, operation, what `auto` took and what kept the kernel out) of programs that are traced meanwhile."""
    names = {tuple(mesh.axis_sizes.values()): name for name, mesh in MESHES.items()}
    found: set[tuple[str, str, str]] = set()
    choose = hopper.choose

    def told(operation: str, implementation: str, available: Mapping[str, Any], why: str | None = None) -> Any:
        run = choose(operation, implementation, available, why)
        if implementation == "auto":
            took = next(name for name, each in available.items() if each is run)
            mesh = names[tuple(jax.sharding.get_abstract_mesh().shape.values())]
            found.add((mesh, operation, took if why is None else f"{took}, as {why}"))
        return run

    with mock.patch.object(hopper, "choose", told):
        yield found


def with_oracle(engine: Engine, answers: Sequence[Sequence[int]]) -> None:
    """Random weights draft badly: after every draft this puts tokens of the answer into its slot, WRONG of them others.
    On device, so that steps are launched ahead as ever. answers: of equal length, by number of the request."""
    runner, drafted = engine.runner, engine.runner.draft
    slots, count, length = runner.layout.num_slots, runner.layout.num_drafts, len(answers[0])
    right = np.pad(np.array(answers, np.int32), ((0, 0), (0, count)))
    right[np.random.default_rng(5).random(right.shape) < WRONG] ^= 1

    @jax.jit
    def put(drafts: Array, lengths: Array, origin: Array, known: Array) -> Array:
        first = jnp.clip(lengths + 1 - origin, 0, length)  # the token at position `lengths` is the newest
        tokens = jnp.take_along_axis(known, first[:, None] + jnp.arange(count), axis=1)
        return jnp.where((drafts >= 0) & (origin > 0)[:, None], tokens, drafts)

    def draft(rows: Sequence[np.ndarray]) -> Any:
        output, state = drafted(rows), runner.state
        origin, known = np.zeros(len(state.length), np.int32), np.zeros((len(state.length), length + count), np.int32)
        for rank in engine.scheduler.ranks:
            for ledger, table in zip(rank.ledgers, rank.tables, strict=True):
                for at, own in enumerate(table.sequences, ledger.rank * slots):
                    if own is not None:
                        origin[at], known[at] = len(own.prompt_ids), right[int(own.request_id)]
        tokens = put(state.draft_token, state.length, origin, known)
        runner.state = state.replace(draft_token=jax.device_put(tokens, state.draft_token.sharding))
        return output

    runner.draft = draft  # type: ignore[method-assign]


def serve(engine: Engine, asked: Iterable[tuple[int, list[int], SamplingParams]]) -> list[sequence.Sequence]:
    """The answers of requests (before which step, prompt, sampling)."""
    waiting, requests, step = list(asked), list[sequence.Request](), 0
    while waiting or engine.has_unfinished:
        while waiting and (waiting[0][0] <= step or not engine.has_unfinished):
            requests.append(engine.add_request(*waiting.pop(0)[1:]))
        engine.step()
        step += 1
    return [request.sequences[0] for request in requests]


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Of the tokens of answers, float64 [N] each, natural logarithms.

    error: how far the log-probability that was told is from the definition's; regret: how far the definition's is below
    that of its best token; spread: how far it moves with the embeddings, the root mean square over MOVED definitions,
    and the median of that over all tokens, below which no token is held to be certain.
    """

    error: np.ndarray
    regret: np.ndarray
    spread: np.ndarray


class Definition:
    """The engine in float32. answers: its own."""

    def __init__(self, engine: Engine, sizes: EngineSizes) -> None:
        self.engine, self.prompts = engine, sizes.prompts()
        self.greedy = SamplingParams(temperature=0, max_tokens=sizes.answer, ignore_eos=True, detokenize=False)
        self.answers = [one.output_ids for one in serve(engine, [(0, each, self.greedy) for each in self.prompts])]
        self._said: dict[tuple[tuple[int, ...], ...], tuple[np.ndarray, ...]] = {}

    def judge(self, answers: Sequence[sequence.Sequence]) -> Judgement:
        ids = tuple(tuple(one.output_ids) for one in answers)
        if ids not in self._said:  # engines often say the same
            exact, best = self._say(ids)
            others = np.array([self._say(ids)[0] for _ in moved_embeddings(self.engine.runner)])
            spread = np.sqrt(np.mean((others - exact) ** 2, axis=0))
            self._said[ids] = exact, best, spread + np.median(spread)
        exact, best, spread = self._said[ids]
        return Judgement(np.abs(np.concatenate([one.logprobs for one in answers]) - exact), best - exact, spread)

    def _say(self, ids: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of the tokens of answers and of the best in their places, [N] each."""
        told = dataclasses.replace(self.greedy, logprobs=1)
        forced = [dataclasses.replace(told, forced_token_ids=own) for own in ids]
        exact = serve(self.engine, [(0, *each) for each in zip(self.prompts, forced, strict=True)])
        assert [tuple(one.output_ids) for one in exact] == list(ids)
        best = np.array([top.logprobs[0] for one in exact for top in one.tops])
        return np.concatenate([one.logprobs for one in exact]), best


@jax.jit
def moved(weight: Array, seed: Array | int) -> Array:
    """Each number of `weight` as it is or the next one up or down of its format, a third of them each."""
    way = words(weight.shape, seed) % 3
    up = jnp.where(way == 1, jnp.inf, -jnp.inf).astype(weight.dtype)
    return jnp.where(way == 0, weight, jnp.nextafter(weight, up))


def moved_embeddings(runner: ModelRunner) -> Iterator[None]:
    """The model has others at each of MOVED turns, and its own again after them."""
    params: Any = runner.params
    leaf = params["embed"]["weight"]
    weight = leaf.get_value()
    try:
        for seed in range(MOVED_SEED, MOVED_SEED + MOVED):
            params["embed"]["weight"] = leaf.replace(jax.device_put(moved(weight, seed), weight.sharding))
            yield
    finally:
        params["embed"]["weight"] = leaf


def distances(judged: Judgement) -> dict[str, float]:
    """Quantiles of the error and the worst token, in nats and in its spread."""
    error, regret, spread = judged.error, judged.regret, judged.spread
    return {
        **dict(zip(("median", "p90", "worst"), np.quantile(error, (0.5, 0.9, 1)).tolist())),
        "worst_regret": float(np.max(regret)),
        "worst_in_spreads": float(np.max(error / spread)),
        "regret_in_spreads": float(np.max(regret / spread)),
        "best_same": float(np.mean(regret <= 0)),
    }


def too_far(found: Mapping[str, float], bar: Mapping[str, float]) -> list[str]:
    """What makes `distances` those of a wrong engine, beside the reference's in bfloat16.

    Between right engines, one device and cp=2, of 13 seeds: the worst token was 0.5 to 1.4 times as many of its
    spreads off in the one as in the other, and behind the best by up to 1.6 times that; in nats, up to 2.4 and 3.3
    times. A token that is best by logits that are off may be as far behind as two of them are off.
    """
    most = {name: factor * bar[name] for name, factor in BARS.items()}
    most["regret_in_spreads"] = most["worst_in_spreads"]
    return [f"{n} {found[n]:.3g}, at most {most[n]:.3g} passes" for n in most if not found[n] <= most[n]]  # nor a NaN


def inexact(found: Mapping[str, float]) -> list[str]:
    """What makes `distances` those of a wrong engine where all are exact: no code can flip, so every token tells."""
    far = {name: found[name] for name in ("worst", "worst_regret") if not found[name] <= EXACT}
    return [f"{name} {nats:.3g}, at most {EXACT:g} passes" for name, nats in far.items()]


def uncovered(count: Mapping[str, int]) -> list[str]:
    """What the answers of these `COUNTS` were to show and did not."""
    accepted, verified = count["accepted"], count["verified"]
    problems = [] if 0 < accepted < verified else [f"{accepted} of {verified} drafts were accepted"]
    problems += [] if count["num_cached_tokens"] else ["no prompt was found in the caches"]
    return problems + (["a request was preempted: its replay keeps other rows"] if count["num_preemptions"] else [])


def engine_result(sizes: EngineSizes, meshes: Iterable[str] = MESHES) -> dict[str, Any]:
    names = [DEFINITION, REFERENCE, *(name for name in meshes if MESHES[name].world <= len(jax.devices()))]
    weights, began = make_weights(sizes.config), time.monotonic()
    parts = {name: build(sizes, name, weights) for name in names}
    workers = min(4, compile_workers())  # of each engine, of whose programs four take long
    with resolved() as chosen:
        jobs = [partial(each.runner.warm_up, each.ladder.buckets(), workers=workers) for each in parts.values()]
        compile_together(jobs, len(jobs))
    compile_s = _seconds(f"{len(parts)} engines compiled", began)
    definition = Definition(Engine(parts[DEFINITION], sizes.settings(DEFINITION).engine), sizes)
    asked = [(at, prompt, definition.greedy) for (at, *_), prompt in zip(sizes.asks, definition.prompts, strict=True)]
    results, problems = dict[str, Any](), list[str]()
    for name in names[1:]:
        began = time.monotonic()
        with_oracle(engine := Engine(parts[name], sizes.settings(name).engine), definition.answers)
        answers = serve(engine, asked)
        found = distances(definition.judge(answers))
        count = {each: sum(getattr(answer, each) for answer in answers) for each in COUNTS}
        same = sum(mine.output_ids == exact for mine, exact in zip(answers, definition.answers, strict=True))
        taken = sorted((operation, took) for mesh, operation, took in chosen if mesh == name)
        kernels = {operation: [took for own, took in taken if own == operation] for operation, _ in taken}
        results[name] = {**found, **count, "answers_same": same, "steps": engine.num_steps, "kernels": kernels}
        results[name]["seconds"] = _seconds(f"{name}: {found}", began)
        wrong = uncovered(count) + (inexact(found) if sizes.exact else too_far(found, results[REFERENCE]))
        if name in MESHES and hopper.unavailable() is None:
            by = {operation: kernels.get(operation) for operation in hopper.WITH_KERNELS}
            wrong += [
                f"{operation} was computed by {took}" for operation, took in by.items() if took != [hopper.KERNEL]
            ]
        problems += [f"{name}: {each}" for each in wrong]
    results |= {name: f"it needs {MESHES[name].world} devices" for name in meshes if name not in names}
    return {
        "prompts": [len(prompt) for prompt in definition.prompts],
        "tokens": sizes.answer * len(asked),
        "bars": BARS,
        "allocator": client_options().get("allocator", "that of jax"),
        "compile_s": compile_s,
        "results": results,
        "problems": problems,
    }


def _seconds(what: str, began: float) -> float:
    print(f"engine: {what}, {(seconds := time.monotonic() - began):.1f} s", file=sys.stderr, flush=True)
    return seconds
