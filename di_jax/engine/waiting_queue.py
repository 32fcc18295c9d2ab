"""Who is served next of those that wait: priority classes, first come first served inside one, and ageing.

A class is one priority (lower is served first, as in vLLM). Inside it arrival decides, so one that was preempted comes
back to its place. For every `ageing_s` that its head has waited a class counts as one higher: nobody starves.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator

AGEING_S = 30.0


class _Node[T]:
    """A place in the line of its class. A removed one keeps `next`, so that a look through the line can go on."""

    __slots__ = ("alive", "arrival", "item", "next", "previous", "priority", "since")

    def __init__(self, item: T | None, priority: int, arrival: int, since: float) -> None:
        self.item, self.priority, self.arrival, self.since = item, priority, arrival, since
        self.alive = True
        self.previous = self.next = self


class WaitingQueue[T: Hashable]:
    """Items by priority, arrival and time waited. A look costs O(classes), however many wait.

    ageing_s: seconds of waiting that count as one class.
    """

    def __init__(self, ageing_s: float = AGEING_S) -> None:
        if not ageing_s > 0:
            raise ValueError(f"ageing_s: {ageing_s} must be more than 0")
        self.ageing_s = ageing_s
        self._nodes: dict[T, _Node[T]] = {}
        self._lines: dict[int, _Node[T]] = {}  # by priority: the end of a ring, whose `next` is the head

    def __len__(self) -> int:
        return len(self._nodes)

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def __contains__(self, item: object) -> bool:
        return item in self._nodes

    def __iter__(self) -> Iterator[T]:
        """All items, class by class without regard to ageing."""
        for priority in sorted(self._lines):
            node = self._lines[priority].next
            while node.item is not None:
                if node.alive:
                    yield node.item
                node = node.next

    def add(self, item: T, priority: int, arrival: int, since: float) -> None:
        """Puts an item behind those of its class that arrived before it, or at the same time. O(1) at either end of
        the line, else O(items between it and the nearer end).

        arrival: a rising number. since: seconds of the clock that `ordered` gets. ValueError when it waits already.
        """
        if item in self._nodes:
            raise ValueError(f"{item!r} waits already")
        node = self._nodes[item] = _Node(item, priority, arrival, since)
        end = self._lines.get(priority)
        if end is None:
            end = self._lines[priority] = _Node(None, priority, 0, 0.0)
        before, after = end.previous, end.next
        while True:  # one step from either end at a time
            if before is end or before.arrival <= arrival:
                break
            if after.arrival > arrival:
                before = after.previous
                break
            before, after = before.previous, after.next
        node.previous, node.next = before, before.next
        before.next.previous = node
        before.next = node

    def remove(self, item: T) -> None:
        """Takes an item out, O(1); one that does not wait is ignored."""
        node = self._nodes.pop(item, None)
        if node is None:
            return
        node.previous.next, node.next.previous = node.next, node.previous
        node.alive = False
        end = self._lines[node.priority]
        if end.next is end:
            del self._lines[node.priority], end.next, end.previous  # no ring of garbage for the collector to find

    def head(self, now: float) -> T | None:
        """Who is served first, or None when nobody waits."""
        return next(self.ordered(now), None)

    def ordered(self, now: float) -> Iterator[T]:
        """Items in the order of service at that time: of the heads of all classes the one whose class, less one for
        every `ageing_s` it has waited, is the lowest; the earlier arrival on a tie; then the next of its class moves
        up.

        The caller may stop early, remove items and add others meanwhile; those added may be left out of this look.
        """
        heads = [self._rank(head, now) for end in self._lines.values() if (head := self._live(end.next)) is not None]
        heapq.heapify(heads)
        while heads:
            node = heads[0][-1]
            if node.alive:
                assert node.item is not None
                yield node.item
                node = node.next
            successor = self._live(node)
            if successor is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, self._rank(successor, now))

    @staticmethod
    def _live(node: _Node[T]) -> _Node[T] | None:
        """The first from `node` on that still waits."""
        while not node.alive:
            node = node.next
        return None if node.item is None else node

    def _rank(self, node: _Node[T], now: float) -> tuple[int, int, int, _Node[T]]:
        """Sorts in the order of service. No two nodes at a time share a priority, so nodes are never compared."""
        aged = int(max(0.0, now - node.since) // self.ageing_s)
        return node.priority - aged, node.arrival, node.priority, node
