"""The training forward pass: the engine's own modules over whole sequences, with the indexer's own loss.

Rows of B sequences of T tokens are one prefill step from empty caches, so what is trained is what the engine runs:
paged entries, window, candidates and selection included. Gradients pass through the caches because `Numerics.training`
stores straight-through values instead of bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from di_jax.model.cache import CacheLayout
from di_jax.model.config import LayerPlan, ModelConfig
from di_jax.model.quantization import matmul
from di_jax.model.rope import rotate, rotation
from di_jax.model.rows import Rows, make_rows
from di_jax.model.transformer import Carry, Transformer
from kernels_pallas.index_topk import reference as index_topk
from scripts.train_demo.attention import entries

TILE = 128
FAR = -1e30


@dataclasses.dataclass(frozen=True)
class Forward:
    """What a pass over [B, T] tokens gave."""

    hidden: Array  # [B * T, D] normed
    taps: Array  # [B * T, taps * D] what the draft reads
    load: Array  # fp32 [L, E] rows of each expert
    index_loss: Array  # fp32 [index sources] KL of each
    covered: Array  # fp32 [index sources, B, S] share of the attention mass on the entries that would be selected


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


def forward(model: Transformer, tokens: Array, sample: Array | None) -> Forward:
    """Runs tokens int32 [B, T]. sample: positions int32 [B, S], the queries of the index loss, or None."""
    c = model.config
    batch, length = tokens.shape
    rows = training_rows(tokens)
    layout = training_layout(c, model.numerics, batch, length)
    carry, memory = model.begin(rows, layout.allocate())
    cos_sin = {compressed: rotation(c, compressed, rows.position) for compressed in (False, True)}
    taps, loads, losses, covered = [], [], [], []
    scores: Array | None = None
    mass: Array | None = None

    def close_group() -> None:
        if scores is not None and mass is not None:
            losses.append(_divergence(scores, mass))
            covered.append(_covered(scores, mass, c.index_topk))

    for plan in c.layers:
        if plan.layer in c.dspark_target_layer_ids:
            taps.append(model.tap(carry.streams))
        before = carry
        carry, record = model.layer(plan, plan.layer, carry, rows, cos_sin, layout, memory)
        carry = model.settle(carry)
        loads.append(jnp.sum(jax.nn.one_hot(record.experts, c.n_routed_experts, dtype=jnp.float32), axis=(0, 1)))
        if sample is not None and plan.ratio:
            new_scores, new_mass = _index_terms(model, plan, before, carry, rows, memory, layout, sample)
            if new_scores is not None:
                close_group()
                scores, mass = new_scores, new_mass
            else:
                mass = new_mass if mass is None else mass + new_mass
    close_group()
    hidden = model.norm(jnp.sum(carry.pre[..., None] * carry.streams.astype(jnp.float32), axis=-2))
    kl = jnp.stack(losses) if losses else jnp.zeros(1)
    inside = jnp.stack(covered) if covered else jnp.zeros((1, 0, 0))
    return Forward(hidden, jnp.concatenate(taps, axis=-1), jnp.stack(loads), kl, inside)


def _index_terms(
    model: Transformer,
    plan: LayerPlan,
    before: Carry,
    after: Carry,
    rows: Rows,
    memory: list[Array],
    layout: CacheLayout,
    sample: Array,
) -> tuple[Array | None, Array]:
    """(index scores [B, S, N] at an index source else None, head-summed attention mass [B, S, N]) of sampled rows.

    The mass has no gradient, and the scores' inputs are detached: the loss trains the indexer alone.
    """
    c, w = model.config, model.layers
    ratio, batch = c.compress_ratios[plan.layer], len(sample)
    sample = (sample + len(before.streams) // batch * jnp.arange(batch)[:, None]).reshape(-1)
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
    reachable = ((position + 1) // ratio).reshape(batch, -1)
    keys = lax.stop_gradient(entries(after.state.compressed, layout, plan.kv_source, batch))
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
    index_keys = entries(after.state.index, layout, plan.kv_source, batch).astype(index_query.dtype)
    score = jax.vmap(index_topk.scores)(
        index_query.reshape(batch, -1, *index_query.shape[1:]),
        weights.reshape(batch, -1, weights.shape[-1]),
        index_keys,
    )
    return jnp.where(visible, score, FAR), mass


def _divergence(scores: Array, mass: Array) -> Array:
    """Mean KL(mass / sum(mass) || softmax(scores)) over sampled queries that can reach an entry."""
    total = jnp.sum(mass, axis=-1, keepdims=True)
    target = mass / jnp.maximum(total, 1e-20)
    log_model = jax.nn.log_softmax(scores, axis=-1)
    kl = jnp.sum(jnp.where(target > 0, target * (jnp.log(jnp.maximum(target, 1e-30)) - log_model), 0.0), axis=-1)
    return jnp.sum(kl) / jnp.maximum(jnp.sum(total > 0), 1)


def _covered(scores: Array, mass: Array, k: int) -> Array:
    """Share [B, S] of the mass on the k entries of the best score; an upper bound where candidates restrict them."""
    lowest = lax.top_k(scores, min(k, scores.shape[-1]))[0][..., -1:]
    inside = jnp.sum(jnp.where(scores >= lowest, mass, 0.0), axis=-1)
    return lax.stop_gradient(inside / jnp.maximum(jnp.sum(mass, axis=-1), 1e-20))


def cross_entropy(
    model: Transformer, hidden: Array, targets: Array, classes: Array, weights: Array, pieces: int = 8
) -> tuple[Array, Array]:
    """(mean next-token loss weighted by class, sums fp32 [C, 3] of loss, hits and tokens by class).

    hidden [N, D], targets int32 [N], classes uint8 [N], weights fp32 [C]. A hit: the target is the likeliest token.
    Logits come in `pieces` slices of the rows, never all at once.
    """
    head = model.head.weight[...]

    @jax.checkpoint
    def piece(sums: Array, x: tuple[Array, Array, Array]) -> tuple[Array, None]:
        h, target, kind = x
        logits = matmul(h, head.astype(h.dtype), jnp.dtype(jnp.float32))
        own = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        loss = jax.nn.logsumexp(logits, axis=-1) - own
        hit = (own >= jnp.max(logits, axis=-1)).astype(jnp.float32)
        members = jax.nn.one_hot(kind, len(weights), dtype=jnp.float32)
        counted = jnp.stack([loss, hit, jnp.ones_like(loss)], axis=1)
        return sums + jnp.einsum("nc,nk->ck", members, counted, precision=lax.Precision.HIGHEST), None

    split = jax.tree.map(lambda a: a.reshape(pieces, -1, *a.shape[1:]), (hidden, targets, classes))
    sums, _ = lax.scan(piece, jnp.zeros((len(weights), 3)), split)
    mean = jnp.dot(weights, sums[:, 0]) / jnp.maximum(jnp.dot(weights, sums[:, 2]), 1.0)
    return mean, lax.stop_gradient(sums)
