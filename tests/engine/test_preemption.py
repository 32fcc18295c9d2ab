"""Whose blocks are taken when the pool runs dry."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine.preemption import NEAR_TIE, Candidate, choose_victim

candidates = st.builds(
    Candidate,
    priority=st.integers(-1, 2),
    arrival=st.integers(0, 50),
    recompute_tokens=st.integers(0, 3000),
    blocks_freed=st.integers(0, 20),
)


@given(st.lists(candidates, max_size=10, unique_by=lambda c: c.arrival))
def test_the_victim(many: list[Candidate]) -> None:
    at = choose_victim(many)
    if not many:
        assert at is None
        return
    assert at is not None
    victim = many[at]
    if len(many) == 1:
        assert at == 0
        return
    oldest = min(many, key=lambda c: (c.priority, c.arrival))
    assert victim != oldest, "somebody always runs to the end"
    rest = [c for c in many if c != oldest]
    assert victim.priority == max(c.priority for c in rest), "the least important class gives first"

    def cost(c: Candidate) -> float:
        return c.recompute_tokens / c.blocks_freed if c.blocks_freed else float("inf")

    for other in rest:
        if other.priority == victim.priority:
            assert cost(victim) <= NEAR_TIE * cost(other)
            if other.arrival > victim.arrival:
                assert cost(other) > cost(victim) or cost(other) > NEAR_TIE * min(map(cost, rest))


def test_the_cheapest_block_and_the_younger_of_near_ties() -> None:
    first = Candidate(0, 0, 10, 10)
    assert choose_victim([first, Candidate(0, 1, 1000, 8), Candidate(0, 2, 1000, 4)]) == 1
    assert choose_victim([first, Candidate(0, 1, 1000, 8), Candidate(0, 2, 1050, 8)]) == 2
    assert choose_victim([first, Candidate(0, 2, 1000, 8), Candidate(0, 1, 1000, 0)]) == 1, "it would free nothing"
    assert choose_victim([Candidate(0, 1, 0, 0), Candidate(0, 2, 5, 0), first]) == 1, "as would all: the youngest"


def test_importance_comes_before_cost() -> None:
    assert choose_victim([Candidate(0, 0, 10, 10), Candidate(5, 1, 9999, 1), Candidate(0, 2, 10, 10)]) == 1
    assert choose_victim([Candidate(0, 9, 10, 10), Candidate(1, 1, 10, 10)]) == 1
    assert choose_victim([Candidate(1, 0, 1, 10), Candidate(1, 1, 9999, 1)]) == 1, "the oldest is spared"


def test_everybody_ends_with_a_pool_that_holds_one() -> None:
    """Each runs a step and, when the pool is dry, takes the blocks of another, which starts over: all end all the same,
    the first ones never having been sent back."""
    rng = random.Random(7)
    length = {arrival: rng.randint(3, 12) for arrival in range(6)}
    done = dict.fromkeys(length, 0)
    running, steps, lost = set(length), 0, set()
    while running:
        while sum(done[a] for a in running) + len(running) > 14:
            order = sorted(running)
            at = choose_victim([Candidate(0, a, done[a], done[a] + 1) for a in order])
            assert at is not None
            running.discard(order[at])
            done[order[at]] = 0
            lost.add(order[at])
        for arrival in sorted(running):
            done[arrival] += 1
            if done[arrival] == length[arrival]:
                running.discard(arrival)
                del length[arrival]
        if not running:
            running = set(length)
        steps += 1
        assert steps < 500
    assert lost and 0 not in lost
