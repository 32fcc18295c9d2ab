"""Masks of what answers may say that have to match something, and the matcher where the answer is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_session import Letters
from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine.batch import Batch, DecodeBatch, DecodePart, Work, work_of
from di_jax.engine.matching import MASK_BITS, Matching, pack_mask, rows_allowed
from di_jax.engine.sequence import Holding, Sequence, Status
from di_jax.engine.slot_table import SlotTable
from di_jax.engine.step_plan import Bucket
from di_jax.sampling_params import SamplingParams

V = 70  # two words and a part of a third
WORDS = -(-V // MASK_BITS)


def unpacked(mask: np.ndarray) -> list[int]:
    """The ids of a mask, bit by bit."""
    return [
        MASK_BITS * word + bit
        for word, value in enumerate(mask.view(np.uint32).tolist())
        for bit in range(MASK_BITS)
        if value >> bit & 1
    ]


def sequence(matcher: Letters | None = None, answer: int = 9) -> Sequence:
    one = Sequence("a", 0, list(range(3, 23)), SamplingParams(detokenize=False), 7, max_tokens=answer)
    one.matcher, one.status, one.held = matcher, Status.RUNNING, [Holding(0, [1, 2], 0)]
    one.goal = len(one)
    return one


def decode_of(*sequences: Sequence, rank: int = 0) -> DecodeBatch:
    table = SlotTable(4, 4, 3)
    for slot, one in enumerate(sequences):
        table.begin(slot, one, 20, 1, [slot, 9])
    slots = table.ready()
    none = np.zeros(len(slots), np.int32)
    return DecodeBatch([DecodePart(rank, table, slots, table.position[slots], list(sequences), none, none > 0)])


@given(st.sets(st.integers(0, V - 1)))
def test_masks_have_a_bit_for_each_id(ids: set[int]) -> None:
    allowed = np.isin(np.arange(V), list(ids))
    mask = pack_mask(allowed, WORDS)
    assert mask.dtype == np.int32 and mask.shape == (WORDS,)
    assert unpacked(mask) == sorted(ids)


# Drafts that may come, those that may not, and none.
DRAFTS = st.lists(st.sampled_from([*Letters.IDS, *Letters.IDS, Letters.END, 5, -1]), max_size=5)
START = st.lists(st.sampled_from([*Letters.IDS, Letters.END]), max_size=6)


def word(start: list[int]) -> Letters:
    """A matcher behind as much of `start` as is a word."""
    matcher = Letters(V)
    for token in start:
        matcher.accept(token)
    return matcher


def rows_of(known: list[int], drafts: list[int]) -> list[list[int]]:
    """What each row may give, from matchers of their own."""
    rows: list[list[int]] = []
    for count in range(len(drafts) + 1):
        matcher = word(known)
        if not all(matcher.accept(draft) for draft in drafts[:count]):
            break
        rows.append(np.flatnonzero(matcher.allowed()).tolist())
    return rows


@given(start=START, drafts=DRAFTS, taken=st.integers(0, 6))
def test_rows_follow_the_drafts_until_one_is_not_allowed(start: list[int], drafts: list[int], taken: int) -> None:
    matcher = word(start)
    known = list(matcher.known)
    rows = [np.flatnonzero(row).tolist() for row in rows_allowed(matcher, drafts)]
    assert rows == rows_of(known, drafts) and matcher.known == known
    # Nothing is left over either when somebody looks at a few rows only.
    some = rows_allowed(matcher, drafts)
    for _ in range(taken):
        next(some, None)
    some.close()  # type: ignore[attr-defined]
    assert matcher.known == known


def test_a_matcher_that_fails_is_left_where_it_was() -> None:
    class Broken(Letters):
        def allowed(self) -> np.ndarray:
            if len(self.known) == 2:
                raise ValueError("broken")
            return super().allowed()

    matcher = Broken(V)
    with pytest.raises(ValueError, match="broken"):
        list(rows_allowed(matcher, [10, 10, 10]))
    assert matcher.known == []


@given(start=START, drafts=DRAFTS, verifies=st.booleans())
def test_masks_stand_at_the_places_of_a_decode_step(start: list[int], drafts: list[int], verifies: bool) -> None:
    free, matched, gone = sequence(), sequence(word(start)), sequence(word(start))
    matched.drafts = gone.drafts = drafts[:3]
    gone.status = Status.FINISHED
    batch = decode_of(free, matched, gone)
    bucket = Bucket(True, 16, 4, drafts=3, requests=4) if verifies else Bucket(True, 4, 4)
    masks = Matching(V).masks(batch, 0, bucket)
    assert masks.dtype == np.int32 and masks.shape == (4, 4 if verifies else 1, WORDS)
    assert (masks[[0, 2, 3]] == -1).all(), "of a free answer, one that has ended, and none"
    want = rows_of(list(matched.matcher.known), matched.drafts if verifies else [])
    assert [unpacked(mask) for mask in masks[1, : len(want)]] == want
    assert (masks[1, len(want) :] == -1).all(), "behind a draft that is refused nothing matters"
    assert (Matching(V).masks(batch, 1, bucket) == -1).all(), "another rank"


def test_which_steps_are_concerned() -> None:
    matching = Matching(V)
    assert matching.concerns(decode_of(sequence(), sequence(Letters(V))))
    assert not matching.concerns(decode_of(sequence(), sequence()))
    one = sequence(Letters(V))
    rest = work_of(one, one.tokens(0, 20), 0, sample=True)
    begun = work_of(one, one.tokens(0, 16), 0, sample=False)
    assert matching.concerns(Batch(work=[rest])) and not matching.concerns(Batch(work=[begun]))


def test_masks_of_first_tokens() -> None:
    """At the places of the rank's chunks, forks among them, of those alone that are given a token."""
    begun, free, matched, elsewhere = (sequence(Letters(V)), sequence(), sequence(word([10])), sequence(Letters(V)))
    matched.drafts = [10]  # of before a preemption
    elsewhere.held = [Holding(1, [1, 2], 0)]

    def part(one: Sequence, end: int) -> Work:
        return work_of(one, one.tokens(0, end), 0, sample=end == 20)

    batch = Batch(work=[part(begun, 16), part(elsewhere, 20), part(free, 20), part(matched, 20)])
    masks = Matching(V).masks(batch, 0, Bucket(False, 64, 4))
    assert masks.shape[1:] == (1, WORDS)
    assert (masks[:2] == -1).all() and (masks[3:] == -1).all()
    assert unpacked(masks[2, 0]) == [1, 10, 11]
    assert unpacked(Matching(V).masks(batch, 1, Bucket(False, 64, 4))[0, 0]) == [10, 11]


def test_the_control_sees_a_mask_that_is_one_bit_off() -> None:
    shifted: Any = pack_mask(np.roll(word([10]).allowed(), 1), WORDS)
    assert unpacked(shifted) != [1, 10, 11]
