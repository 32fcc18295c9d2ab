"""Snapshots of window state in host memory."""

from __future__ import annotations

import logging

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine.state_cache import WindowStateCache


def snapshot(size: int, value: int = 0) -> np.ndarray:
    return np.full(size, value, np.uint8)


def test_the_least_recently_used_goes_first_and_a_look_is_not_a_use() -> None:
    cache = WindowStateCache(10)
    for key in (b"a", b"b", b"c"):
        assert cache.put(key, snapshot(3, key[0]))
    assert b"a" in cache and b"z" not in cache
    assert cache.get(b"b") is not None and cache.get(b"z") is None
    assert cache.put(b"d", snapshot(4))
    assert [key in cache for key in (b"a", b"b", b"c", b"d")] == [False, True, True, True]
    assert cache.put(b"e", snapshot(3))
    assert [key in cache for key in (b"b", b"c", b"d", b"e")] == [True, False, True, True]
    assert (len(cache), cache.nbytes, cache.hits, cache.misses, cache.evictions) == (3, 10, 1, 1, 2)
    cache.clear()
    assert (len(cache), cache.nbytes, cache.evictions, b"b" in cache) == (0, 0, 2, False)


def test_bytes_are_counted_not_elements() -> None:
    cache = WindowStateCache(16)
    assert cache.put(b"a", np.zeros((2, 2), np.float32))
    assert cache.nbytes == 16
    assert not cache.put(b"b", np.zeros(5, np.float32))


def test_a_snapshot_larger_than_the_budget_is_refused_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    cache = WindowStateCache(4)
    assert cache.put(b"a", snapshot(4, 7))
    with caplog.at_level(logging.WARNING):
        assert not cache.put(b"b", snapshot(5))
        assert not cache.put(b"a", snapshot(6))
    assert [record.getMessage() for record in caplog.records] == [
        "engine.state_cache_bytes is 4, less than one snapshot of 5 bytes: no window state is kept"
    ]
    kept = cache.get(b"a")
    assert kept is not None and kept.tolist() == [7] * 4
    assert (cache.nbytes, cache.evictions) == (4, 0)


def test_a_budget_of_zero_keeps_nothing_and_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    cache = WindowStateCache(0)
    with caplog.at_level(logging.WARNING):
        assert not cache.put(b"a", snapshot(1))
    assert cache.get(b"a") is None and not caplog.records
    with pytest.raises(ValueError, match=r"engine\.state_cache_bytes must be at least 0, got -1"):
        WindowStateCache(-1)


@pytest.mark.parametrize("view", [False, True])
def test_what_is_kept_cannot_change(view: bool) -> None:
    cache, buffer = WindowStateCache(100), np.arange(100, dtype=np.uint8)
    given_array = buffer[10:14] if view else buffer
    assert cache.put(b"a", given_array)
    kept = cache.get(b"a")
    assert kept is not None
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 1
    if view:  # the buffer is the caller's, and 100 bytes are not kept alive for 4
        buffer[:] = 0
        assert kept.tolist() == [10, 11, 12, 13] and kept.base is None
    else:
        assert kept is buffer


def test_what_a_device_sent_is_kept_without_a_copy() -> None:
    cache, sent = WindowStateCache(100), np.asarray(jnp.zeros((1, 10), jnp.uint8))
    assert cache.put(b"whole", sent[0]) and cache.put(b"part", sent[0, :9])
    whole, part = cache.get(b"whole"), cache.get(b"part")
    assert whole is not None and np.shares_memory(whole, sent)
    assert part is not None and not np.shares_memory(part, sent)


KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])
EVENTS = st.one_of(
    st.tuples(st.just("put"), KEYS, st.integers(0, 12)), st.tuples(st.sampled_from(["get", "drop"]), KEYS, st.just(0))
)


@given(st.integers(0, 20), st.lists(EVENTS, max_size=60))
def test_it_does_what_a_list_would(budget: int, events: list[tuple[str, bytes, int]]) -> None:
    cache = WindowStateCache(budget)
    kept: list[tuple[bytes, int, int]] = []  # key, size, value; the least recently used one first
    hits = misses = evictions = 0
    for value, (event, key, size) in enumerate(events):
        mine = next((entry for entry in kept if entry[0] == key), None)
        if event == "put":
            assert cache.put(key, snapshot(size, value)) == (size <= budget)
            if size <= budget:
                kept = [entry for entry in kept if entry is not mine] + [(key, size, value)]
                while sum(entry[1] for entry in kept) > budget:
                    kept.pop(0)
                    evictions += 1
        elif event == "drop":
            cache.drop(key)
            kept = [entry for entry in kept if entry is not mine]
        else:
            found = cache.get(key)
            hits, misses = hits + (mine is not None), misses + (mine is None)
            if mine is None:
                assert found is None
            else:
                assert found is not None and found.tolist() == [mine[2]] * mine[1]
                kept.remove(mine)
                kept.append(mine)
        assert cache.nbytes == sum(entry[1] for entry in kept) <= budget
        assert len(cache) == len(kept) and all(entry[0] in cache for entry in kept)
        assert (cache.hits, cache.misses, cache.evictions) == (hits, misses, evictions)
