"""Any mix of requests gets the answers that each would get alone, whatever the engine does to fit them in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import pytest
from fake_device import DeviceError, Drafting, FakeDevice
from fake_engine import Setup
from fake_session import Letters, Session, ids
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from di_jax.engine import prefix_cache
from di_jax.engine.cache_chores import CacheChores
from di_jax.engine.scheduler import Scheduler
from di_jax.engine.sequence import Request, Sequence
from di_jax.engine.slot_table import SlotTable
from di_jax.engine.state_programs import StateCopies
from di_jax.prompts import QueueFullError, RequestError
from di_jax.sampling_params import SamplingParams

TEXT = ids(700, 99)  # what prompts that share a prefix begin with


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request to come before step `at`. shared: tokens that it begins with out of TEXT. follows: index of an earlier
    request that it goes on from: its prompt, its first answer so far, then `length` tokens. abort: steps later; None:
    never. matched: whether its answers are words of `Letters`."""

    at: int
    shared: int
    length: int
    sampling: SamplingParams
    follows: int | None = None
    abort: int | None = None
    matched: bool = False


@dataclasses.dataclass(frozen=True)
class Scenario:
    setup: Setup
    arrivals: tuple[Arrival, ...]
    jumps: tuple[tuple[int, float], ...] = ()  # (step, seconds that pass before it)
    faults: tuple[tuple[int, str], ...] = ()  # (step, what goes wrong on the device in it)
    seed: int = 0


@st.composite
def samplings(draw: st.DrawFn, crowd: bool, matched: bool = False) -> SamplingParams:
    """A word may not be forced to anything."""
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.8])),
        max_tokens=draw(st.integers(20, 80) if crowd else st.one_of(st.integers(1, 6), st.integers(1, 60))),
        n=draw(st.sampled_from([1, 1, 1, 2, 3, 4])),
        seq_seed=draw(st.integers(0, 2**64 - 1)),
        ignore_eos=crowd or draw(st.booleans()),
        priority=draw(st.sampled_from([0, 0, 0, 1, -2])),
        deadline_s=draw(st.sampled_from([None, None, None, 5.0])),
        cache_salt=draw(st.sampled_from([None, None, None, "salt"])),
        forced_token_ids=None if matched else draw(st.sampled_from([None, None, None, (7, -1, 9)])),
        stop_token_ids=draw(st.sampled_from([None, None, None, tuple(range(50, 70))])),
        logprobs=draw(st.sampled_from([None, None, None, None, 0, 2])),
        detokenize=False,
    )


@st.composite
def arrivals(draw: st.DrawFn, longest: int) -> tuple[Arrival, ...]:
    """In a crowd short prompts with long answers come together, so that blocks run out while they decode."""
    made: list[Arrival] = []
    at, crowd = 0, draw(st.booleans())
    for number in range(draw(st.integers(3 if crowd else 1, 8))):
        at += draw(st.sampled_from([0, 0, 1, 2] if crowd else [0, 0, 1, 2, 5, 20, 60]))
        matched = draw(st.integers(0, 5)) == 5
        made.append(
            Arrival(
                at,
                shared=draw(st.one_of(st.just(0), st.integers(0, longest // (4 if crowd else 1)))),
                length=draw(st.one_of(st.integers(1, 40), st.integers(1, longest // (2 if crowd else 1)))),
                sampling=draw(samplings(crowd, matched)),
                follows=draw(st.one_of(st.none(), st.integers(0, number - 1))) if number else None,
                abort=draw(st.one_of(st.none(), st.none(), st.integers(0, 12))),
                matched=matched,
            )
        )
    return tuple(made)


@st.composite
def draftings(draw: st.DrawFn) -> Drafting:
    return Drafting(
        num_drafts=draw(st.integers(1, 5)),
        right=draw(st.sampled_from([0.0, 0.5, 0.8, 0.95, 1.0])),
        ids=draw(st.sampled_from([None, Letters.IDS])),
        confidence=draw(st.sampled_from(["random", "random", 0.0, 0.9, 1.0])),
    )


@st.composite
def setups(draw: st.DrawFn, replays: SequenceOf[tuple[str, str]], *, mesh: bool = True) -> Setup:
    window, size = draw(st.sampled_from([(16, 16), (4, 16), (16, 128)]))
    most = draw(st.sampled_from([8, 20, 40] if size == 16 else [2, 5]))  # blocks of a sequence
    tokens = draw(st.sampled_from([size, 2 * size, 128, 256]))
    decoder, encoder = draw(st.sampled_from(replays))
    slots = draw(st.integers(1, 6))
    cp = draw(st.sampled_from([1, 1, 2])) if mesh else 1
    prefill = draw(st.sampled_from([None, None, (max(32, tokens),), (64, max(128, tokens))]))
    config: dict[str, Any] = {
        "replay": {"decoder": decoder, "encoder": encoder},
        "async_scheduling": draw(st.sampled_from([True, True, True, False])),
        "prefix_caching": draw(st.sampled_from([True, True, True, False])),
        "state_cache_bytes": draw(st.sampled_from([0, 3000, 20_000, 2**30, 2**30])),
        "max_sum_context": draw(st.sampled_from([None, None, 200, 600])),
        "itl_target_ms": draw(st.sampled_from([None, None, 1.0, 5.0])),
        "ttft_target_ms": draw(st.sampled_from([None, None, 50.0, 1000.0])),
        "watermark": draw(st.sampled_from([0.9, 0.5, 1.0])),
        "max_waiting": draw(st.sampled_from([None, None, 3])),
        "type": draw(st.sampled_from(["normal", "normal", "normal", "completion", "prompt"])),
    }
    if draw(st.integers(0, 7)) == 0:
        config |= {"policy": "deepinfer", "type": "normal", "itl_target_ms": None, "ttft_target_ms": None}
    return Setup(
        window=window,
        block_size=size,
        num_blocks=draw(st.one_of(st.just(most), st.integers(max(2, most // 2), 2 * most))),
        num_slots=slots,
        max_model_len=most * size,
        tokens=tokens,
        prefill=prefill,
        decode=draw(st.sampled_from([None, None, (slots,), (max(1, slots - 1), slots + 2)])),
        dp=draw(st.sampled_from([1, 1, 2])) if mesh else 1,
        cp=cp,
        keep_tokens=window + 6 + draw(st.sampled_from([0, 2, 40])),
        config=config,
        drafting=draw(st.one_of(st.none(), draftings())),
        varlen=draw(st.sampled_from([True, True, False])),
        curve=draw(st.sampled_from(["flat", "stairs", "steep"])),
    )


@st.composite
def scenarios(draw: st.DrawFn, *replays: tuple[str, str], mesh: bool = True) -> Scenario:
    """replays: (decoder, encoder), one of which the engine has. mesh: on several ranks, perhaps."""
    setup = draw(setups(replays, mesh=mesh))
    steps = st.integers(0, 150)
    faults = st.lists(
        st.tuples(steps, st.sampled_from(["launch", "wait", "not finite", "accept", "draft"])), max_size=2
    )
    return Scenario(
        setup,
        draw(arrivals(setup.max_model_len - 1)),
        tuple(draw(st.lists(st.tuples(steps, st.sampled_from([0.5, 11.0, 40.0])), max_size=3))),
        tuple(draw(faults)) if draw(st.integers(0, 3)) == 0 else (),
        draw(st.integers(0, 2**32 - 1)),
    )


def play(scenario: Scenario) -> Session:
    """Runs a scenario to its end, with all checks of `Session`."""
    with pytest.MonkeyPatch.context() as patch:
        session = Session(scenario.setup, patch, scenario.seed)
        pending, made = list(scenario.arrivals), list[Request | None]()
        aborts: list[tuple[int, Request]] = []
        tick = 0
        while pending or session.engine.has_unfinished:
            while pending and (pending[0].at <= tick or not session.engine.has_unfinished):
                arrival = pending.pop(0)
                request = submit(session, prompt_of(arrival, made, session), arrival)
                made.append(request)
                if request is not None and arrival.abort is not None:
                    aborts.append((tick + arrival.abort, request))
            for _, request in [one for one in aborts if one[0] == tick]:
                session.abort(request)
            session.device.clock.advance(sum(seconds for step, seconds in scenario.jumps if step == tick))
            for what in (what for step, what in scenario.faults if step == tick):
                fail(session.device, what)
            session.step()
            tick += 1
        session.finish()
    return session


def prompt_of(arrival: Arrival, made: list[Request | None], session: Session) -> list[int]:
    before = None if arrival.follows is None else made[arrival.follows]
    known = TEXT[: arrival.shared]
    if before is not None:
        known = before.prompt_ids + before.sequences[0].output_ids
    return (known + ids(arrival.length, len(made)))[: session.setup.max_model_len - 1]


def fail(device: FakeDevice, what: str) -> None:
    if what in ("launch", "accept", "draft"):
        device.fail_launch, device.fail_program = DeviceError(what), None if what == "launch" else what
    elif what == "wait":
        device.fail_host = DeviceError(what)
    else:
        device.spoil = True


def submit(session: Session, prompt: list[int], arrival: Arrival) -> Request | None:
    """None for a request that is refused, as it has to be."""
    engine, sampling = session.engine, arrival.sampling
    room = engine.has_room
    try:
        request = session.add(prompt, sampling, matcher=Letters if arrival.matched else None)
    except QueueFullError:
        assert not room
        return None
    except RequestError:
        answer = (
            1 if engine.config.type == "prompt" else min(sampling.max_tokens, session.setup.max_model_len - len(prompt))
        )
        ledger = engine.scheduler.ledgers[0]
        assert -(-(len(prompt) + answer) // ledger.block_size) > ledger.num_blocks
        return None
    assert room
    return request


def examples(count: int) -> settings:
    return settings(max_examples=count, suppress_health_check=list(HealthCheck))


@examples(60)
@given(scenario=scenarios(("off", "off")))
def test_without_replay_answers_are_those_of_each_request_alone(scenario: Scenario) -> None:
    play(scenario)


@examples(40)
@given(scenario=scenarios(("mask", "off"), ("compact", "off")))
def test_with_decoder_replay_alone_what_was_cached_does_not_matter(scenario: Scenario) -> None:
    play(scenario)


@examples(40)
@given(scenario=scenarios(("off", "on"), ("mask", "on"), ("compact", "on")))
def test_with_encoder_replay_answers_follow_from_the_hit(scenario: Scenario) -> None:
    play(scenario)


@pytest.mark.slow
@examples(1500)
@given(scenario=scenarios(*((decoder, encoder) for decoder in ("off", "mask", "compact") for encoder in ("off", "on"))))
def test_many_more_of_all_kinds(scenario: Scenario) -> None:
    play(scenario)


# ---- what went wrong once ----

GREEDY = SamplingParams(temperature=0, ignore_eos=True, detokenize=False)
OFF = {"replay": {"decoder": "off", "encoder": "off"}}


def greedy(**fields: Any) -> SamplingParams:
    return dataclasses.replace(GREEDY, **fields)


def test_steps_that_end_early_for_a_preemption_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step that completes is in a report, or a request's end goes unseen."""
    session = Session(Setup(block_size=16, num_blocks=6, num_slots=3, max_model_len=96, config=OFF), monkeypatch)
    for number in range(3):
        session.add(ids(10 + number, number), greedy(max_tokens=40 + number))
    session.finish()
    assert session.engine.scheduler.preemptions


@pytest.mark.parametrize("drafting", [None, Drafting(1, right=0.0)])
def test_one_that_gave_way_in_a_step_that_fails_is_not_lost(
    drafting: Drafting | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tick in range(14, 20):
        setup = Setup(block_size=16, num_blocks=3, num_slots=2, max_model_len=96, config=OFF, drafting=drafting)
        session = Session(setup, monkeypatch)
        requests = [session.add(ids(1, number), greedy(max_tokens=20)) for number in range(2)]
        while session.steps < tick:
            session.step()
        before = session.engine.scheduler.preemptions
        fail(session.device, "launch")
        session.step()
        if session.engine.scheduler.preemptions > before:
            session.finish()
            assert [request.failure is None for request in requests].count(True) == 1
            return
    pytest.fail("nobody gave way")


def test_the_only_answer_gives_way_to_a_prompt_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode step that was to run is empty then."""
    config = {**OFF, "policy": "deepinfer"}  # up to 70 decode steps between two chunks of a prompt
    setup = Setup(block_size=16, num_blocks=11, num_slots=2, max_model_len=176, tokens=16, config=config)
    session = Session(setup, monkeypatch)
    answer = session.add(ids(15), greedy(max_tokens=100, priority=1))
    session.step()
    session.add(ids(64, 1), greedy(max_tokens=8))
    session.finish()
    assert answer.sequences[0].num_preemptions == 1


def test_nobody_passes_one_that_has_lost_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill step that would admit nobody was chosen."""
    setup = Setup(block_size=16, num_blocks=8, num_slots=4, max_model_len=128, tokens=32, config=OFF)
    session = Session(setup, monkeypatch)
    session.add(ids(20), greedy(max_tokens=60))
    session.step()
    big = session.add(ids(120, 1), greedy(max_tokens=4))
    session.step()
    session.device.clock.advance(11)
    small = session.add(ids(5, 2), greedy(max_tokens=4))
    session.finish()
    assert big.started is not None and small.started is not None and big.started < small.started


def test_a_prompt_engine_needs_room_for_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(block_size=16, num_blocks=8, max_model_len=256, config={**OFF, "type": "prompt"})
    session = Session(setup, monkeypatch)
    request = session.add(ids(127), greedy(max_tokens=100))
    with pytest.raises(RequestError, match="129 tokens, 9 blocks of 16; the engine has 8"):
        session.add(ids(128), greedy(max_tokens=1))
    session.finish()
    assert len(request.sequences[0].output_ids) == 1


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("drafting", [None, Drafting(5, right=0.8)])
def test_the_time_before_every_token_but_the_first_is_counted_once(
    asynchronous: bool, drafting: Drafting | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end token is seen when the step after it is in flight: the token of that one is nobody's."""
    config = {**OFF, "async_scheduling": asynchronous}
    setup = Setup(
        block_size=16, num_blocks=99, num_slots=8, max_model_len=160, config=config, drafting=drafting, curve="flat"
    )
    session = Session(setup, monkeypatch)
    for number in range(30):
        session.add(ids(20, number), greedy(temperature=1.0, seq_seed=number, max_tokens=60, ignore_eos=False))
    session.finish()
    answers = [sequence for request in session.requests for sequence in request.sequences]
    assert sum(sequence.finish_reason == "stop" for sequence in answers) > 3
    assert not session.engine.scheduler.preemptions
    assert session.engine.metrics.inter_token.total == sum(len(sequence.output_ids) - 1 for sequence in answers)
    assert session.engine.metrics.generated_tokens == sum(len(sequence.output_ids) for sequence in answers)


# ---- nobody starves ----


def stream(session: Session, until: Request) -> float:
    """Keeps short requests of various lengths waiting until another one has its first token; the seconds it took."""
    began, number = session.device.clock.now, 0
    while until.first_token is None:
        while session.engine.scheduler.num_waiting < 5:
            session.add(ids(20, number), greedy(max_tokens=6 + number % 9))
            number += 1
        session.device.clock.advance(0.2)
        session.step()
        assert session.steps < 2000, "it starves"
    took = session.device.clock.now - began
    session.finish()
    return took


def test_a_prompt_that_needs_most_blocks_gets_in_among_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(block_size=16, num_blocks=20, num_slots=6, max_model_len=320, tokens=64, config=OFF)
    session = Session(setup, monkeypatch)
    for number in range(6):
        session.add(ids(20, number), greedy(max_tokens=6 + number % 9))
    session.step()
    large = session.add(ids(270, 9), greedy(max_tokens=2))
    # It lets others pass for ten seconds; then those that run end.
    assert 10 < stream(session, large) < 30


def test_a_class_of_little_importance_is_served_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(block_size=16, num_blocks=40, num_slots=2, max_model_len=160, tokens=32, config=OFF)
    session = Session(setup, monkeypatch)
    for number in range(8):
        session.add(ids(20, number), greedy(max_tokens=6))
    low = session.add(ids(20, 50), greedy(max_tokens=2, priority=1))
    # After 30 s it counts as one class up, and it came before those of that class.
    assert 30 < stream(session, low) < 60


# ---- what the checks see ----


def one_of_each(session: Session) -> None:
    """Forks, hits with and without window state, preemptions and aborts."""
    for turn in range(3):
        requests = [
            session.add(
                TEXT[:70] + ids(20, number),
                greedy(temperature=0.5, seq_seed=number, max_tokens=30, n=1 + number % 3),
            )
            for number in range(4)
        ]
        session.step()
        session.step()
        session.abort(requests[turn])
        session.finish()


SEEN = Setup(block_size=16, num_blocks=26, num_slots=6, max_model_len=160, tokens=128)


def test_the_requests_of_the_controls_meet_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(SEEN, monkeypatch)
    one_of_each(session)
    assert session.forks and session.restored and session.hits > session.restored
    assert session.engine.scheduler.preemptions and sum(x.evictions for x in session.engine.scheduler.ledgers)


def nothing(*_: Any) -> None:
    pass


BREAKS: dict[str, tuple[Any, str, Any]] = {
    "blocks of forks are not copied": (StateCopies, "blocks", property(lambda _: (), nothing)),
    "slots of forks are not copied": (StateCopies, "slots", property(lambda _: (), nothing)),
    "window state is not restored": (CacheChores, "before", nothing),
    "blocks are given back at once": (Scheduler, "_later", lambda _, rank, held, step=0: [*map(rank.release, held)]),
    "a hit leaves too little to compute": (
        prefix_cache,
        "hit_limit",
        lambda tokens, _, size: (tokens - 1) // size * size,
    ),
    "rows before a chunk are forgotten": (Sequence, "tokens", lambda s, a, b: _known(s)[a:b] if b > a + 3 else []),
    "an answer's numbers start again": (SlotTable, "advance", lambda t, slots, *_: _advance(t, slots)),
    "the text of another counts": (prefix_cache, "_digest", lambda *parts: bytes(15) + bytes([len(parts)])),
}


def _known(sequence: Sequence) -> list[int]:
    return sequence.prompt_ids + sequence.output_ids


def _advance(table: SlotTable, slots: np.ndarray) -> None:
    table.position[slots] += 1
    table.left[slots] -= 1
    table.output_index[slots] += table.output_index[slots] < 5


@pytest.mark.parametrize("what", BREAKS)
def test_what_is_broken_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken = BREAKS[what]
    monkeypatch.setattr(where, name, broken)
    with pytest.raises((AssertionError, RuntimeError, DeviceError)):
        session = Session(SEEN, monkeypatch)
        one_of_each(session)


@pytest.mark.parametrize("what", ["a cached block", "a ring", "the length of a slot", "the last token"])
def test_caches_that_change_are_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(dataclasses.replace(SEEN, config=OFF), monkeypatch)
    session.add(TEXT[:70], greedy(max_tokens=20))
    for _ in range(5):
        session.step()
    caches, ledger = session.device.state[0], session.engine.scheduler.ledgers[0]
    if what == "a cached block":
        session.finish()
        session.add(TEXT[:70] + ids(30), greedy(max_tokens=20))
        for page in caches.pages:
            page[list(ledger._cached)] += np.uint64(1)
    elif what == "a ring":
        caches.window += np.uint64(1)
    elif what == "the length of a slot":
        caches.length += 1
    else:
        caches.last_token[:] = (caches.last_token + 1) % 200
    with pytest.raises(AssertionError):
        session.finish()
