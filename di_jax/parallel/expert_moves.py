"""Which slot's weights go where when the experts of one group are rearranged (engine.md 7.5), as plain data.

Pure functions of NumPy arrays, all layers at once. Slots are physical slots of the whole group: slot s is the
(s % S)-th of rank s // S, with S slots on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

KEEP, LOCAL, REMOTE, DUPLICATE = range(4)


@dataclass(frozen=True)
class MovePlan:
    """Where every slot of the new arrangement gets its expert's weights. L layers, P slots.

    action: int8 [L, P]. KEEP: holds them already. LOCAL: another slot of the rank held them before the move. REMOTE: a
    slot of another rank did. DUPLICATE: the rank receives them once, in a lower slot, and copies them afterwards.
    source: int32 [L, P], the slot to read. For KEEP the slot itself; for LOCAL and REMOTE its weights before the move,
    so nothing may be overwritten before it has been read; for DUPLICATE its weights after the REMOTE moves.
    """

    action: NDArray[np.int8]
    source: NDArray[np.int32]
    num_ranks: int


@dataclass(frozen=True)
class MoveTraffic:
    """Bytes that a plan moves in each layer, int64 [L]: between ranks, within ranks (LOCAL and DUPLICATE), and the most
    that one rank sends or receives, which bounds the time of a layer's exchange."""

    remote: NDArray[np.int64]
    local: NDArray[np.int64]
    busiest_rank: NDArray[np.int64]


def plan_moves(old: NDArray[np.int32], new: NDArray[np.int32], num_ranks: int) -> MovePlan:
    """The least moves from the slots `old` to `new`, int32 [L, P]: no rank receives an expert that it holds, nor twice.

    An expert that N ranks without it need is sent by the M ranks that hold it, in ascending order, from their first
    slot with it: by N // M neighbouring receivers each, and the N % M last receivers go to the first senders one more
    each. Raises ValueError when an expert of `new` is nowhere in `old`.
    """
    num_layers, num_slots = old.shape
    slots_per_rank = num_slots // num_ranks
    by_rank = (num_layers, num_ranks, slots_per_rank)
    held, wanted = old.reshape(by_rank), new.reshape(by_rank)
    first_of_rank = np.arange(num_ranks, dtype=np.int32)[:, None] * slots_per_rank
    own = np.tile(np.arange(num_slots, dtype=np.int32), (num_layers, 1)).reshape(by_rank)

    same = wanted[..., :, None] == held[..., None, :]  # [L, R, wanted slot, held slot]
    received = ~same.any(axis=3)
    first_wanted = (wanted[..., :, None] == wanted[..., None, :]).argmax(axis=3)
    duplicate = received & (first_wanted != np.arange(slots_per_rank))
    remote = received & ~duplicate

    action = np.select([wanted == held, duplicate, remote], [KEEP, DUPLICATE, REMOTE], LOCAL).astype(np.int8)
    source = np.where(duplicate, first_wanted, same.argmax(axis=3)).astype(np.int32) + first_of_rank
    source[action == KEEP] = own[action == KEEP]

    first_held = (held[..., :, None] == held[..., None, :]).argmax(axis=3) == np.arange(slots_per_rank)
    source[remote] = _senders(held, first_held, wanted, remote)
    return MovePlan(action.reshape(num_layers, -1), source.reshape(num_layers, -1), num_ranks)


def apply_moves(plan: MovePlan, layer: int, weights: NDArray) -> NDArray:
    """Weights of a layer after its move, [R, S, ...] like `weights` before it. The definition of what a plan means."""
    slots = weights.reshape(-1, *weights.shape[2:])
    action, source = plan.action[layer], plan.source[layer]
    moved = slots[source]
    duplicate = action == DUPLICATE
    moved[duplicate] = moved[source[duplicate]]
    return moved.reshape(weights.shape)


def move_traffic(plan: MovePlan, expert_bytes: int) -> MoveTraffic:
    """What the plan moves, `expert_bytes` for one expert's weights and scales in one layer."""
    num_layers, num_slots = plan.action.shape
    layer, receiver = np.nonzero(plan.action == REMOTE)
    sender = plan.source[layer, receiver]

    def per_rank(slots: NDArray) -> NDArray[np.int64]:
        ranks = layer * plan.num_ranks + slots // (num_slots // plan.num_ranks)
        return np.bincount(ranks, minlength=num_layers * plan.num_ranks).reshape(num_layers, plan.num_ranks)

    received = per_rank(receiver)
    copied = np.isin(plan.action, (LOCAL, DUPLICATE)).sum(axis=1)
    busiest = np.maximum(per_rank(sender), received).max(axis=1)
    return MoveTraffic(received.sum(axis=1) * expert_bytes, copied * expert_bytes, busiest * expert_bytes)


def _senders(
    held: NDArray[np.int32], first_held: NDArray[np.bool_], wanted: NDArray[np.int32], remote: NDArray[np.bool_]
) -> NDArray[np.int32]:
    """The slot that sends to each slot marked in `remote`, in the order of np.nonzero(remote). All arrays [L, R, S];
    first_held marks the first slot of a rank that holds an expert."""
    num_layers = len(held)
    num_experts = int(max(held.max(), wanted.max())) + 1
    layer = np.arange(num_layers)[:, None, None]
    slot = np.broadcast_to(np.arange(held[0].size, dtype=np.int32).reshape(1, *held.shape[1:]), held.shape)

    def grouped(mask: NDArray[np.bool_], experts: NDArray[np.int32]) -> tuple[NDArray, NDArray, NDArray]:
        """Marked slots by (layer, expert), ranks ascending: the permutation, each one's group, sizes of all groups."""
        group = (layer * num_experts + experts)[mask]
        order = np.argsort(group, kind="stable")
        return order, group[order], np.bincount(group, minlength=num_layers * num_experts)

    send_order, _, num_senders = grouped(first_held, held)
    receive_order, group, num_receivers = grouped(remote, wanted)
    if (num_senders[group] == 0).any():
        lost = int(group[num_senders[group] == 0][0])
        raise ValueError(f"layer {lost // num_experts}: no rank holds expert {lost % num_experts}, which is to move")
    nth = np.arange(len(group)) - (np.cumsum(num_receivers) - num_receivers)[group]
    count = num_senders[group]
    share = num_receivers[group] // count
    sender = np.where(nth < share * count, nth // np.maximum(share, 1), nth - share * count)
    sending = slot[first_held][send_order][(np.cumsum(num_senders) - num_senders)[group] + sender]
    senders = np.empty(len(group), np.int32)
    senders[receive_order] = sending
    return senders
