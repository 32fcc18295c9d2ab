"""The training forward pass computes what the engine's step computes; its own gradients are those of its functions."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from di_jax.model.config import ModelConfig
from di_jax.model.engram import HashTable, NgramHash
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from di_jax.model.quantization import CacheFormats, fake_quantize_weight, matmul
from di_jax.model.transformer import Transformer
from kernels_pallas.expert_ffn import dense
from kernels_pallas.index_topk import reference as index_topk
from scripts.train_demo import attention
from scripts.train_demo.architecture import config_json
from scripts.train_demo.forward import cross_entropy, forward, training_layout, training_rows
from scripts.train_demo.parameters import Params, builder, initial, storages

CONFIG = ModelConfig.from_dict(config_json(64, 64, 63))
TABLES = EngramTables.build(CONFIG, np.arange(64, dtype=np.int32))
# Plain caches: a code that flips between two summation orders would hide a real difference.
NUMERICS = Numerics(jnp.dtype(jnp.float32), CacheFormats.plain(jnp.dtype(jnp.float32)), False, False)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 256)), jnp.int32)
SAMPLE = jnp.tile(jnp.arange(15, 256, 16, dtype=jnp.int32), (2, 1))


@pytest.fixture(scope="module")
def params() -> Params:
    return initial(CONFIG, builder(CONFIG, NUMERICS, TABLES)[1], seed=5)


@pytest.fixture(scope="module")
def outputs(params: Params) -> dict[str, tuple[jax.Array, ...]]:
    """(hidden, taps, index loss, covered) of the training pass, sparse and dense, and sparse with the masters as they
    are; (hidden, taps) of the engine's, with weights that are quantized first, and with the masters."""
    made: dict[str, tuple[jax.Array, ...]] = {}
    for name in ("sparse", "dense"):
        build, _ = builder(CONFIG, NUMERICS, TABLES, dense=name == "dense")
        run = jax.jit(lambda p, exact, build=build: forward(build(p, exact), TOKENS, SAMPLE).__dict__)
        for form, exact in ((name, False), (f"{name}, masters", True)):
            out = run(params, jnp.bool_(exact))
            made[form] = (out["hidden"], out["taps"], out["index_loss"], out["covered"])

    @jax.jit
    def engine(params: Params) -> tuple[jax.Array, jax.Array]:
        abstract = nnx.eval_shape(lambda: Transformer(dataclasses.replace(CONFIG, quantization=None), NUMERICS))
        leaves = nnx.to_flat_state(nnx.state(abstract, nnx.Param))
        loaded = nnx.from_flat_state({path: leaf.replace(params[".".join(map(str, path))]) for path, leaf in leaves})
        hashes = nnx.State({"ngram_hash": nnx.state(NgramHash(CONFIG, TABLES), HashTable)})
        layout = training_layout(CONFIG, NUMERICS, *TOKENS.shape)
        model = nnx.merge(nnx.graphdef(abstract), nnx.merge_state(loaded, hashes))
        out = model(training_rows(TOKENS), layout.allocate(), layout, taps=True)
        return out.hidden, out.taps

    kinds = storages(nnx.eval_shape(lambda: Transformer(CONFIG, NUMERICS)))
    stored = jax.jit(lambda p: {path: fake_quantize_weight(p[path], kind) for path, kind in kinds.items()})(params)
    made["engine"], made["engine, masters"] = engine(params | stored), engine(params)
    return made


def test_it_computes_what_the_engine_computes(outputs: dict[str, tuple[jax.Array, ...]]) -> None:
    """With quantized weights, and where the masters are to be seen as they are, with these."""
    for form in ("", ", masters"):
        for mine, expected in zip(outputs["sparse" + form], outputs["engine" + form]):
            np.testing.assert_allclose(mine, expected, atol=1e-4)
    for quantized, exact in zip(outputs["sparse"], outputs["sparse, masters"]):
        assert np.abs(quantized - exact).max() > 1e-2


@pytest.mark.slow
def test_dense_attention_differs_where_more_entries_than_selected_are_reachable(outputs) -> None:
    sparse, dense_ = (np.asarray(outputs[name][0]).reshape(2, 256, -1) for name in ("sparse", "dense"))
    few = CONFIG.index_topk - 1  # with ratio 1 as many entries as positions
    np.testing.assert_allclose(sparse[:, :few], dense_[:, :few], atol=1e-4)
    assert np.abs(sparse[:, 2 * few :] - dense_[:, 2 * few :]).max() > 1e-2


KEYS = ("compressors.wk.weight", "compressors.k_norm.weight")  # what an index key is made with


@pytest.mark.slow
def test_the_loss_of_the_indexers_moves_nothing_else(params: Params) -> None:
    """Its inputs and what it is to follow are detached; the loss of the text leaves the indexers alone."""
    build, _ = builder(CONFIG, NUMERICS, TABLES)

    @jax.jit
    def moved(params: Params) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        def losses(params: Params) -> tuple[jax.Array, jax.Array]:
            out = forward(build(params), TOKENS, SAMPLE)
            return jnp.sum(out.index_loss), jnp.sum(out.hidden**2)

        _, back = jax.vjp(losses, params)
        one, none = jnp.float32(1), jnp.float32(0)
        of = [jax.tree.map(lambda g: jnp.any(g != 0), back(seeds)[0]) for seeds in ((one, none), (none, one))]
        return of[0], of[1]

    by_index, by_text = ({name for name, any_ in found.items() if any_} for found in moved(params))
    assert by_index == {*(f"indexers.{n}.weight" for n in ("wq_b", "weights_proj")), *KEYS}
    assert len(by_text) > 20 and not by_text & by_index


@pytest.mark.slow
def test_what_the_indexer_would_select_is_measured(outputs) -> None:
    *_, loss, covered = outputs["dense"]
    assert covered.shape == (len(CONFIG.index_source_layer_ids), *SAMPLE.shape) and (loss > 0).all()
    assert (covered[:, :, :3] > 0.999).all()  # up to position 63 every entry is
    assert 0.2 < float(covered[:, :, -1].mean()) < 0.999


@pytest.mark.parametrize("seed", range(3))
def test_the_best_are_those_of_the_engine_ties_included(seed: int) -> None:
    rng = np.random.default_rng(seed)
    score = rng.integers(-3, 4, (40, 50)).astype(np.float32) * rng.choice([1e-3, 1.0, 1e9])
    score[rng.random(score.shape) < 0.3] = -np.inf
    for k in (1, 7, 30, 60):
        chosen = np.asarray(index_topk.best_entries(jnp.asarray(score), k))
        expected = np.stack([np.isin(np.arange(50), row) for row in chosen])
        np.testing.assert_array_equal(attention.best_mask(jnp.asarray(score), k), expected)


@pytest.mark.slow
def test_entries_are_selected_as_the_engine_selects_them() -> None:
    """Long enough that candidates leave blocks out; ratio 2 has none and ratio 1 is filtered by them."""
    batch, length, heads, dim = 1, 768, 8, 32
    rows = training_rows(jnp.zeros((batch, length), jnp.int32))
    layout = training_layout(CONFIG, NUMERICS, batch, length)
    rng = np.random.default_rng(4)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    pool = drawn(layout.num_blocks, layout.rows_per_block, dim)
    options = {"rows": rows, "layout": layout}
    candidates = blocks = None
    for source, make, use in ((0, False, False), (3, True, False), (3, False, True)):
        query, weights = drawn(length, heads, dim), drawn(length, heads)
        listed, made = index_topk.index_topk(
            query, weights, pool, source=source, candidates=candidates if use else None, make_candidates=make, **options
        )
        keys = attention.entries(pool, layout, source, batch)
        masks, made_blocks = attention.select_entries(
            query[None], weights[None], keys, CONFIG, blocks if use else None, make
        )
        count = keys.shape[1]
        for found, expected, width in ((masks, listed, count), (made_blocks, made, count // 8)):
            if expected is None:
                continue
            wide = [np.pad(np.asarray(m)[0], ((0, 0), (0, width - m.shape[-1]))) for m in found]
            chosen = np.stack([np.isin(np.arange(width), row) for row in np.asarray(expected)])
            np.testing.assert_array_equal(np.concatenate(wide), chosen)
        if make:
            candidates, blocks = made, made_blocks
            assert any(not np.asarray(m)[0, -1].all() for m in blocks)


def naive(query, keys, visible, sink, scale):
    """Softmax over the visible keys and the sink, in one piece."""
    logits = jnp.einsum("bchd,bkd->bchk", query, keys, precision="highest") * scale
    logits = jnp.where(visible[:, :, None], logits, -jnp.inf)
    sinks = jnp.broadcast_to(sink[:, None], (*logits.shape[:-1], 1))
    weight = jax.nn.softmax(jnp.concatenate([logits, sinks], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bchk,bkd->bchd", weight, keys, precision="highest")


def test_attention_has_the_gradient_of_its_function() -> None:
    rng = np.random.default_rng(1)
    query, keys, sink = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 8, 3, 16), (2, 12, 16), (3,)))
    visible = jnp.asarray(rng.random((2, 8, 12)) < 0.5).at[:, 0].set(False)
    toward = jnp.asarray(rng.normal(size=query.shape), jnp.float32)

    def total(function, *arrays):
        q, k, s = arrays
        return jnp.vdot(function(q, k, visible, s, 0.3), toward)

    both = [
        jax.value_and_grad(partial(total, f), argnums=(0, 1, 2))(query, keys, sink) for f in (attention.attend, naive)
    ]
    for mine, expected in zip(jax.tree.leaves(both[0]), jax.tree.leaves(both[1])):
        np.testing.assert_allclose(mine, expected, atol=1e-5)


def test_experts_and_linears_have_the_gradients_of_their_functions() -> None:
    rng = np.random.default_rng(2)
    shapes = ((6, 8), (6, 3), (3, 5, 8), (3, 5, 8), (3, 8, 5))
    arrays = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]
    toward = jnp.asarray(rng.normal(size=(6, 8)), jnp.float32)

    def derived(h, share, w1, w3, w2):
        return jnp.vdot(dense._forward(h, share, w1, w3, w2, 0.7, False)[0], toward)

    def own(h, share, w1, w3, w2):
        return jnp.vdot(dense._experts(h, share, w1, w3, w2, 0.7, False), toward)

    for mine, expected in zip(*(jax.grad(f, argnums=tuple(range(5)))(*arrays) for f in (own, derived))):
        np.testing.assert_allclose(mine, expected, atol=1e-5)
    x, weight = jnp.asarray(rng.normal(size=(2, 3, 4)), jnp.float32), arrays[0]
    for index, spec in ((0, "abo,oi->abi"), (1, "abo,abi->oi")):
        g = jnp.asarray(rng.normal(size=(2, 3, 6)), jnp.float32)
        weight = jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)
        mine = jax.grad(lambda *a, g=g: jnp.vdot(matmul(*a, jnp.dtype(jnp.float32)), g), argnums=index)(x, weight)
        np.testing.assert_allclose(mine, jnp.einsum(spec, g, (weight, x)[index]), atol=1e-5)


def test_losses_are_summed_by_class(params: Params) -> None:
    build, _ = builder(CONFIG, NUMERICS, TABLES)
    rng = np.random.default_rng(3)
    hidden = jnp.asarray(rng.normal(size=(24, CONFIG.hidden_size)), jnp.float32)
    targets, classes = rng.integers(0, 64, 24), rng.integers(0, 3, 24).astype(np.uint8)
    weights = jnp.asarray([1.0, 0.0, 4.0])
    logits = np.asarray(hidden) @ np.asarray(params["head.weight"]).T
    targets[:5] = logits[:5].argmax(axis=1)

    @jax.jit
    def summed(params: Params) -> tuple[jax.Array, jax.Array]:
        return cross_entropy(build(params), hidden, jnp.asarray(targets), jnp.asarray(classes), weights, pieces=4)

    mean, sums = summed(params)
    loss = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(24), targets]
    hit = logits.argmax(axis=1) == targets
    expected = np.stack([[v[classes == c].sum() for v in (loss, hit, np.ones(24))] for c in range(3)])
    np.testing.assert_allclose(sums, expected, rtol=1e-4)
    w = np.asarray(weights)
    assert float(mean) == pytest.approx(float(w @ expected[:, 0] / (w @ expected[:, 2])), rel=1e-5)
