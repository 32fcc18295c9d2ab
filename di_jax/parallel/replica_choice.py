"""Which copy of an expert a row goes to, and routing forced for measurements: hashes of (sequence seed, position).

A row's choice depends on neither its batch row nor its rank, so it is the same in every batch (engine.md 15.11). All
functions but `forced_slot_factors` use operators alone and take NumPy and JAX arrays alike, inside a jitted step too.
Seeds, positions and slots are uint32 arrays, not scalars: their products wrap.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = Any  # a uint32 array of NumPy or JAX

MAX_FACTOR = 100.0


def mix(words: Words) -> Words:
    """Words of uint32 that look random and independent: the finaliser of MurmurHash3, a bijection."""
    words = words ^ (words >> np.uint32(16))
    words = words * np.uint32(0x85EBCA6B)
    words = words ^ (words >> np.uint32(13))
    words = words * np.uint32(0xC2B2AE35)
    return words ^ (words >> np.uint32(16))


def row_hash(seed: Words, position: Words) -> Words:
    """A uint32 for each row; seed and position broadcast. The odd constant keeps position 0 of seed 0 off the fixed
    point of `mix`."""
    return mix(seed ^ mix(position + np.uint32(0x9E3779B9)))


def replica_index(row_hashes: Words, num_replicas: Any) -> Any:
    """The copy that serves each row, int32 from 0 to num_replicas - 1; both arguments broadcast.

    row_hashes: uint32, from `row_hash`; num_replicas: integers, at least 1. A modulus of 32 random bits favours no copy
    by more than num_replicas / 2^32.
    """
    return (row_hashes % num_replicas.astype(np.uint32)).astype(np.int32)


def forced_slot_scores(row_hashes: Words, slots: Words, factors: Any) -> Any:
    """Scores that replace the router's over physical slots, float32 [N, P]; the slots of the top k scores are a row's
    choice, without repetition.

    row_hashes: uint32 [N]; slots: uint32 [P], 0 to P - 1; factors: float32 [P]. Scores are uniform in [0, factor):
    equal factors force balance, those of `forced_slot_factors` imbalance.
    """
    bits = mix(row_hashes[:, None] ^ mix(slots + np.uint32(0x9E3779B9))[None]) >> np.uint32(8)
    return bits.astype(np.float32) * np.float32(2.0**-24) * factors


def forced_slot_factors(ratio: float, num_ranks: int, num_slots: int, top_k: int, hot_rank: int = 0) -> NDArray:
    """Factors, float32 [P], under which rank `hot_rank` gets `ratio` times the rows of any other (engine.md 7.2).

    With x = ratio / (ratio + ranks - 1), the hot rank's share, a row's k-th score lies near the t with
    (P - n)(1 - t) = (1 - x) k others above it, n slots a rank; n (1 - t / f) = x k gives the factor f. A row cannot
    choose more than the n slots that the rank has: f saturates at 100.
    """
    slots_per_rank = num_slots // num_ranks
    if ratio <= 0 or num_ranks < 2 or num_slots % num_ranks or top_k > num_slots - slots_per_rank:
        raise ValueError(
            f"imbalance {ratio} of {num_slots} slots on {num_ranks} ranks, {top_k} a row: the ratio must be positive, "
            "2 ranks or more divide the slots, and a row's choice must fit the other ranks"
        )
    share = ratio / (ratio + num_ranks - 1)
    threshold = 1 - (1 - share) * top_k / (num_slots - slots_per_rank)
    below = 1 - share * top_k / slots_per_rank
    factors = np.ones(num_slots, np.float32)
    first = hot_rank * slots_per_rank
    factors[first : first + slots_per_rank] = min(threshold / below, MAX_FACTOR) if below > 0 else MAX_FACTOR
    return factors
