"""Splitting work over row tiles so that a reference implementation's temporaries stay within a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

# Temporaries of one batch of tiles. 256 MB holds 256 rows of 512 gathered fp32 entries at head size 512.
TEMPORARY_BYTES = 256 * 2**20


def map_tiles(fn: Callable[[Any], Any], xs: Any, bytes_per_tile: int) -> Any:
    """fn over the leading axis of xs: at once when the temporaries fit the budget, else in batches."""
    tiles = jax.tree.leaves(xs)[0].shape[0]
    batch = max(1, TEMPORARY_BYTES // max(1, bytes_per_tile))
    if tiles <= batch:
        return jax.vmap(fn)(xs)
    return jax.lax.map(fn, xs, batch_size=batch)
