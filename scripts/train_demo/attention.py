"""Attention of the training pass: whole sequences side by side, dense products under a mask, and its own gradient.

Every sequence has the same length and starts from empty caches, so a stretch of rows reads one slice of the window
keys and one of the compressed entries: no gather, hence no scatter in the backward pass, and nothing of the future.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from di_jax.model.attention import Attention
from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.config import LayerPlan, ModelConfig
from di_jax.model.linear import Numerics
from di_jax.model.rope import rotate
from di_jax.model.rows import Rows
from kernels_pallas.choice import KernelChoice
from kernels_pallas.index_topk import reference as index_topk
from kernels_pallas.sparse_attention.reference import MASKED

EXACT = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend(query: Array, keys: Array, visible: Array, sink: Array, scale: float) -> Array:
    """Shared-KV attention [B, C, H, d] of queries [B, C, H, d] over keys [B, K, d], which are the values as well.

    visible: bool [1 or B, C, K]; sink: fp32 [H]. The probabilities are never stored: the gradient computes them again
    from the log of their sum, 1.3 GB in float32 for 32,768 rows of 8 heads and 1,215 keys.
    """
    return _attend(query, keys, visible, sink, scale)[0]


def _logits(query: Array, keys: Array, visible: Array, scale: float) -> Array:
    logits = jnp.einsum("bchd,bkd->bchk", query, keys, **EXACT) * scale
    return jnp.where(visible[:, :, None], logits, MASKED)


def _attend(query: Array, keys: Array, visible: Array, sink: Array, scale: float) -> tuple[Array, tuple[Array, ...]]:
    logits = _logits(query, keys, visible, scale)
    peak = jnp.maximum(jnp.max(logits, axis=-1), sink)
    weight = jnp.exp(logits - peak[..., None])
    total = jnp.sum(weight, axis=-1) + jnp.exp(sink - peak)
    out = jnp.einsum("bchk,bkd->bchd", weight.astype(keys.dtype), keys, **EXACT) / total[..., None]
    out = out.astype(query.dtype)
    return out, (query, keys, visible, sink, out, peak + jnp.log(total))


def _gradient(scale: float, saved: tuple[Array, ...], g: Array) -> tuple[Array, Array, None, Array]:
    query, keys, visible, sink, out, log_total = saved
    weight = jnp.exp(_logits(query, keys, visible, scale) - log_total[..., None])
    mean = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    toward = jnp.einsum("bchd,bkd->bchk", g, keys, **EXACT)
    change = (weight * (toward - mean[..., None]) * scale).astype(keys.dtype)
    d_query = jnp.einsum("bchk,bkd->bchd", change, keys, **EXACT)
    d_keys = jnp.einsum("bchk,bchd->bkd", change, query, **EXACT)
    d_keys += jnp.einsum("bchk,bchd->bkd", weight.astype(keys.dtype), g, **EXACT)
    d_sink = -jnp.sum(jnp.exp(sink - log_total) * mean, axis=(0, 1))
    return d_query.astype(query.dtype), d_keys.astype(keys.dtype), None, d_sink


attend.defvjp(_attend, _gradient)


def stretch(length: int) -> int:
    """Rows that are attended together: fewer waste less on the window's corners, more make fewer kernels."""
    return min(length, 256 if length <= 1024 else 512)


def attention(
    query: Array,
    near: Array,
    far: Array | None,
    chosen: tuple[Array, ...] | None,
    sink: Array,
    window: int,
    scale: float,
) -> Array:
    """[B, T, H, d] attention of whole sequences.

    query [B, T, H, d]; near [B, T, d] keys of the `window` last positions; far [B, N, d] compressed entries, each of
    T / N positions, or None; chosen: the masks of `select_entries`, or None for all entries that are complete.
    """
    length, size = query.shape[1], stretch(query.shape[1])
    ratio = 1 if far is None else length // far.shape[1]
    outs: list[Array] = []
    for begin in range(0, length, size):
        end = min(begin + size, length)
        rows = np.arange(begin, end)[:, None]
        first = max(0, begin - window + 1)
        age = rows - np.arange(first, end)
        keys, visible = near[:, first:end], jnp.asarray((age >= 0) & (age < window))[None]
        if far is not None:
            complete = end // ratio
            keys = jnp.concatenate([keys, far[:, :complete]], axis=1)
            if chosen is None:
                beyond = jnp.asarray(np.arange(complete) < (rows + 1) // ratio)[None]
            else:
                beyond = chosen[len(outs)]
            visible = jnp.concatenate([jnp.broadcast_to(visible, (len(beyond), *visible.shape[1:])), beyond], axis=2)
        outs.append(attend(query[:, begin:end], keys, visible, sink, scale))
    return jnp.concatenate(outs, axis=1)


def entries(pool: Array, layout: CacheLayout, source: int, batch: int) -> Array:
    """The entries [B, N, record] of one KV source, of B sequences that lie side by side in the pool."""
    first, per_block = layout.source_offset[source], layout.entries_per_block[source]
    pages = pool.reshape(batch, -1, *pool.shape[1:])[:, :, first : first + per_block]
    return pages.reshape(batch, -1, pool.shape[-1])


def best_mask(score: Array, k: int) -> Array:
    """The k best of score fp32 [..., N] that are not -inf, as a mask; ties take the lower.

    Finds the k-th best bit by bit, in 32 counts, and then how many of its equals there is room for: a sort of 32,768 x
    1,024 scores takes several times as long.
    """
    there = score > -jnp.inf
    size = score.shape[-1]
    if k >= size:
        return there
    bits = lax.bitcast_convert_type(score, jnp.int32)
    # As unsigned numbers these bits are in the order of the scores.
    order = lax.bitcast_convert_type(jnp.where(bits < 0, ~bits, bits | jnp.int32(-(2**31))), jnp.uint32)
    place = jnp.arange(size, dtype=jnp.uint32)

    def highest(width: int, fits: Callable[[Array], Array]) -> Array:
        """The highest number of `width` bits that fits, if all below it do: uint32 [..., 1]."""

        def one_bit(i: Array, bound: Array) -> Array:
            higher = bound | (jnp.uint32(1) << (width - 1 - i).astype(jnp.uint32))
            return jnp.where(fits(higher), higher, bound)

        return lax.fori_loop(0, width, one_bit, jnp.zeros((*score.shape[:-1], 1), jnp.uint32))

    def count(mask: Array) -> Array:
        return jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.int32)

    bound = highest(32, lambda value: count(order >= value) >= k)
    above, equal = order > bound, order == bound
    spare = k - count(above)
    end = highest(size.bit_length(), lambda value: count(equal & (place < value)) <= spare)
    return there & (above | (equal & (place < end)))


def select_entries(
    query: Array,
    weights: Array,
    keys: Array,
    config: ModelConfig,
    candidates: tuple[Array, ...] | None,
    make_candidates: bool,
) -> tuple[tuple[Array, ...], tuple[Array, ...] | None]:
    """`index_topk` as masks: (entries bool [B, C, n], candidate blocks bool [B, C, ceil(n / size)] or None), both of
    each stretch of C rows over the n entries that are complete at its end.

    query [B, T, h, d]; weights fp32 [B, T, h]; keys [B, N, d]; candidates: those of the candidate source, or None.
    """
    length, step, block = query.shape[1], stretch(query.shape[1]), config.candidate_block_size
    ratio = length // keys.shape[1]
    masks, blocks = [], []
    for i, begin in enumerate(range(0, length, step)):
        end = min(begin + step, length)
        complete = end // ratio
        reachable = (np.arange(begin, end)[:, None] + 1) // ratio
        score = jax.vmap(index_topk.scores)(query[:, begin:end], weights[:, begin:end], keys[:, :complete])
        score = jnp.where(np.arange(complete) < reachable, score, -jnp.inf)
        count = -(-complete // block)
        if make_candidates:
            padded = jnp.pad(score, ((0, 0), (0, 0), (0, count * block - complete)), constant_values=-jnp.inf)
            best = jnp.max(padded.reshape(*score.shape[:2], count, block), axis=-1)
            pinned = (np.arange(count) == (reachable - 1) // block) & (reachable > 0)
            blocks.append(best_mask(jnp.where(pinned, jnp.inf, best), config.candidate_topk_blocks))
        if candidates is not None:
            score = jnp.where(jnp.repeat(candidates[i], block, axis=-1)[..., :complete], score, -jnp.inf)
        masks.append(best_mask(score, config.index_topk))
    return tuple(masks), tuple(blocks) if make_candidates else None


class TrainingAttention(Attention):
    """`Attention` over whole sequences; `dense` attends to every complete entry, whatever was selected."""

    def __init__(self, config: ModelConfig, numerics: Numerics, kernels: KernelChoice, layers: int, dense: bool):
        super().__init__(config, numerics, kernels, layers)
        self.dense = dense

    def __call__(
        self,
        plan: LayerPlan,
        layer: Array | int,
        x: Array,
        latent_query: Array,
        selected: Any,
        cos_sin: tuple[Array, Array],
        rows: Rows,
        state: EngineState,
        layout: CacheLayout,
    ) -> tuple[Array, EngineState]:
        """As `Attention`; selected: masks of `select_entries`, anything if dense, or None. No window ring is kept."""
        c, batch = self.config, rows.start.shape[0]
        query = self.query(layer, latent_query, cos_sin)
        near = self.window_kv(layer, x, cos_sin)
        far = chosen = None
        if selected is not None:
            far = entries(state.compressed, layout, plan.kv_source, batch)
            far = layout.formats.compressed.decode(far).astype(query.dtype)
            chosen = None if self.dense else selected
        out = attention(
            query.reshape(batch, -1, *query.shape[1:]),
            near.reshape(batch, -1, near.shape[-1]),
            far,
            chosen,
            self.attn_sink[layer],
            c.sliding_window,
            c.head_dim**-0.5,
        )
        cos, sin = cos_sin
        out = rotate(out.reshape(query.shape), (cos[:, None], sin[:, None]), inverse=True)
        return self.output(layer, out), state
