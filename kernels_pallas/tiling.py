"""Splitting work over tiles of rows so that temporaries stay within a budget, and are there no longer than needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

# Temporaries of one batch of tiles. 256 MB holds 256 rows of 512 gathered fp32 entries at head size 512.
TEMPORARY_BYTES = 256 * 2**20


def map_tiles(fn: Callable[[Any], Any], xs: Any, bytes_per_tile: int) -> Any:
    """fn over the leading axis of xs: at once when the temporaries fit the budget, else in batches.

    xs: arrays, the first not empty; no PRNG keys. Batches are of one size, so the last may compute some tiles again.
    What they are written into begins as some value of xs rather than as zeros, for the reason that `zeros_after` gives.
    """
    leaves = jax.tree.leaves(xs)
    tiles = leaves[0].shape[0]
    rounds = -(-tiles // max(1, TEMPORARY_BYTES // max(1, bytes_per_tile)))
    if rounds <= 1:
        return jax.vmap(fn)(xs)
    batch = -(-tiles // rounds)

    def one_batch(number: Array, out: Any) -> Any:
        first = jnp.minimum(number * batch, tiles - batch)
        some = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, batch), xs)
        return jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, first, 0), out, jax.vmap(fn)(some)
        )

    any_value = leaves[0].reshape(-1)[0]
    made = jax.eval_shape(jax.vmap(fn), xs)
    out = jax.tree.map(lambda a: jnp.broadcast_to(any_value.astype(a.dtype), a.shape), made)
    return lax.fori_loop(0, -(-tiles // batch), one_batch, out)


def zeros_after(count: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Zeros that a loop writes into, made once `count` is known, a signed integer of at least 0 that the loop goes by.

    To XLA constants are no reason to wait: it fills those of all loops of a step in one kernel at the beginning, and
    each keeps its memory until its loop comes. That was 5 of the 9.5 GB of temporaries of a prefill of 16,384 rows
    (EP64 on an H200, kernels on: the expert rows of five runs of layers, 98,304 x 5,120 in bfloat16).
    """
    return jnp.broadcast_to((count < 0).astype(dtype), shape)
