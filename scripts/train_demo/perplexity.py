"""Perplexity of fp32 weights in training's own forward pass, in float32 and without any rounding of weights."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from di_jax.model.config import ModelConfig
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Numerics
from scripts.train_demo.dataset import text_rows
from scripts.train_demo.forward import cross_entropy, forward
from scripts.train_demo.parameters import builder

Weights = Mapping[str, np.ndarray]
ROW, CONTEXT, BATCH = 1024, 256, 8  # rows of so many tokens, of which the first are context only


def measure(
    config: ModelConfig, tables: EngramTables, length: int = ROW, context: int = CONTEXT, batch: int = BATCH
) -> Callable[[Weights, np.ndarray], float]:
    """A function of fp32 weights and a text [N]: exp(mean negative log-likelihood), no weight rounded.

    The text is cut into rows of `length` tokens, of which the first `context` are not counted again.
    """
    build, _ = builder(config, Numerics.training("float32"), tables)

    @jax.jit
    def run(weights: Mapping[str, Array], tokens: Array, counted: Array) -> Array:
        """fp32 [2, 3]: loss, hits and tokens of those that are not counted, and of those that are."""
        model = build(weights, exact=True)  # the cache quantizers belong to the function and stay
        out = forward(model, tokens[:, :-1], None)
        _, sums = cross_entropy(model, out.hidden, tokens[:, 1:].reshape(-1), counted.reshape(-1), jnp.ones(2))
        return sums

    def perplexity(weights: Weights, text: np.ndarray) -> float:
        rows = text_rows(text, length, context)
        missing = -len(rows["tokens"]) % batch
        tokens, counted = (np.pad(rows[name], ((0, missing), (0, 0))) for name in ("tokens", "weights"))
        on_device = {path: jnp.asarray(value) for path, value in weights.items()}
        total = np.zeros(3)
        for first in tqdm(range(0, len(tokens), batch), desc="perplexity", disable=None, file=sys.stderr):
            some = slice(first, first + batch)
            total += np.asarray(run(on_device, tokens[some], counted[some].astype(np.uint8))[1], np.float64)
        return math.exp(total[0] / total[2])

    return perplexity
