"""A few layers of a model by every implementation, beside the reference in float32 (`kernel_check`)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from di_jax.commands.bench_slice.random_arrays import random_params, random_state
from di_jax.config import PlatformGroup
from di_jax.engine.compiling import compile_together
from di_jax.engine.runner import TRACE, ModelRunner
from di_jax.engine.step_plan import Bucket, Chunk, StepPlan, build_plan
from di_jax.model.cache import CacheLayout
from di_jax.model.config import ModelConfig
from di_jax.model.linear import Numerics
from di_jax.model.transformer import abstract_model
from di_jax.parallel.mesh import DeviceMesh
from di_jax.platforms.compiler import Compiler
from kernels_pallas import hopper
from kernels_pallas.benchmark import RELEASED
from kernels_pallas.choice import KernelChoice
from kernels_pallas.hopper import KERNEL, WITH_KERNELS, UnsupportedShape
from tests import golden_model as tiny

REFERENCE = KernelChoice("reference")
UNTUNED = {"xla_gpu_autotune_level": 0}
FACTOR, FEW = 1.5, 2  # times the reference's distance; and rows whose likeliest token is another by chance
MISSED = 0.02  # of the entries, that are others by chance
# Every kind of layer: window-only, source of pooled entries, a run that reuses them, candidate source, Reindex.
LAYERS: dict[str, Any] = {
    "num_hidden_layers": 6,
    "compress_ratios": (0, 2, 2, 2, 1, 1),
    "kv_source_layer_ids": (1, 4),
    "index_source_layer_ids": (1, 4, 5),
    "candidate_source_layer_id": 4,
    "engram_layer_ids": (),
    "engram_num_embeddings": (),
    "num_nextn_predict_layers": 0,
}
SLOTS, DECODE_ROWS = 4, 8
DECODES = ((1, 1, 1), (3, 1, 2), (1, 1, 1), (2, 3, 1), (1, 2, 3))  # rows of each sequence; more than one verify drafts
# A norm of queries of 2 gives attention a few entries that matter: with 1 it is nearly a mean of 640, and wrong ones
# would hardly show.
SHARPNESS = 2.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A model and what it is fed: `chunks[n][i]` tokens of sequence i in prefill step n, from position starts[i]."""

    config: ModelConfig
    context: int
    prefill_rows: int
    starts: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]

    @property
    def blocks(self) -> int:
        """Of a sequence."""
        return -(-self.context // 128)

    @property
    def buckets(self) -> tuple[Bucket, Bucket]:
        """Of prefill and decode."""
        return Bucket(False, self.prefill_rows, self.blocks), Bucket(True, DECODE_ROWS, self.blocks)

    def layout(self, numerics: Numerics) -> CacheLayout:
        return CacheLayout(self.config, numerics.formats, len(self.starts) * self.blocks, SLOTS)

    def steps(self) -> Iterator[StepPlan]:
        at, lots = list(self.starts), [np.random.default_rng(i) for i in range(len(self.starts))]
        blocks = lots[0].permutation(len(at) * self.blocks).reshape(len(at), -1)
        prefill, decode = self.buckets
        for number, counts in enumerate((*self.chunks, *DECODES)):
            step = []
            for i, count in enumerate(counts):
                ids = lots[i].integers(3, self.config.vocab_size, count).tolist()
                step.append(Chunk(ids, at[i], slot=SLOTS - 1 - i, blocks=blocks[i].tolist()))
                at[i] += count
            yield build_plan(prefill, step) if number < len(self.chunks) else decode_plan(decode, step)


def decode_plan(bucket: Bucket, chunks: Sequence[Chunk]) -> StepPlan:
    """A decode step in which a sequence may have several rows, as in those that verify drafts."""
    plan = build_plan(bucket, [dataclasses.replace(chunk, tokens=chunk.tokens[:1]) for chunk in chunks])
    view, row = bucket.unpack(plan.buffer), 0
    for i, chunk in enumerate(chunks):
        count = len(chunk.tokens)
        view["token"][row : row + count] = chunk.tokens
        view["tile_sequence"][row : row + count] = i
        view["first_row"][i], view["count"][i] = row, count
        row += count
    view["tile_sequence"][row:] = len(chunks)  # a sequence of no rows
    return StepPlan(bucket, plan.buffer, tuple(chunks))


def released_sizes() -> Sizes:
    """One context is longer than 2,048 candidate blocks of 8 entries, one than the 512 selected, one has neither."""
    config = dataclasses.replace(
        ModelConfig.from_file(RELEASED), **LAYERS, vocab_size=8192, n_routed_experts=6, num_experts_per_tok=6
    )
    return Sizes(config, 20_480, 512, (20_001, 0, 1_501), ((132, 173, 45), (86, 90, 61)))


def small_sizes() -> Sizes:
    config = dataclasses.replace(tiny.TINY, **LAYERS, n_routed_experts=4, num_experts_per_tok=4)
    return Sizes(config, 512, 128, (301, 0, 71), ((38, 45, 18), (21, 30, 11)))


@dataclasses.dataclass
class Computed:
    """What the steps gave, rows joined: logits [N, V], streams [L, N, hc D], selected entries [N, k] by layer."""

    decode: np.ndarray  # bool [N]
    logits: np.ndarray
    streams: np.ndarray
    selected: dict[int, np.ndarray]


class LayerModel:
    """The layers by one choice of implementations. like: a model whose weights and first caches it takes over."""

    def __init__(self, sizes: Sizes, dtype: str, kernels: KernelChoice, like: LayerModel | None = None) -> None:
        self.sizes = sizes
        numerics = Numerics.create(dtype, quantize_activations=False)
        graph, params = nnx.split(abstract_model(sizes.config, numerics, kernels))
        mesh = DeviceMesh().build()
        layout = sizes.layout(numerics)
        if like is None:
            sharding = NamedSharding(mesh, PartitionSpec())
            self.weights = random_weights(params, sizes.config, sharding)
            self.state = random_state(layout, 0, jax.tree.map(lambda _: sharding, layout.abstract()))
        else:
            self.weights, self.state = like.weights, like.state
        self.runner = ModelRunner(nnx.merge(graph, self.weights), layout, mesh, compiler=compiler())

    def jobs(self) -> list[Callable[[], str | None]]:
        return [partial(self._compile, bucket) for bucket in self.sizes.buckets]

    def _compile(self, bucket: Bucket) -> str | None:
        """Why it cannot run; None when it can."""
        try:
            self.runner.compiled(bucket, TRACE)
        except UnsupportedShape as error:
            return str(error)
        return None

    def compute(self) -> Computed:
        runner, config = self.runner, self.sizes.config
        runner.state = jax.tree.map(jnp.copy, self.state)  # a step donates what it gets
        decode: list[np.ndarray] = []
        logits: list[np.ndarray] = []
        streams: list[np.ndarray] = []
        selected: dict[int, list[np.ndarray]] = {layer: [] for layer in config.index_source_layer_ids}
        for plan in self.sizes.steps():
            output = runner.execute([plan], TRACE).host()[0]
            assert output.logits is not None and output.trace is not None
            rows = np.concatenate([np.arange(*plan.rows_of(i).indices(2**31)) for i in range(len(plan.chunks))])
            decode.append(np.full(len(rows), plan.bucket.decode))
            logits.append(np.asarray(output.logits)[rows])
            layers = np.concatenate([np.asarray(run.streams)[:, rows] for run in output.trace])
            streams.append(layers.astype(np.float32).reshape(*layers.shape[:2], -1))
            for run, record in zip(config.layer_runs, output.trace):
                if run[0].owns_index:
                    selected[run[0].layer].append(np.asarray(record.selected)[0, rows])
        return Computed(
            np.concatenate(decode),
            np.concatenate(logits),
            np.concatenate(streams, axis=1),
            {layer: np.concatenate(found) for layer, found in selected.items()},
        )


def random_weights(params: nnx.State, config: ModelConfig, sharding: Any) -> nnx.State:
    """Random ones in the stored formats, with `SHARPNESS`."""
    made = random_params(params, config, sharding, config.n_routed_experts)
    flat = dict(nnx.to_flat_state(made))
    return nnx.from_flat_state(
        {p: leaf.replace(leaf.get_value() * SHARPNESS) if "q_norm" in p else leaf for p, leaf in flat.items()}
    )


def layer_choices(operations: Sequence[str]) -> dict[str, KernelChoice]:
    """The choices that are held against the reference: each kernel by name, and all together."""
    by_name = {name: KernelChoice("reference", ((name, KERNEL),)) for name in operations}
    return {**by_name, "all": KernelChoice("reference", tuple((name, KERNEL) for name in operations))}


def row_errors(mine: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Of rows [..., N, F]: the difference's norm over the exact row's, [..., N]."""
    return np.linalg.norm(mine - exact, axis=-1) / np.linalg.norm(exact, axis=-1)


def shared_entries(mine: np.ndarray, exact: np.ndarray) -> float:
    """Share of the entries [N, k] that `exact` selected and `mine` too; -1 is none."""
    wanted = exact >= 0
    found = sum(int(np.isin(theirs[has], own).sum()) for own, theirs, has in zip(mine, exact, wanted))
    return found / max(1, int(wanted.sum()))


def distances(mine: Computed, exact: Computed) -> dict[str, dict[str, Any]]:
    """How far the rows are from the exact ones, of prefill and of decode."""
    found = {}
    for phase, rows in (("prefill", ~exact.decode), ("decode", exact.decode)):
        error = row_errors(mine.logits[rows], exact.logits[rows])
        layers = np.median(row_errors(mine.streams[:, rows], exact.streams[:, rows]), axis=-1)
        same = mine.logits[rows].argmax(-1) == exact.logits[rows].argmax(-1)
        found[phase] = {
            "rows": int(rows.sum()),
            "median": float(np.median(error)),
            "worst": float(np.max(error)),
            "argmax_same": float(same.mean()),
            "median_by_layer": layers.tolist(),
            "selected_same": {
                layer: shared_entries(mine.selected[layer][rows], own[rows]) for layer, own in exact.selected.items()
            },
        }
    return found


def too_far(found: Mapping[str, Mapping[str, Any]], bar: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What makes `distances` of a kernel those of a wrong one, beside those of the reference in the same precision."""
    problems = []

    def hold(what: str, own: float, theirs: float, slack: float = 0.0) -> None:
        if not own <= FACTOR * theirs + slack:  # a NaN is not
            problems.append(f"{what} {own:.3g}, the reference's {theirs:.3g}")

    for phase, own in found.items():
        theirs = bar[phase]
        for name in ("median", "worst"):
            hold(f"{phase}: {name} error", own[name], theirs[name])
        for layer, pair in enumerate(zip(own["median_by_layer"], theirs["median_by_layer"])):
            hold(f"{phase}: median error after layer {layer}", *pair)
        hold(f"{phase}: other argmax", 1 - own["argmax_same"], 1 - theirs["argmax_same"], FEW / own["rows"])
        for layer, share in own["selected_same"].items():
            hold(f"{phase}: other entries in layer {layer}", 1 - share, 1 - theirs["selected_same"][layer], MISSED)
    return problems


def layers_result(sizes: Sizes) -> dict[str, Any]:
    choices, reasons = layer_choices(WITH_KERNELS), {}
    if (unavailable := hopper.unavailable()) is not None:
        reasons, choices = dict.fromkeys(choices, unavailable), {}
    models = layer_models(sizes, choices)
    jobs = [(name, job) for name, model in models.items() for job in model.jobs()]
    began = time.monotonic()
    for (name, _), why in zip(jobs, compile_together([job for _, job in jobs])):
        if why is not None:
            reasons[name] = why
    compile_s = time.monotonic() - began
    exact, plain = models["float32"].compute(), models["reference"].compute()
    bar = distances(plain, exact)
    results: dict[str, Any] = {"reference": bar}
    problems = []
    for name in choices:
        if name in reasons:
            continue
        mine = models[name].compute()
        found = distances(mine, exact)
        results[name] = {**found, "from_reference": float(np.median(row_errors(mine.logits, plain.logits)))}
        problems += [f"{name}: {each}" for each in too_far(found, bar)]
    results |= reasons
    if unavailable is None:
        problems += [f"{name}: {why}" for name, why in reasons.items()]
    c = sizes.config
    return {
        "hidden_size": c.hidden_size,
        "compress_ratios": c.compress_ratios,
        "context": sizes.context,
        "factor": FACTOR,
        "compile_s": compile_s,
        "results": results,
        "problems": problems,
    }


def layer_models(sizes: Sizes, choices: Mapping[str, KernelChoice]) -> dict[str, LayerModel]:
    """float32 and reference, and those of `choices`, with the same weights."""
    exact = LayerModel(sizes, "float32", REFERENCE)
    given = {"reference": REFERENCE, **choices}
    made = {name: LayerModel(sizes, "bfloat16", choice, exact) for name, choice in given.items()}
    return {"float32": exact, **made}


def compiler() -> Compiler:
    """As the engine compiles, but for the trials of which program is fastest: they take most of the time."""
    engine = Compiler.of(PlatformGroup(), jax.devices()[0])
    return Compiler({**engine.options, **UNTUNED}) if engine.options else engine
