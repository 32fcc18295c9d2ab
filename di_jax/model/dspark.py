"""DSpark draft model: a block of drafts in one pass, seeded by what the target computed (dspark 1, numerics 15.4).

One decode step with drafts, R requests whose committed length is L and whose newest token, the anchor, sits at L:

    out = target(rows, state, layout, taps=True)                         # rows at positions < L
    state = draft.store_context(out.taps, rows, out.state, layout)       # the draft's window KV of these rows
    block = draft(target, anchor, L, draft.context(slot, L, state, layout))

The target is frozen for the draft: it lends its embedding and its head. Nothing here writes the block's own keys, so a
rejected draft leaves no trace; context rows stored beyond L are overwritten before a block reads them (dspark 4).
Shapes: R requests, B = dspark_block_size rows of a block, M stages, W = sliding_window, d = head_dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.config import ModelConfig, ModelConfigError
from di_jax.model.linear import Linear, Numerics, RMSNorm
from di_jax.model.rope import rotate, rotation
from di_jax.model.rows import Rows
from di_jax.model.transformer import Embedding, Layers, Transformer, fill
from di_jax.parallel.mesh import ONE_DEVICE, Parallel
from kernels_pallas.choice import KernelChoice
from kernels_pallas.compress_store import api as compress_store
from kernels_pallas.hyper_connections import api as hyper_connections
from kernels_pallas.sparse_attention.reference import attend

LEAF_PREFIX = "draft."
# A sigmoid beyond +-60 is 0 or 1 in fp32, and a tiny temperature must not make it NaN (dspark 1.5).
MAX_LOGIT = 60.0

# (logits fp32 [R, V], number of the draft int32 [], 0-based) -> drafts int32 [R], and what to keep of them [R, ...].
Choose = Callable[[Array, Array], tuple[Array, Any]]


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class DraftContext:
    """Window KV of the W positions before each block."""

    keys: Array  # [M, R, W, d] of positions start - W .. start - 1, each key also the value; 0 where not visible
    visible: Array  # bool [R, W] the position exists


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class DraftBlock:
    """What a block predicts. Index k stands for position start + k + 1; B drafts, or as many as were asked for."""

    token: Array  # int32 [R, B] drafts
    logits: Array  # fp32 [R, B, V] with the Markov bias, never rounded: the drafts are drawn from them
    score: Array  # fp32 [R, B] raw confidence: its sigmoid is P(draft k is accepted, given that all before it are)
    kept: Any = None  # [R, B, ...] what `Choose` gave beside each draft


class MarkovHead(nnx.Module):
    """A first-order bias on the logits, of low rank: head[v] . embed[previous token] (dspark 1.5)."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        self.dtype = numerics.dtype
        self.embed = Embedding(config, config.dspark_markov_rank)
        self.head = Embedding(config, config.dspark_markov_rank)

    def embedding(self, previous: Array) -> Array:
        """int32 [...] -> [..., rank]."""
        return self.embed.weight[...][previous].astype(self.dtype)

    def bias(self, embedded: Array) -> Array:
        """[..., rank] -> fp32 [..., V], accumulated in fp32."""
        return jnp.einsum(
            "...r,vr->...v",
            embedded,
            self.head.weight[...].astype(self.dtype),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )


class ConfidenceHead(nnx.Module):
    """w . [h; embed[previous token]] in fp32, h before the final norm (dspark 1.5)."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        features = config.hidden_size + config.dspark_markov_rank
        self.proj = Linear(config, numerics, (), 1, features, storage="bf16", axes=(None, None))

    def __call__(self, hidden: Array, embedded: Array) -> Array:
        """[..., D], [..., rank] -> fp32 [...]."""
        both = jnp.concatenate([hidden.astype(jnp.float32), embedded.astype(jnp.float32)], axis=-1)
        return self.proj(both, out_dtype=jnp.dtype(jnp.float32))[..., 0]


class DraftModel(nnx.Module):
    """The draft's own weights, stages stacked [M]. Paths: `checkpoint.mapping`, below `draft.`.

    parallel: of the target. The draft's experts are spread over the same ranks, without copies and without balancing.
    Raises ModelConfigError when the config has no draft, or one that cannot be built, and ConfigError when its experts
    do not divide among the ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        kernels: KernelChoice | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        check_draft(config)
        parallel = draft_parallel(parallel or ONE_DEVICE)
        parallel.mesh.check_experts(config.dspark_n_routed_experts, 0, "dspark_n_routed_experts")
        c = self.config = config
        self.numerics = numerics
        self.kernels = kernels = kernels or KernelChoice()
        dim, taps = c.hidden_size, len(c.dspark_target_layer_ids) * c.hidden_size
        self.main_proj = Linear(c, numerics, (), dim, taps, storage="fp8", axes=(None, None))
        self.main_norm = RMSNorm(c, numerics, (), dim)
        self.stages = Layers(c.draft_config, numerics, kernels, parallel)
        self.norm = RMSNorm(c, numerics, (), dim)
        self.markov_head = MarkovHead(c, numerics)
        self.confidence_head = ConfidenceHead(c, numerics)

    # ---- context: what the target's taps leave in the draft's windows (dspark 1.3) ----

    def context_kv(self, taps: Array, position: Array) -> Array:
        """taps [T, tapped layers * D] at position int32 [T] -> rotated, cache-quantized KV of every stage [M, T, d]."""
        main = self.main_norm(self.main_proj(taps))
        cos_sin = rotation(self.config, False, position)
        graph, stages = nnx.split(self.stages.attn)

        def of_stage(weights: Any) -> Array:
            attn: Any = nnx.merge(graph, weights)
            return attn.window_kv(..., main, cos_sin)  # there is no stack left to index

        return jax.vmap(of_stage)(stages)  # all stages in one product

    def store_context(self, taps: Array, rows: Rows, state: EngineState, layout: CacheLayout) -> EngineState:
        """Stores the context KV of a step's rows, those that the taps are of; context ranks store what all computed.

        Raises ValueError when the layout has no rings for the stages.
        """
        self._check_layout(layout)
        every = rows.gathered(jnp.moveaxis(self.context_kv(taps, rows.position), 0, 1))
        window = compress_store.store_window(
            state.window,
            layout.config.num_hidden_layers,
            jnp.moveaxis(every, 1, 0),
            rows.stored,
            layout,
            implementation=self.kernels.of(compress_store.OPERATION),
        )
        return state.replace(window=window)

    def context(self, slot: Array, start: Array, state: EngineState, layout: CacheLayout) -> DraftContext:
        """The windows before position `start` int32 [R] of the sequences in `slot` int32 [R]."""
        self._check_layout(layout)
        c = self.config
        position = start[:, None] - c.sliding_window + jnp.arange(c.sliding_window, dtype=jnp.int32)
        visible = position >= 0
        ring = layout.config.num_hidden_layers + jnp.arange(c.num_nextn_predict_layers, dtype=jnp.int32)
        record = state.window[ring[:, None, None], slot[:, None], position % c.window_ring]
        keys = layout.formats.window.decode(record).astype(self.numerics.dtype)
        # Zeros, because a row that was never written may hold anything, and 0 * NaN is NaN.
        return DraftContext(jnp.where(visible[..., None], keys, 0), visible)

    def _check_layout(self, layout: CacheLayout) -> None:
        stages = self.config.num_nextn_predict_layers
        if layout.draft_stages != stages:
            raise ValueError(
                f"the cache layout has rings for {layout.draft_stages} draft stages, the draft has {stages}"
            )

    # ---- the block (dspark 1.4) ----

    def hidden(
        self, target: Transformer, anchor: Array, start: Array, context: DraftContext, valid: Array | None = None
    ) -> Array:
        """Runs the stages on [anchor, noise, noise, ...] at positions start ..: [R, B, D], before the final norm.

        anchor, start int32 [R]; valid bool [R]: requests that are padding route to no expert.
        """
        c, block = self.config, self.config.draft_block
        requests = anchor.shape[0]
        noise = jnp.full((requests, block - 1), c.dspark_noise_token_id, anchor.dtype)
        token = jnp.concatenate([anchor[:, None], noise], axis=1).reshape(-1)
        position = (start[:, None] + jnp.arange(block, dtype=jnp.int32)).reshape(-1)
        embedded = target.embed.weight[...][token].astype(self.numerics.dtype)
        streams = jnp.repeat(embedded[:, None], c.hc_mult, axis=1)
        pre = jnp.zeros((requests * block, c.hc_mult), jnp.float32).at[:, 0].set(1.0)
        cos_sin = rotation(c, False, position)
        visible = visible_keys(context.visible, block)
        live = jnp.ones(requests, bool) if valid is None else valid
        live = jnp.repeat(live, block)
        image = jnp.zeros_like(live)  # a draft is text: the plain router bias
        w = self.stages

        def stage(carry: tuple[Array, Array, Any], x: tuple[Array, Array]) -> tuple[tuple[Array, Array, Any], None]:
            (streams, pre, pending), (number, keys) = carry, x
            streams, y, pre, post, comb = w.hc_attn.fused(number, pending, streams, pre, w.attn_norm)
            y = self._attention(number, y, keys, visible, cos_sin)
            streams, y, pre, post, comb = w.hc_ffn.fused(number, (y, post, comb), streams, pre, w.ffn_norm)
            y, *_ = w.ffn(number, y, image, live)
            return (streams, pre, (y, post, comb)), None

        numbers = jnp.arange(c.num_nextn_predict_layers, dtype=jnp.int32)
        begun = (streams, pre, hyper_connections.nothing_written(streams))
        (streams, pre, (y, post, comb)), _ = lax.scan(stage, begun, (numbers, context.keys))
        streams = w.hc_ffn.expand(y, streams, post, comb)
        implementation = self.kernels.of("hyper_connections")
        hidden = hyper_connections.collapse(streams, pre, implementation=implementation)
        return hidden.reshape(requests, block, -1)

    def _attention(self, stage: Array, x: Array, context: Array, visible: Array, cos_sin: tuple[Array, Array]) -> Array:
        """x [R * B, D], context [R, W, d], visible bool [R, B, W + B] -> the sublayer's output [R * B, D]."""
        attn, (requests, block, _) = self.stages.attn, visible.shape
        heads, dim = self.config.num_attention_heads, self.config.head_dim
        query = attn.query(stage, attn.latent_query(stage, x), cos_sin)
        own = attn.window_kv(stage, x, cos_sin)  # quantized as the context is (dspark 1.4)
        keys = jnp.concatenate([context, own.reshape(requests, block, dim)], axis=1)
        # A window-only layer: no compressed entries.
        nothing, nowhere = jnp.zeros((block, 0, dim), keys.dtype), jnp.zeros((block, 0), bool)

        def one(query: Array, keys: Array, visible: Array) -> Array:
            return attend(query, keys, visible, nothing, nowhere, attn.attn_sink[stage], dim**-0.5)

        out = jax.vmap(one)(query.reshape(requests, block, heads, dim), keys, visible)
        cos, sin = cos_sin
        out = rotate(out.reshape(-1, heads, dim), (cos[:, None], sin[:, None]), inverse=True)
        return attn.output(stage, out)

    # ---- heads (dspark 1.5) ----

    def base_logits(self, target: Transformer, hidden: Array) -> Array:
        """[..., D] -> fp32 [..., V], without the Markov bias."""
        flat = self.norm(hidden).reshape(-1, hidden.shape[-1])
        return target.logits(flat).reshape(*hidden.shape[:-1], -1)

    def __call__(
        self,
        target: Transformer,
        anchor: Array,
        start: Array,
        context: DraftContext,
        *,
        choose: Choose | None = None,
        valid: Array | None = None,
        count: int | None = None,
    ) -> DraftBlock:
        """The drafts that follow `anchor` int32 [R] at position `start` int32 [R].

        choose: how a draft is drawn from its logits, None for greedy (the lowest id on ties); it may sample, or return
        given ids (teacher forcing). Only the choice is sequential: the stages and the head run once for all rows.
        count: the first so many drafts alone, by default all; the stages run the whole block anyway.
        """
        count = self.config.draft_block if count is None else count
        hidden = self.hidden(target, anchor, start, context, valid)[:, :count]
        base = self.base_logits(target, hidden)
        choose = choose or greedy

        def draw(previous: Array, x: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array, Array, Any]]:
            base, number = x
            embedded = self.markov_head.embedding(previous)
            logits = base + self.markov_head.bias(embedded)
            token, kept = choose(logits, number)
            token = token.astype(previous.dtype)
            return token, (token, logits, embedded, kept)

        numbers = jnp.arange(count, dtype=jnp.int32)
        _, drawn = lax.scan(draw, anchor, (jnp.moveaxis(base, 1, 0), numbers))
        token, logits, embedded, kept = jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1), drawn)
        return DraftBlock(token, logits, self.confidence_head(hidden, embedded), kept)


def visible_keys(context: Array, block: int) -> Array:
    """Which keys each row of a block sees, bool [R, B, W + B]: the context bool [R, W], then the block.

    The same for all rows: the window ends where the block starts, it does not slide, and rows see later rows.
    """
    seen = jnp.concatenate([context, jnp.ones((context.shape[0], block), bool)], axis=1)
    return jnp.broadcast_to(seen[:, None], (context.shape[0], block, seen.shape[1]))


def draft_parallel(parallel: Parallel) -> Parallel:
    """What the draft's modules know of the target's mesh: routed by score, every expert once."""
    return dataclasses.replace(parallel, extra_experts=0, balanced=False, force="none")


def greedy(logits: Array, number: Array) -> tuple[Array, None]:
    """The most likely token, the lowest id on ties: `Choose` for temperature 0."""
    return jnp.argmax(logits, axis=-1), None


def confidence(score: Array, temperatures: Array | None = None) -> Array:
    """P(draft k is accepted, given that all before it are): sigmoid of score fp32 [R, B] over temperatures fp32 [B].

    temperatures: of the calibration, all positive; None for 1. Raises ValueError unless there is one per draft.
    """
    if temperatures is not None:
        if temperatures.shape != score.shape[-1:]:
            raise ValueError(f"{temperatures.shape} calibration temperatures for blocks of {score.shape[-1]} drafts")
        score = score / temperatures
    return jax.nn.sigmoid(jnp.clip(score, -MAX_LOGIT, MAX_LOGIT))


def check_draft(config: ModelConfig) -> None:
    """Raises ModelConfigError unless the config describes a draft that can be built."""
    c, ids = config, config.dspark_target_layer_ids
    for ok, field, why in (
        (c.num_nextn_predict_layers > 0, "num_nextn_predict_layers", "is 0: this model has no draft to load"),
        (
            bool(ids) and list(ids) == sorted(set(ids)) and ids[-1] < c.num_hidden_layers,
            "dspark_target_layer_ids",
            f"must ascend within the {c.num_hidden_layers} layers, found {list(ids)}",
        ),
        (
            # Published programs tap such a layer before or after its Engram; no released model has one.
            not set(ids) & set(c.engram_layer_ids),
            "dspark_target_layer_ids",
            f"names an Engram layer: {sorted(set(ids) & set(c.engram_layer_ids))}",
        ),
        (c.dspark_markov_rank > 0, "dspark_markov_rank", "must be at least 1"),
        (
            0 < c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts,
            "dspark_num_experts_per_tok",
            f"is {c.dspark_num_experts_per_tok} of {c.dspark_n_routed_experts} experts",
        ),
        (
            c.dspark_noise_token_id < c.vocab_size,
            "dspark_noise_token_id",
            f"is {c.dspark_noise_token_id}, the vocabulary ends at {c.vocab_size}",
        ),
    ):
        if not ok:
            raise ModelConfigError(f"config.json: {field} {why}")


def abstract_draft(
    config: ModelConfig,
    numerics: Numerics,
    kernels: KernelChoice | None = None,
    parallel: Parallel | None = None,
) -> DraftModel:
    """The draft with ShapeDtypeStructs for weights: global shapes. Raises ModelConfigError and ConfigError."""
    return nnx.eval_shape(lambda: DraftModel(config, numerics, kernels, parallel))


def assemble_draft(
    config: ModelConfig,
    numerics: Numerics,
    leaves: Mapping[str, Array],
    kernels: KernelChoice | None = None,
    parallel: Parallel | None = None,
) -> DraftModel:
    """The draft around the `draft.*` among `leaves`; others are the target's and left alone.

    Raises ModelConfigError and ConfigError, and ValueError when a leaf is missing, unknown or of another shape.
    """
    model = abstract_draft(config, numerics, kernels, parallel)
    own = {path.removeprefix(LEAF_PREFIX): leaf for path, leaf in leaves.items() if path.startswith(LEAF_PREFIX)}
    return nnx.merge(nnx.graphdef(model), fill(model, own))
