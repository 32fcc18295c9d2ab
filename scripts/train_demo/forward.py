"""The training forward pass: the engine's own modules over whole sequences, with the indexer's own loss.

Rows of B sequences of T tokens are one prefill step from empty caches, so what is trained is what the engine runs:
paged entries, window, candidates and selection included. Gradients pass through the caches because `Numerics.training`
stores straight-through values instead of bytes.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from di_jax.model.cache import CacheLayout
from di_jax.model.config import LayerPlan, ModelConfig
from di_jax.model.rope import rotate, rotation
from di_jax.model.rows import Rows, make_rows
from di_jax.model.transformer import Carry, Transformer
from kernels_pallas.index_topk import reference as index_topk
from scripts.train_demo.parameters import SELECTED

TILE = 128
FAR = -1e30


@dataclasses.dataclass(frozen=True)
class Forward:
    """What a pass over [B, T] tokens gave."""

    hidden: Array  # [B * T, D] normed
    taps: Array  # [B * T, taps * D] what the draft reads
    load: Array  # fp32 [L, E] rows of each expert
    index_loss: Array  # fp32 [index sources] KL of each


def training_layout(config: ModelConfig, numerics: Any, batch: int, length: int) -> CacheLayout:
    """Caches of B sequences side by side: sequence b holds blocks b * (T / 128) on."""
    return CacheLayout(config, numerics.formats, batch * length // TILE, batch)


def training_rows(tokens: Array) -> Rows:
    """Every token of [B, T] as the first chunk of its sequence; T divides by 128."""
    batch, length = tokens.shape
    sequence = jnp.arange(batch, dtype=jnp.int32)
    blocks = length // TILE
    return make_rows(
        tokens.reshape(-1),
        jnp.repeat(sequence, blocks),
        jnp.zeros(batch, jnp.int32),
        sequence * length,
        jnp.full(batch, length, jnp.int32),
        sequence,
        sequence[:, None] * blocks + jnp.arange(blocks, dtype=jnp.int32),
        decode=False,
    )


def forward(model: Transformer, tokens: Array, stride: int, *, index_loss: bool = True) -> Forward:
    """Runs tokens int32 [B, T]. Every `stride`-th position is a query of the index loss."""
    c = model.config
    batch, length = tokens.shape
    rows = training_rows(tokens)
    layout = training_layout(c, model.numerics, batch, length)
    sample = (jnp.arange(batch)[:, None] * length + jnp.arange(stride - 1, length, stride)).reshape(-1)
    carry, memory = model.begin(rows, layout.allocate())
    cos_sin = {compressed: rotation(c, compressed, rows.position) for compressed in (False, True)}
    graph, params = nnx.split(model)
    taps, loads, losses = [], [], []
    scores: Array | None = None
    mass: Array | None = None
    for plan in c.layers:
        if plan.layer in c.dspark_target_layer_ids:
            taps.append(model.tap(carry.streams))
        if plan.owns_index and scores is not None:
            losses.append(_divergence(scores, mass))
            scores = None

        @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(SELECTED))
        def one_layer(params: Any, carry: Carry, memory: list[Array], plan: LayerPlan = plan) -> tuple[Carry, Array]:
            layer_model: Transformer = nnx.merge(graph, params)
            carry, record = layer_model.layer(plan, plan.layer, carry, rows, cos_sin, layout, memory)
            chosen = jnp.sum(jax.nn.one_hot(record.experts, c.n_routed_experts, dtype=jnp.float32), axis=(0, 1))
            return carry, chosen

        before = carry
        carry, chosen = one_layer(params, carry, memory)
        loads.append(chosen)
        if index_loss and plan.ratio:
            new_scores, new_mass = _index_terms(model, plan, before, carry, rows, memory, layout, sample, batch)
            scores = new_scores if new_scores is not None else scores
            mass = new_mass if plan.owns_index or mass is None else mass + new_mass
    if scores is not None:
        losses.append(_divergence(scores, mass))
    hidden = model.norm(jnp.sum(carry.pre[..., None] * carry.streams.astype(jnp.float32), axis=-2))
    kl = jnp.stack(losses) if losses else jnp.zeros(1)
    return Forward(hidden, jnp.concatenate(taps, axis=-1), jnp.stack(loads), kl)


def _index_terms(
    model: Transformer,
    plan: LayerPlan,
    before: Carry,
    after: Carry,
    rows: Rows,
    memory: list[Array],
    layout: CacheLayout,
    sample: Array,
    batch: int,
) -> tuple[Array | None, Array]:
    """(index scores [B, S, N] at an index source else None, head-summed attention mass [B, S, N]) of sampled rows.

    The mass has no gradient, and the scores' inputs are detached: the loss trains the indexer alone.
    """
    c, w = model.config, model.layers
    ratio = c.compress_ratios[plan.layer]
    streams = lax.stop_gradient(before.streams)[sample]
    if plan.engram >= 0:
        assert model.engrams is not None
        dead = jnp.zeros(sample.shape, bool)
        streams = model.engrams(plan.engram, streams, memory[plan.engram][sample], dead)
    x, *_ = w.hc_attn(plan.layer, streams, lax.stop_gradient(before.pre)[sample])
    x = lax.stop_gradient(w.attn_norm(x, plan.layer))
    latent = lax.stop_gradient(w.attn.latent_query(plan.layer, x))
    position = rows.position[sample]
    angles = rotation(c, True, position)
    first, per_block = layout.source_offset[plan.kv_source], layout.entries_per_block[plan.kv_source]

    def entries(pool: Array) -> Array:
        pages = pool.reshape(batch, -1, *pool.shape[1:])[:, :, first : first + per_block]
        return pages.reshape(batch, -1, pool.shape[-1])

    reachable = ((position + 1) // ratio).reshape(batch, -1)
    keys = lax.stop_gradient(entries(after.state.compressed))
    visible = jnp.arange(keys.shape[1]) < reachable[..., None]
    query = w.attn.wq_b(latent, plan.layer).reshape(-1, c.num_attention_heads, c.head_dim)
    query = rotate(query, (angles[0][:, None], angles[1][:, None]))
    query = lax.stop_gradient(query).reshape(batch, -1, *query.shape[1:])
    logits = jnp.einsum("bshd,bnd->bshn", query, keys.astype(query.dtype), preferred_element_type=jnp.float32)
    logits = jnp.where(visible[:, :, None], logits * c.head_dim**-0.5, FAR)
    sink = w.attn.attn_sink[plan.layer][:, None]
    peak = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), sink)
    weight = jnp.exp(logits - peak)
    mass = jnp.sum(weight / (jnp.sum(weight, axis=-1, keepdims=True) + jnp.exp(sink - peak)), axis=2)
    mass = lax.stop_gradient(jnp.where(visible, mass, 0.0))
    if not plan.owns_index:
        return None, mass
    assert model.indexers is not None
    index_query = model.indexers.query(plan.index_source, latent, angles)
    weights = model.indexers.head_weights(plan.index_source, x)
    index_keys = entries(after.state.index).astype(index_query.dtype)
    score = jax.vmap(index_topk.scores)(
        index_query.reshape(batch, -1, *index_query.shape[1:]),
        weights.reshape(batch, -1, weights.shape[-1]),
        index_keys,
    )
    return jnp.where(visible, score, FAR), mass


def _divergence(scores: Array, mass: Array | None) -> Array:
    """Mean KL(mass / sum(mass) || softmax(scores)) over sampled queries that can reach an entry."""
    assert mass is not None
    total = jnp.sum(mass, axis=-1, keepdims=True)
    target = mass / jnp.maximum(total, 1e-20)
    log_model = jax.nn.log_softmax(scores, axis=-1)
    kl = jnp.sum(jnp.where(target > 0, target * (jnp.log(jnp.maximum(target, 1e-30)) - log_model), 0.0), axis=-1)
    return jnp.sum(kl) / jnp.maximum(jnp.sum(total > 0), 1)


def cross_entropy(model: Transformer, hidden: Array, targets: Array, weights: Array, pieces: int = 8) -> Array:
    """Weighted mean of the next-token loss; logits in `pieces` slices of the rows, never all at once.

    hidden [N, D], targets int32 [N], weights fp32 [N].
    """
    head = model.head.weight[...]

    @jax.checkpoint
    def piece(carry: tuple[Array, Array], x: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], None]:
        h, target, weight = x
        logits = jnp.einsum("td,vd->tv", h, head.astype(h.dtype), preferred_element_type=jnp.float32)
        loss = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        return (carry[0] + jnp.sum(loss * weight), carry[1] + jnp.sum(weight)), None

    split = jax.tree.map(lambda a: a.reshape(pieces, -1, *a.shape[1:]), (hidden, targets, weights))
    (total, count), _ = lax.scan(piece, (jnp.zeros(()), jnp.zeros(())), split)
    return total / jnp.maximum(count, 1.0)
