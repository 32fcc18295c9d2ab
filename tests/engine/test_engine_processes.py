"""Engines of several processes keep in step: threads stand for the processes, each with fake devices of its own."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from fake_device import Drafting
from fake_engine import Profiles, Setup
from fake_session import Letters, Session
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_engine_properties import Arrival, Scenario, greedy, prompt_of, scenarios, submit

from di_jax.engine import engine as engine_module
from di_jax.engine.sequence import Request
from di_jax.engine.speculation import Speculation
from di_jax.parallel.agreement import Agreement

PATIENCE_S = 60.0  # a process that waits longer waits for one that is gone


class Meeting:
    """Where the threads meet: everybody brings numbers and takes those of all."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.brought: list[tuple[str, np.ndarray] | None] = [None] * count

    def gather(self, index: int, values: np.ndarray, what: str) -> np.ndarray:
        self.brought[index] = what, values
        self.barrier.wait(PATIENCE_S)
        everyones = [one for one in self.brought if one is not None]
        assert len({name for name, _ in everyones}) == 1, "the processes talk of different things"
        gathered = np.stack([values for _, values in everyones])
        self.barrier.wait(PATIENCE_S)
        return gathered


class Member(Agreement):
    """One of the threads."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        self.meeting, self.process_id, self.num_processes = meeting, index, len(meeting.brought)

    def gather(self, values: np.ndarray, what: str) -> np.ndarray:
        return self.meeting.gather(self.process_id, values, what)


class Processes:
    """Stands for the module: the agreement of the engine that is made now."""

    def __init__(self, owners: Sequence[int]) -> None:
        self.owners, self.member = owners, Agreement()

    def current(self) -> Agreement:
        return self.member

    def data_rank_owners(self, *_: Any) -> Sequence[int]:
        return self.owners


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as made:
        yield made


def play_together(setup: Setup, parts: Sequence[Scenario], patch: pytest.MonkeyPatch) -> list[Session]:
    """Runs a process for each part, with its arrivals and aborts, and one data-parallel rank each."""
    meeting, stand_in = Meeting(len(parts)), Processes(range(len(parts)))
    patch.setattr(engine_module, "processes", stand_in)
    patch.setattr(engine_module, "step_profile", Profiles)
    sessions = []
    for index, part in enumerate(parts):
        stand_in.member = Member(meeting, index)
        ranks = range(index * setup.cp, (index + 1) * setup.cp)
        sessions.append(Session(setup, None, part.seed, local_ranks=ranks))
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            drive(sessions[index], parts[index], Member(meeting, index))
        except BaseException as error:
            failures.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = [error for error in failures if not isinstance(error, threading.BrokenBarrierError)]
    if failures:
        raise (told or failures)[0]
    return sessions


def drive(session: Session, part: Scenario, member: Member) -> None:
    """Steps as often as the others do, until nobody has work or arrivals."""
    pending, made = list(part.arrivals), list[Request | None]()
    aborts: list[tuple[int, Request]] = []
    tick = 0
    while True:
        working = bool(pending) or session.engine.has_unfinished
        if not member.gather(np.array([working]), "whether somebody has work").any():
            break
        while pending and pending[0].at <= tick:
            arrival = pending.pop(0)
            request = submit(session, prompt_of(arrival, made, session), arrival)
            made.append(request)
            if request is not None and arrival.abort is not None:
                aborts.append((tick + arrival.abort, request))
        for _, request in [one for one in aborts if one[0] == tick]:
            session.abort(request)
        session.step_with_others()
        tick += 1
    session.check_end()


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    first=scenarios(("off", "off"), ("compact", "on"), mesh=False),
    others=st.lists(scenarios(("off", "off"), mesh=False), min_size=1, max_size=2),
    cp=st.sampled_from([1, 1, 2]),
)
def test_processes_run_the_same_programs(first: Scenario, others: list[Scenario], cp: int) -> None:
    parts = [first, *others]
    setup = dataclasses.replace(first.setup, dp=len(parts), cp=cp)
    with pytest.MonkeyPatch.context() as patch:
        sessions = play_together(setup, parts, patch)
    assert all(session.device.calls == sessions[0].device.calls for session in sessions)
    assert all(session.engine.num_steps == sessions[0].engine.num_steps for session in sessions)


def drafting_parts() -> list[Scenario]:
    """Three processes: one whose answers are many, one with a word to match, one with nothing to do."""
    setup = Setup(
        block_size=16,
        num_blocks=40,
        num_slots=4,
        max_model_len=160,
        dp=3,
        drafting=Drafting(3, right=0.7, ids=Letters.IDS, confidence=0.5),
    )
    many = tuple(Arrival(0, 0, 20 + at, greedy(max_tokens=40, temperature=1.0, n=2)) for at in range(3))
    word = (Arrival(3, 0, 30, greedy(max_tokens=20, logprobs=2), matched=True),)
    return [Scenario(setup, many), Scenario(setup, word, seed=1), Scenario(setup, (), seed=2)]


def test_processes_verify_and_draft_together(patch: pytest.MonkeyPatch) -> None:
    """Masks and rows of extra sampling of one are asked of all, and so are drafts."""
    parts = drafting_parts()
    sessions = play_together(parts[0].setup, parts, patch)
    calls = sessions[0].device.calls
    assert all(session.device.calls == calls for session in sessions)
    assert {call[-2:] for call in calls if call[0] == "accept"} == {(False, False), (True, True)}
    assert sum(call[0] == "draft" for call in calls) > 10
    assert all(session.device.accepted for session in sessions[:2]) and not sessions[2].device.drafted


def test_a_process_that_decides_alone_whether_to_draft_is_seen(patch: pytest.MonkeyPatch) -> None:
    """The control."""

    def selfish(books: Speculation, *_: Any) -> bool:
        return any(bool((table.left > 0).any()) for table in books.tables.values())

    patch.setattr(Speculation, "drafts", selfish)
    parts = drafting_parts()
    sessions = play_together(parts[0].setup, parts, patch)
    assert any(session.device.calls != sessions[0].device.calls for session in sessions)


def test_a_process_that_fails_keeps_nobody_waiting(patch: pytest.MonkeyPatch) -> None:
    """The control: the threads end with the error of the one that fails."""
    part = Scenario(Setup(dp=2), ())
    patch.setattr(Session, "step_with_others", lambda _: 1 / 0)
    patch.setattr(Session, "check_end", lambda session: session.step_with_others())
    with pytest.raises(ZeroDivisionError):
        play_together(Setup(dp=2), [part, part], patch)
