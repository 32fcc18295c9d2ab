"""Any mix of requests gets the answers that each would get alone, whatever the engine does to fit them in."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from fake_device import Setup
from fake_session import Session, ids
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st

from di_jax.engine.sequence import Request
from di_jax.prompts import QueueFullError, RequestError
from di_jax.sampling_params import SamplingParams

TEXT = ids(700, 99)  # what prompts that share a prefix begin with


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request to come before step `at`. shared: tokens that it begins with out of TEXT. follows: index of an earlier
    request that it goes on from: its prompt, its first answer so far, then `length` tokens. abort: steps later; None:
    never."""

    at: int
    shared: int
    length: int
    sampling: SamplingParams
    follows: int | None = None
    abort: int | None = None


@dataclasses.dataclass(frozen=True)
class Scenario:
    setup: Setup
    arrivals: tuple[Arrival, ...]
    jumps: tuple[tuple[int, float], ...] = ()  # (step, seconds that pass before it)
    seed: int = 0


@st.composite
def samplings(draw: st.DrawFn, crowd: bool) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.8])),
        max_tokens=draw(st.integers(20, 80) if crowd else st.one_of(st.integers(1, 6), st.integers(1, 60))),
        n=draw(st.sampled_from([1, 1, 1, 2, 3, 4])),
        seq_seed=draw(st.integers(0, 2**64 - 1)),
        ignore_eos=crowd or draw(st.booleans()),
        priority=draw(st.sampled_from([0, 0, 0, 1, -2])),
        deadline_s=draw(st.sampled_from([None, None, None, 5.0])),
        cache_salt=draw(st.sampled_from([None, None, None, "salt"])),
        forced_token_ids=draw(st.sampled_from([None, None, None, (7, -1, 9)])),
        detokenize=False,
    )


@st.composite
def arrivals(draw: st.DrawFn, longest: int) -> tuple[Arrival, ...]:
    """In a crowd short prompts with long answers come together, so that blocks run out while they decode."""
    made: list[Arrival] = []
    at, crowd = 0, draw(st.booleans())
    for number in range(draw(st.integers(3 if crowd else 1, 8))):
        at += draw(st.sampled_from([0, 0, 1, 2] if crowd else [0, 0, 1, 2, 5, 20, 60]))
        made.append(
            Arrival(
                at,
                shared=draw(st.one_of(st.just(0), st.integers(0, longest // (4 if crowd else 1)))),
                length=draw(st.one_of(st.integers(1, 40), st.integers(1, longest // (2 if crowd else 1)))),
                sampling=draw(samplings(crowd)),
                follows=draw(st.one_of(st.none(), st.integers(0, number - 1))) if number else None,
                abort=draw(st.one_of(st.none(), st.none(), st.integers(0, 12))),
            )
        )
    return tuple(made)


@st.composite
def setups(draw: st.DrawFn, replays: tuple[tuple[str, str], ...], *, mesh: bool = True) -> Setup:
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
    )


@st.composite
def scenarios(draw: st.DrawFn, replays: tuple[tuple[str, str], ...]) -> Scenario:
    setup = draw(setups(replays))
    jumps = st.lists(st.tuples(st.integers(0, 150), st.sampled_from([0.5, 11.0, 40.0])), max_size=3)
    return Scenario(setup, draw(arrivals(setup.max_model_len - 1)), tuple(draw(jumps)), draw(st.integers(0, 2**32 - 1)))


def play(scenario: Scenario) -> Session:
    """Runs a scenario to its end, with all checks of `Session`."""
    with pytest.MonkeyPatch.context() as patch:
        session = Session(scenario.setup, patch, scenario.seed)
        pending, made = list(scenario.arrivals), dict[int, Request | None]()
        due: list[tuple[int, Request]] = []
        limit = scenario.setup.max_model_len - 1
        tick = 0
        while pending or session.engine.has_unfinished:
            while pending and (pending[0].at <= tick or not session.engine.has_unfinished):
                arrival = pending.pop(0)
                before = None if arrival.follows is None else made[arrival.follows]
                prompt = TEXT[: arrival.shared]
                if before is not None:
                    prompt = before.prompt_ids + before.sequences[0].output_ids
                prompt = (prompt + ids(arrival.length, len(made)))[-limit:] if before else prompt + ids(
                    arrival.length, len(made)
                )
                request = submit(session, prompt[:limit], arrival.sampling)
                made[len(made)] = request
                if request is not None and arrival.abort is not None:
                    due.append((tick + arrival.abort, request))
            for step, request in list(due):
                if step <= tick:
                    due.remove((step, request))
                    session.abort(request)
            session.device.clock.advance(sum(seconds for step, seconds in scenario.jumps if step == tick))
            session.step()
            tick += 1
        session.finish()
    return session


def submit(session: Session, prompt: list[int], sampling: SamplingParams) -> Request | None:
    """None for a request that is refused, as it has to be."""
    engine = session.engine
    room = engine.has_room
    try:
        request = session.add(prompt, sampling)
    except QueueFullError:
        assert not room
        return None
    except RequestError:
        answer = 1 if engine.config.type == "prompt" else min(sampling.max_tokens, session.setup.max_model_len - len(prompt))
        ledger = engine.scheduler.ledgers[0]
        assert -(-(len(prompt) + answer) // ledger.block_size) > ledger.num_blocks
        return None
    assert room
    return request


QUICK = settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)


@QUICK
@given(scenario=scenarios((("off", "off"),)))
def test_without_replay_answers_are_those_of_each_request_alone(scenario: Scenario) -> None:
    play(scenario)


@QUICK
@given(scenario=scenarios((("mask", "off"), ("compact", "off"))))
def test_with_decoder_replay_only_the_end_of_the_prompt_counts(scenario: Scenario) -> None:
    play(scenario)


@QUICK
@given(scenario=scenarios((("off", "on"), ("mask", "on"), ("compact", "on"))))
def test_with_encoder_replay_answers_follow_from_the_hit(scenario: Scenario) -> None:
    play(scenario)


_ = (Counter, np, example, note)
