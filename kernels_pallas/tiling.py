"""Splitting work over tiles of rows so that temporaries stay within a budget, and are there no longer than needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

# Temporaries of one batch of tiles. 256 MB holds 256 rows of 512 gathered fp32 entries at head size 512.
TEMPORARY_BYTES = 256 * 2**20


def map_tiles(fn: Callable[[Any], Any], xs: Any, bytes_per_tile: int) -> Any:
    """fn over the leading axis of xs: at once when the temporaries fit the budget, else in batches."""
    tiles = jax.tree.leaves(xs)[0].shape[0]
    batch = max(1, TEMPORARY_BYTES // max(1, bytes_per_tile))
    if tiles <= batch:
        return jax.vmap(fn)(xs)
    return jax.lax.map(fn, xs, batch_size=batch)


def zeros_after(count: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Zeros that a loop writes into, made once `count` is known, an integer of at least 0 that the loop goes by.

    To XLA constants are no reason to wait: it fills those of all loops of a step in one kernel at the beginning, and
    each keeps its memory until its loop comes. That was 5 of the 9.5 GB of temporaries of a prefill of 16,384 rows
    (EP64 on an H200, kernels on: the expert rows of five runs of layers, 98,304 x 5,120 in bfloat16).
    """
    return jnp.broadcast_to((count < 0).astype(dtype), shape)
