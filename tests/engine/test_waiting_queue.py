"""The order in which those that wait are served, against plain sorting and a plain merge."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine.waiting_queue import WaitingQueue

AGEING = 30.0

Entry = tuple[str, int, int, float]  # item, priority, arrival, since


def merged(entries: list[Entry], now: float) -> list[str]:
    """Classes in order of arrival; of their heads the lowest (aged priority, arrival), one after the other."""
    lines: dict[int, list[Entry]] = {}
    for entry in sorted(entries, key=lambda e: e[2]):
        lines.setdefault(entry[1], []).append(entry)
    order = []
    while any(lines.values()):
        heads = [line[0] for line in lines.values() if line]
        first = min(heads, key=lambda e: (e[1] - max(0, math.floor((now - e[3]) / AGEING)), e[2], e[1]))
        lines[first[1]].remove(first)
        order.append(first[0])
    return order


def queue_of(entries: list[Entry]) -> WaitingQueue[str]:
    queue: WaitingQueue[str] = WaitingQueue(AGEING)
    for entry in entries:
        queue.add(*entry)
    return queue


seconds = st.integers(0, 200).map(float)
places = st.tuples(st.integers(-2, 3), st.integers(0, 20), seconds)
crowds = st.lists(places, max_size=25).map(lambda many: [(str(n), *place) for n, place in enumerate(many)])


@given(crowds, seconds)
def test_the_order_is_that_of_the_heads_of_classes(entries: list[Entry], now: float) -> None:
    queue = queue_of(entries)
    assert list(queue.ordered(now)) == merged(entries, now)
    assert queue.head(now) == next(iter(merged(entries, now)), None)
    assert len(queue) == len(entries) and bool(queue) == bool(entries)
    assert sorted(queue) == sorted(entry[0] for entry in entries)


@given(st.lists(st.integers(-2, 3), max_size=25), st.integers(1, 40), seconds)
def test_with_waits_in_order_of_arrival_it_is_a_sort(priorities: list[int], gap: int, later: float) -> None:
    entries = [(str(n), priority, n, float(gap * n)) for n, priority in enumerate(priorities)]
    now = gap * len(entries) + later
    expected = sorted(entries, key=lambda e: (e[1] - int((now - e[3]) // AGEING), e[2]))
    assert list(queue_of(entries).ordered(now)) == [entry[0] for entry in expected]


@given(st.data())
def test_items_come_and_go_meanwhile(data: st.DataObject) -> None:
    """Whoever stays from the beginning to the end of a look is seen once, those of a class in their order; who left
    before his turn is not. Where only those already seen leave, and nobody comes, the order is the whole one."""
    entries = data.draw(crowds)
    queue, now = queue_of(entries), data.draw(seconds)
    known = {entry[0]: entry for entry in entries}
    expected, stayed, seen = merged(entries, now), set(known), []
    fresh, only_seen = itertools.count(len(entries)), data.draw(st.booleans())
    for item in queue.ordered(now):
        assert item in queue
        seen.append(item)
        leaving = sorted(set(seen) & set(known) if only_seen else known)
        for gone in data.draw(st.lists(st.sampled_from(leaving), max_size=3)) if leaving else ():
            queue.remove(gone)
            known.pop(gone, None)
            stayed.discard(gone)
        if not only_seen and data.draw(st.booleans()):
            added = (str(next(fresh)), *data.draw(places))
            queue.add(*added)
            known[added[0]] = added
    assert len(set(seen)) == len(seen) and stayed <= set(seen)
    for priority in {entry[1] for entry in entries}:
        line = [entry[0] for entry in entries if entry[1] == priority and entry[0] in stayed]
        assert [item for item in seen if item in line] == [item for item in expected if item in line]
    if only_seen:
        assert seen == expected
    assert sorted(queue) == sorted(known)
    assert list(queue.ordered(now)) == merged(list(known.values()), now)


def test_a_preempted_item_comes_back_to_its_place() -> None:
    queue = queue_of([(name, 0, n, 0.0) for n, name in enumerate("abcd")])
    for item in "ab":
        queue.remove(item)
    queue.add("late", 0, 9, 1.0)
    queue.add("b", 0, 1, 1.0)
    assert list(queue.ordered(2.0)) == ["b", "c", "d", "late"]
    queue.add("a", 0, 0, 1.0)
    queue.add("twin of c", 0, 2, 1.0)
    assert list(queue.ordered(2.0)) == ["a", "b", "c", "twin of c", "d", "late"]


def test_waiting_counts_as_classes() -> None:
    queue = queue_of([("low", 2, 0, 0.0), ("high", 0, 1, 0.0)])
    assert queue.head(0.0) == queue.head(59.9) == "high"
    queue.remove("high")
    queue.add("high", 0, 1, 59.0)
    assert queue.head(59.9) == "high" and queue.head(60.0) == "low", "two classes up, and it came first"


def test_unknown_items_and_items_twice() -> None:
    queue = queue_of([("a", 0, 0, 0.0)])
    queue.remove("b")
    with pytest.raises(ValueError, match="'a' waits already"):
        queue.add("a", 1, 1, 0.0)
    assert list(queue) == ["a"] and "a" in queue and "b" not in queue
    queue.remove("a")
    queue.remove("a")
    assert not queue and queue.head(0.0) is None
    with pytest.raises(ValueError, match="ageing_s: 0"):
        WaitingQueue(0)


def test_a_look_at_a_long_queue_touches_few() -> None:
    """20,000 wait in 4 classes: the first look at 8 of them allocates no more than with 40."""

    def peak(count: int) -> int:
        queue = queue_of([(str(n), n % 4, n, 0.0) for n in range(count)])
        tracemalloc.start()
        try:
            assert len(list(itertools.islice(queue.ordered(100.0), 8))) == 8
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(20_000) < peak(40) + 1000


def test_items_that_left_are_not_kept() -> None:
    """Without the cyclic collector: memory of 20,000 that came and went is gone."""
    queue: WaitingQueue[int] = WaitingQueue()

    def churn(rounds: int) -> None:
        for n in range(rounds):
            queue.add(n, n % 7, n, 0.0)
            if n >= 3:
                queue.remove(n - 3)
        for n in range(rounds):
            queue.remove(n)

    churn(100)
    import gc

    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        churn(20_000)
        assert tracemalloc.get_traced_memory()[0] < 20_000
    finally:
        tracemalloc.stop()
        gc.enable()
