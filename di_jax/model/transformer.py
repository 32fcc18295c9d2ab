"""The DeepSeek-V4.1 backbone: rows of tokens in, final hidden states out, caches updated (numerics 9, 10, 13, 15)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from di_jax.model.attention import Attention
from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.compressor import Compressor, CompressorGate
from di_jax.model.config import LayerPlan, ModelConfig
from di_jax.model.engram import Engram, EngramTable, HashTable, NgramHash, RowSource, host_memory
from di_jax.model.engram_tables import EngramTables
from di_jax.model.hyper_connections import HyperConnection
from di_jax.model.indexer import Indexer
from di_jax.model.linear import Numerics, RMSNorm, parameter
from di_jax.model.moe import MoE, slot_tables
from di_jax.model.rope import rotation
from di_jax.model.rows import Rows
from di_jax.parallel.eplb import initial_slots
from di_jax.parallel.mesh import ONE_DEVICE, Parallel
from di_jax.parallel.replica_choice import row_hash
from kernels_pallas.choice import KernelChoice
from kernels_pallas.hyper_connections import api as hyper_connections


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Carry:
    """What one layer hands to the next."""

    streams: Array  # [T, hc, D] residual streams, without `pending`
    pre: Array  # fp32 [T, hc] how the next attention collapses them
    state: EngineState
    selected: Array | None  # int32 [T, index_topk] entries chosen by the last index source
    candidates: Array | None  # int32 [T, candidate_topk_blocks] of the candidate source
    load: Array | None = None  # int32 [L, expert slots] rows of this rank that each slot got
    # y [T, D], post and comb of the layer's experts, which the next site writes into the streams as it reads them; None
    # where that is done.
    pending: tuple[Array, Array, Array] | None = None


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class LayerTrace:
    """What one layer computed, for `score.trace` and the golden tests. Runs of layers add a leading axis."""

    streams: Array | None  # [T, hc, D] leaving the layer; None where nobody asked
    experts: Array  # int32 [T, k]
    selected: Array | None  # int32 [T, index_topk], index sources only


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class ModelOutput:
    """What a step of the backbone gives. traces, taps and load only when asked for."""

    hidden: Array  # [T, D] normed
    rows: Rows  # of hidden and taps: those that the decoder layers ran
    state: EngineState  # every cache updated
    traces: list[LayerTrace]  # one for each run of layers
    taps: Array | None  # [T, tapped layers * D] what the draft reads (dspark 1.2)
    load: Array | None  # int32 [L, expert slots] rows of this rank that each slot got


class Layers(nnx.Module):
    """The weights that every backbone layer has, stacked [L]."""

    def __init__(self, config: ModelConfig, numerics: Numerics, kernels: KernelChoice, parallel: Parallel) -> None:
        count = config.num_hidden_layers
        self.attn = Attention(config, numerics, kernels, count)
        self.attn_norm = RMSNorm(config, numerics, (count,), config.hidden_size)
        self.ffn_norm = RMSNorm(config, numerics, (count,), config.hidden_size)
        self.hc_attn = HyperConnection(config, kernels, count)
        self.hc_ffn = HyperConnection(config, kernels, count)
        self.ffn = MoE(config, numerics, kernels, count, parallel)


class Embedding(nnx.Module):
    """A vocabulary matrix [V, features], for look-up or, as the head, for logits. features: by default hidden_size."""

    def __init__(self, config: ModelConfig, features: int | None = None) -> None:
        shape = (config.vocab_size, features or config.hidden_size)
        self.weight = parameter(shape, jnp.bfloat16, ("vocabulary", None))


class Transformer(nnx.Module):
    """A DeepSeek-V4.1 language model in its stored formats. Paths of its weights: `checkpoint.mapping`."""

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        kernels: KernelChoice | None = None,
        tables: EngramTables | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        c = self.config = config
        self.parallel = parallel = parallel or ONE_DEVICE
        self.numerics = numerics
        self.kernels = kernels = kernels or KernelChoice()
        self.embed, self.head = Embedding(c), Embedding(c)
        self.norm = RMSNorm(c, numerics, (), c.hidden_size)
        self.layers = Layers(c, numerics, kernels, parallel)
        self.compressors = Compressor(c, numerics, kernels) if c.kv_source_layer_ids else None
        self.gates = CompressorGate(c, numerics) if c.pooled_sources else None
        self.indexers = Indexer(c, numerics, kernels) if c.index_source_layer_ids else None
        self.ngram_hash = NgramHash(c, tables) if c.engram_layer_ids else None
        self.engrams = Engram(c, numerics) if c.engram_layer_ids else None
        on_device = c.engram_num_embeddings if parallel.engram_placement == "device" else ()
        self.engram_tables = nnx.List([EngramTable(c, numerics, rows, parallel) for rows in on_device])
        self.host_tables: RowSource | None = None

    def __call__(
        self,
        rows: Rows,
        state: EngineState,
        layout: CacheLayout,
        *,
        kept: Rows | None = None,
        trace: bool = False,
        taps: bool = False,
    ) -> ModelOutput:
        """Runs `rows` through all layers. taps: the means of the streams that enter the `dspark_target_layer_ids`.

        kept: with it the decoder layers run these rows alone (`Rows.kept`); the first of them still stores the entries
        of all. A trace has all rows, taps are of the decoder layers: ValueError for a trace of kept rows.
        """
        c = self.config
        if kept is not None and trace:
            raise ValueError("a trace asked of a step that drops rows: their later layers are not computed")
        tapped = c.dspark_target_layer_ids if taps else ()
        means: dict[int, Array] = {}
        carry, memory = self.begin(rows, state)
        cos_sin = self._angles(rows)
        traces: list[LayerTrace] = []
        for run in c.layer_runs:
            wanted = [plan.layer for plan in run if plan.layer in tapped]
            boundary = run[0].layer == c.first_decoder_layer  # a KV source: it has no other layer in its run
            if boundary and kept is None:
                rows = rows.masked
            if len(run) == 1:
                plan = run[0]
                means.update((layer, self.tap(self.settle(carry).streams)) for layer in wanted)
                after = (kept, self._angles(kept)) if boundary and kept is not None else None
                carry, record = self.layer(plan, plan.layer, carry, rows, cos_sin, layout, memory, after)
                rows, cos_sin = after or (rows, cos_sin)
                records = jax.tree.map(lambda a: a[None], self._traced(record, carry)) if trace else None
            else:
                carry, records, entering = self._scan(run, carry, rows, cos_sin, layout, trace, bool(wanted))
                if entering is not None:
                    means.update((layer, entering[layer - run[0].layer]) for layer in wanted)
            if records is not None:
                traces.append(records)
        hidden = hyper_connections.collapse(
            self.settle(carry).streams, carry.pre, implementation=self.kernels.of("hyper_connections")
        )
        hidden, tap = self.norm(hidden), None
        if taps:
            # Whoever stores what comes of the taps does it after the last layer has read its ring: else the rings, of
            # which that would be a second version, are copied in every step (9 MB for 128 slots of the bundled model).
            tap = jnp.concatenate([means[layer] for layer in tapped], axis=-1)
            hidden, tap = lax.optimization_barrier((hidden, tap))
        return ModelOutput(hidden, rows, carry.state, traces, tap, carry.load)

    def _angles(self, rows: Rows) -> dict[bool, tuple[Array, Array]]:
        """Rotations of the rows' positions, by whether a layer compresses."""
        return {compressed: rotation(self.config, compressed, rows.position) for compressed in (False, True)}

    def begin(self, rows: Rows, state: EngineState) -> tuple[Carry, list[Array]]:
        """What layer 0 gets, and the memory [T, columns * head_dim] of every Engram layer."""
        hc = self.config.hc_mult
        embedded = self.embed.weight[...][rows.token].astype(self.numerics.dtype)
        memory: list[Array] = []
        if self.ngram_hash is not None:
            look, history = self.ngram_hash.lookback(rows.stored, state.engram_history)
            table_rows = self.ngram_hash(rows.own(look))
            state = state.replace(engram_history=history)
            # Look-ups depend on ids only: they are issued before layer 0 and consumed where the layer needs them.
            if self.parallel.engram_placement == "host":
                memory = host_memory(self.host_tables, self.config, self.numerics.dtype, table_rows, rows.valid)
            else:
                memory = [t(table_rows[g], rows.valid) for g, t in enumerate(self.engram_tables)]
        streams = jnp.repeat(embedded[:, None], hc, axis=1)
        pre = jnp.zeros((rows.num_rows, hc), jnp.float32).at[:, 0].set(1.0)
        slots = self.layers.ffn.num_slots
        load = jnp.zeros((self.config.num_hidden_layers, slots), jnp.int32) if self.parallel.balanced else None
        return Carry(streams, pre, state, selected=None, candidates=None, load=load), memory

    def settle(self, carry: Carry) -> Carry:
        """The same with the last layer's output in the streams."""
        if carry.pending is None:
            return carry
        y, post, comb = carry.pending
        return dataclasses.replace(carry, streams=self.layers.hc_ffn.expand(y, carry.streams, post, comb), pending=None)

    def _traced(self, record: LayerTrace, carry: Carry) -> LayerTrace:
        """The record of the layer that left `carry`, with its streams."""
        return dataclasses.replace(record, streams=self.settle(carry).streams)

    def tap(self, streams: Array) -> Array:
        """Mean over the streams [T, hc, D] -> [T, D]: an fp32 sum, rounded once."""
        mean = jnp.sum(streams.astype(jnp.float32), axis=1) * (1 / self.config.hc_mult)
        return mean.astype(self.numerics.dtype)

    def _scan(
        self,
        run: tuple[LayerPlan, ...],
        carry: Carry,
        rows: Rows,
        cos_sin: dict[bool, tuple[Array, Array]],
        layout: CacheLayout,
        trace: bool,
        taps: bool,
    ) -> tuple[Carry, LayerTrace | None, Array | None]:
        """A run of layers of one kind: the program holds their body once. With `taps`, also those of its layers."""

        def body(carry: Carry, layer: Array) -> tuple[Carry, tuple[LayerTrace | None, Array | None]]:
            entering = self.tap(self.settle(carry).streams) if taps else None
            carry, record = self.layer(run[0], layer, carry, rows, cos_sin, layout, [])
            return carry, (self._traced(record, carry) if trace else None, entering)

        if carry.pending is None:  # a loop's carry has one structure
            carry = dataclasses.replace(carry, pending=hyper_connections.nothing_written(carry.streams))
        numbers = jnp.arange(run[0].layer, run[-1].layer + 1, dtype=jnp.int32)
        carry, (records, entering) = lax.scan(body, carry, numbers)
        return carry, records, entering

    def layer(
        self,
        plan: LayerPlan,
        layer: Array | int,
        carry: Carry,
        rows: Rows,
        cos_sin: dict[bool, tuple[Array, Array]],
        layout: CacheLayout,
        memory: list[Array],
        kept: tuple[Rows, dict[bool, tuple[Array, Array]]] | None = None,
    ) -> tuple[Carry, LayerTrace]:
        """One block (numerics 10). plan: its kind, static; layer: its number, traced inside a run.

        kept: rows and their cos_sin that the layer goes on with, once the entries of all `rows` are stored.
        """
        w = self.layers
        state, selected, candidates = carry.state, carry.selected, carry.candidates
        if plan.engram >= 0:
            assert self.engrams is not None
            carry = self.settle(carry)
            streams = self.engrams(plan.engram, carry.streams, memory[plan.engram], rows.image)
            carry = dataclasses.replace(carry, streams=streams)
        streams, x, pre, post, comb = w.hc_attn.fused(layer, carry.pending, carry.streams, carry.pre, w.attn_norm)
        if plan.owns_kv:
            assert self.compressors is not None
            state = self.compressors(plan.kv_source, self.gates, x, rows, state, layout)
        if kept is not None:
            streams, x, pre, post, comb = kept[0].taken(rows, (streams, x, pre, post, comb))
            rows, cos_sin = kept
        angles = cos_sin[plan.ratio > 0]
        latent_query = w.attn.latent_query(layer, x)
        if plan.owns_index:
            selected, made = self.select(plan, x, latent_query, angles, rows, state, layout, candidates)
            candidates = made if plan.is_candidate_source else candidates
        y, state = w.attn(plan, layer, x, latent_query, selected if plan.ratio else None, angles, rows, state, layout)
        streams, x, next_pre, post, comb = w.hc_ffn.fused(layer, (y, post, comb), streams, pre, w.ffn_norm)
        lots = self.parallel.draws_lots
        lot = row_hash(rows.seed[rows.sequence], rows.position.astype(jnp.uint32)) if lots else None
        y, experts, slots = w.ffn(layer, x, rows.image, rows.valid, lot)
        load = carry.load
        if load is not None:
            load = load.at[layer].set(jnp.zeros(load.shape[1], jnp.int32).at[slots.reshape(-1)].add(1, mode="drop"))
        record = LayerTrace(None, experts, selected if plan.owns_index else None)
        return Carry(streams, next_pre, state, selected, candidates, load, (y, post, comb)), record

    def select(
        self,
        plan: LayerPlan,
        x: Array,
        latent_query: Array,
        cos_sin: tuple[Array, Array],
        rows: Rows,
        state: EngineState,
        layout: CacheLayout,
        candidates: Array | None,
    ) -> tuple[Array, Array | None]:
        """The entries that the layers of an index source attend to, and candidate blocks; see `Indexer`."""
        assert self.indexers is not None
        return self.indexers(plan, x, latent_query, cos_sin, rows, state, layout, candidates)

    def logits(self, hidden: Array) -> Array:
        """[N, D] -> fp32 logits [N, V] (numerics 15.2)."""
        return head_logits(self.head.weight[...], hidden)


def head_logits(weight: Array, hidden: Array) -> Array:
    """fp32 logits [N, V] of hidden [N, D] under the head's weight [V, D]."""
    if not hidden.dtype == weight.dtype == jnp.bfloat16:
        hidden, weight = hidden.astype(jnp.float32), weight.astype(jnp.float32)
    # Products of two bf16 are exact in fp32: no fp32 copy of the head, 2.65 GB in the released model.
    return jnp.einsum("td,vd->tv", hidden, weight, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def abstract_model(
    config: ModelConfig,
    numerics: Numerics,
    kernels: KernelChoice | None = None,
    parallel: Parallel | None = None,
) -> Transformer:
    """The model with ShapeDtypeStructs for weights: global shapes, dtypes and logical axes at no cost."""
    return nnx.eval_shape(lambda: Transformer(config, numerics, kernels, parallel=parallel))


def parameter_paths(model: nnx.Module) -> dict[str, nnx.Param]:
    """Dotted path -> parameter, the names that `checkpoint.mapping` uses."""
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def fill(model: nnx.Module, leaves: Mapping[str, Array]) -> nnx.State:
    """The parameters of an abstract model, loaded; leaves by dotted path. Raises ValueError as `assemble` does."""
    flat = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    if flat.keys() != leaves.keys():
        raise ValueError(f"weights do not match the model: {sorted(flat.keys() ^ leaves.keys())}")
    loaded = {}
    for name, (path, leaf) in flat.items():
        array, spec = leaves[name], leaf.get_value()
        if array.shape != spec.shape or array.dtype != spec.dtype:
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, expected {spec.dtype}{list(spec.shape)}")
        loaded[path] = leaf.replace(array)
    return nnx.from_flat_state(loaded)


def assemble(
    config: ModelConfig,
    numerics: Numerics,
    leaves: Mapping[str, Array],
    tables: EngramTables | None,
    kernels: KernelChoice | None = None,
    parallel: Parallel | None = None,
    host_tables: RowSource | None = None,
) -> Transformer:
    """The model around loaded weights. host_tables: for Engram tables that are no weights. Raises ValueError when a
    leaf is missing, unknown or of another shape."""
    model = abstract_model(config, numerics, kernels, parallel)
    model.host_tables = host_tables
    state = fill(model, leaves)
    hashes = nnx.state(NgramHash(config, tables), HashTable) if config.engram_layer_ids else None
    if hashes is not None:
        state = nnx.merge_state(state, nnx.State({"ngram_hash": hashes}))
    if model.parallel.balanced:
        first = initial_slots(config.num_hidden_layers, config.n_routed_experts, model.layers.ffn.num_slots)
        state = nnx.merge_state(state, nnx.State({"layers": {"ffn": slot_tables(first, config.n_routed_experts)}}))
    return nnx.merge(nnx.graphdef(model), state)
