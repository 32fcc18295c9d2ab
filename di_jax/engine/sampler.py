"""Drawing the next token on device: greedy or temperature, reproducible from (seed, output index) alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def sample(
    logits: Array, temperature: Array, seed_low: Array, seed_high: Array, output_index: Array, forced: Array
) -> tuple[Array, Array]:
    """(token int32 [S], its log-probability fp32 [S] under the raw logits).

    logits fp32 [S, V]; temperature fp32 [S], 0 = argmax (ties take the lower id); the 64-bit seed as two int32 words;
    forced int32 [S], -1 = free. Gumbel noise is keyed by (seed, output index): a token does not depend on the batch,
    the bucket or the schedule (engine 15.10).
    """

    def noise(low: Array, high: Array, index: Array) -> Array:
        words = jnp.stack([low, high]).astype(jnp.uint32)
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), index)
        return jax.random.gumbel(key, logits.shape[-1:], jnp.float32)

    greedy = jnp.argmax(logits, axis=-1)
    heat = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    drawn = jnp.argmax(logits / heat + jax.vmap(noise)(seed_low, seed_high, output_index), axis=-1)
    token = jnp.where(temperature > 0, drawn, greedy).astype(jnp.int32)
    token = jnp.where(forced >= 0, forced, token)
    picked = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return token, picked - jax.nn.logsumexp(logits, axis=-1)
