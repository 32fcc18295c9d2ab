"""The engine over the golden tiny model: a mix of requests, and prompts that begin like earlier ones, get the answers
that each would get alone from empty caches. Without cache quantizers, in float32, and without replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from fake_session import ids
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from di_jax.config import Config, EngineGroup
from di_jax.engine.engine import Engine
from di_jax.engine.sequence import Request, Sequence
from di_jax.engine.setup import EngineParts, build_engine_parts
from di_jax.sampling_params import SamplingParams, choice_seed

TEXT = ids(383, 98, 500)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
NO_REPLAY = {"decoder": "off", "encoder": "off"}
LOGPROB = 2e-4  # chunks of other sizes round otherwise


def config_of(golden: Path, **engine: Any) -> Config:
    return Config.from_dict(
        {
            "model": {"path": str(golden / "tiny-v41-fp8"), "dtype": "float32", "quantize_caches": False},
            "engine": {
                "max_num_seqs": 6,
                "max_num_batched_tokens": 128,
                "prefill_buckets": [128],
                "decode_buckets": [6],
                "max_model_len": 384,
                "num_blocks": 16,
                "log_interval": 0,
                "replay": NO_REPLAY,
                **engine,
            },
        }
    )


@dataclasses.dataclass
class Model:
    """A warm runner. Engines over it are made one after the other; each finds caches that it takes for empty."""

    parts: EngineParts
    config: EngineGroup
    known: dict[Any, tuple[list[int], list[float]]] = dataclasses.field(default_factory=dict)

    def engine(self, num_blocks: int | None = None, **changes: Any) -> Engine:
        parts = self.parts
        if num_blocks is not None:
            parts = dataclasses.replace(parts, layout=dataclasses.replace(parts.layout, num_blocks=num_blocks))
        return Engine(parts, dataclasses.replace(self.config, **changes))

    def alone(self, prompt: list[int], sampling: SamplingParams, index: int = 0) -> tuple[list[int], list[float]]:
        """The tokens of one answer and their log-probabilities, computed by a synchronous engine that does nothing
        else and knows no prefixes. Not while another engine runs."""
        seed = choice_seed(sampling.resolved_seed(), index)
        sampling = dataclasses.replace(sampling, n=1, seq_seed=seed, priority=0, cache_salt=None)
        key = tuple(prompt), repr(sampling)  # it may hold a mapping
        if key not in self.known:
            engine = self.engine(async_scheduling=False, prefix_caching=False)
            request = engine.add_request(prompt, sampling)
            drain(engine)
            (sequence,) = request.sequences
            self.known[key] = sequence.output_ids, sequence.logprobs
        return self.known[key]


@pytest.fixture(scope="module")
def model(golden: Path) -> Iterator[Model]:
    config = config_of(golden)
    made = Model(build_engine_parts(config), config.engine)
    made.engine()  # compiles
    yield made


def drain(engine: Engine) -> None:
    """Steps until nothing is left; all is free then."""
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check()
    assert engine.step() is None and not engine.requests
    for ledger in engine.scheduler.ledgers:
        assert ledger.num_available == ledger.num_blocks and ledger.num_free_slots == ledger.num_slots


def same(sequence: Sequence, want: tuple[list[int], list[float]]) -> bool:
    """Whether an answer is the beginning of another."""
    count = len(sequence.output_ids)
    return sequence.output_ids == want[0][:count] and bool(
        np.allclose(sequence.logprobs, want[1][:count], atol=LOGPROB, rtol=0)
    )


# ---- any mix ----


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request before step `at`: `shared` tokens of TEXT, then `length` of its own; abort: steps later."""

    at: int
    shared: int
    length: int
    sampling: SamplingParams
    abort: int | None


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """Most prompts end shortly before a block does: then blocks run out while they decode."""
    made, at = [], 0
    for _ in range(draw(st.integers(2, 6))):
        at += draw(st.sampled_from([0, 0, 1, 4, 12]))
        shared = draw(st.sampled_from([0, 120, 150, 256]))
        near = draw(st.sampled_from([128, 256])) - draw(st.integers(1, 14)) - shared
        sampling = dataclasses.replace(
            GREEDY,
            temperature=draw(st.sampled_from([0.0, 0.7])),
            max_tokens=draw(st.integers(1, 20)),
            n=draw(st.sampled_from([1, 1, 2, 3])),
            seq_seed=draw(st.integers(0, 2**64 - 1)),
            ignore_eos=draw(st.booleans()),
            priority=draw(st.sampled_from([0, 0, 1])),
        )
        length = draw(st.one_of(st.just(near) if near > 0 else st.integers(1, 60), st.integers(1, 100)))
        made.append(Arrival(at, shared, length, sampling, draw(st.sampled_from([None, None, None, 0, 1, 3, 9]))))
    return made


def run_mix(model: Model, mix: list[Arrival], num_blocks: int, changes: dict[str, Any]) -> Engine:
    """The engine that answered a mix, as it has to."""
    engine = model.engine(num_blocks, **changes)
    pending, requests, aborts, tick = list(mix), list[Request](), list[tuple[int, Request]](), 0
    while pending or engine.has_unfinished:
        while pending and (pending[0].at <= tick or not engine.has_unfinished):
            arrival = pending.pop(0)
            prompt = TEXT[: arrival.shared] + ids(arrival.length, len(requests), 500)
            requests.append(engine.add_request(prompt, arrival.sampling))
            if arrival.abort is not None:
                aborts.append((tick + arrival.abort, requests[-1]))
        for _, request in [one for one in aborts if one[0] == tick]:
            engine.abort(request.request_id)
            engine.scheduler.check()
        engine.step()
        engine.scheduler.check()
        tick += 1
        assert tick < 2000, "requests do not get on"
    drain(engine)
    assert engine.compiles_after_warmup == 0
    for request in requests:
        for sequence in request.sequences:
            assert same(sequence, model.alone(request.prompt_ids, request.sampling, sequence.index))
            assert sequence.finish_reason in ("stop", "length", "abort")
    return engine


@settings(max_examples=14, suppress_health_check=list(HealthCheck))
@given(
    mix=arrivals(),
    num_blocks=st.sampled_from([4, 5, 7, 16]),
    changes=st.fixed_dictionaries(
        {
            "async_scheduling": st.sampled_from([True, True, False]),
            "prefix_caching": st.sampled_from([True, True, False]),
            "state_cache_bytes": st.sampled_from([2**30, 2**30, 300_000, 0]),
        }
    ),
)
def test_any_mix_is_answered_as_each_request_alone(
    model: Model, mix: list[Arrival], num_blocks: int, changes: dict[str, Any]
) -> None:
    run_mix(model, mix, num_blocks, changes)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_preemptions_hits_and_forks_change_no_answer(model: Model, asynchronous: bool) -> None:
    long = dataclasses.replace(GREEDY, max_tokens=24)
    crowd = [Arrival(0, 0, 118 - number, long, None) for number in range(3)]
    later = [
        Arrival(9, 120, 30, dataclasses.replace(long, n=3, temperature=0.7, seq_seed=5), None),
        Arrival(90, 140, 60, dataclasses.replace(long, n=2), None),
        Arrival(95, 118, 3, long, 12),
    ]
    engine = run_mix(model, crowd + later, 5, {"async_scheduling": asynchronous})
    assert engine.scheduler.preemptions and engine.metrics.prefix_hits and engine.scheduler.ledgers[0].evictions


# ---- prefixes ----


def answer(engine: Engine, prompt: list[int], **fields: Any) -> Sequence:
    request = engine.add_request(prompt, dataclasses.replace(GREEDY, **fields))
    drain(engine)
    return request.sequences[0]


# The window is 16: the last 22 tokens are always computed.
HITS = {
    1: 0,
    127: 0,
    128: 0,
    129: 0,
    149: 0,
    150: 128,
    151: 128,
    255: 128,
    256: 128,
    277: 128,
    278: 256,
    279: 256,
    377: 256,
}


@pytest.mark.parametrize("length", HITS)
def test_a_prompt_that_comes_again_is_answered_as_before(model: Model, length: int) -> None:
    prompt = ids(length, 1000 + length, 500)
    want = model.alone(prompt, GREEDY)
    engine = model.engine()
    cold, again = answer(engine, prompt), answer(engine, prompt)
    assert (cold.num_cached_tokens, again.num_cached_tokens) == (0, HITS[length])
    assert same(cold, want) and same(again, want) and again.output_ids == cold.output_ids


@pytest.mark.parametrize(("known", "length"), [(128, 150), (128, 300), (256, 300), (300, 377), (150, 173), (377, 301)])
def test_a_prompt_that_begins_like_another_is_answered_as_alone(model: Model, known: int, length: int) -> None:
    first = ids(known, 50, 500)
    prompt = (first + ids(max(0, length - known), 51, 500))[:length]
    want = model.alone(prompt, GREEDY)
    engine = model.engine()
    answer(engine, first)
    second = answer(engine, prompt)
    # Window state is kept where a prompt ends a block: a longer one goes on from there.
    assert second.num_cached_tokens == min(known, length - 22) // 128 * 128
    assert same(second, want)


def test_after_eviction_there_is_no_hit_and_the_same_answer(model: Model) -> None:
    prompt = ids(300, 60, 500)
    want = model.alone(prompt, GREEDY)
    engine = model.engine(num_blocks=5)
    answer(engine, prompt)
    for seed in range(3):
        answer(engine, ids(300, 61 + seed, 500))
    assert engine.scheduler.ledgers[0].evictions
    again = answer(engine, prompt)
    assert again.num_cached_tokens == 0 and same(again, want)
    once_more = answer(engine, prompt)
    assert once_more.num_cached_tokens == 256 and same(once_more, want)


def test_a_hit_survives_the_eviction_of_later_blocks(model: Model) -> None:
    """The end of a chain goes first."""
    prompt, other = ids(300, 64, 500), ids(300, 65, 500)
    want = model.alone(prompt, GREEDY)
    engine = model.engine(num_blocks=4)
    answer(engine, prompt[:200])
    answer(engine, prompt)
    answer(engine, other)
    again = answer(engine, prompt)
    assert again.num_cached_tokens in (0, 128) and same(again, want)


@pytest.mark.parametrize(
    ("first", "said", "more", "hit"),
    [
        (60, 30, 40, 0),
        (100, 40, 60, 128),
        (120, 20, 100, 128),
        (127, 2, 40, 128),
        (128, 60, 100, 128),
        (200, 90, 60, 256),
    ],
)
def test_the_next_turn_of_a_conversation_goes_on_from_the_answer(
    model: Model, first: int, said: int, more: int, hit: int
) -> None:
    prompt = ids(first, 70 + first, 500)
    said_alone = model.alone(prompt, dataclasses.replace(GREEDY, max_tokens=said))
    turn = prompt + said_alone[0] + ids(more, 71, 500)
    want = model.alone(turn, GREEDY)
    engine = model.engine()
    one = answer(engine, prompt, max_tokens=said)
    assert same(one, said_alone)
    two = answer(engine, prompt + one.output_ids + ids(more, 71, 500))
    assert two.num_cached_tokens == hit and same(two, want)


@pytest.mark.parametrize("budget", [0, 30_000, 10**6])
def test_without_room_for_window_state_there_is_no_hit(model: Model, budget: int) -> None:
    """A snapshot of all ten layers is 10 x 22 rows of 64 channels in float32: 56,320 bytes."""
    prompt = ids(200, 80, 500)
    want = model.alone(prompt, GREEDY)
    engine = model.engine(state_cache_bytes=budget)
    answer(engine, prompt)
    again = answer(engine, prompt)
    assert again.num_cached_tokens == (128 if budget > 56_320 else 0) and same(again, want)
    assert engine.snapshots.nbytes == (56_320 if budget > 56_320 else 0)


# ---- what the tests see ----


def spoil_blocks(engine: Engine) -> None:
    """Another number in every cached block."""
    runner, blocks = engine.runner, jnp.array(list(engine.scheduler.ledgers[0]._cached))
    assert len(blocks)
    runner.state = runner.state.replace(compressed=runner.state.compressed.at[blocks].multiply(-1))


def spoil_snapshots(engine: Engine) -> None:
    """The window state of other tokens."""
    kept = engine.snapshots._snapshots
    for key, rings in kept.items():
        kept[key] = np.roll(rings, 1, axis=1)


def forget_restores(engine: Engine) -> None:
    """Rings that stay as their slot's last sequence left them."""
    engine.runner.restore = lambda *_: None  # type: ignore[method-assign]


@pytest.mark.parametrize("spoil", [spoil_blocks, spoil_snapshots, forget_restores])
def test_a_corrupted_block_and_a_stale_ring_are_seen(
    model: Model, spoil: Callable[[Engine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = ids(200, 90, 500)
    want = model.alone(prompt, GREEDY)
    engine = model.engine()
    monkeypatch.setattr(engine.runner, "restore", engine.runner.restore)  # put back afterwards
    assert same(answer(engine, prompt), want)
    answer(engine, ids(140, 91, 500))
    spoil(engine)
    again = answer(engine, prompt)
    assert again.num_cached_tokens == 128 and not same(again, want)


@pytest.mark.slow
def test_hits_of_many_blocks(golden: Path) -> None:
    """At 4,096 and 4,097 tokens, one more than a power of two, and at the first length that hits 4,096."""
    config = config_of(
        golden,
        max_model_len=4352,
        num_blocks=140,
        max_num_batched_tokens=1024,
        prefill_buckets=[1024],
        decode_buckets=[6],
        context_buckets=[4352],
    )
    model = Model(build_engine_parts(config), config.engine)
    for length, hit in ((4096, 3968), (4097, 3968), (4117, 3968), (4118, 4096), (4200, 4096)):
        prompt = ids(length, length, 500)
        want = model.alone(prompt, GREEDY)
        engine = model.engine()
        cold, again = answer(engine, prompt), answer(engine, prompt)
        assert (cold.num_cached_tokens, again.num_cached_tokens) == (0, hit)
        assert same(cold, want) and same(again, want)
        longer = prompt + again.output_ids + ids(60, 3, 500)
        want = model.alone(longer, GREEDY)
        engine = model.engine()
        answer(engine, prompt)
        turn = answer(engine, longer)
        assert turn.num_cached_tokens == length // 128 * 128 and same(turn, want)
