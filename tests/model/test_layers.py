"""Every layer alone against the stored traces: fed with what the golden fed it, so that no rounding flip can pile up."""

from __future__ import annotations

from functools import partial
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
from di_jax.model.quantization import Codec
from di_jax.model.rope import rotation
from di_jax.model.rows import Rows, make_rows
from di_jax.model.transformer import Carry, Transformer
from kernels_pallas.hyper_connections import reference as hyper_connections
from kernels_pallas.index_topk import reference as index_topk

T = 64
BAR, COEFFICIENTS = 1e-4, 1e-5
LAYERS = range(TINY.num_hidden_layers)
BLOCKS = (1, 0)


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
        if (stored := self.trace.get(f"L{layer - 1}/hc_ffn_pre")) is not None:
            return stored
        return self.recomputed_pre[layer - 1]

    def state(self) -> EngineState:
        """Caches that hold the stored entries of all KV sources, at paged addresses."""
        state = self.layout.allocate()
        for source, layer in enumerate(TINY.kv_source_layer_ids):
            for pool, codec, name in (
                ("compressed", self.layout.formats.compressed, "compressed_kv"),
                ("index", self.layout.formats.index, "index_k"),
            ):
                values = jnp.asarray(self.trace[f"L{layer}/{name}"])
                row = self.layout.entry_row(source, jnp.asarray(BLOCKS), jnp.arange(len(values)))
                held = getattr(state, pool)
                flat = held.reshape(-1, held.shape[-1]).at[row].set(self.encode(codec, values))
                state = state.replace(**{pool: flat.reshape(held.shape)})
        return state

    def stored(self, state: EngineState, layer: int, pool: str, codec: Codec) -> np.ndarray:
        """Entries of a KV source as a pool holds them after the layer ran."""
        source, held = TINY.kv_source_layer_ids.index(layer), getattr(state, pool)
        row = self.layout.entry_row(source, jnp.asarray(BLOCKS), jnp.arange(T // TINY.compress_ratios[layer]))
        return np.asarray(codec.decode(held.reshape(-1, held.shape[-1])[row]))

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
        out = layer_tensors(self.graph, self.layout, TINY.layers[layer], self.params, self.rows, carry or self.carry(layer))
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
    model: Transformer = nnx.merge(graph, params)
    w, layer = model.layers, plan.layer
    cos_sin = {compressed: rotation(TINY, compressed, rows.position) for compressed in (False, True)}
    memory = []
    if plan.engram >= 0:
        look, _ = model.ngram_hash.lookback(rows, carry.state.engram_history)
        table_rows = model.ngram_hash(look)
        memory = [t(table_rows[g], jnp.float32) for g, t in enumerate(model.engram_tables)]
    after, record = model.layer(plan, layer, carry, rows, cos_sin, layout, memory)
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
        capacity = rows.block_table.shape[1] * layout.entries_per_block[plan.kv_source]
        # Keys of this layer's own source, as its own pools hold them after the layer stored them.
        row = layout.entry_row(plan.kv_source, rows.block_table[0], jnp.arange(capacity))
        keys = layout.formats.index.decode(after.state.index.reshape(-1, after.state.index.shape[-1])[row])
        out |= {"index_scores": index_topk.scores(query, weights, keys), "topk_idx": record.selected}
        for other in range(len(TINY.kv_source_layer_ids)):
            if other != plan.kv_source and layout.entries_per_block[other] == layout.entries_per_block[plan.kv_source]:
                row = layout.entry_row(other, rows.block_table[0], jnp.arange(capacity))
                keys = layout.formats.index.decode(after.state.index.reshape(-1, after.state.index.shape[-1])[row])
                out["scores_of_other_source"] = index_topk.scores(query, weights, keys)
        if plan.is_candidate_source:
            out["candidates"] = after.candidates
    y, _ = w.attn(plan, layer, x, latent_query, selected, angles, rows, carry.state.replace(
        compressed=after.state.compressed), layout)
    out["attn_out"] = y
    streams = w.hc_attn.expand(y, streams, post, comb)
    x, _, out["hc_ffn_post"], out["hc_ffn_comb"] = w.hc_ffn(layer, streams, pre)
    x = out["ffn_in"] = w.ffn_norm(x, layer)
    out["expert_ids"], out["expert_w"] = w.ffn.gate(layer, x, rows.image)
    out["ffn_out"], _ = w.ffn(layer, x, rows.image, rows.valid)
    out["experts"] = record.experts
    out["streams_attn"] = streams
    return out


@pytest.fixture(scope="module")
def kvq() -> Bench:
    return Bench("kvq")


@pytest.fixture(scope="module")
def results(kvq: Bench) -> dict[int, dict[str, Any]]:
    """Every layer's tensors, compiled once."""
    return {layer: kvq.run(layer) for layer in LAYERS}


def flipped_rows(bench: Bench, layer: int, out: dict[str, Any]) -> np.ndarray:
    """bool [T]: rows that may read a cache value which rounded to another code than the golden's."""
    rows = np.zeros(T, bool)
    for t in np.flatnonzero((np.abs(out["window_kv"] - bench.trace[f"L{layer}/window_kv"]) > BAR).any(axis=-1)):
        rows[t : t + TINY.sliding_window] = True
    if TINY.layers[layer].owns_kv:
        ratio, formats = TINY.compress_ratios[layer], bench.layout.formats
        for pool, codec, name in (("compressed", formats.compressed, "compressed_kv"), ("index", formats.index, "index_k")):
            mine = bench.stored(out["state"], layer, pool, codec)
            differs = (np.abs(mine - bench.trace[f"L{layer}/{name}"]) > BAR).any(axis=-1)
            for entry in np.flatnonzero(differs):
                rows[(entry + 1) * ratio - 1 :] = True
    return rows


def visible(layer: int) -> np.ndarray:
    """bool [T, n]: entries whose last token lies at or before the query (numerics 8.5)."""
    ratio = TINY.compress_ratios[layer]
    return np.arange(T // ratio) < ((np.arange(T) + 1) // ratio)[:, None]


def close(mine: np.ndarray, expected: np.ndarray, bar: float, rows: np.ndarray) -> None:
    assert np.isfinite(mine).all()
    assert np.abs(mine - expected)[rows].max(initial=0) <= bar


def test_the_embedding_enters_in_four_copies(kvq: Bench) -> None:
    np.testing.assert_array_equal(kvq.streams_in(0), kvq.trace["L0/streams_in"])


def test_stored_caches_encode_to_themselves(kvq: Bench) -> None:
    """Records hold the goldens' cache values exactly, so feeding them through the pools changes nothing."""
    state = kvq.state()
    for layer in TINY.kv_source_layer_ids:
        formats = kvq.layout.formats
        for pool, codec, name in (("compressed", formats.compressed, "compressed_kv"), ("index", formats.index, "index_k")):
            np.testing.assert_array_equal(kvq.stored(state, layer, pool, codec), kvq.trace[f"L{layer}/{name}"])


@pytest.mark.parametrize("layer", LAYERS)
def test_hyper_connection_coefficients(kvq: Bench, results: dict[int, dict[str, Any]], layer: int) -> None:
    """To 1e-5, an order under what one normalisation too many does."""
    good = ~flipped_rows(kvq, layer, results[layer])
    for name in ("attn_pre", "attn_post", "attn_comb", "ffn_pre", "ffn_post", "ffn_comb"):
        expected = kvq.trace[f"L{layer}/hc_{name}"]
        rows = np.ones(T, bool) if name.startswith("attn") else good
        close(results[layer][f"hc_{name}"], expected, COEFFICIENTS, rows)


@pytest.mark.parametrize("layer", LAYERS)
def test_layer(kvq: Bench, results: dict[int, dict[str, Any]], layer: int) -> None:
    out, everywhere = results[layer], np.ones(T, bool)
    good = ~flipped_rows(kvq, layer, out)
    assert good.mean() >= 0.7, f"{(~good).sum()} of {T} rows read a flipped cache code"
    close(out["attn_in"], kvq.trace[f"L{layer}/attn_in"], BAR, everywhere)
    for name in ("attn_out", "ffn_in", "ffn_out", "expert_w", "streams_out"):
        close(out[name], kvq.trace[f"L{layer}/{name}"], BAR, good)
    np.testing.assert_array_equal(out["expert_ids"][good], kvq.trace[f"L{layer}/expert_ids"][good])
    np.testing.assert_array_equal(out["experts"], out["expert_ids"])


@pytest.mark.parametrize("layer", TINY.engram_layer_ids)
def test_engram_write(kvq: Bench, results: dict[int, dict[str, Any]], layer: int) -> None:
    close(results[layer]["engram_out"], kvq.trace[f"L{layer}/engram_out"], BAR, np.ones(T, bool))
    ordinal = TINY.engram_layer_ids.index(layer)
    np.testing.assert_array_equal(results[layer]["engram_hash_ids"], kvq.trace["engram_hash_ids"][:, ordinal])
    wrote = np.abs(kvq.trace[f"L{layer}/engram_out"] - kvq.streams_in(layer)).max()
    assert wrote > 100 * BAR, "the memory is not silent in this trace"


@pytest.mark.parametrize("layer", TINY.index_source_layer_ids)
def test_index_scores_and_selection(kvq: Bench, results: dict[int, dict[str, Any]], layer: int) -> None:
    out, expected = results[layer], kvq.trace[f"L{layer}/index_scores"]
    good = ~flipped_rows(kvq, layer, out)
    comparable = np.isfinite(expected) & good[:, None]
    assert (np.isfinite(expected) <= visible(layer)).all()
    mine = out["index_scores"][:, : expected.shape[1]]
    assert np.abs(mine - expected)[comparable].max() <= BAR
    np.testing.assert_array_equal(out["topk_idx"][good], kvq.trace[f"L{layer}/topk_idx"][good])
    wrong = out.get("scores_of_other_source")
    if wrong is not None:  # control: keys of another source of the same ratio
        assert np.abs(wrong[:, : expected.shape[1]] - expected)[comparable].max() > 100 * BAR


def test_candidates(kvq: Bench, results: dict[int, dict[str, Any]]) -> None:
    """Whole blocks where the query sees them; the golden's mask also covers entries of a block that come later."""
    good = ~flipped_rows(kvq, 6, results[6])
    mine = np.zeros((T, T), bool)
    for t, blocks in enumerate(results[6]["candidates"]):
        for block in blocks[blocks >= 0]:
            mine[t, block * TINY.candidate_block_size : (block + 1) * TINY.candidate_block_size] = True
    expected = kvq.trace["L6/candidates"].astype(bool)
    seen = visible(6) & good[:, None]
    np.testing.assert_array_equal(mine[seen], expected[seen])
    assert (expected & visible(6)).sum() < visible(6).sum(), "the filter drops something in this trace"
    np.testing.assert_array_equal(np.isfinite(kvq.trace["L8/index_scores"]), expected & visible(6))


@pytest.mark.parametrize("layer", TINY.kv_source_layer_ids)
def test_cache_entries(kvq: Bench, results: dict[int, dict[str, Any]], layer: int) -> None:
    """Codes of the compressed KV and the index keys; a value on a rounding edge may flip one."""
    formats = kvq.layout.formats
    for pool, codec, name in (("compressed", formats.compressed, "compressed_kv"), ("index", formats.index, "index_k")):
        mine = kvq.stored(results[layer]["state"], layer, pool, codec)
        assert (mine != kvq.trace[f"L{layer}/{name}"]).mean() <= 0.001


@pytest.mark.parametrize("layer", LAYERS)
def test_window_rows(kvq: Bench, results: dict[int, dict[str, Any]], layer: int) -> None:
    assert (results[layer]["window_kv"] != kvq.trace[f"L{layer}/window_kv"]).mean() <= 0.001


def test_final_norm_and_head(kvq: Bench) -> None:
    streams, pre = jnp.asarray(kvq.streams_out[LAYERS[-1]]), jnp.asarray(kvq.trace[f"L{LAYERS[-1]}/hc_ffn_pre"])
    hidden = kvq.model.norm(hyper_connections.collapse(streams, pre))
    close(np.asarray(hidden), kvq.trace["final_hidden"], COEFFICIENTS, np.ones(T, bool))
    close(np.asarray(kvq.model.logits(hidden)), kvq.trace["logits"], BAR, np.ones(T, bool))


def test_one_sinkhorn_normalisation_too_many_is_seen(kvq: Bench, results: dict[int, dict[str, Any]]) -> None:
    """Control: a row normalisation after the last column moves the coefficients past the bar."""
    over = 0
    for layer in LAYERS:
        comb = results[layer]["hc_attn_comb"]
        more = comb / (comb.sum(axis=-1, keepdims=True) + TINY.hc_eps)
        over += np.abs(more - kvq.trace[f"L{layer}/hc_attn_comb"]).max() > COEFFICIENTS
    assert over >= 5


@pytest.mark.parametrize("layer", [1, 2, 6])
def test_the_wrong_pre_mix_is_seen(kvq: Bench, results: dict[int, dict[str, Any]], layer: int) -> None:
    """Control: collapsing with the attention mix of the layer before, or with this layer's own."""
    streams = jnp.asarray(results[layer].get("engram_out", kvq.streams_in(layer)))
    for wrong in (kvq.trace[f"L{layer - 1}/hc_attn_pre"], kvq.trace[f"L{layer}/hc_attn_pre"]):
        x = kvq.model.layers.attn_norm(hyper_connections.collapse(streams, jnp.asarray(wrong)), layer)
        assert np.abs(np.asarray(x) - kvq.trace[f"L{layer}/attn_in"]).max() > 100 * BAR


def test_candidates_bind_the_reindex_layer(kvq: Bench) -> None:
    """Control: with other candidates layer 8 selects other entries, so the filter is live in this trace."""
    carry = kvq.carry(8)
    import dataclasses

    all_first = jnp.broadcast_to(jnp.arange(TINY.candidate_topk_blocks, dtype=jnp.int32), carry.candidates.shape)
    out = kvq.run(8, dataclasses.replace(carry, candidates=all_first))
    assert (out["topk_idx"] != kvq.trace["L8/topk_idx"]).any()
    assert out["topk_idx"].max() < TINY.candidate_topk_blocks * TINY.candidate_block_size
