"""Expert-parallel load balancing: which expert every physical slot of one expert group holds (engine.md 7.1, 7.4).

A group is a stack of MoE layers with the same experts: the backbone is one, the draft another. `num_ranks` ranks hold
contiguous, equally long runs of the physical slots; there are more slots than experts, so hot experts get copies.
Everything here is a pure function of NumPy arrays, all layers at once. The shapes in the docstrings:

    T pooled intervals of the window    L layers    E experts    P physical slots    R ranks
    slot_experts   int32 [L, P]   the expert of every slot
    counts         [T, L, E]      tokens that chose an expert

At 16 intervals, 40 layers, 384 experts and 448 slots on 64 ranks `rebalance_experts` takes 30 to 50 ms on one core
(scripts/results/eplb-simulation.json).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_INTERVALS = 16  # pooled intervals that the policy looks at: its time grows with them
MIN_GAIN = 0.01  # a layer keeps its slots when new ones would relieve its busiest rank by less than this share
PRIOR = 1e-3  # load of an expert that nobody chose, in mean loads: copies and places spread evenly without tokens
TIE_BREAK = 1 / 64  # weight of the second criterion of a placement


@dataclass(frozen=True)
class ExpertMap:
    """The tables that routing reads: where the copies of every expert are.

    replica_slots: int32 [L, E, P - E + 1], physical slots of an expert's copies in ascending order, padded with -1.
    num_replicas: int32 [L, E], at least 1.
    """

    replica_slots: NDArray[np.int32]
    num_replicas: NDArray[np.int32]


@dataclass(frozen=True)
class Rebalance:
    """What `rebalance_experts` decided. balance_before, balance_after: moe_lb of the window under the old and the new
    slots; their quotient is the factor by which MoE layers would have been faster."""

    slot_experts: NDArray[np.int32]
    balance_before: float
    balance_after: float


def num_physical_slots(num_experts: int, num_ranks: int, extra_per_rank: int) -> int:
    """Slots of a group: `extra_per_rank` redundant ones on every rank, and more until `num_ranks` divides the total."""
    if num_experts < 1 or num_ranks < 1 or extra_per_rank < 0:
        raise ValueError(
            f"{num_experts} experts on {num_ranks} ranks with {extra_per_rank} extra each: "
            "experts and ranks must be positive, extra_per_rank must not be negative"
        )
    least = num_experts + extra_per_rank * num_ranks
    return least + -least % num_ranks


def initial_slots(num_layers: int, num_experts: int, num_slots: int) -> NDArray[np.int32]:
    """slot_experts before any statistics: slot i holds expert i, the redundant slots experts 0, 1, 2, ... again."""
    return np.tile(np.arange(num_slots, dtype=np.int32) % num_experts, (num_layers, 1))


def expert_map(slot_experts: NDArray[np.int32], num_experts: int) -> ExpertMap:
    """The routing tables of `slot_experts`. Raises ValueError when an expert has no slot."""
    num_layers, num_slots = slot_experts.shape
    num_replicas = _copies(slot_experts, num_experts)
    if not num_replicas.all():
        layer, expert = np.argwhere(num_replicas == 0)[0]
        raise ValueError(f"layer {layer}: expert {expert} has no physical slot")
    order = np.argsort(slot_experts, axis=1, kind="stable")
    experts = np.take_along_axis(slot_experts, order, axis=1)
    first = np.cumsum(num_replicas, axis=1) - num_replicas
    replica = np.arange(num_slots) - np.take_along_axis(first, experts, axis=1)
    replica_slots = np.full((num_layers, num_experts, num_slots - num_experts + 1), -1, np.int32)
    replica_slots[np.arange(num_layers)[:, None], experts, replica] = order
    return ExpertMap(replica_slots, num_replicas)


def pooled_interval(step: ArrayLike, num_steps: int) -> NDArray[np.intp]:
    """The pooled interval, below MAX_INTERVALS, that step `step` of a window of `num_steps` steps is summed into."""
    return np.asarray(step, np.intp) * min(num_steps, MAX_INTERVALS) // num_steps


def pool_window(counts: NDArray) -> NDArray:
    """Sums the steps of a window [steps, ...] into at most MAX_INTERVALS intervals of nearly equal length."""
    num_steps = len(counts)
    starts = np.searchsorted(pooled_interval(np.arange(num_steps), num_steps), np.arange(min(num_steps, MAX_INTERVALS)))
    return np.add.reduceat(counts, starts, axis=0)


def rank_loads(counts: NDArray, slot_experts: NDArray[np.int32], num_ranks: int) -> NDArray[np.float32]:
    """Expected tokens of every rank, float32 [T, L, R]: an expert's tokens spread evenly over its copies."""
    per_copy = counts / _copies(slot_experts, counts.shape[-1]).astype(np.float32)
    slots = np.take_along_axis(per_copy, slot_experts[None], axis=2)
    return slots.reshape(*slots.shape[:2], num_ranks, -1).sum(axis=3, dtype=np.float32)


def moe_lb(*loads: NDArray) -> float:
    """Balance of rank loads [..., R], of one expert group or several: the busiest ranks' tokens, summed over steps and
    layers, over those of the mean rank (engine.md 7.3). 1 is even, and the value without tokens; R is the worst."""
    busiest = sum(float(each.max(axis=-1).sum(dtype=np.float64)) for each in loads)
    mean = sum(float(each.sum(dtype=np.float64)) / each.shape[-1] for each in loads)
    return busiest / mean if mean else 1.0


def rebalance_experts(
    counts: NDArray, slot_experts: NDArray[np.int32], num_ranks: int, min_gain: float = MIN_GAIN
) -> Rebalance:
    """New slots that minimise the busiest rank's tokens, summed over the window.

    counts [T, L, E]: the window, pooled; slot_experts int32 [L, P]: the slots now. What a rank goes on holding stays in
    its slot, and a layer that would gain less than `min_gain` stays as it is. Raises ValueError for shapes that do not
    fit.
    """
    (num_layers, num_slots), num_experts = slot_experts.shape, counts.shape[-1]
    if counts.ndim != 3 or counts.shape[1] != num_layers or num_slots % num_ranks or num_slots < num_experts:
        raise ValueError(
            f"counts {counts.shape} and slots {slot_experts.shape} on {num_ranks} ranks: the layers must agree, the "
            "ranks divide the slots, and every expert needs a slot"
        )
    loads = np.asarray(counts, np.float32)
    before = rank_loads(loads, slot_experts, num_ranks)
    copies = replicate_experts(loads, num_slots - num_experts)
    fresh = keep_in_place(place_copies(loads, copies, num_ranks), slot_experts, num_ranks)
    after = rank_loads(loads, fresh, num_ranks)
    busiest_before, busiest_after = (each.max(axis=2).sum(axis=0) for each in (before, after))
    stays = busiest_after >= busiest_before * (1 - min_gain)
    after[:, stays] = before[:, stays]
    return Rebalance(np.where(stays[:, None], slot_experts, fresh), moe_lb(before), moe_lb(after))


def replicate_experts(counts: NDArray, num_redundant: int) -> NDArray[np.int32]:
    """Copies of every expert, int32 [L, E], E + num_redundant in each layer (engine.md 7.4, replication).

    Each round gives one copy to the expert whose copy lowers the tokens of the busiest copy most, summed over the
    intervals. Only the busiest expert of an interval can lower its maximum; experts that tie hide each other's gain, so
    a ten-thousandth of the load counts as well. The lowest index wins a tie.
    """
    counts = np.ascontiguousarray(_with_prior(counts).transpose(1, 0, 2))
    num_layers, num_intervals, num_experts = counts.shape
    layer = np.arange(num_layers)
    copies = np.ones((num_layers, num_experts), np.float32)
    per_copy = counts.copy()
    flat_counts, flat_per_copy, flat_copies = counts.reshape(-1), per_copy.reshape(-1), copies.reshape(-1)
    of_interval = np.arange(num_layers * num_intervals) * num_experts  # where a row of the flat [L, T, E] begins
    of_layer = np.repeat(layer * num_experts, num_intervals)  # where its layer begins in the flat [L, E]
    for _ in range(num_redundant):
        busiest = per_copy.argmax(axis=2).reshape(-1)
        at, expert = of_interval + busiest, of_layer + busiest
        highest = flat_per_copy[at]
        flat_per_copy[at] = 0
        second = flat_per_copy[of_interval + per_copy.argmax(axis=2).reshape(-1)]  # argmax is 3 times as fast as max
        flat_per_copy[at] = highest
        gain = highest - np.maximum(second, flat_counts[at] / (flat_copies[expert] + 1)) + 1e-4 * highest
        chosen = np.bincount(expert, gain, copies.size).reshape(copies.shape).argmax(axis=1)
        copies[layer, chosen] += 1
        per_copy[layer, :, chosen] = counts[layer, :, chosen] / copies[layer, chosen, None]
    return copies.astype(np.int32)


def place_copies(counts: NDArray, copies: NDArray[np.int32], num_ranks: int) -> NDArray[np.int32]:
    """slot_experts int32 [L, P] for `copies` int32 [L, E] (engine.md 7.4, placement).

    Copies go from the heaviest to the lightest to the rank, among those with a free slot, that keeps the sum over the
    intervals of the busiest rank lowest. Two things differ from the plain rule, where large copies fill the first ranks
    and then their last slots must take small ones on top (moe_lb 1.02 instead of 1.001 on loads by Zipf's law, exponent
    1): no rank counts as busy below the mean rank, the least that the busiest can end with; and of ranks that tie, the
    one with the least load wins, free slots counted as if mean ones of the remaining copies sat there.
    """
    counts = _with_prior(counts)
    num_intervals, num_layers, num_experts = counts.shape
    num_slots = int(copies[0].sum())
    slots_per_rank = num_slots // num_ranks
    layer = np.arange(num_layers)
    all_experts = np.tile(np.arange(num_experts, dtype=np.int32), num_layers)
    experts = np.repeat(all_experts, copies.reshape(-1)).reshape(num_layers, num_slots)
    tokens = np.take_along_axis(counts / copies.astype(np.float32), experts[None], axis=2)
    order = np.argsort(-tokens.sum(axis=0), axis=1, kind="stable")
    experts = np.take_along_axis(experts, order, axis=1)
    tokens = np.ascontiguousarray(np.take_along_axis(tokens, order[None], axis=2).transpose(2, 0, 1))  # [P, T, L]
    totals = tokens.sum(axis=1)  # [P, L]
    remaining = np.cumsum(totals[::-1], axis=0)[::-1] - totals
    mean_remaining = remaining / np.maximum(np.arange(num_slots)[::-1, None], 1).astype(np.float32)

    load = np.zeros((num_intervals, num_layers, num_ranks), np.float32)
    total = np.zeros((num_layers, num_ranks), np.float32)
    free = np.full((num_layers, num_ranks), slots_per_rank, np.float32)
    busiest = tokens.sum(axis=0) / num_ranks  # [T, L]
    ranks = np.empty((num_slots, num_layers), np.intp)
    candidate, cost, expected = np.empty_like(load), np.empty_like(total), np.empty_like(total)
    for copy in range(num_slots):
        np.add(load, tokens[copy, :, :, None], out=candidate)
        np.maximum(candidate, busiest[:, :, None], out=candidate)
        np.add.reduce(candidate, axis=0, out=cost)
        np.multiply(free, mean_remaining[copy, :, None], out=expected)
        expected += total
        expected *= TIE_BREAK
        cost += expected
        np.copyto(cost, np.inf, where=free == 0)
        rank = ranks[copy] = cost.argmin(axis=1)
        grown = load[:, layer, rank] + tokens[copy]
        load[:, layer, rank] = grown
        np.maximum(busiest, grown, out=busiest)
        total[layer, rank] += totals[copy]
        free[layer, rank] -= 1
    by_rank = np.argsort(ranks.T, axis=1, kind="stable")
    return np.take_along_axis(experts, by_rank, axis=1)


def keep_in_place(slot_experts: NDArray[np.int32], current: NDArray[np.int32], num_ranks: int) -> NDArray[np.int32]:
    """`slot_experts` int32 [L, P] with the slots of every rank reordered: what the rank holds in `current` already
    stays in its slot, the others take the remaining slots in order."""
    new = slot_experts.reshape(-1, slot_experts.shape[1] // num_ranks)
    old = current.reshape(new.shape)
    row = np.arange(len(new))
    kept = np.full_like(new, -1)
    waiting = np.ones(new.shape, bool)
    for slot in range(new.shape[1]):
        fits = (old == new[:, slot, None]) & (kept < 0)
        stays = fits.any(axis=1)
        kept[row[stays], fits[stays].argmax(axis=1)] = new[stays, slot]
        waiting[stays, slot] = False
    kept[kept < 0] = new[waiting]  # both in order of rank and slot, equally many on every rank
    return kept.reshape(slot_experts.shape)


def _copies(slot_experts: NDArray[np.int32], num_experts: int) -> NDArray[np.int32]:
    """How many slots hold each expert, int32 [L, E]."""
    num_layers = len(slot_experts)
    flat = slot_experts + np.arange(num_layers)[:, None] * num_experts
    return np.bincount(flat.reshape(-1), minlength=num_layers * num_experts).reshape(num_layers, -1).astype(np.int32)


def _with_prior(counts: NDArray) -> NDArray[np.float32]:
    """float32 counts as multiples of their layer's mean, plus PRIOR."""
    mean = counts.mean(axis=(0, 2), dtype=np.float64, keepdims=True)
    return (counts / np.where(mean > 0, mean, 1)).astype(np.float32) + np.float32(PRIOR)
