"""The plan of an expert rearrangement."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.parallel.eplb import initial_slots, rebalance_experts
from di_jax.parallel.expert_moves import DUPLICATE, KEEP, LOCAL, REMOTE, apply_moves, move_traffic, plan_moves


@st.composite
def arrangements(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Old and new slots of a group, every expert in both; ranks. Experts may sit on a rank several times."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ranks, slots, layers = draw(st.integers(1, 8)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    experts = draw(st.integers(1, ranks * slots))

    def slot_experts() -> np.ndarray:
        extra = rng.integers(0, experts, (layers, ranks * slots - experts))
        every = np.concatenate([np.tile(np.arange(experts), (layers, 1)), extra], axis=1)
        return rng.permuted(every, axis=1).astype(np.int32)

    return slot_experts(), slot_experts(), ranks


@given(arrangements())
def test_every_slot_ends_with_the_expert_of_the_new_map(arrangement: tuple[np.ndarray, np.ndarray, int]) -> None:
    old, new, ranks = arrangement
    plan = plan_moves(old, new, ranks)
    for layer in range(len(old)):
        # Weights tell the expert and, to see that sources are read before they are overwritten, nothing else.
        weights = np.stack([old[layer], -old[layer]], axis=-1).reshape(ranks, -1, 2)
        before = weights.copy()
        moved = apply_moves(plan, layer, weights)
        np.testing.assert_array_equal(moved[..., 0].reshape(-1), new[layer])
        np.testing.assert_array_equal(moved[..., 1].reshape(-1), -new[layer])
        np.testing.assert_array_equal(weights, before)


@given(arrangements())
def test_a_plan_moves_no_more_than_it_must(arrangement: tuple[np.ndarray, np.ndarray, int]) -> None:
    old, new, ranks = arrangement
    layers, num_slots = old.shape
    plan = plan_moves(old, new, ranks)
    rank_of = np.arange(num_slots) // (num_slots // ranks)
    np.testing.assert_array_equal(plan.action == KEEP, old == new)
    for layer in range(layers):
        received = []
        for slot in range(num_slots):
            action, source = plan.action[layer, slot], plan.source[layer, slot]
            here = rank_of == rank_of[slot]
            held = (old[layer, here] == new[layer, slot]).any()
            if action == KEEP:
                assert source == slot
            elif action == LOCAL:
                assert held and here[source] and old[layer, source] == new[layer, slot]
            elif action == REMOTE:
                assert not held and not here[source] and old[layer, source] == new[layer, slot]
                received.append((rank_of[slot], new[layer, slot]))
            else:
                assert action == DUPLICATE and not held and here[source] and source < slot
                assert plan.action[layer, source] == REMOTE and new[layer, source] == new[layer, slot]
        assert len(received) == len(set(received))


def plain_senders(old: np.ndarray, new: np.ndarray, ranks: int) -> dict[tuple[int, int], int]:
    """(receiving rank, expert) -> sending slot of one layer, as engine.md 7.5 words it."""
    size = len(old) // ranks
    held, wanted = old.reshape(ranks, size).tolist(), new.reshape(ranks, size).tolist()
    senders = {}
    for expert in set(new.tolist()):
        send = [r for r in range(ranks) if expert in held[r]]
        receive = [r for r in range(ranks) if expert in wanted[r] and expert not in held[r]]
        n = len(receive) // len(send)
        for j, receiver in enumerate(receive):
            rank = send[j // n] if j < n * len(send) else send[j - n * len(send)]
            senders[receiver, expert] = rank * size + held[rank].index(expert)
    return senders


@given(arrangements())
def test_senders_are_spread_as_the_rule_says(arrangement: tuple[np.ndarray, np.ndarray, int]) -> None:
    old, new, ranks = arrangement
    plan = plan_moves(old, new, ranks)
    size = old.shape[1] // ranks
    for layer in range(len(old)):
        planned = {
            (slot // size, int(new[layer, slot])): int(plan.source[layer, slot])
            for slot in np.flatnonzero(plan.action[layer] == REMOTE).tolist()
        }
        assert planned == plain_senders(old[layer], new[layer], ranks)


def test_two_holders_share_five_receivers() -> None:
    old = np.array([[0, 0, 1, 2, 3, 4, 5]], np.int32)
    plan = plan_moves(old, np.array([[0, 0, 0, 0, 0, 0, 0]], np.int32), 7)
    assert plan.action.tolist() == [[KEEP, KEEP, REMOTE, REMOTE, REMOTE, REMOTE, REMOTE]]
    assert plan.source.tolist() == [[0, 1, 0, 0, 1, 1, 0]]


def test_a_swap_on_one_rank_reads_before_it_writes() -> None:
    plan = plan_moves(np.array([[0, 1, 2, 3]], np.int32), np.array([[1, 0, 2, 2]], np.int32), 2)
    assert plan.action.tolist() == [[LOCAL, LOCAL, KEEP, LOCAL]]
    assert apply_moves(plan, 0, np.arange(4).reshape(2, 2)).tolist() == [[1, 0], [2, 2]]


def test_traffic_counts_bytes_between_and_within_ranks() -> None:
    old = np.array([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]], np.int32)
    new = np.array([[0, 1, 0, 0, 0, 5], [1, 0, 2, 3, 4, 5]], np.int32)
    traffic = move_traffic(plan_moves(old, new, 3), 10)
    assert traffic.remote.tolist() == [20, 0]  # expert 0 to ranks 1 and 2
    assert traffic.local.tolist() == [10, 20]  # its second copy on rank 1; the swap
    assert traffic.busiest_rank.tolist() == [20, 0]  # rank 0 sends both


@given(arrangements())
def test_traffic_agrees_with_the_plan(arrangement: tuple[np.ndarray, np.ndarray, int]) -> None:
    old, new, ranks = arrangement
    plan = plan_moves(old, new, ranks)
    traffic = move_traffic(plan, 7)
    size = old.shape[1] // ranks
    for layer in range(len(old)):
        sent, received = [0] * ranks, [0] * ranks
        for slot in np.flatnonzero(plan.action[layer] == REMOTE).tolist():
            received[slot // size] += 7
            sent[plan.source[layer, slot] // size] += 7
        assert traffic.remote[layer] == sum(sent) == sum(received)
        assert traffic.busiest_rank[layer] == max(sent + received)
        moves = plan.action[layer] != KEEP
        assert traffic.remote[layer] + traffic.local[layer] == 7 * moves.sum()


def test_nothing_moves_between_equal_maps_and_little_after_a_small_change() -> None:
    rng = np.random.default_rng(0)
    counts = rng.permuted(np.tile(np.arange(1, 49) ** -1.0, (1, 2, 1)), axis=2) * 1e6
    slots = rebalance_experts(counts, initial_slots(2, 48, 56), 8).slot_experts
    traffic = move_traffic(plan_moves(slots, slots, 8), 1)
    assert not traffic.remote.any() and not traffic.local.any() and not traffic.busiest_rank.any()
    swapped = slots.copy()
    swapped[0, [0, -1]] = slots[0, [-1, 0]]
    assert move_traffic(plan_moves(slots, swapped, 8), 1).remote.tolist() == [2, 0]


def test_an_expert_that_nobody_holds_is_an_error() -> None:
    with pytest.raises(ValueError, match="layer 1: no rank holds expert 3"):
        plan_moves(np.array([[0, 3], [0, 1]], np.int32), np.array([[3, 0], [0, 3]], np.int32), 2)
