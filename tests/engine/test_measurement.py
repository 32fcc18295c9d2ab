"""When what is counted: the engine over a fake device, whose clock is the time."""

from __future__ import annotations

import dataclasses

import pytest
from fake_engine import Setup, fake_engine

from di_jax.engine.engine import Engine
from di_jax.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
OFF = {"replay": {"decoder": "off", "encoder": "off"}}


def engine_of(monkeypatch: pytest.MonkeyPatch, *, asynchronous: bool) -> Engine:
    engine, _ = fake_engine(Setup(config={**OFF, "async_scheduling": asynchronous}), monkeypatch)
    return engine


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_time_to_the_first_token_is_counted_when_it_comes(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer may take minutes, and a request that is aborted meanwhile had its first token all the same."""
    engine = engine_of(monkeypatch, asynchronous=asynchronous)
    first_token = engine.metrics.first_token
    two = [engine.add_request([5] * length, GREEDY) for length in (300, 20)]
    seen = []
    while not all(request.first_token for request in two):
        assert engine.step() is not None
        seen.append((first_token.total, sum(request.first_token is not None for request in two)))
    assert all(counted == came for counted, came in seen) and seen[0] != seen[-1]
    assert not any(request.finished for request in two)
    times = [request.first_token - request.arrived for request in two]  # type: ignore[operator]
    assert first_token.sum == pytest.approx(sum(times))
    engine.abort(two[0].request_id)
    while engine.step() is not None:
        pass
    assert first_token.total == 2, "not again at the end"


def test_requests_without_a_first_token_and_with_several_answers_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(monkeypatch, asynchronous=True)
    lost = engine.add_request([5] * 600, GREEDY)
    engine.step()
    engine.abort(lost.request_id)
    three = engine.add_request([6] * 40, dataclasses.replace(GREEDY, n=3, temperature=1.0, seq_seed=1, max_tokens=1))
    while engine.step() is not None:
        pass
    assert lost.first_token is None and three.finished and engine.metrics.first_token.total == 1
