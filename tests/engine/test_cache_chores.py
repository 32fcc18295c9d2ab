"""Programs around a step, as many on every process, and window state that is kept once its tokens are known."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import pytest

from di_jax.engine.cache_chores import CacheChores, Pending
from di_jax.engine.prefix_cache import BlockKeys
from di_jax.engine.scheduler import Chores
from di_jax.engine.sequence import Sequence
from di_jax.engine.state_cache import WindowStateCache
from di_jax.engine.state_programs import NOTHING, PAIRS, Snapshot, StateCopies
from di_jax.sampling_params import SamplingParams

BLOCK, LAYERS = 16, 3


class Recorder:
    """A runner of two ranks that writes down what it is asked for. A snapshot of a slot holds the slot's number."""

    local_ranks = (4, 5)

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def restore(self, slots: SequenceOf[int], rings: SequenceOf[np.ndarray | None], layers: int) -> None:
        self.calls.append(("restore", tuple(slots), tuple(None if ring is None else int(ring[0]) for ring in rings)))

    def copy(self, copies: SequenceOf[StateCopies], launches: int) -> None:
        self.calls.append(("copy", [(list(own.blocks), list(own.slots)) for own in copies], launches))

    def snapshot(self, slots: SequenceOf[int], layers: int) -> Snapshot:
        self.calls.append(("snapshot", tuple(slots), layers))
        return Snapshot([None if slot == NOTHING else np.full((1, 2), slot) for slot in slots])  # type: ignore[misc]


@pytest.fixture
def made() -> tuple[CacheChores, Recorder, WindowStateCache]:
    recorder, cache = Recorder(), WindowStateCache(1000)
    return CacheChores(recorder, cache, LAYERS, BLOCK), recorder, cache  # type: ignore[arg-type]


def sequence(prompt: int, answer: int = 0) -> Sequence:
    one = Sequence("a", 0, list(range(prompt)), SamplingParams(), 7, max_tokens=99, keys=BlockKeys(BLOCK))
    one.output_ids = list(range(answer))
    return one


def key(one: Sequence, boundary: int) -> bytes:
    keys = BlockKeys(BLOCK)
    keys.extend(one.tokens(0, boundary))
    return keys.keys[-1]


def ring(number: int) -> np.ndarray:
    return np.array([number])


def test_every_rank_has_its_turn(made: tuple[CacheChores, Recorder, WindowStateCache]) -> None:
    chores, recorder, _ = made
    due = Chores(
        restores=[(5, 1, ring(10)), (4, 2, ring(20)), (5, 3, ring(30))],
        block_copies=[(4, 7, 8)],
        slot_copies=[(4, 0, 1), (5, 2, 3)],
        snapshots=[(5, 1, sequence(40), 32), (5, 3, sequence(40), 16)],
    )
    assert chores.launches(due) == [2, 1, 2] and chores.launches(Chores()) == [0, 0, 0]
    assert chores.launches(Chores(slot_copies=[(4, 0, n + 1) for n in range(PAIRS + 1)])) == [0, 2, 0]
    chores.before(due, 2)
    chores.after(due, 1, 2)
    assert recorder.calls == [
        ("restore", (2, 1), (20, 10)),
        ("restore", (NOTHING, 3), (None, 30)),
        ("copy", [([(7, 8)], [(0, 1)]), ([], [(2, 3)])], 1),
        ("snapshot", (NOTHING, 1), LAYERS),
        ("snapshot", (NOTHING, 3), LAYERS),
    ]


def test_programs_that_other_processes_need_are_launched_too(
    made: tuple[CacheChores, Recorder, WindowStateCache],
) -> None:
    chores, recorder, cache = made
    chores.before(Chores(), 1)
    chores.keep(chores.after(Chores(), 3, 1))
    assert recorder.calls == [
        ("restore", (NOTHING, NOTHING), (None, None)),
        ("copy", [([], []), ([], [])], 3),
        ("snapshot", (NOTHING, NOTHING), LAYERS),
    ]
    assert not len(cache)
    recorder.calls.clear()
    chores.after(Chores(), 0, 0)
    assert not recorder.calls


def test_window_state_is_kept_under_the_key_of_its_tokens(
    made: tuple[CacheChores, Recorder, WindowStateCache],
) -> None:
    chores, _, cache = made
    first, second = sequence(40), sequence(64)
    second.prompt_ids = [9, *second.prompt_ids[1:]]
    pending = chores.after(Chores(snapshots=[(4, 2, first, 32), (5, 6, second, 64), (5, 7, second, 16)]), 0, 2)
    chores.keep(pending)
    assert len(cache) == 3
    for one, boundary, slot in ((first, 32, 2), (second, 64, 6), (second, 16, 7)):
        kept = cache.get(key(one, boundary))
        assert kept is not None and kept.tolist() == [slot, slot] and not kept.flags.writeable
    assert not first.snapshot, "a prompt's state stays: others may begin alike"


def test_what_an_answer_left_before_is_replaced(made: tuple[CacheChores, Recorder, WindowStateCache]) -> None:
    chores, _, cache = made
    one = sequence(20)
    for boundary in (16, 32, 48):
        one.output_ids = list(range(boundary - 20 + 1))
        chores.keep(chores.after(Chores(snapshots=[(4, 0, one, boundary)]), 0, 1))
    assert key(one, 16) in cache, "of the prompt"
    assert key(one, 32) not in cache and key(one, 48) in cache and one.snapshot == key(one, 48)


def test_state_of_tokens_that_nobody_knows_is_dropped(made: tuple[CacheChores, Recorder, WindowStateCache]) -> None:
    """Of a sequence that ended before the step that crossed the boundary was seen complete."""
    chores, _, cache = made
    gone, keyless = sequence(20, 5), sequence(40)
    keyless.keys = None
    chores.keep(chores.after(Chores(snapshots=[(4, 0, gone, 32), (5, 0, keyless, 32)]), 0, 1))
    assert not len(cache)
    chores.keep(Pending())


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (32, 33, True),  # the token at 31 was fed: the window ends there
        (30, 35, True),  # in the middle of the step's rows
        (27, 32, False),  # the newest token is in no cache
        (33, 36, False),  # crossed a step before: the window may be too far on
        (28, 31, False),
    ],
)
def test_of_several_tokens_of_a_step_the_one_that_crosses_counts(
    before: int, after: int, kept: bool, made: tuple[CacheChores, Recorder, WindowStateCache]
) -> None:
    chores, _, cache = made
    one = sequence(20, before - 20)
    pending = chores.after(Chores(snapshots=[(4, 2, one, 32)]), 0, 1)
    known = pending.lengths()
    assert known == {one: before}
    one.output_ids = list(range(after - 20))
    chores.keep(pending, known)
    assert len(cache) == kept and (not kept or one.snapshot == key(one, 32))


def test_a_boundary_that_two_steps_may_cross_is_kept_of_the_one_that_did(
    made: tuple[CacheChores, Recorder, WindowStateCache],
) -> None:
    """Both took a snapshot before anything of the first was known."""
    chores, _, cache = made
    one = sequence(20, 10)
    steps = [chores.after(Chores(snapshots=[(rank, slot, one, 32)]), 0, 1) for rank, slot in ((4, 2), (5, 3))]
    for pending, tokens in zip(steps, (14, 16), strict=True):
        known = pending.lengths()
        one.output_ids = list(range(tokens))
        chores.keep(pending, known)
    kept = cache.get(key(one, 32))
    assert kept is not None and kept.tolist() == [2, 2]


def test_state_larger_than_the_budget_replaces_nothing() -> None:
    recorder, cache = Recorder(), WindowStateCache(20)
    chores = CacheChores(recorder, cache, LAYERS, BLOCK)  # type: ignore[arg-type]
    one = sequence(20, 13)
    one.snapshot = b"before"
    cache.put(b"before", np.zeros(1, np.int64))
    cache.budget_bytes = 8
    chores.keep(chores.after(Chores(snapshots=[(4, 0, one, 32)]), 0, 1))
    assert b"before" in cache and one.snapshot == b"before"
