"""Which drafts are verified and where their rows go: device, numpy and plain Python (dspark 7: T4, T5, T7)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine.allocation import allocate, allocate_reference, pack, pack_reference
from di_jax.engine.verification import SURVIVAL_FLOOR, survival

K = 5
SPECIAL = np.array([0, 1, 0.5, 0.25, 1e-40, 1e-45, 1e-38, 1e-30, 1 - 1e-7, np.nan, 2, -1], np.float32)


device = jax.jit(jax.vmap(allocate))  # compiled once for each number of cases and requests


def plain(confidence: np.ndarray, caps: np.ndarray, drafts: int) -> list[int]:
    """The order of dspark 3.2 as it is written there."""
    entries = []
    for r, row in enumerate(confidence.tolist()):
        chance = np.float32(1)
        for k, c in enumerate(row):
            chance = np.float32(chance * np.float32(min(c, 1.0)))
            chance = chance if chance >= SURVIVAL_FLOOR else np.float32(0)
            if k < caps[r]:
                entries.append((-chance, k, r))
    lengths = [min(int(cap), 0) for cap in caps]
    for _, _, r in sorted(entries)[: max(0, drafts)]:
        lengths[r] += 1
    return lengths


def cases(rng: np.random.Generator, count: int, padded: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """confidence, caps, drafts: uniform ones, ones with many ties, and ones of SPECIAL; padded requests behind."""
    shape = (count, padded, K)
    kinds = np.stack(
        [
            rng.random(shape, np.float32),
            rng.choice(np.array([0.25, 0.5, 1], np.float32), shape),
            rng.choice(SPECIAL, shape),
            np.full(shape, rng.choice(SPECIAL[:6]), np.float32),
        ]
    )
    confidence = kinds[rng.integers(0, len(kinds), count), np.arange(count)]
    caps = np.where(rng.random((count, 1)) < 0.5, K, rng.integers(0, K + 1, shape[:2])).astype(np.int32)
    live = rng.integers(1, padded + 1, (count, 1))
    caps[np.arange(padded) >= live] = -1
    total = np.maximum(caps, 0).sum(axis=1)
    drafts = rng.integers(0, total + 3).astype(np.int32)
    return confidence, caps, drafts


@pytest.mark.parametrize(("padded", "count"), [(1, 2000), (4, 4000), (16, 3000), (128, 1000)])
def test_device_numpy_and_plain_python_agree(padded: int, count: int) -> None:
    confidence, caps, drafts = cases(np.random.default_rng(padded), count, padded)
    found = np.asarray(device(confidence, caps, drafts))
    for i in range(count):
        np.testing.assert_array_equal(found[i], allocate_reference(confidence[i], caps[i], int(drafts[i])))
    for i in range(0, count, 1 + padded // 8):
        assert found[i].tolist() == plain(confidence[i], caps[i], int(drafts[i]))
    allowed = np.maximum(caps, 0)
    assert (np.maximum(found, 0).sum(axis=1) == np.minimum(drafts, allowed.sum(axis=1))).all()
    assert (found <= caps).all() and ((found == -1) == (caps == -1)).all()


@pytest.mark.parametrize("padded", [1, 4, 16])
def test_one_draft_more_takes_none_away(padded: int) -> None:
    confidence, caps, _ = cases(np.random.default_rng(7), 40, padded)
    for one, cap in zip(confidence, caps):
        most = int(np.maximum(cap, 0).sum())
        budgets = np.arange(most + 2, dtype=np.int32)
        each = np.stack([allocate_reference(one, cap, int(drafts)) for drafts in budgets])
        steps = np.diff(each, axis=0)
        assert (steps >= 0).all() and (steps.sum(axis=1) == (budgets[1:] <= most)).all()


def test_ties_go_by_place_then_by_request() -> None:
    certain = np.ones((3, K), np.float32)
    caps = np.full(3, K, np.int32)
    found = [np.asarray(jax.jit(allocate)(certain, caps, drafts)).tolist() for drafts in (1, 2, 4, 14)]
    assert found == [[1, 0, 0], [1, 1, 0], [2, 1, 1], [5, 5, 4]]


def test_later_confidences_do_not_move_earlier_drafts() -> None:
    """C1: at a fixed budget, whether draft i is verified does not depend on the confidences after it."""
    rng = np.random.default_rng(11)
    confidence, caps, drafts = cases(rng, 1500, 16)
    request, after = rng.integers(0, 16, 1500), rng.integers(1, K, 1500)
    changed = confidence.copy()
    for i in range(len(changed)):
        changed[i, request[i], after[i] :] = rng.choice(SPECIAL, K - after[i])
    before, now = (np.asarray(device(each, caps, drafts)) for each in (confidence, changed))
    at = np.arange(len(changed)), request
    np.testing.assert_array_equal(np.minimum(before[at], after), np.minimum(now[at], after))
    assert (before != now).any()


def test_survival_never_rises_and_ignores_what_is_no_chance() -> None:
    rows = survival(np.array([[0.5, np.nan, 1, 1, 1], [2, 0.5, -1, 1, 1], [1e-20, 1e-20, 1, 1, 1]], np.float32))
    np.testing.assert_array_equal(rows[0], [0.5, 0, 0, 0, 0])
    np.testing.assert_array_equal(rows[1], [1, 0.5, 0, 0, 0])
    np.testing.assert_array_equal(rows[2], [np.float32(1e-20), 0, 0, 0, 0])


@given(st.lists(st.integers(-1, K), min_size=1, max_size=12), st.integers(0, 9))
def test_rows_point_back_to_their_requests(lengths: list[int], spare: int) -> None:
    counts = [1 + length for length in lengths]
    layout = pack_reference(np.array(lengths, np.int32), sum(counts) + spare)
    expected = [(r, o) for r, count in enumerate(counts) for o in range(count)]
    used = int(layout.start[-1])
    assert list(zip(layout.request[:used].tolist(), layout.offset[:used].tolist())) == expected
    assert layout.valid.tolist() == [True] * used + [False] * spare
    assert (layout.request[used:] == -1).all() and (layout.offset[used:] == -1).all()
    assert np.diff(layout.start).tolist() == counts


def test_packing_on_device_is_the_same() -> None:
    rng, rows = np.random.default_rng(5), 80
    packed = jax.jit(jax.vmap(functools.partial(pack, rows=rows)))
    lengths = rng.integers(-1, K + 1, (300, 12)).astype(np.int32)
    lengths[0], lengths[1] = K, -1  # 72 rows; none
    found = jax.device_get(packed(lengths))
    for i, each in enumerate(lengths):
        expected = pack_reference(each, rows)
        for name in expected._fields:
            got = getattr(found, name)[i]
            np.testing.assert_array_equal(got, getattr(expected, name), err_msg=name)
            assert got.dtype == getattr(expected, name).dtype


def test_too_few_rows_are_told() -> None:
    with pytest.raises(ValueError, match="2 requests need 9 rows, the step has 8"):
        pack_reference(np.array([5, 2]), 8)


def test_what_was_packed_is_found_again() -> None:
    """Rows gathered by request and offset, and scattered back, are what they were; no other place is touched."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(-1, K + 1, 9).astype(np.int32)
    values = rng.integers(1, 1000, (9, K + 1))
    layout = jax.device_get(jax.jit(pack, static_argnames="rows")(jnp.asarray(lengths), rows=64))
    valid = layout.valid
    rows = values[layout.request, layout.offset]
    back = np.full_like(values, -7)
    back[layout.request[valid], layout.offset[valid]] = rows[valid]
    np.testing.assert_array_equal(back, np.where(np.arange(K + 1) <= lengths[:, None], values, -7))
