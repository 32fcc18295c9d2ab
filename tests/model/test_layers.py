"""Every layer alone against the stored traces: fed with what the golden fed it, so no rounding flip can pile up."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_model import TINY, golden_file, tiny_model, tiny_numerics
from jax import Array

from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.config import LayerPlan
from di_jax.model.rope import rotation
from di_jax.model.rows import Rows, make_rows
from di_jax.model.transformer import Carry
from kernels_pallas.hyper_connections import reference as hyper_connections
from kernels_pallas.index_topk import reference as index_topk

T = 64
BAR, COEFFICIENTS = 1e-4, 1e-5
LAYERS = range(TINY.num_hidden_layers)
BLOCKS = (1, 0)
POOLS = {"compressed": "compressed_kv", "index": "index_k"}  # in the state, in the goldens


class Bench:
    """The tiny model and one step of the trace's 64 tokens. variant: nokvq or kvq."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.trace = golden_file(f"tiny-v41.trace-{variant}")
        self.model = tiny_model(tiny_numerics(variant))
        self.layout = CacheLayout(TINY, self.model.numerics.formats, num_blocks=2, num_slots=1)
        zero = jnp.zeros(1, jnp.int32)
        self.rows = make_rows(
            jnp.asarray(self.trace["input_ids"]),
            zero,
            start=zero,
            first_row=zero,
            count=jnp.full(1, T, jnp.int32),
            slot=zero,
            block_table=jnp.asarray([BLOCKS], jnp.int32),
            decode=False,
        )
        self.graph, self.params = nnx.split(self.model)
        self.streams_out = {layer: self.trace[f"L{layer}/streams_out"] for layer in LAYERS}
        self.results: dict[int, dict[str, Any]] = {}
        self.encode = jax.jit(lambda codec, x: codec.encode(x), static_argnums=0)

    def streams_in(self, layer: int) -> np.ndarray:
        """[T, hc, D] entering a layer; layer 0 gets copies of the embedding."""
        if layer:
            return self.streams_out[layer - 1]
        embedded = np.asarray(self.model.embed.weight[...], np.float32)[self.trace["input_ids"]]
        return np.repeat(embedded[:, None], TINY.hc_mult, axis=1)

    def pre(self, layer: int) -> np.ndarray:
        """[T, hc] how the layer's attention collapses the streams."""
        if layer == 0:
            return np.eye(TINY.hc_mult, dtype=np.float32)[np.zeros(T, int)]
        # The nokvq trace holds no coefficients: there the layer before, itself fed with stored streams, gives them.
        stored = self.trace.get(f"L{layer - 1}/hc_ffn_pre")
        return self.results[layer - 1]["hc_ffn_pre"] if stored is None else stored

    def state(self) -> EngineState:
        """Caches that hold the stored entries of all KV sources, at paged addresses."""
        state = self.layout.allocate()
        for source, layer in enumerate(TINY.kv_source_layer_ids):
            for pool, name in POOLS.items():
                values = jnp.asarray(self.trace[f"L{layer}/{name}"])
                row = self.layout.entry_row(source, jnp.asarray(BLOCKS), jnp.arange(len(values)))
                held = getattr(state, pool)
                record = self.encode(getattr(self.layout.formats, pool), values)
                flat = held.reshape(-1, held.shape[-1]).at[row].set(record)
                state = state.replace(**{pool: flat.reshape(held.shape)})
        return state

    def stored(self, state: EngineState, layer: int, pool: str) -> np.ndarray:
        """Entries of a KV source layer as a pool of `state` holds them."""
        return np.asarray(pooled_entries(self.layout, TINY.kv_source_layer_ids.index(layer), pool, state))

    def carry(self, layer: int) -> Carry:
        plan = TINY.layers[layer]
        selected = candidates = None
        if plan.ratio:
            selected = jnp.asarray(self.trace[f"L{TINY.index_source_layer_ids[plan.index_source]}/topk_idx"])
        if plan.is_reindex:
            candidates = jnp.asarray(candidate_list(self.trace["L6/candidates"]))
        return Carry(
            jnp.asarray(self.streams_in(layer)), jnp.asarray(self.pre(layer)), self.state(), selected, candidates
        )

    def run(self, layer: int, carry: Carry | None = None) -> dict[str, Any]:
        """Numpy results of one layer, by the goldens' names, and its state."""
        plan = TINY.layers[layer]
        out = layer_tensors(self.graph, self.layout, plan, self.params, self.rows, carry or self.carry(layer))
        return {name: value if name == "state" else np.asarray(value) for name, value in out.items()}


def candidate_list(mask: np.ndarray) -> np.ndarray:
    """The goldens' mask over entries [T, n] -> our blocks, int32 [T, candidate_topk_blocks] ascending, -1 padded."""
    size = TINY.candidate_block_size
    blocks = np.full((len(mask), TINY.candidate_topk_blocks), -1, np.int32)
    for t, row in enumerate(mask.reshape(len(mask), -1, size).any(axis=-1)):
        kept = np.flatnonzero(row)
        blocks[t, : len(kept)] = kept
    return blocks


@partial(jax.jit, static_argnums=(0, 1, 2))
def layer_tensors(
    graph: Any, layout: CacheLayout, plan: LayerPlan, params: Any, rows: Rows, carry: Carry
) -> dict[str, Any]:
    """The layer as the model runs it, and every inner tensor of it from the same submodules."""
    model: Any = nnx.merge(graph, params)  # a Transformer of which no part is absent
    w, layer = model.layers, plan.layer
    cos_sin = {compressed: rotation(TINY, compressed, rows.position) for compressed in (False, True)}
    memory = []
    if plan.engram >= 0:
        look, _ = model.ngram_hash.lookback(rows, carry.state.engram_history)
        table_rows = model.ngram_hash(look)
        memory = [t(table_rows[g], rows.valid) for g, t in enumerate(model.engram_tables)]
    after, record = model.layer(plan, layer, carry, rows, cos_sin, layout, memory)
    after = model.settle(after)
    out: dict[str, Any] = {"streams_out": after.streams, "hc_ffn_pre": after.pre, "state": after.state}
    streams = carry.streams
    if plan.engram >= 0:
        streams = out["engram_out"] = model.engrams(plan.engram, streams, memory[plan.engram], rows.image)
        out["engram_hash_ids"] = table_rows[plan.engram]
    x, pre, post, comb = w.hc_attn(layer, streams, carry.pre)
    out |= {"hc_attn_pre": pre, "hc_attn_post": post, "hc_attn_comb": comb}
    x = out["attn_in"] = w.attn_norm(x, layer)
    angles = cos_sin[plan.ratio > 0]
    latent_query = w.attn.latent_query(layer, x)
    out["window_kv"] = w.attn.window_kv(layer, x, angles)
    selected = after.selected if plan.ratio else None
    if plan.owns_index:
        query = model.indexers.query(plan.index_source, latent_query, angles)
        weights = model.indexers.head_weights(plan.index_source, x)
        for source, ratio in enumerate(TINY.kv_source_ratios):
            if ratio == plan.ratio:
                keys = pooled_entries(layout, source, "index", after.state)
                out[f"index_scores_{source}"] = index_topk.scores(query, weights, keys)
        out["topk_idx"] = record.selected
        if plan.is_candidate_source:
            out["candidates"] = after.candidates
    before = carry.state.replace(compressed=after.state.compressed)
    y, _ = w.attn(plan, layer, x, latent_query, selected, angles, rows, before, layout)
    out["attn_out"] = y
    streams = w.hc_attn.expand(y, streams, post, comb)
    x, _, out["hc_ffn_post"], out["hc_ffn_comb"] = w.hc_ffn(layer, streams, pre)
    x = out["ffn_in"] = w.ffn_norm(x, layer)
    out["expert_ids"], out["expert_w"] = w.ffn.gate(layer, x, rows.image)
    out["ffn_out"], *_ = w.ffn(layer, x, rows.image, rows.valid)
    out["experts"] = record.experts
    return out


def pooled_entries(layout: CacheLayout, source: int, pool: str, state: EngineState) -> Array:
    """fp32 [T / ratio, channels] entries of the sequence for one KV source, from the pool `compressed` or `index`."""
    held, codec = getattr(state, pool), getattr(layout.formats, pool)
    row = layout.entry_row(source, jnp.asarray(BLOCKS), jnp.arange(T // TINY.kv_source_ratios[source]))
    return codec.decode(held.reshape(-1, held.shape[-1])[row])


@cache
def bench_of(variant: str) -> Bench:
    bench = Bench(variant)
    for layer in LAYERS:
        bench.results[layer] = bench.run(layer)
    return bench


@pytest.fixture(params=["nokvq", "kvq"])
def bench(request: pytest.FixtureRequest) -> Bench:
    """Both variants; all layers have run. The nokvq trace holds only a part of the tensors."""
    return bench_of(request.param)


@pytest.fixture
def kvq() -> Bench:
    """The real model, with the full trace."""
    return bench_of("kvq")


def flipped_rows(bench: Bench, layer: int) -> np.ndarray:
    """bool [T]: rows that may read a cache value which rounded to another code than the golden's."""
    rows, out = np.zeros(T, bool), bench.results[layer]
    if (window := bench.trace.get(f"L{layer}/window_kv")) is not None:
        for t in np.flatnonzero((np.abs(out["window_kv"] - window) > BAR).any(axis=-1)):
            rows[t : t + TINY.sliding_window] = True
    if TINY.layers[layer].owns_kv:
        for pool, name in POOLS.items():
            differs = np.abs(bench.stored(out["state"], layer, pool) - bench.trace[f"L{layer}/{name}"]) > BAR
            for entry in np.flatnonzero(differs.any(axis=-1)):
                rows[(entry + 1) * TINY.compress_ratios[layer] - 1 :] = True
    return rows


def visible(layer: int) -> np.ndarray:
    """bool [T, n]: entries whose last token lies at or before the query (numerics 8.5)."""
    ratio = TINY.compress_ratios[layer]
    return np.arange(T // ratio) < ((np.arange(T) + 1) // ratio)[:, None]


def close(mine: np.ndarray, expected: np.ndarray, bar: float, rows: np.ndarray) -> None:
    assert np.isfinite(mine).all()
    assert np.abs(mine - expected)[rows].max(initial=0) <= bar


def test_the_embedding_enters_in_four_copies(bench: Bench) -> None:
    np.testing.assert_array_equal(bench.streams_in(0), bench.trace["L0/streams_in"])


def test_stored_caches_encode_to_themselves(bench: Bench) -> None:
    """Records hold the goldens' cache values exactly, so feeding them through the pools changes nothing."""
    state = bench.state()
    for layer in TINY.kv_source_layer_ids:
        for pool, name in POOLS.items():
            np.testing.assert_array_equal(bench.stored(state, layer, pool), bench.trace[f"L{layer}/{name}"])


@pytest.mark.parametrize("layer", LAYERS)
def test_layer(bench: Bench, layer: int) -> None:
    """What leaves the layer and its sublayers, on rows that read no flipped cache code."""
    out, good = bench.results[layer], ~flipped_rows(bench, layer)
    assert good.mean() >= (0.7 if bench.variant == "kvq" else 1), f"{(~good).sum()} of {T} rows read a flipped code"
    for name in ("attn_out", "expert_w", "streams_out"):
        close(out[name], bench.trace[f"L{layer}/{name}"], BAR, good)
    np.testing.assert_array_equal(out["expert_ids"][good], bench.trace[f"L{layer}/expert_ids"][good])
    np.testing.assert_array_equal(out["experts"], out["expert_ids"])


@pytest.mark.parametrize("layer", LAYERS)
def test_sublayer_inputs_and_coefficients(kvq: Bench, layer: int) -> None:
    """Coefficients to 1e-5: an order under what one normalisation too many does."""
    out, everywhere, good = kvq.results[layer], np.ones(T, bool), ~flipped_rows(kvq, layer)
    close(out["attn_in"], kvq.trace[f"L{layer}/attn_in"], BAR, everywhere)
    for name in ("ffn_in", "ffn_out"):
        close(out[name], kvq.trace[f"L{layer}/{name}"], BAR, good)
    for name in ("pre", "post", "comb"):
        close(out[f"hc_attn_{name}"], kvq.trace[f"L{layer}/hc_attn_{name}"], COEFFICIENTS, everywhere)
        close(out[f"hc_ffn_{name}"], kvq.trace[f"L{layer}/hc_ffn_{name}"], COEFFICIENTS, good)


@pytest.mark.parametrize("layer", TINY.engram_layer_ids)
def test_engram_write(bench: Bench, layer: int) -> None:
    out, expected = bench.results[layer], bench.trace[f"L{layer}/engram_out"]
    close(out["engram_out"], expected, BAR, np.ones(T, bool))
    hashes = bench.trace["engram_hash_ids"][:, TINY.engram_layer_ids.index(layer)]
    np.testing.assert_array_equal(out["engram_hash_ids"], hashes)
    assert np.abs(expected - bench.streams_in(layer)).max() > 100 * BAR, "the memory is not silent in this trace"


@pytest.mark.parametrize("layer", TINY.index_source_layer_ids)
def test_selection(bench: Bench, layer: int) -> None:
    good = ~flipped_rows(bench, layer)
    np.testing.assert_array_equal(bench.results[layer]["topk_idx"][good], bench.trace[f"L{layer}/topk_idx"][good])


@pytest.mark.parametrize("layer", TINY.index_source_layer_ids)
def test_index_scores(kvq: Bench, layer: int) -> None:
    """Where the entry is visible and, after the candidate source, a candidate. The queries are fp4 too and no golden
    holds them: at most one row in 32 may have a flipped query code."""
    expected, good = kvq.trace[f"L{layer}/index_scores"], ~flipped_rows(kvq, layer)
    assert (np.isfinite(expected) <= visible(layer)).all()
    own = TINY.layers[layer].kv_source
    for source, ratio in enumerate(TINY.kv_source_ratios):
        if ratio != TINY.compress_ratios[layer]:
            continue
        mine = kvq.results[layer][f"index_scores_{source}"]
        difference = np.where(np.isfinite(expected), np.abs(mine - expected), 0).max(axis=-1)
        if source == own:
            assert (difference[good] > BAR).sum() <= T / 32
        else:  # control: the keys of another source with the same ratio
            assert (difference > 100 * BAR).mean() > 0.9


def test_candidates(bench: Bench) -> None:
    """Whole blocks, where the query sees them; the golden's mask also covers entries of a block that come later."""
    layer, size = TINY.candidate_source_layer_id, TINY.candidate_block_size
    mine = np.zeros((T, T), bool)
    for t, blocks in enumerate(bench.results[layer]["candidates"]):
        for block in blocks[blocks >= 0]:
            mine[t, block * size : (block + 1) * size] = True
    expected = bench.trace[f"L{layer}/candidates"].astype(bool)
    seen = visible(layer) & ~flipped_rows(bench, layer)[:, None]
    np.testing.assert_array_equal(mine[seen], expected[seen])
    assert (expected & visible(layer)).sum() < visible(layer).sum(), "the filter drops something in this trace"


@pytest.mark.parametrize("layer", TINY.kv_source_layer_ids)
def test_cache_entries(bench: Bench, layer: int) -> None:
    """Codes of the compressed KV and the index keys; a value on a rounding edge may flip one."""
    for pool, name in POOLS.items():
        mine = bench.stored(bench.results[layer]["state"], layer, pool)
        differs = np.abs(mine - bench.trace[f"L{layer}/{name}"]) > 1e-5
        assert differs.mean() <= (0.001 if bench.variant == "kvq" else 0)


@pytest.mark.parametrize("layer", LAYERS)
def test_window_rows(kvq: Bench, layer: int) -> None:
    assert (kvq.results[layer]["window_kv"] != kvq.trace[f"L{layer}/window_kv"]).mean() <= 0.001


def test_final_norm_and_head(bench: Bench) -> None:
    last = bench.results[LAYERS[-1]]
    streams = jnp.asarray(bench.trace[f"L{LAYERS[-1]}/streams_out"])
    hidden = bench.model.norm(hyper_connections.collapse(streams, jnp.asarray(last["hc_ffn_pre"])))
    close(np.asarray(hidden), bench.trace["final_hidden"], BAR, np.ones(T, bool))
    close(np.asarray(bench.model.logits(hidden)), bench.trace["logits"], BAR, np.ones(T, bool))


def test_one_sinkhorn_normalisation_too_many_is_seen(kvq: Bench) -> None:
    """Control: a row normalisation after the last column. Logits move by 2e-4 only; the coefficients by over 1e-3."""
    worst = 0.0
    for layer in LAYERS:
        for site in ("attn", "ffn"):
            comb = kvq.results[layer][f"hc_{site}_comb"]
            more = comb / (comb.sum(axis=-1, keepdims=True) + TINY.hc_eps)
            worst = max(worst, np.abs(more - kvq.trace[f"L{layer}/hc_{site}_comb"]).max())
    assert worst > 50 * COEFFICIENTS


@pytest.mark.parametrize("layer", [1, 2, 6])
def test_the_wrong_pre_mix_is_seen(kvq: Bench, layer: int) -> None:
    """Control: collapsing with the attention mix of the layer before, or with this layer's own."""
    streams = jnp.asarray(kvq.results[layer].get("engram_out", kvq.streams_in(layer)))
    for wrong in (kvq.trace[f"L{layer - 1}/hc_attn_pre"], kvq.trace[f"L{layer}/hc_attn_pre"]):
        x = kvq.model.layers.attn_norm(hyper_connections.collapse(streams, jnp.asarray(wrong)), layer)
        assert np.abs(np.asarray(x) - kvq.trace[f"L{layer}/attn_in"]).max() > 100 * BAR


def test_candidates_bind_the_reindex_layer(kvq: Bench) -> None:
    """Control: with other candidates the reindex layer selects other entries, all inside them."""
    layer, carry = 8, kvq.carry(8)
    first = jnp.broadcast_to(jnp.arange(TINY.candidate_topk_blocks, dtype=jnp.int32), (T, TINY.candidate_topk_blocks))
    out = kvq.run(layer, dataclasses.replace(carry, candidates=first))
    assert (out["topk_idx"] != kvq.trace[f"L{layer}/topk_idx"]).any()
    assert out["topk_idx"].max() < TINY.candidate_topk_blocks * TINY.candidate_block_size
