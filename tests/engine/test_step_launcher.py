"""The programs of a step, their order, and what processes tell each other of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from fake_device import Drafting, FakeDevice
from fake_engine import Setup
from fake_session import Letters, Session, ids
from hypothesis import given
from hypothesis import strategies as st
from test_engine_properties import greedy

from di_jax.engine.batch import Batch, DecodeBatch
from di_jax.engine.engine import Engine
from di_jax.engine.results import Results
from di_jax.engine.speculation import Outlook
from di_jax.engine.step_launcher import Launches

SETUP = Setup(block_size=16, num_blocks=40, num_slots=4, max_model_len=160, varlen=False)
DRAFTS = dataclasses.replace(SETUP, drafting=Drafting(3, ids=Letters.IDS))

counts = st.lists(st.integers(0, 9), min_size=12, max_size=12)


@given(st.lists(counts, min_size=1, max_size=4))
def test_every_process_launches_what_any_needs(numbers: list[list[int]]) -> None:
    everyones = np.array(numbers)
    found = Launches.of_all(everyones)
    kinds = [found.restores, found.copies, found.snapshots, found.extra, found.begins, found.masked]
    assert kinds == everyones[:, :6].max(axis=0).tolist()
    assert found.outlook == Outlook(*everyones[:, 6:11].sum(axis=0).tolist(), everyones[:, 11].max())
    assert Launches.of_all(np.array([found.numbers()])) == found


def programs(session: Session) -> list[list[str]]:
    """Names of what was launched, step by step."""
    steps: list[list[str]] = []
    for call in session.device.calls:
        name = call if isinstance(call, str) else call[0]
        if name in ("execute", "verify", "restore") and not (steps and steps[-1] == ["restore"]):
            steps.append([])
        steps[-1].append(name)
    return steps


def answered(setup: Setup, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Session:
    session = Session(setup, monkeypatch)
    matcher = fields.pop("matcher", None)
    session.add(ids(20), greedy(max_tokens=3, **fields), matcher=matcher)
    session.finish()
    return session


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_order_of_programs(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"state_cache_bytes": 0, "async_scheduling": asynchronous}
    plain, drafts = (dataclasses.replace(setup, config=config) for setup in (SETUP, DRAFTS))
    assert programs(answered(plain, monkeypatch)) == [["execute"]] * 3
    first, *others = programs(answered(drafts, monkeypatch))
    assert first == ["execute", "draft"]
    assert 1 <= len(others) <= 3 and all(one == ["verify", "accept", "draft"] for one in others)
    assert programs(answered(plain, monkeypatch, matcher=Letters)) == [["execute", "resample"]] * 3
    first, *others = programs(answered(drafts, monkeypatch, matcher=Letters))
    assert first == ["execute", "resample", "draft"]
    assert 1 <= len(others) <= 3 and all(one == ["verify", "accept", "draft"] for one in others)


def test_copies_and_snapshots_come_before_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork drafts from its own caches, and a snapshot holds no row that the draft wrote."""
    session = Session(dataclasses.replace(DRAFTS, config={"replay": {"decoder": "off", "encoder": "off"}}), monkeypatch)
    session.add(ids(20), greedy(max_tokens=20, temperature=1.0, n=2))
    session.finish()
    steps = programs(session)
    assert ["execute", "snapshot"] in steps, "the prompt's boundary"
    assert ["execute", "copy", "draft"] in steps
    assert any(
        one[:2] == ["verify", "accept"] and one[2:] in (["snapshot", "draft"], ["snapshot"] * 2 + ["draft"])
        for one in steps
    )


def test_kinds_of_programs_follow_from_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `accept`: whether with rows of extra sampling, and whether with masks."""
    for fields, want in (({}, (False, False)), ({"logprobs": 2}, (True, False)), ({"matcher": Letters}, (True, True))):
        session = answered(DRAFTS, monkeypatch, **fields)
        kinds = {call[3:] for call in session.device.calls if call[0] == "accept"}
        assert kinds == {want}, fields


@pytest.mark.parametrize("matched", [True, False])
def test_tokens_are_drawn_when_the_matcher_has_seen_those_before(
    matched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model runs meanwhile. Without a matcher nobody waits."""
    events: list[str] = []
    for where, name in ((FakeDevice, "verify"), (FakeDevice, "accept"), (FakeDevice, "draft"), (Results, "book")):
        original = getattr(where, name)

        def noted(*args: Any, original: Any = original, name: str = name) -> Any:
            events.append(name)
            return original(*args)

        monkeypatch.setattr(where, name, noted)
    answered(DRAFTS, monkeypatch, matcher=Letters if matched else None)
    order = ["verify", "book", "accept", "draft"] if matched else ["verify", "accept", "draft", "book"]
    at = events.index("verify")
    assert events[at : at + 4] == order


def test_results_that_come_early_end_answers_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose word ended is in the step that is being launched; what that gives it is nobody's."""
    session = Session(DRAFTS, monkeypatch)
    for number in range(8):
        sampling = greedy(max_tokens=40, temperature=1.0, seq_seed=number, ignore_eos=False)
        session.add(ids(20, number), sampling, matcher=Letters)
    session.finish()
    answers = [request.sequences[0] for request in session.requests]
    ended = [one for one in answers if one.finish_reason == "stop"]
    assert len(ended) > 3 and all(one.output_ids[-1] == Letters.END for one in ended)


def test_masks_before_the_results_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: nobody handles the steps before."""
    monkeypatch.setattr(Engine, "_complete_early", lambda _: None)
    with pytest.raises((AssertionError, RuntimeError)):
        answered(dataclasses.replace(DRAFTS, drafting=None), monkeypatch, matcher=Letters)
        for number in range(5):
            session = Session(DRAFTS, monkeypatch)
            session.add(ids(20, number), greedy(max_tokens=40, temperature=1.0), matcher=Letters)
            session.finish()


def test_a_process_without_work_launches_what_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(DRAFTS, monkeypatch)
    launcher = session.engine.launcher
    agreed = Launches(restores=1, copies=1, snapshots=2, extra=1, masked=1, outlook=Outlook(3000, 3000, 3, 0, 3, 3))
    bucket = session.engine.parts.ladder.bucket(True, 16, 10, requests=4)
    batch = DecodeBatch([], num_drafts=3)
    assert launcher.launches(batch) == Launches()
    launched = launcher.launch(batch, bucket, agreed, lambda: None)
    names = [call if isinstance(call, str) else call[0] for call in session.device.calls]
    assert names == ["restore", "verify", "accept", "copy", "snapshot", "snapshot", "draft"]
    assert launched.draft is not None and launched.rounds == {}
    assert session.device.calls[2] == ("accept", 4, 16, True, True)
    (output,) = launched.host()
    assert (np.asarray(output.token) == -1).all() and (np.asarray(output.verified) == -1).all()
    assert output.draft is not None and output.draft.token.shape == (4, 3)
    prefill = session.engine.parts.ladder.bucket(False, 64, 10)
    launched = launcher.launch(Batch(), prefill, Launches(outlook=Outlook()), lambda: None)
    assert launched.draft is None and launched.host()[0].draft is None
