"""What bounded replay is defined to compute (numerics 13), written down plainly: the reference of the replay tests.

A sequence is a row of tokens with absolute positions, and every cache an array over all positions: no pages, rings,
chunks, tiles or buckets. Attention, windows, selection and compression are dense masks over positions; what is local to
a token (linears, norms, hyper-connections, experts, the n-gram hash, the cache quantizers) is the model's own.

    oracle = ReplayOracle(model)                                # a `Transformer` on one device, text only
    cold = oracle.prefill(prompt)                               # the exact pass: cold.logits[t] at every position t
    hit = oracle.prefill(other, hit=128, earlier=cold, keep_tokens=32)
    ids, after = oracle.greedy(hit, 8)                          # 8 ids; the first is drawn after the prompt

`earlier` is a run whose first `hit` tokens are those of the new sequence, of which the entries are taken over; how that
run was made (cold, replayed, with decoded tokens) is the caller's to choose: an engine takes what it has. A read of a
window row that the definition does not provide gives NaN, so a comparison with this oracle also checks the oracle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from di_jax.model.rope import rotate, rotation
from di_jax.model.transformer import Transformer

BLOCK = 128  # tokens of a cache block: hits are whole blocks, and encoder replay runs one again
EXACT = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}


@partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Caches:
    """Everything that later tokens may read, by position: N = the oracle's capacity."""

    window: Array  # [L, N, d] window KV
    known: Array  # bool [L, N] whether it was computed, or taken over
    pairs: list[Array]  # of each source fp32 [N, 2, d] (gate, latent), or [N, 0, d] when it does not pool
    entries: list[Array]  # of each source [N / ratio, d] compressed KV, as its cache holds it
    keys: list[Array]  # of each source [N / ratio, index_head_dim]


@dataclasses.dataclass(frozen=True)
class OracleRun:
    """A sequence up to some token. Rows are those that the last call kept, the last one the newest token."""

    tokens: tuple[int, ...]
    start: int  # position of the first row
    hidden: np.ndarray  # [rows, D] normed
    logits: np.ndarray  # fp32 [rows, V]
    caches: Caches
    ratios: tuple[int, ...]  # of the sources

    @property
    def token(self) -> int:
        """The most likely id after the last row, the lowest on ties."""
        return int(self.logits[-1].argmax())

    @property
    def margin(self) -> float:
        """How far the second most likely id is behind."""
        best = np.partition(self.logits[-1], -2)[-2:]
        return float(best[1] - best[0])

    def window(self, layer: int, position: int) -> np.ndarray | None:
        """[d] window KV of a layer at a position; None where there is none."""
        known = bool(self.caches.known[layer, position])
        return np.asarray(self.caches.window[layer, position]) if known else None

    def entries(self, source: int) -> tuple[np.ndarray, np.ndarray]:
        """Compressed KV [n, d] and index keys [n, index_head_dim] of the groups that the tokens complete."""
        count = len(self.tokens) // self.ratios[source]
        return np.asarray(self.caches.entries[source][:count]), np.asarray(self.caches.keys[source][:count])


class ReplayOracle:
    """The definition over one model. capacity: the most tokens of a sequence; every prefill computes that many rows, so
    there are two programs, one for prompts and one for single tokens."""

    def __init__(self, model: Transformer, capacity: int = 512) -> None:
        self.config, self.capacity = model.config, capacity
        self._graph, self._params = nnx.split(model)
        c, dtype = model.config, model.numerics.dtype
        layers, ratios = c.num_hidden_layers, c.kv_source_ratios
        self._empty = Caches(
            jnp.zeros((layers, capacity, c.head_dim), dtype),
            jnp.zeros((layers, capacity), bool),
            [jnp.zeros((capacity, 2 if r > 1 else 0, c.head_dim), jnp.float32) for r in ratios],
            [jnp.zeros((capacity // r, c.head_dim), dtype) for r in ratios],
            [jnp.zeros((capacity // r, c.index_head_dim), dtype) for r in ratios],
        )

    def prefill(
        self,
        tokens: Sequence[int],
        *,
        hit: int = 0,
        earlier: OracleRun | None = None,
        restored: bool = False,
        keep_tokens: int | None = None,
        replayed: int = BLOCK,
    ) -> OracleRun:
        """A prompt, with entries of its first `hit` tokens, a multiple of 128, taken over from `earlier`.

        restored: windows before the hit are taken over too, and rows start there; else the last `replayed` tokens
        before it are run again, and no window reaches further back. keep_tokens: rows at the end of the prompt that the
        decoder layers compute, their windows ending where these rows do; None for all. Restored windows are those of
        all layers, or with keep_tokens those of the encoder layers.
        """
        length = len(tokens)
        if not 0 < length <= self.capacity:
            raise ValueError(f"{length} tokens, the capacity is {self.capacity}")
        if hit % BLOCK or not 0 <= hit < length or bool(hit) != (earlier is not None):
            raise ValueError(f"a hit of {hit} of {length} tokens {'without' if earlier is None else 'in'} a run")
        first = hit if restored else max(0, hit - replayed)
        encoder = 0 if restored else first
        decoder = (0 if restored else first) if keep_tokens is None else max(first, length - keep_tokens)
        caches = self._empty
        if earlier is not None:
            if tuple(earlier.tokens[:hit]) != tuple(int(t) for t in tokens[:hit]):
                raise ValueError(f"the earlier run has other tokens among the first {hit}")
            caches = self._taken_over(earlier.caches, hit, restored, keep_tokens)
        return self._run(tokens, first, caches, encoder, decoder, hit, self.capacity)

    def decode(self, run: OracleRun, token: int) -> OracleRun:
        """One more token: nothing is cut."""
        return self._run((*run.tokens, token), len(run.tokens), run.caches, 0, 0, 0, 1)

    def greedy(self, run: OracleRun, count: int) -> tuple[list[int], OracleRun]:
        """The `count` likeliest ids after a run, each fed to draw the next; the run has all of them but the last."""
        ids = [run.token]
        while len(ids) < count:
            run = self.decode(run, ids[-1])
            ids.append(run.token)
        return ids, run

    def _taken_over(self, earlier: Caches, hit: int, restored: bool, keep_tokens: int | None) -> Caches:
        """Of an earlier run what a hit provides."""
        ratios, boundary = self.config.kv_source_ratios, self.config.kv_source_layer_ids[-1]
        layers = 0 if not restored else boundary if keep_tokens is not None else self.config.num_hidden_layers
        known = earlier.known & (jnp.arange(self.capacity) < hit)
        known = known & (jnp.arange(self.config.num_hidden_layers)[:, None] < layers)

        def head(array: Array, ratio: int) -> Array:
            return jnp.where((jnp.arange(len(array)) < hit // ratio)[:, None], array, 0)

        return Caches(
            jnp.where(known[..., None], earlier.window, 0),
            known,
            self._empty.pairs,
            [head(array, ratio) for array, ratio in zip(earlier.entries, ratios)],
            [head(array, ratio) for array, ratio in zip(earlier.keys, ratios)],
        )

    def _run(
        self, tokens: Sequence[int], first: int, caches: Caches, encoder: int, decoder: int, cached: int, rows: int
    ) -> OracleRun:
        padded = np.zeros(self.capacity, np.int32)
        padded[: len(tokens)] = tokens
        bounds = np.array([first, len(tokens), encoder, decoder, cached], np.int32)
        hidden, logits, caches = _forward(self._graph, rows, self._params, padded, bounds, caches)
        start = max(first, decoder)
        kept = slice(start - first, len(tokens) - first)
        ids = tuple(int(t) for t in tokens)
        ratios = self.config.kv_source_ratios
        return OracleRun(ids, start, np.asarray(hidden)[kept], np.asarray(logits)[kept], caches, ratios)


@partial(jax.jit, static_argnums=(0, 1))
def _forward(
    graph: Any, rows: int, params: Any, tokens: Array, bounds: Array, caches: Caches
) -> tuple[Array, Array, Caches]:
    """Hidden states, logits and caches of the rows from position `first` on; those below `decoder` mean nothing.

    tokens int32 [N], bounds int32: positions first and end of the rows, where the windows of encoder and decoder layers
    end, and the end of the entries that are left alone.
    """
    model: Any = nnx.merge(graph, params)  # a Transformer of which no part is absent
    c, w = model.config, model.layers
    first, end, encoder, decoder, cached = bounds
    capacity = len(tokens)
    everywhere = jnp.arange(capacity)
    position = first + jnp.arange(rows)
    valid = position < end
    window, known = caches.window, caches.known
    pairs, entries, keys = list(caches.pairs), list(caches.entries), list(caches.keys)
    text = jnp.zeros(rows, bool)

    back = position[:, None] - jnp.arange(c.engram_max_ngram_size)
    mapped = jnp.where(back >= 0, model.ngram_hash.token_map[...][tokens[back]], model.ngram_hash.pad[...])
    table_rows = model.ngram_hash(mapped)
    memory = [table(table_rows[g], valid) for g, table in enumerate(model.engram_tables)]

    embedded = model.embed.weight[...][tokens[position]].astype(model.numerics.dtype)
    streams = jnp.repeat(embedded[:, None], c.hc_mult, axis=1)
    pre = jnp.zeros((rows, c.hc_mult), jnp.float32).at[:, 0].set(1.0)
    chosen = candidates = jnp.zeros((rows, 0), bool)  # over the entries of the layer's source
    for plan in c.layers:
        layer = plan.layer
        bottom = decoder if layer >= c.kv_source_layer_ids[-1] else encoder
        live = valid & (position >= bottom)
        if plan.engram >= 0:
            streams = model.engrams(plan.engram, streams, memory[plan.engram], text)
        x, pre_ffn, post, comb = w.hc_attn(layer, streams, pre)
        x = w.attn_norm(x, layer)
        if plan.owns_kv:
            s, ratio = plan.kv_source, plan.ratio
            pairs[s], latent = _latents(model, s, x, position, valid, pairs[s], capacity)
            group = jnp.arange(capacity // ratio) * ratio
            fresh = (group >= cached) & (group + ratio > first) & (group + ratio <= end)
            at_first = rotation(c, True, group)
            key = rotate(model.compressors.k_norm(model.compressors.wk(latent, s), s), at_first)
            for stored, codec, value in (
                (entries, model.numerics.formats.compressed, rotate(latent, at_first)),
                (keys, model.numerics.formats.index, key),
            ):
                held = codec.decode(codec.encode(value)).astype(stored[s].dtype)
                stored[s] = jnp.where(fresh[:, None], held, stored[s])
        angles = rotation(c, plan.ratio > 0, position)
        latent_query = w.attn.latent_query(layer, x)
        if plan.owns_index:
            query = model.indexers.query(plan.index_source, latent_query, angles)
            weights = model.indexers.head_weights(plan.index_source, x)
            score = jnp.einsum("thd,nd->thn", query, keys[plan.kv_source], **EXACT)
            score = jnp.sum(jnp.maximum(score, 0) * weights[..., None], axis=1)
            reachable = jnp.arange(score.shape[1]) < ((position + 1) // plan.ratio)[:, None]
            score = jnp.where(reachable, score, -jnp.inf)
            if plan.is_candidate_source:
                candidates = _candidates(score, reachable, c.candidate_block_size, c.candidate_topk_blocks)
            chosen = _best(jnp.where(candidates, score, -jnp.inf) if plan.is_reindex else score, c.index_topk)
        row = jnp.where(live, position, capacity)
        kv = w.attn.window_kv(layer, x, angles)
        window = window.at[layer, row].set(kv, mode="drop")
        known = known.at[layer, row].set(True, mode="drop")
        age = position[:, None] - everywhere
        near = (age >= 0) & (age < c.sliding_window) & (everywhere >= bottom)
        query = w.attn.query(layer, latent_query, angles)
        key_sets = [(window[layer], near)]
        if plan.ratio:
            key_sets.append((entries[plan.kv_source], chosen))
        out = _attend(query, key_sets, w.attn.attn_sink[layer], c.head_dim**-0.5)
        # A row that a window should hold and does not.
        out = jnp.where(jnp.any(near & ~known[layer], axis=1)[:, None, None], jnp.nan, out)
        out = rotate(out.astype(x.dtype), (angles[0][:, None], angles[1][:, None]), inverse=True)
        streams = w.hc_attn.expand(w.attn.output(layer, out), streams, post, comb)
        # Dropped rows have no later layers: zeros keep what they would have been out of every sum.
        streams = jnp.where(live[:, None, None], streams, 0)
        x, pre, post, comb = w.hc_ffn(layer, streams, pre_ffn)
        y, *_ = w.ffn(layer, w.ffn_norm(x, layer), text, live)
        streams = w.hc_ffn.expand(y, streams, post, comb)
    collapsed = jnp.sum(pre[..., None] * streams.astype(jnp.float32), axis=1).astype(model.numerics.dtype)
    hidden = model.norm(collapsed)
    return hidden, model.logits(hidden), Caches(window, known, pairs, entries, keys)


def _latents(
    model: Any, source: int, x: Array, position: Array, valid: Array, pairs: Array, capacity: int
) -> tuple[Array, Array]:
    """The pairs of a source with those of x, and its normed latents [N / ratio, d] (numerics 7), each of which means
    something where all tokens of its group have been seen."""
    ratio = model.config.kv_source_ratios[source]
    row = jnp.where(valid, position, capacity)
    if ratio == 1:
        latent = jnp.zeros((capacity, model.config.head_dim), x.dtype)
        latent = latent.at[row].set(model.compressors.wkv(x, source), mode="drop")
    else:
        gate = model.gates.wgate(x, model.config.pooled_sources.index(source), out_dtype=jnp.dtype(jnp.float32))
        value = model.compressors.wkv(x, source, out_dtype=jnp.dtype(jnp.float32))
        pairs = pairs.at[row].set(jnp.stack([gate, value], axis=1), mode="drop")
        grouped = pairs.reshape(-1, ratio, 2, pairs.shape[-1])
        weight = jnp.exp(grouped[:, :, 0] - jnp.max(grouped[:, :, 0], axis=1, keepdims=True))
        latent = jnp.sum(weight * grouped[:, :, 1], axis=1) / jnp.sum(weight, axis=1)
    return pairs, model.compressors.norm(latent.astype(x.dtype), source)


def _best(score: Array, count: int) -> Array:
    """bool [T, n]: the `count` best of each row that are not -inf, the lower one on a tie."""
    rank = jnp.argsort(jnp.argsort(-score, axis=1, stable=True), axis=1)
    return (rank < count) & (score > -jnp.inf)


def _candidates(score: Array, reachable: Array, size: int, count: int) -> Array:
    """bool [T, n]: entries of the `count` best blocks of `size`; the block of the last reachable one is always there
    (numerics 8.7)."""
    rows, n = score.shape
    padded = jnp.pad(score, ((0, 0), (0, -n % size)), constant_values=-jnp.inf)
    block = jnp.max(padded.reshape(rows, -1, size), axis=2)
    last = (jnp.sum(reachable, axis=1) - 1) // size  # -1: none is reachable
    block = jnp.where(jnp.arange(block.shape[1]) == last[:, None], jnp.inf, block)
    return jnp.repeat(_best(block, count), size, axis=1)[:, :n]


def _attend(query: Array, key_sets: list[tuple[Array, Array]], sink: Array, scale: float) -> Array:
    """fp32 [T, H, d]: one softmax over the keys [n, d] that the masks bool [T, n] let through, each also the value, and
    the sink of each head (numerics 6.4)."""
    logits = [
        jnp.where(mask[:, None], jnp.einsum("thd,nd->thn", query, keys, **EXACT) * scale, -jnp.inf)
        for keys, mask in key_sets
    ]
    peak = jnp.maximum(jnp.max(jnp.concatenate(logits, axis=2), axis=2), sink)
    weights = [jnp.exp(logit - peak[..., None]) for logit in logits]
    total = jnp.exp(sink - peak) + sum(jnp.sum(weight, axis=2) for weight in weights)
    out = sum(jnp.einsum("thn,nd->thd", weight, keys, **EXACT) for weight, (keys, _) in zip(weights, key_sets))
    return out / total[..., None]
