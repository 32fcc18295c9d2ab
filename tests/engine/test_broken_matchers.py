"""Matchers that fail end their own requests alone, at the same output with drafts and without (dspark 2.6)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from fake_device import Drafting
from fake_session import Letters, Session, ids
from test_engine_properties import greedy
from test_matching import V, decode_of, sequence, unpacked, word
from test_speculation import OFF, ROOMY

from di_jax.engine.matching import Matching
from di_jax.engine.step_plan import Bucket

FAILS_AT = 3


class Raises(Letters):
    def allowed(self) -> np.ndarray:
        if len(self.known) >= FAILS_AT:
            raise ValueError("broken grammar")
        return super().allowed()


class Refuses(Letters):
    def accept(self, token: int) -> bool:
        if len(self.known) >= FAILS_AT:
            raise ValueError("broken grammar")
        return super().accept(token)


class Nothing(Letters):
    def allowed(self) -> np.ndarray:
        return super().allowed() & (len(self.known) < FAILS_AT)


class Longer(Letters):
    def allowed(self) -> np.ndarray:
        return np.append(super().allowed(), [True] * (len(self.known) >= FAILS_AT))


class Ended(Letters):
    """Nothing may be asked of it behind the end of a word."""

    def allowed(self) -> np.ndarray:
        if self.END in self.known:
            raise RuntimeError("terminated")
        return super().allowed()


WHY = {Raises: "ValueError: broken", Refuses: "ValueError: broken", Nothing: "it allows no id", Longer: "shape (212,)"}
DRAFTINGS = [None, Drafting(5, right=0.5, ids=(Letters.END, *Letters.IDS)), Drafting(5, right=0.0, ids=Letters.IDS)]


def answer(
    monkeypatch: pytest.MonkeyPatch, drafting: Drafting | None, asynchronous: bool, matcher: Any, **fields: Any
) -> Session:
    """Neighbours with a matcher and without, before and behind the request that `matcher` is of; None: without it."""
    config = {**OFF, "async_scheduling": asynchronous}
    session = Session(dataclasses.replace(ROOMY, drafting=drafting, config=config), monkeypatch)
    sampled = greedy(max_tokens=40, temperature=1.0, **fields)
    for number, own in enumerate([None, matcher, Letters, None]):
        if number != 1 or matcher is not None:
            given = dataclasses.replace(sampled, seq_seed=1 + number)
            session.add(ids(20, number), given, f"request {number}", matcher=own)
    session.finish()
    return session


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("drafting", DRAFTINGS)
@pytest.mark.parametrize("matcher", WHY)
def test_a_matcher_that_fails_ends_its_request_alone(
    matcher: type[Letters], drafting: Drafting | None, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Session` looks at every step that its books and matchers are where the answers are."""
    with_it = answer(monkeypatch, drafting, asynchronous, matcher)
    first, failed, *others = with_it.requests
    assert failed.failure is not None and failed.failure.type == "model_error"
    assert failed.failure.message.startswith(f"output token {FAILS_AT}: {matcher.__name__}, ")
    assert WHY[matcher] in failed.failure.message
    (lost,) = failed.sequences
    assert lost.finish_reason is None and len(lost.output_ids) == FAILS_AT
    assert failed in with_it.told, "the step that it ended in reports it"
    alone = answer(monkeypatch, drafting, asynchronous, None)
    for mine, want in zip([first, *others], alone.requests, strict=True):
        assert mine.failure is None and mine.sequences[0].finish_reason == "length"
        assert mine.sequences[0].output_ids == want.sequences[0].output_ids
        assert mine.sequences[0].logprobs == want.sequences[0].logprobs
    assert not with_it.engine.runner.resets - alone.engine.runner.resets
    if drafting is not None:
        assert with_it.device.accepted > 5


@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_a_matcher_that_works_is_no_failure(drafting: Drafting | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    assert not any(request.failure for request in answer(monkeypatch, drafting, True, Letters).requests)


@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_behind_the_end_of_an_answer_a_matcher_may_fail(
    drafting: Drafting | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts go beyond the end, and nothing comes of what their rows may give."""
    session = answer(monkeypatch, drafting, True, Ended, ignore_eos=False)
    one = session.requests[1]
    assert one.failure is None
    assert (one.sequences[0].finish_reason, one.sequences[0].output_ids[-1]) == ("stop", Letters.END)


def test_rows_before_a_failure_are_masked_and_those_behind_it_free() -> None:
    one = sequence(Raises(V))
    one.drafts, one.output_ids = [10, 10, 10, 11], [77] * 5
    matching = Matching(V)
    masks = matching.masks(decode_of(one), 0, Bucket(True, 16, 4, drafts=4, requests=4))
    assert [unpacked(mask) for mask in masks[0, :3]] == [
        np.flatnonzero(word([10] * n).allowed()).tolist() for n in range(3)
    ]
    assert (masks[0, 3:] == -1).all() and one.matcher.known == []
    for token in (10, 10, 10):
        assert matching.accept(one, token) is None
        one.output_ids.append(token)
    why = matching.accept(one, 10)
    assert why is not None and why.startswith("Raises, ") and one.matcher.known == [10] * 3
    # Another look forgets what the last one met.
    one.matcher = Letters(V)
    matching.masks(decode_of(one), 0, Bucket(True, 4, 4))
    assert matching.accept(one, 5) == "id 5 does not match what the answer has to" and matching.accept(one, 10) is None


def test_a_matcher_that_keeps_its_drafts_ends_the_answer_there() -> None:
    class Stuck(Letters):
        def rollback(self, count: int) -> None:
            raise KeyError("stuck")

    one, matching = sequence(Stuck(V)), Matching(V)
    one.drafts = [10, 11]
    batch = decode_of(one)
    matching.masks(batch, 0, Bucket(True, 16, 4, drafts=3, requests=4))
    assert matching.accept(one, 10) == "Stuck, which the answer has to match, failed (KeyError: 'stuck')"


def test_an_interrupt_while_a_matcher_is_asked_goes_up() -> None:
    class Slow(Letters):
        def allowed(self) -> np.ndarray:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Matching(V).masks(decode_of(sequence(Slow(V))), 0, Bucket(True, 4, 4))
