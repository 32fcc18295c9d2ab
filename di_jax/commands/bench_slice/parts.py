"""The parts of a step as programs of their own: the model's own code over the same rows, caches and weights, all layers
in one program. What a step takes beyond their sum is what lies between them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec

from di_jax.commands.bench_slice.points import Point
from di_jax.commands.bench_slice.random_arrays import uniform, words
from di_jax.commands.bench_slice.rank import Program
from di_jax.engine.runner import step_rows
from di_jax.engine.speculative_steps import verified_rows
from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.config import LayerPlan
from di_jax.model.dspark import DraftModel
from di_jax.model.moe import MoE
from di_jax.model.rope import rotation
from di_jax.model.rows import Rows
from di_jax.model.transformer import Transformer
from di_jax.parallel.replica_choice import row_hash
from kernels_pallas.compress_store import api as compress_store
from kernels_pallas.hyper_connections import api as hyper_connections
from kernels_pallas.sparse_attention import api as sparse_attention

Angles = dict[bool, tuple[Array, Array]]


@dataclasses.dataclass(frozen=True)
class Span:
    """Layers [first, last) of the backbone that run the same rows."""

    first: int
    last: int
    rows: Any  # Rows, or their number

    def plans(self, model: Transformer) -> tuple[LayerPlan, ...]:
        return model.config.layers[self.first : self.last]


@dataclasses.dataclass(frozen=True)
class Step:
    """What a part is given: models, the step's rows by span, and a seed for its activations."""

    model: Transformer
    draft: DraftModel
    spans: tuple[Span, ...]
    every: Rows  # of the encoder layers: all of the step
    seed: Array
    drafts: int

    def random(self, rows: int, *shape: int, deviation: float = 1.0) -> Array:
        return uniform((rows, *shape), self.seed + jnp.uint32(rows), deviation, self.model.numerics.dtype)

    def angles(self, rows: Rows) -> Angles:
        return {c: rotation(self.model.config, c, rows.position) for c in (False, True)}


Run = Callable[[Step, EngineState, Any], Any]


def layers_of_rows(point: Point) -> tuple[Span, ...]:
    """The spans of a step, with numbers of rows."""
    count, boundary = point.rank.model_config.num_hidden_layers, point.rank.model_config.first_decoder_layer
    if not point.bucket.drops_rows:
        return (Span(0, count, point.bucket.rows),)
    return (Span(0, boundary, point.bucket.rows), Span(boundary, count, point.bucket.kept_rows))


def programs(point: Point) -> dict[str, Program]:
    """Every part that a step of `point` has, but for those that are programs already; each takes (weights, state,
    rows of `rows_program`, seed) and gives (state, an array) if it is one of STORES, which donate it, else an array."""
    rank = point.rank
    state = point.layout.global_abstract(rank.mesh, rank.plan)
    rows = jax.eval_shape(_over_rank(point, partial(_rows, point)), state, _buffer(point))
    shapes = rank.params, state, rows, jax.ShapeDtypeStruct((), jnp.uint32)
    placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=rank.sharding), shapes)

    def trace(name: str) -> Any:
        body = _over_rank(point, partial(_part, point, RUNS[name], name in STORES))
        return jax.jit(body, donate_argnums=1 if name in STORES else ()).trace(*placed)

    return {name: Program(name, partial(trace, name), rank.compiler) for name in RUNS}


def rows_program(point: Point) -> Callable[[EngineState, Array], Any]:
    """The rows of the next step of `point` from its state and packed plan: those of all layers, and the kept ones."""
    return jax.jit(_over_rank(point, partial(_rows, point)))


def _over_rank(point: Point, body: Callable[..., Any]) -> Callable[..., Any]:
    whole = PartitionSpec()
    return jax.shard_map(body, mesh=point.rank.mesh, in_specs=whole, out_specs=whole, check_vma=False)


def _buffer(point: Point) -> Any:
    return jax.ShapeDtypeStruct((1, point.bucket.size), jnp.int32, sharding=point.rank.sharding)


def _rows(point: Point, state: EngineState, buffer: Array) -> tuple[Rows, Rows | None]:
    fields = point.bucket.unpack(buffer[0])
    if point.bucket.drafts:
        return verified_rows(point.bucket, fields, state)[0], None
    return step_rows(point.rank.plan, point.bucket, fields, state)


def _part(point: Point, run: Run, stores: bool, weights: Any, state: EngineState, rows: Any, seed: Array) -> Any:
    model: Transformer = nnx.merge(point.rank.graphs[0], weights[0])
    draft: DraftModel = nnx.merge(point.rank.graphs[1], weights[1])
    every, kept = rows
    by_span = (every,) if kept is None else (every, kept)
    spans = tuple(dataclasses.replace(span, rows=own) for span, own in zip(layers_of_rows(point), by_span))
    step = Step(model, draft, spans, every, seed, point.rank.settings.num_drafts)
    result = run(step, state, point.layout)
    return (result, result.length) if stores else jax.tree.map(lambda a: jnp.sum(a.astype(jnp.float32)), result)


def _each_layer(span: Span, body: Callable[[Array, Any], Any], carry: Any) -> Any:
    """carry after body(layer, carry) of every layer of a span."""
    numbers = jnp.arange(span.first, span.last, dtype=jnp.int32)
    return lax.scan(lambda carry, layer: (body(layer, carry), None), carry, numbers)[0]


# ---- the parts ----


def _projections(step: Step, state: EngineState, layout: CacheLayout) -> Any:
    """Down and up to queries, down to the window's key, and the grouped output; norms, rotation and quantizers."""
    model, results = step.model, []
    attn = model.layers.attn
    for span in step.spans:
        cos_sin = step.angles(span.rows)[True]

        def layer(number: Array, x: Array, cos_sin: Any = cos_sin) -> Array:
            query = attn.query(number, attn.latent_query(number, x), cos_sin)
            kv = attn.window_kv(number, x, cos_sin)
            return attn.output(number, query + kv[:, None])

        x = step.random(span.rows.num_rows, model.config.hidden_size)
        results.append(_each_layer(span, layer, x))
    return results


def _hyper_connections(step: Step, state: EngineState, layout: CacheLayout) -> Any:
    """Both sites of a layer as the model has them, with the input of each sublayer for its output."""
    model, c, results = step.model, step.model.config, []
    w = model.layers
    for span in step.spans:

        def layer(number: Array, carry: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
            streams, pre, pending = carry
            streams, x, pre, post, comb = w.hc_attn.fused(number, pending, streams, pre, w.attn_norm)
            streams, x, pre, post, comb = w.hc_ffn.fused(number, (x, post, comb), streams, pre, w.ffn_norm)
            return streams, pre, (x, post, comb)

        rows = span.rows.num_rows
        streams = step.random(rows, c.hc_mult, c.hidden_size)
        pending = hyper_connections.nothing_written(streams)
        results.append(_each_layer(span, layer, (streams, jnp.ones((rows, c.hc_mult), jnp.float32), pending)))
    return results


def _index_topk(step: Step, state: EngineState, layout: CacheLayout) -> Any:
    """Index queries, scores over the keys in the caches and the choice of entries, in the layers that choose."""
    model, c, results = step.model, step.model.config, []
    for span in step.spans:
        rows = span.rows.num_rows
        x, latent, candidates = step.random(rows, c.hidden_size), step.random(rows, c.q_lora_rank), None
        for plan in span.plans(model):
            if plan.owns_index:
                angles = step.angles(span.rows)[plan.ratio > 0]
                chosen, made = model.select(plan, x, latent, angles, span.rows, state, layout, candidates)
                candidates = made if plan.is_candidate_source else candidates
                results.append(chosen)
    return results


def _sparse_attention(step: Step, state: EngineState, layout: CacheLayout) -> Any:
    """Window and selected entries of every layer."""
    model, c = step.model, step.model.config

    def run_of(span: Span, run: tuple[LayerPlan, ...], query: Array, kv: Array, angles: Angles) -> Array:
        plan = run[0]
        selected = _spread_entries(step, span.rows.num_rows, plan.ratio, layout) if plan.ratio else None

        def layer(number: Array, query: Array) -> Array:
            return sparse_attention.sparse_attention(
                number,
                query,
                kv,
                state.window,
                None if selected is None else state.compressed,
                selected,
                model.layers.attn.attn_sink[...],
                angles[plan.ratio > 0],
                span.rows,
                layout,
                source=plan.kv_source,
                scale=c.head_dim**-0.5,
                implementation=model.kernels.of("sparse_attention"),
            )

        return _each_layer(Span(plan.layer, run[-1].layer + 1, span.rows), layer, query)

    results = []
    for span in step.spans:
        query = step.random(span.rows.num_rows, c.num_attention_heads, c.head_dim)
        kv, angles = step.random(span.rows.num_rows, c.head_dim), step.angles(span.rows)
        for run in runs_of_sources(span.plans(model)):
            query = run_of(span, run, query, kv, angles)
        results.append(query)
    return results


def _spread_entries(step: Step, rows: int, ratio: int, layout: CacheLayout) -> Array:
    """int32 [T, index_topk] ascending: an entry out of each of so many equal stretches of the context."""
    top_k = step.model.config.index_topk
    entries = layout.num_blocks // layout.num_slots * layout.block_size // ratio
    stretch = max(1, (entries - layout.block_size) // top_k)
    place = words((rows, top_k), step.seed) % jnp.uint32(stretch)
    selected = jnp.arange(top_k, dtype=jnp.int32) * stretch + place.astype(jnp.int32)
    return jnp.where(selected < entries, selected, -1)


def _compress_store(step: Step, state: EngineState, layout: CacheLayout) -> EngineState:
    """Compressors of the KV sources, and every layer's window rows into the rings: in decode from the projection on."""
    model, c = step.model, step.model.config
    for plan in c.layers:
        if plan.owns_kv:
            assert model.compressors is not None
            x = step.random(step.every.num_rows, c.hidden_size)
            state = model.compressors(plan.kv_source, model.gates, x, step.every, state, layout)
    window, weight, how = state.window, model.layers.attn.kv_norm.weight[...], model.kernels.of("compress_store")
    for span in step.spans:
        kv, angles = step.random(span.rows.num_rows, c.head_dim), step.angles(span.rows)[True]

        def layer(number: Array, ring: Array, kv: Array = kv, rows: Rows = span.rows, angles: Any = angles) -> Array:
            if rows.decode:
                return compress_store.store_projected(
                    ring, number, kv, weight, angles, rows, layout, implementation=how
                )
            return compress_store.store_window(ring, number, kv, rows.stored, layout, implementation=how)

        window = _each_layer(span, layer, window)
    return state.replace(window=window)


def _experts(step: Step, state: EngineState, layout: CacheLayout) -> Any:
    """Routed experts on the rows that they get, sorted, sent and combined as between ranks."""
    model, results = step.model, []
    ffn = model.layers.ffn
    for span in step.spans:
        slot, weight = _routes(step, ffn, span.rows)

        def layer(number: Array, x: Array, slot: Array = slot, weight: Array = weight) -> Array:
            # Another layer, other slots: as balanced, and none twice for a row.
            slot = jnp.where(slot < ffn.num_slots, (slot + 5 * number) % ffn.num_slots, slot)
            ranks = step.model.parallel.mesh.ep
            return ffn._dispatched(number, x, slot, weight, ranks).astype(x.dtype)

        x = step.random(span.rows.num_rows, model.config.hidden_size)
        results.append(_each_layer(span, layer, x))
    return results


def _routes(step: Step, ffn: MoE, rows: Rows) -> tuple[Array, Array]:
    """Slots int32 [T, k] by lot and weights fp32 [T, k]."""
    lot = row_hash(rows.seed[rows.sequence], rows.position.astype(jnp.uint32))
    k = ffn.config.num_experts_per_tok
    slot = ffn._slots(0, jnp.zeros((rows.num_rows, k), jnp.int32), lot)
    return jnp.where(rows.valid[:, None], slot, ffn.num_slots), jnp.full(slot.shape, 1.0 / k, jnp.float32)


def _router_shared(step: Step, state: EngineState, layout: CacheLayout) -> Any:
    """The router, the lots that take its place when balance is forced, and the shared expert."""
    model, results = step.model, []
    ffn = model.layers.ffn
    for span in step.spans:
        lot = row_hash(span.rows.seed[span.rows.sequence], span.rows.position.astype(jnp.uint32))

        def layer(number: Array, carry: tuple[Array, Array], lot: Array = lot, rows: Rows = span.rows) -> Any:
            x, total = carry
            expert, weight = ffn.gate(number, x, rows.image)
            slot = ffn._slots(number, expert, lot)
            return ffn.shared_experts(x, number), total + weight + slot

        x = step.random(span.rows.num_rows, model.config.hidden_size)
        total = jnp.zeros((span.rows.num_rows, ffn.config.num_experts_per_tok), jnp.float32)
        results.append(_each_layer(span, layer, (x, total)))
    return results


def _engram(step: Step, state: EngineState, layout: CacheLayout) -> Any:
    """Embedding, n-gram hash, table look-ups as between ranks, and the gated memory of the Engram layers."""
    carry, memory = step.model.begin(step.every, state)
    streams = carry.streams
    for ordinal, own in enumerate(memory):
        assert step.model.engrams is not None
        streams = step.model.engrams(ordinal, streams, own, step.every.image)
    return streams


def _head(step: Step, state: EngineState, layout: CacheLayout) -> Any:
    """Logits of the rows that tokens are drawn from."""
    rows = step.every.num_rows if step.every.decode else step.every.start.shape[0]
    return jnp.max(step.model.logits(step.random(rows, step.model.config.hidden_size)), axis=-1)


def _draft_context(step: Step, state: EngineState, layout: CacheLayout) -> EngineState:
    """What the step's rows leave to the draft: its windows."""
    rows, c = step.spans[-1].rows, step.model.config
    taps = step.random(rows.num_rows, len(c.dspark_target_layer_ids) * c.hidden_size)
    return step.draft.store_context(taps, rows, state, layout)


RUNS: dict[str, Run] = {
    "projections": _projections,
    "hyper_connections": _hyper_connections,
    "index_topk": _index_topk,
    "sparse_attention": _sparse_attention,
    "compress_store": _compress_store,
    "experts": _experts,
    "router_shared": _router_shared,
    "engram": _engram,
    "head": _head,
    "draft_context": _draft_context,
}
STORES = ("compress_store", "draft_context")


def runs_of_sources(plans: tuple[LayerPlan, ...]) -> Iterator[tuple[LayerPlan, ...]]:
    """Consecutive layers that attend to the entries of the same source, or to windows alone."""
    for _, run in itertools.groupby(plans, key=lambda plan: (plan.ratio, plan.kv_source)):
        yield tuple(run)
