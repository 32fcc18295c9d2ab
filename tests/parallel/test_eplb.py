"""The expert balancing policy: slots, maps, copies, placement."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.parallel import eplb


@st.composite
def groups(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """counts [T, L, E] with cold experts and layers among them, ranks, slots."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    experts, ranks = draw(st.integers(1, 24)), draw(st.integers(1, 8))
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 3)), experts
    counts = rng.integers(0, draw(st.sampled_from([1, 3, 1000, 10**9])), shape) * rng.integers(0, 2, shape[1:])
    return counts, ranks, eplb.num_physical_slots(experts, ranks, draw(st.integers(0, 3)))


@pytest.mark.parametrize(
    ("experts", "ranks", "extra", "slots"),
    [(384, 64, 1, 448), (384, 4, 8, 416), (384, 8, 4, 416), (128, 64, 1, 192), (384, 7, 0, 385), (384, 5, 2, 395)],
)
def test_slots_are_rounded_up_to_the_ranks(experts: int, ranks: int, extra: int, slots: int) -> None:
    assert eplb.num_physical_slots(experts, ranks, extra) == slots


@given(st.integers(1, 500), st.integers(1, 80), st.integers(0, 8))
def test_rounding_adds_less_than_one_slot_a_rank(experts: int, ranks: int, extra: int) -> None:
    slots = eplb.num_physical_slots(experts, ranks, extra)
    assert slots % ranks == 0 and 0 <= slots - experts - extra * ranks < ranks


@pytest.mark.parametrize("sizes", [(0, 4, 1), (8, 0, 1), (8, 4, -1)])
def test_sizes_that_make_no_group_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"{sizes[0]} experts on {sizes[1]} ranks with {sizes[2]} extra"):
        eplb.num_physical_slots(*sizes)


def test_initial_slots_repeat_the_experts() -> None:
    assert eplb.initial_slots(2, 4, 6).tolist() == [[0, 1, 2, 3, 0, 1]] * 2
    assert eplb.initial_slots(1, 2, 6).tolist() == [[0, 1, 0, 1, 0, 1]]


def test_map_of_a_small_group() -> None:
    tables = eplb.expert_map(np.array([[2, 0, 1, 0, 0], [0, 1, 2, 1, 2]], np.int32), 3)
    assert tables.num_replicas.tolist() == [[3, 1, 1], [1, 2, 2]]
    assert tables.replica_slots.tolist() == [
        [[1, 3, 4], [2, -1, -1], [0, -1, -1]],
        [[0, -1, -1], [1, 3, -1], [2, 4, -1]],
    ]
    assert tables.num_replicas.dtype == tables.replica_slots.dtype == np.int32


def test_an_expert_without_a_slot_is_an_error() -> None:
    with pytest.raises(ValueError, match="layer 1: expert 2 has no physical slot"):
        eplb.expert_map(np.array([[0, 1, 2], [0, 1, 1]], np.int32), 3)


@given(groups())
def test_every_slot_is_in_the_map_once(group: tuple[np.ndarray, int, int]) -> None:
    counts, ranks, slots = group
    _, layers, experts = counts.shape
    slot_experts = eplb.rebalance_experts(counts, eplb.initial_slots(layers, experts, slots), ranks).slot_experts
    tables = eplb.expert_map(slot_experts, experts)
    assert tables.replica_slots.shape == (layers, experts, slots - experts + 1)
    for layer in range(layers):
        for expert in range(experts):
            copies = tables.num_replicas[layer, expert]
            mine = tables.replica_slots[layer, expert]
            assert mine[:copies].tolist() == np.flatnonzero(slot_experts[layer] == expert).tolist()
            assert (mine[copies:] == -1).all()


@pytest.mark.parametrize("steps", [1, 7, 16, 17, 100, 1000])
def test_pooling_keeps_every_token_and_the_order(steps: int) -> None:
    counts = np.random.default_rng(steps).integers(0, 100, (steps, 2, 5))
    pooled = eplb.pool_window(counts)
    assert len(pooled) == min(steps, eplb.MAX_INTERVALS)
    where = eplb.pooled_interval(np.arange(steps), steps)
    lengths = np.bincount(where)
    assert (np.diff(where) >= 0).all() and len(lengths) == len(pooled) and np.ptp(lengths) <= 1
    for interval in range(len(pooled)):
        np.testing.assert_array_equal(pooled[interval], counts[where == interval].sum(axis=0))


def greedy_copies(counts: np.ndarray, redundant: int) -> np.ndarray:
    """Replication as engine.md 7.4 words it, for one layer [T, E] without ties."""
    copies = np.ones(counts.shape[1], int)
    for _ in range(redundant):
        busiest = []
        for expert in range(len(copies)):
            copies[expert] += 1
            busiest.append((counts / copies).max(axis=1).sum())
            copies[expert] -= 1
        copies[np.argmin(busiest)] += 1
    return copies


@pytest.mark.parametrize("seed", range(5))
def test_copies_relieve_the_busiest_copy_as_the_plain_rule_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.pareto(1.5, (6, 3, 20)) * 1000
    copies = eplb.replicate_experts(counts, 12)
    for layer in range(3):
        plain = greedy_copies(counts[:, layer], 12)
        busiest = [(counts[:, layer] / each).max(axis=1).sum() for each in (copies[layer], plain)]
        assert busiest[0] <= busiest[1] * 1.001
        assert copies[layer].sum() == 32


def test_equally_busy_experts_get_a_copy_each() -> None:
    # No single copy lowers the maximum here: the plain rule gives all four to expert 0.
    counts = np.array([[[90.0, 1, 90, 90, 1, 90]]])
    assert eplb.replicate_experts(counts, 4).tolist() == [[2, 1, 2, 2, 1, 2]]
    assert eplb.replicate_experts(np.zeros((3, 1, 6)), 4).tolist() == [[2, 2, 2, 2, 1, 1]]


@given(groups())
def test_placement_holds_every_copy_and_fills_every_rank(group: tuple[np.ndarray, int, int]) -> None:
    counts, ranks, slots = group
    experts = counts.shape[2]
    copies = eplb.replicate_experts(counts, slots - experts)
    assert (copies >= 1).all() and (copies.sum(axis=1) == slots).all()
    placed = eplb.place_copies(counts, copies, ranks)
    assert placed.shape == (counts.shape[1], slots) and placed.dtype == np.int32
    for layer in range(len(placed)):
        assert np.bincount(placed[layer], minlength=experts).tolist() == copies[layer].tolist()


@given(groups())
def test_layers_are_decided_alone_and_alike_every_time(group: tuple[np.ndarray, int, int]) -> None:
    counts, ranks, slots = group
    _, layers, experts = counts.shape
    start = eplb.initial_slots(layers, experts, slots)
    together = eplb.rebalance_experts(counts, start, ranks).slot_experts
    for layer in range(layers):
        alone = eplb.rebalance_experts(counts[:, [layer]], start[[layer]], ranks).slot_experts
        np.testing.assert_array_equal(together[[layer]], alone)


@given(groups())
def test_balance_is_reported_and_never_worse(group: tuple[np.ndarray, int, int]) -> None:
    counts, ranks, slots = group
    _, layers, experts = counts.shape
    start = eplb.initial_slots(layers, experts, slots)
    found = eplb.rebalance_experts(counts, start, ranks)
    assert 1 - 1e-5 <= found.balance_after <= found.balance_before
    after = eplb.rank_loads(counts.astype(np.float32), found.slot_experts, ranks)
    assert eplb.moe_lb(after) == pytest.approx(found.balance_after, rel=1e-5)


def test_experts_hot_at_the_same_time_are_kept_apart() -> None:
    # Four topics take turns. Their experts weigh the same over the window, so its sum cannot tell them apart.
    rng = np.random.default_rng(0)
    topic = rng.permutation(np.arange(64) % 4)
    counts = np.where(topic[None, None, :] == np.arange(16)[:, None, None] % 4, 110, 10) * np.ones((1, 3, 1), int)
    start = eplb.initial_slots(3, 64, 72)
    by_step = eplb.rebalance_experts(counts, start, 8)
    by_sum = eplb.rebalance_experts(counts.sum(axis=0, keepdims=True), start, 8)
    assert by_step.balance_after < 1.15
    assert eplb.moe_lb(eplb.rank_loads(counts, by_sum.slot_experts, 8)) > 1.3


def test_a_layer_in_balance_stays_as_it_is() -> None:
    rng = np.random.default_rng(1)
    popularity = rng.permutation(np.arange(1, 33) ** -1.0)
    counts = np.stack([popularity, popularity])[None] * 1e6
    settled = eplb.rebalance_experts(counts, eplb.initial_slots(2, 32, 40), 8)
    assert settled.balance_after < settled.balance_before / 2
    counts[0, 1] = counts[0, 1, ::-1]
    again = eplb.rebalance_experts(counts * rng.uniform(0.999, 1.001, counts.shape), settled.slot_experts, 8)
    np.testing.assert_array_equal(again.slot_experts[0], settled.slot_experts[0])
    assert (again.slot_experts[1] != settled.slot_experts[1]).any()
    nothing = eplb.rebalance_experts(np.zeros((4, 2, 32)), settled.slot_experts, 8)
    np.testing.assert_array_equal(nothing.slot_experts, settled.slot_experts)
    assert nothing.balance_before == nothing.balance_after == 1


@given(groups(), st.integers(0, 2**32 - 1))
def test_what_a_rank_keeps_stays_in_its_slot(group: tuple[np.ndarray, int, int], seed: int) -> None:
    counts, ranks, slots = group
    layers, experts = counts.shape[1:]
    rng = np.random.default_rng(seed)
    old, new = (rng.integers(0, experts, (layers, slots)).astype(np.int32) for _ in range(2))
    kept = eplb.keep_in_place(new, old, ranks)
    by_rank = (layers * ranks, slots // ranks)
    for before, wanted, after in zip(old.reshape(by_rank), new.reshape(by_rank), kept.reshape(by_rank), strict=True):
        assert sorted(after) == sorted(wanted)
        common = [min((before == e).sum(), (wanted == e).sum()) for e in range(experts)]
        assert (before == after).sum() == sum(common)


def test_balance_of_known_loads() -> None:
    loads = np.array([[[4, 0], [1, 1]], [[2, 2], [0, 6]]])  # [steps, layers, ranks]
    assert eplb.moe_lb(loads) == (4 + 1 + 2 + 6) / (2 + 1 + 2 + 3)
    assert eplb.moe_lb(loads, np.array([[[8, 0, 0, 0]]])) == (13 + 8) / (8 + 2)
    assert eplb.moe_lb(np.zeros((3, 2, 4))) == 1
    assert eplb.moe_lb(np.array([[0, 0, 5]])) == 3


def test_rank_loads_split_an_expert_among_its_copies() -> None:
    loads = eplb.rank_loads(np.array([[[6, 3, 9]]]), np.array([[2, 0, 1, 2]], np.int32), 2)
    np.testing.assert_allclose(loads, [[[4.5 + 6, 3 + 4.5]]])


@pytest.mark.parametrize(
    ("counts", "slots", "ranks"),
    [((2, 3, 8), (2, 8), 4), ((2, 2, 8), (2, 8), 3), ((2, 2, 9), (2, 8), 4), ((2, 8), (2, 8), 4)],
)
def test_shapes_that_do_not_fit_are_refused(counts: tuple[int, ...], slots: tuple[int, int], ranks: int) -> None:
    with pytest.raises(ValueError, match=r"counts \(.*\) and slots \(2, 8\) on \d ranks"):
        eplb.rebalance_experts(np.zeros(counts), np.zeros(slots, np.int32), ranks)
