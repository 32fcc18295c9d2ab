"""The indexer's loss in numpy: KL from the head-summed attention mass to the softmax of the index scores."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from di_jax.model.config import LayerPlan, ModelConfig
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from di_jax.model.quantization import CacheFormats
from di_jax.model.rope import rotation
from scripts.train_demo import parameters
from scripts.train_demo.architecture import config_json
from scripts.train_demo.forward import forward, training_layout
from scripts.train_demo.parameters import TrainingTransformer, builder, initial

BATCH, LENGTH, BLOCK = 2, 256, 128
# Of ratio 2 the first position reaches no entry, and position 5 three of 128.
SAMPLE = np.array([[0, 5, 130, 255], [0, 1, 128, 200]], np.int32)


def shared_config() -> ModelConfig:
    """Layer 1 alone with its indexer, of ratio 2; layers 2 and 3, of ratio 1, select by that of layer 2."""
    raw = config_json(64, 64, 63, small=True)
    raw["text_config"]["index_source_layer_ids"] = [1, 2]
    return ModelConfig.from_dict(raw)


class Passed:
    """A pass whose layers leave random streams and random caches, and what the loss is made of at each of them.

    The model's own modules give queries, index queries and head weights of all rows; entries, attention, scores and the
    loss are the oracle's.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        c = self.config = shared_config()
        numerics = Numerics(jnp.dtype(jnp.float32), CacheFormats.plain(jnp.dtype(jnp.float32)), False, False)
        build, shapes = builder(c, numerics, EngramTables.build(c, np.arange(64, dtype=np.int32)))
        self.rng = np.random.default_rng(0)
        params = initial(c, shapes, seed=0)
        sinks = self.drawn(*shapes["layers.attn.attn_sink"])  # 0 at the beginning, where a wrong sign would not be seen
        params["layers.attn.attn_sink"] = jnp.asarray(sinks)
        self.layout = training_layout(c, numerics, BATCH, LENGTH)
        self.plans = {plan.layer: plan for plan in c.layers if plan.ratio}
        self.made: dict[int, dict[str, Any]] = {}
        monkeypatch.setattr(TrainingTransformer, "layer", self.layer)
        # Whatever the weights are: as they are here they compile in a third of the time.
        monkeypatch.setattr(parameters, "fake_quantize_weight", lambda master, _: master)
        tokens = jnp.asarray(self.rng.integers(0, 64, (BATCH, LENGTH)), jnp.int32)

        @jax.jit
        def run(params: parameters.Params) -> Any:
            self.model = build(params)
            return forward(self.model, tokens, jnp.asarray(SAMPLE)).index_loss, self.made

        self.losses, made = jax.device_get(run(params))
        self.terms = {n: {name: np.asarray(v, np.float64) for name, v in terms.items()} for n, terms in made.items()}

    def drawn(self, *shape: int) -> np.ndarray:
        return self.rng.normal(size=shape).astype(np.float32)

    def layer(self, plan: LayerPlan, number: int, carry: Any, rows: Any, *others: Any) -> tuple[Any, Any]:
        c, model = self.config, self.model
        state = carry.state.replace(
            compressed=jnp.asarray(self.drawn(*carry.state.compressed.shape)),
            index=jnp.asarray(self.drawn(*carry.state.index.shape)),
        )
        if plan.ratio:
            streams = carry.streams
            if plan.engram >= 0:
                memory = others[-1][plan.engram]
                streams = model.engrams(plan.engram, streams, memory, jnp.zeros(len(streams), bool))
            x, *_ = model.layers.hc_attn(number, streams, carry.pre)
            x = model.layers.attn_norm(x, number)
            latent, angles = model.layers.attn.latent_query(number, x), rotation(c, True, rows.position)
            self.made[number] = {
                "query": model.layers.attn.query(number, latent, angles),
                "sink": model.layers.attn.attn_sink[number],
                "index_query": model.indexers.query(plan.index_source, latent, angles),
                "head_weight": model.indexers.head_weights(plan.index_source, x),
                "compressed": state.compressed,
                "index": state.index,
            }
        carry = dataclasses.replace(
            carry,
            streams=jnp.asarray(self.drawn(*carry.streams.shape)),
            pre=jax.nn.softmax(jnp.asarray(self.drawn(*carry.pre.shape))),
            state=state,
        )
        return carry, SimpleNamespace(experts=jnp.zeros((len(rows.token), 2), jnp.int32))

    def entries(self, pool: np.ndarray, source: int, sequence: int) -> np.ndarray:
        """[N, d] of a KV source, from the blocks of one sequence."""
        first, count = self.layout.source_offset[source], self.layout.entries_per_block[source]
        blocks = range(sequence * LENGTH // BLOCK, (sequence + 1) * LENGTH // BLOCK)
        return np.concatenate([pool[block, first : first + count] for block in blocks])

    def loss(self, group: list[int], *, sink: bool = True, heads: int | None = None, masked: bool = True) -> float:
        """The index loss of the layers of one index source, the source's own first; the options are wrong ones."""
        divergences = []
        for sequence, position in ((b, p) for b in range(BATCH) for p in SAMPLE[b]):
            row, source = sequence * LENGTH + position, self.terms[group[0]]
            ratio, kv_source = self.plans[group[0]].ratio, self.plans[group[0]].kv_source
            reach = (position + 1) // ratio if masked else LENGTH // ratio
            if not reach:
                continue
            mass = np.zeros(reach)
            for number in group:
                t = self.terms[number]
                keys = self.entries(t["compressed"], kv_source, sequence)[:reach]
                for query, of_sink in list(zip(t["query"][row], t["sink"]))[:heads]:
                    weight = np.exp(keys @ query * self.config.head_dim**-0.5)
                    mass += weight / (weight.sum() + (np.exp(of_sink) if sink else 0.0))
            keys = self.entries(source["index"], kv_source, sequence)[:reach]
            score = np.maximum(keys @ source["index_query"][row].T, 0) @ source["head_weight"][row]
            wanted, log_model = mass / mass.sum(), score - np.log(np.exp(score).sum())
            divergences.append(np.sum(wanted * (np.log(wanted) - log_model)))
        return float(np.mean(divergences))


def test_the_index_loss_is_the_divergence_of_the_mass_and_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = Passed(monkeypatch)
    c = passed.config
    assert c.num_attention_heads > 1 and c.index_n_heads > 1
    assert [(p.index_source, p.owns_index) for p in passed.plans.values()] == [(0, True), (1, True), (1, False)]
    groups = ([1], [2, 3])
    np.testing.assert_allclose(passed.losses, [passed.loss(group) for group in groups], rtol=1e-4)
    # What the numbers would be if one part of it were wrong.
    for loss, group in zip(passed.losses, groups):
        for wrong in ({"sink": False}, {"heads": 1}, {"masked": False}):
            assert abs(passed.loss(group, **wrong) / loss - 1) > 2e-3, wrong
    assert abs(passed.loss([2]) / passed.losses[1] - 1) > 2e-3
