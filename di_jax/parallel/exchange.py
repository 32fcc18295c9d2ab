"""Items to the ranks that can serve them, and the answers back: expert dispatch and combine, Engram look-ups.

No item is ever dropped: what exceeds the fixed capacity of a round waits for the next one, and the number of rounds
is agreed in the group (architecture 7.7).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.tiling import zeros_after


def capacity_of(items: int, ranks: int, factor: float) -> int:
    """Items that one rank may send another in a round: `factor` times the mean, in steps of 8, and never more than
    there are. Load within it costs one round."""
    mean = -(-items // ranks)
    return max(1, min(items, -(-int(mean * factor) // 8) * 8))


def exchange(
    take: Callable[[Array], Any],
    destination: Array,
    serve: Callable[[Any, Array], Any],
    *,
    axes: tuple[str, ...],
    ranks: int,
    capacity: int,
) -> Any:
    """serve's answers to N items, one by one; zeros for items that go nowhere.

    take(int32 [n]) gives what is sent for those items, a tree of [n, ...] arrays. destination int32 [N]: the rank
    along `axes` that serves the item, or `ranks` for none. serve(sent, valid) gets a tree of [ranks * capacity, ...]
    and bool [ranks * capacity] and returns a tree of [ranks * capacity, ...]; rows that are not valid hold some item's
    copy and their answers are discarded. To be called inside `shard_map`, by all ranks of the group alike. Bytes of a
    round and rank: ranks * capacity items there and answers back.
    """
    items = destination.shape[0]
    order = jnp.argsort(destination, stable=True).astype(jnp.int32)
    count = jnp.zeros(ranks + 1, jnp.int32).at[destination].add(1)[:ranks]
    first = jnp.cumsum(count) - count
    rounds = lax.pmax((jnp.max(count) + capacity - 1) // capacity, axes)

    def across(tree: Any) -> Any:
        return jax.tree.map(lambda a: lax.all_to_all(a, axes, 0, 0, tiled=True), tree)

    def one_round(number: Array, answers: Any) -> Any:
        place = number * capacity + jnp.arange(capacity, dtype=jnp.int32)
        there = (place < count[:, None]).reshape(-1)
        item = order[jnp.minimum(first[:, None] + place, items - 1)].reshape(-1)
        received = across(take(item))
        answered = across(serve(received, across(there)))
        target = jnp.where(there, item, items)
        return jax.tree.map(lambda a, b: a.at[target].set(b, mode="drop"), answers, answered)

    slots = jax.ShapeDtypeStruct((ranks * capacity,), jnp.int32)
    answer = jax.eval_shape(serve, jax.eval_shape(take, slots), jax.ShapeDtypeStruct(slots.shape, bool))
    empty = jax.tree.map(lambda s: zeros_after(rounds, (items, *s.shape[1:]), s.dtype), answer)
    return lax.fori_loop(0, rounds, one_round, empty)
