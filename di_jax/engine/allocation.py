"""Which drafts a decode step verifies, and its packed rows, decided on device (dspark 3.2, 3.6).

The host fixes how many drafts are verified (`engine.verification`); which, and hence how many of each request, follows
from the confidences that are on the device only. R requests, k drafts each, T rows of the compiled step. The functions
called `*_reference` are the same in numpy, with equal results in every bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from di_jax.engine.verification import SURVIVAL_FLOOR, survival


class RowLayout(NamedTuple):
    """Where the rows of a step come from. Rows of a request stand together, requests in order.

    request: int32 [T], -1 where nobody uses the row. offset: int32 [T], 0 for the request's newest token, i for its
    i-th draft, -1 where nobody uses the row. valid: bool [T], whether somebody does. start: int32 [R + 1], the first
    row of each request, and after the last one's rows.
    """

    request: Any
    offset: Any
    valid: Any
    start: Any


def allocate(confidence: Array, caps: Array, drafts: Array) -> Array:
    """Drafts of each request that are verified, int32 [R]: a request's first ones, `drafts` in all or sum of caps.

    confidence: float32 [R, k], chance of each draft given those before it. caps: int32 [R], the most that may be
    verified of each request, 0..k; -1 for a padded request, whose length then is -1: it has not even the row that every
    request has. drafts: int32 scalar, from older confidences only.

    Drafts are ranked by survival, largest first, then by place in the block, then by request. Along a request survivals
    never rise and places do, so a draft never outranks one before it: neither a later confidence of a request nor the
    draft itself changes whether it is verified.
    """
    requests, k = confidence.shape
    bounded = jnp.minimum(confidence, 1.0)
    survivals, so_far = [], jnp.ones(requests, jnp.float32)
    for place in range(k):  # in the order of `verification.survival`: a cumulative product may be summed as a tree
        so_far = so_far * bounded[:, place]
        so_far = jnp.where(so_far >= SURVIVAL_FLOOR, so_far, 0.0)
        survivals.append(so_far)
    places = jnp.arange(k, dtype=jnp.int32)[:, None]
    # By place, then by request, which is the order that a stable sort leaves equals in. 1 is above all of -survival.
    keys = jnp.where(places < caps, -jnp.stack(survivals), 1.0)
    request = jnp.broadcast_to(jnp.arange(requests, dtype=jnp.int32), (k, requests))
    ranked, request = lax.sort((keys.reshape(-1), request.reshape(-1)), num_keys=1, is_stable=True)
    admitted = (jnp.arange(k * requests, dtype=jnp.int32) < drafts) & (ranked <= 0)
    return jnp.minimum(caps, 0).at[request].add(admitted.astype(jnp.int32))


def pack(lengths: Array, rows: int) -> RowLayout:
    """The rows of requests with so many drafts each, int32 [R]; -1: no row at all. rows: T, enough for all."""
    start = jnp.pad(jnp.cumsum(1 + lengths, dtype=jnp.int32), (1, 0))
    row = jnp.arange(rows, dtype=jnp.int32)
    valid = row < start[-1]
    request = jnp.sum(start[1:] <= row[:, None], axis=1, dtype=jnp.int32)
    offset = row - start[jnp.minimum(request, len(lengths) - 1)]
    return RowLayout(jnp.where(valid, request, -1), jnp.where(valid, offset, -1), valid, start)


def allocate_reference(confidence: np.ndarray, caps: np.ndarray, drafts: int) -> np.ndarray:
    """`allocate` in numpy."""
    caps = np.asarray(caps)
    chance = survival(confidence)
    request, place = np.nonzero(np.arange(chance.shape[1]) < caps[:, None])
    ranked = np.lexsort((request, place, -chance[request, place]))[: max(0, drafts)]
    return (np.minimum(caps, 0) + np.bincount(request[ranked], minlength=len(caps))).astype(np.int32)


def pack_reference(lengths: np.ndarray, rows: int) -> RowLayout:
    """`pack` in numpy. Raises ValueError when the rows are too few."""
    counts = 1 + np.asarray(lengths, np.int32)
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    if start[-1] > rows:
        raise ValueError(f"{len(counts)} requests need {start[-1]} rows, the step has {rows}")
    request, offset = np.full((2, rows), -1, np.int32)
    request[: start[-1]] = np.repeat(np.arange(len(counts)), counts)
    offset[: start[-1]] = np.arange(start[-1]) - np.repeat(start[:-1], counts)
    return RowLayout(request, offset, request >= 0, start)
