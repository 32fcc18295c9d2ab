"""The training forward pass computes what the engine's step computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from di_jax.model.cache import CacheLayout
from di_jax.model.config import ModelConfig
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from di_jax.model.quantization import CacheFormats
from di_jax.model.transformer import Transformer
from scripts.train_demo.architecture import config_json
from scripts.train_demo.forward import forward, training_layout, training_rows
from scripts.train_demo.parameters import Params, builder, initial

CONFIG = ModelConfig.from_dict(config_json(64, 64, 63))
TABLES = EngramTables.build(CONFIG, np.arange(64, dtype=np.int32))
# Plain caches: a code that flips between two summation orders would hide a real difference.
NUMERICS = Numerics(jnp.dtype(jnp.float32), CacheFormats.plain(jnp.dtype(jnp.float32)), False, False, True)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (1, 128)), jnp.int32)


@pytest.fixture(scope="module")
def params() -> Params:
    return initial(CONFIG, builder(CONFIG, NUMERICS, TABLES)[1], seed=5)


def test_it_computes_what_the_engine_computes(params: Params) -> None:
    build, _ = builder(CONFIG, NUMERICS, TABLES)

    @jax.jit
    def both(params: Params) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        model = build(params, jnp.zeros((), bool))
        trained = forward(model, TOKENS, 16)
        layout: CacheLayout = training_layout(CONFIG, NUMERICS, 1, TOKENS.shape[1])
        run = Transformer.__call__
        hidden, _, _, taps = run(model, training_rows(TOKENS), layout.allocate(), layout, taps=True)
        return trained.hidden, hidden, trained.taps, taps

    hidden, expected, taps, expected_taps = both(params)
    np.testing.assert_allclose(hidden, expected, atol=1e-4)
    np.testing.assert_allclose(taps, expected_taps, atol=1e-4)
