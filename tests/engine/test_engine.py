"""The engine loop over the golden tiny model: what it compiles, frees, stops at, and survives."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from di_jax.engine.compile_counter import COMPILATIONS
from di_jax.engine.engine import Engine
from di_jax.engine.runner import StepOutput
from di_jax.engine.sequence import Request, perplexity
from di_jax.engine.step_policy import DECODE, PREFILL
from di_jax.llm import LLM
from di_jax.prompts import RequestError
from di_jax.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def engine(llm: LLM) -> Engine:
    """The shared engine, which has to come back empty."""
    assert_all_free(llm.engine)
    return llm.engine


@pytest.fixture(scope="module")
def goldens(golden: Path) -> dict[str, np.ndarray]:
    return load_file(golden / "tiny-v41.kvq.safetensors")


def assert_all_free(engine: Engine) -> None:
    engine.scheduler.check()
    assert engine.scheduler.ledgers[0].num_available == engine.scheduler.ledgers[0].num_blocks
    assert engine.scheduler.ledgers[0].num_free_slots == engine.scheduler.ledgers[0].num_slots
    assert not engine.requests and not engine.has_unfinished


def finish(engine: Engine, *requests: Request) -> list[list[int]]:
    """Steps until nothing is left; the answers' ids."""
    while engine.has_unfinished:
        assert engine.step() is not None
    assert engine.step() is None
    assert_all_free(engine)
    assert all(request.finished for request in requests)
    return [sequence.output_ids for request in requests for sequence in request.sequences]


def ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


def test_200_mixed_steps_after_warm_up_compile_nothing(engine: Engine) -> None:
    before = COMPILATIONS.count
    choose = random.Random(5)
    kinds: set[str] = set()
    steps = 0
    while steps < 200:
        while len(engine.requests) < 6:
            sampling = SamplingParams(
                temperature=choose.choice([0, 0.7, 1.0]),
                max_tokens=choose.randint(1, 20),
                n=choose.choice([1, 1, 2]),
                stop_token_ids=(choose.randrange(512),),
            )
            engine.add_request(ids(choose.randint(1, 300), steps), sampling)
        report = engine.step()
        assert report is not None and report.requests is not None
        kinds.add(report.kind)
        steps += 1
        engine.scheduler.check()
        if steps % 17 == 0:
            engine.abort(next(iter(engine.requests)))
    assert kinds == {PREFILL, DECODE}
    finish(engine)
    assert COMPILATIONS.count == before
    assert engine.compiles_after_warmup == before - engine.compiles_when_ready


def test_the_counter_sees_a_compilation(engine: Engine) -> None:
    import jax

    before = COMPILATIONS.count
    jax.jit(lambda x: x * 3 + before)(np.arange(before % 7 + 3, dtype=np.float32)).block_until_ready()
    assert COMPILATIONS.count > before


def test_a_slot_and_blocks_used_before_leave_no_trace(engine: Engine, goldens: dict[str, np.ndarray]) -> None:
    want = goldens["p7/greedy_ids"][:8].tolist()
    for before in ("p300", "p150", "p7"):
        finish(engine, engine.add_request(goldens[f"{before}/input_ids"].tolist(), GREEDY))
        assert finish(engine, engine.add_request(goldens["p7/input_ids"].tolist(), GREEDY)) == [want]


def test_a_prompt_that_joins_late_changes_nobody(engine: Engine, goldens: dict[str, np.ndarray]) -> None:
    prompt = goldens["p64/input_ids"].tolist()
    want = goldens["p64/greedy_ids"].tolist()
    first = engine.add_request(prompt, dataclasses.replace(GREEDY, max_tokens=20))
    for _ in range(7):
        engine.step()
    late = [engine.add_request(ids(n, n), GREEDY) for n in (300, 1, 129)]
    again = engine.add_request(prompt, dataclasses.replace(GREEDY, max_tokens=20))
    answers = finish(engine, first, *late, again)
    assert answers[0] == answers[-1] == want[:20]


def test_more_requests_than_slots_wait_their_turn(engine: Engine) -> None:
    requests = [engine.add_request(ids(40, seed), GREEDY) for seed in range(12)]
    alone = [list(answer) for answer in finish(engine, *requests)]
    assert [len(answer) for answer in alone] == [8] * 12
    assert finish(engine, engine.add_request(ids(40, 11), GREEDY)) == [alone[11]]


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([], {}, "prompt: is empty"),
        ([5] * 384, {}, "prompt: has 384 tokens; engine.max_model_len = 384 leaves room for 383"),
        ([5, 512], {}, "prompt_token_ids[1]: 512 is not a token id of the model, 0 to 511"),
        ([-1], {}, "prompt_token_ids[0]: -1 is not a token id"),
        ([5, True], {}, "prompt_token_ids[1]: True is not a token id"),
        ([1.0], {}, "prompt_token_ids[0]: 1.0 is not a token id"),
        (["5"], {}, "prompt_token_ids[0]: '5' is not a token id"),
        ([5], {"stop_token_ids": [512]}, "sampling.stop_token_ids[0]: 512 is not a token id"),
        ([5], {"forced_token_ids": [-1, 700]}, "sampling.forced_token_ids[1]: 700 is not a token id"),
    ],
)
def test_bad_requests_are_refused_and_nothing_is_queued(
    engine: Engine, prompt: list[Any], sampling: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        engine.add_request(prompt, SamplingParams.from_dict(sampling))
    assert words in str(caught.value)
    assert_all_free(engine)


def test_a_request_that_no_pool_can_hold_is_refused(llm: LLM) -> None:
    parts = dataclasses.replace(llm.engine.parts, layout=dataclasses.replace(llm.engine.parts.layout, num_blocks=2))
    small = Engine(parts, llm.config.engine)
    with pytest.raises(RequestError, match=r"360 tokens, 3 blocks of 128; the engine has 2: .*sampling.max_tokens"):
        small.add_request([5] * 300, SamplingParams(max_tokens=60))
    assert_all_free(small)
    assert len(finish(small, small.add_request([5] * 250, SamplingParams(max_tokens=6, ignore_eos=True)))[0]) == 6


def test_the_same_id_twice_at_once_is_refused(engine: Engine) -> None:
    request = engine.add_request([5], GREEDY, "mine")
    with pytest.raises(RequestError, match="'mine' is running already"):
        engine.add_request([5], GREEDY, "mine")
    finish(engine, request)
    finish(engine, engine.add_request([5], GREEDY, "mine"))


def test_the_answer_is_clipped_to_the_context(engine: Engine) -> None:
    request = engine.add_request(ids(380), dataclasses.replace(GREEDY, max_tokens=1000))
    assert [len(answer) for answer in finish(engine, request)] == [4]
    assert request.sequences[0].finish_reason == "length"


def test_forced_tokens_replay_a_trajectory(engine: Engine, goldens: dict[str, np.ndarray]) -> None:
    prompt, want = goldens["p7/input_ids"].tolist(), goldens["p7/greedy_ids"].tolist()
    free = engine.add_request(prompt, GREEDY)
    finish(engine, free)
    hot = SamplingParams(temperature=1, max_tokens=8, ignore_eos=True, seq_seed=4, forced_token_ids=(*want[:5], -1))
    forced = engine.add_request(prompt, hot)
    finish(engine, forced)
    assert forced.sequences[0].output_ids[:5] == want[:5]
    np.testing.assert_allclose(forced.sequences[0].logprobs[:5], free.sequences[0].logprobs[:5], atol=1e-4)
    other = engine.add_request(prompt, dataclasses.replace(GREEDY, forced_token_ids=(7, -1, 9)))
    answer = finish(engine, other)[0]
    assert (answer[0], answer[2]) == (7, 9) and answer[1] != want[1]


def test_the_order_of_stops(engine: Engine, goldens: dict[str, np.ndarray]) -> None:
    prompt, greedy = goldens["p300/input_ids"].tolist(), goldens["p300/greedy_ids"].tolist()
    eos = engine.parts.model_config.eos_token_id
    at = greedy.index(eos)

    def ending(**fields: Any) -> tuple[int, str | None, str | int | None]:
        request = engine.add_request(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 32, **fields}))
        finish(engine, request)
        sequence = request.sequences[0]
        assert sequence.output_ids == greedy[: len(sequence.output_ids)]
        return len(sequence.output_ids), sequence.finish_reason, sequence.stop_reason

    assert ending() == (at + 1, "stop", None)
    assert ending(stop_token_ids=(eos,), max_tokens=at + 1) == (at + 1, "stop", None)
    assert ending(stop_token_ids=(eos,), ignore_eos=True) == (at + 1, "stop", eos)
    assert ending(stop_token_ids=(greedy[3], greedy[6])) == (4, "stop", greedy[3])
    assert ending(stop_token_ids=(greedy[3],), max_tokens=4) == (4, "stop", greedy[3])
    assert ending(max_tokens=3) == (3, "length", None)
    assert ending(ignore_eos=True, max_tokens=at + 1) == (at + 1, "length", None)
    text = engine.parts.tokenizer.decode([greedy[3]])
    assert text.isalpha()
    assert ending(stop=text) == (4, "stop", text)
    assert ending(stop=text, stop_token_ids=(greedy[3],), max_tokens=4) == (4, "stop", greedy[3])
    assert ending(stop=text, max_tokens=4) == (4, "stop", text)


def test_logits_that_are_not_finite_fail_their_request_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = engine.parts.runner.execute

    class Spoiled:
        """A step's output whose second chunk came out as NaN."""

        def __init__(self, plan: Any) -> None:
            (output,) = execute(plan).host()
            logprob = np.array(output.logprob)
            logprob[1] = np.nan
            self.output = dataclasses.replace(output, logprob=logprob)

        def host(self) -> list[StepOutput]:
            return [self.output]

    good = engine.add_request(ids(20), GREEDY)
    bad = engine.add_request(ids(20, 1), dataclasses.replace(GREEDY, n=2))
    monkeypatch.setattr(engine.parts.runner, "execute", lambda plan: execute(plan) if bad.failure else Spoiled(plan))
    answers = finish(engine, good, bad)
    assert len(answers[0]) == 8 and good.failure is None
    assert bad.failure is not None and bad.failure.type == "model_error" and "not finite" in bad.failure.message
    assert [s.finish_reason for s in bad.sequences] == [None, None]


def break_step(engine: Engine, patch: pytest.MonkeyPatch, error: BaseException, *, after: int) -> None:
    """The executable of the step after `after` good ones takes the state and raises, once."""
    runner, count = engine.parts.runner, itertools.count()

    def breaking(executable: Any) -> Any:
        def call(*arguments: Any) -> Any:
            result = executable(*arguments)
            if next(count) == after:
                raise error
            return result

        return call

    for key, executable in list(runner._compiled.items()):
        patch.setitem(runner._compiled, key, breaking(executable))


FAILURES = [
    (KeyboardInterrupt(), "interrupted", "was interrupted"),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room"), "model_error", "RESOURCE_EXHAUSTED: no room"),
]


@pytest.mark.parametrize(("error", "kind", "words"), FAILURES, ids=["interrupt", "device"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_broken_step_fails_what_runs_and_nothing_else(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: BaseException, kind: str, words: str, after: int
) -> None:
    want = finish(engine, engine.add_request(ids(9, 3), GREEDY))
    running = [engine.add_request(ids(9, seed), GREEDY) for seed in range(8)]
    waiting = [engine.add_request(ids(9, seed), GREEDY) for seed in (3, 4)]
    changes = engine.changes
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        break_step(engine, patch, error, after=after)
        for _ in range(after + 1):
            engine.step()
    for request in running:
        assert request.finished and request.failure is not None
        assert request.failure.type == kind and words in request.failure.message
        assert {s.finish_reason for s in request.sequences} == {None}
    # The step before the broken one was in flight.
    assert engine.changes == changes + max(0, after - 1) + len(running)
    assert engine.scheduler.ledgers[0].num_free_slots == engine.scheduler.ledgers[0].num_slots
    assert list(engine.requests.values()) == waiting
    assert finish(engine, *waiting)[0] == want[0] and all(r.failure is None for r in waiting)


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_result_that_does_not_come_empties_the_state(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The state was replaced by then, by the result of the broken step."""
    want = finish(engine, engine.add_request(ids(9), GREEDY))
    request = engine.add_request(ids(9), GREEDY)
    engine.step()
    old, resets = engine.parts.runner.state, engine.parts.runner.resets

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError(f"broken on the {place}")

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        if place == "device":
            patch.setattr(StepOutput, "host", fail)
        else:
            patch.setattr(engine.results, "book", fail)
        engine.step()
    assert engine.parts.runner.resets == resets + 1
    assert old.last_token.is_deleted() and not engine.parts.runner.state.last_token.is_deleted()
    assert request.failure is not None and f"ZeroDivisionError: broken on the {place}" in request.failure.message
    assert finish(engine, engine.add_request(ids(9), GREEDY)) == want


def test_a_second_interrupt_while_recovering(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step finds what the recovery left undone."""
    request = engine.add_request(ids(9), GREEDY)
    late = [engine.add_request(ids(9, seed), GREEDY) for seed in range(8)]  # one more than there are slots left
    engine.step()

    def again() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        break_step(engine, patch, KeyboardInterrupt(), after=0)
        patch.setattr(engine.parts.runner, "_allocate", again)
        engine.step()
    assert engine.parts.runner.state.last_token.is_deleted() and not request.finished
    assert engine.step() is not None
    assert request.failure is not None and "its caches were lost" in request.failure.message
    assert late[0].failure is not None and late[-1].failure is None
    finish(engine, late[-1])


def test_two_engines_over_one_runner_both_notice(llm: LLM, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Engine(engine.parts, llm.config.engine)
    theirs = other.add_request(ids(9), GREEDY)
    other.step()
    engine.add_request(ids(9, 1), GREEDY)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        break_step(engine, patch, KeyboardInterrupt(), after=0)
        engine.step()
    assert other.step() is None
    assert theirs.failure is not None and theirs.failure.type == "model_error"
    assert_all_free(other)


def test_numpy_integers_are_token_ids(engine: Engine) -> None:
    plain = engine.add_request([5, 6, 7], GREEDY)
    mixed = engine.add_request([np.int32(5), np.uint8(6), 7], GREEDY)
    array = engine.add_request(np.array([5, 6, 7]), GREEDY)  # type: ignore[arg-type]
    answers = finish(engine, plain, mixed, array)
    assert answers[0] == answers[1] == answers[2]
    assert all(type(i) is int for request in (mixed, array) for i in request.prompt_ids)
    for bad in (np.True_, np.int64(512), np.float32(5), None):
        with pytest.raises(RequestError, match=r"prompt_token_ids\[1\]: .* is not a token id of the model, 0 to 511"):
            engine.add_request([5, bad], GREEDY)
    with pytest.raises(RequestError, match="prompt: is empty"):
        engine.add_request(np.array([], int), GREEDY)  # type: ignore[arg-type]


def test_a_stop_text_that_the_last_byte_completes(engine: Engine) -> None:
    """A character left unfinished becomes U+FFFD at the end of the answer, and may be, or complete, a stop text."""
    half = next(i for i in range(512) if engine.parts.tokenizer.token_bytes(i) == b"\xa1")
    word = engine.parts.tokenizer.encode("a")

    def answer(**fields: Any) -> tuple[str, str | None, str | int | None]:
        sampling = SamplingParams(**{"temperature": 0, "max_tokens": 2, "ignore_eos": True, **fields})
        request = engine.add_request([5], dataclasses.replace(sampling, forced_token_ids=(*word, half)))
        finish(engine, request)
        sequence = request.sequences[0]
        return sequence.text, sequence.finish_reason, sequence.stop_reason

    assert len(word) == 1
    assert answer() == ("a\ufffd", "length", None)
    assert answer(stop="\ufffd") == ("a", "stop", "\ufffd")
    assert answer(stop="a\ufffd") == ("", "stop", "a\ufffd")
    assert answer(stop="a\ufffd", include_stop_str_in_output=True) == ("a\ufffd", "stop", "a\ufffd")
    assert answer(stop="a\ufffdb") == ("a\ufffd", "length", None)


def test_metrics_count_what_happened(engine: Engine) -> None:
    request = engine.add_request(ids(10), dataclasses.replace(GREEDY, n=3, max_tokens=5))
    assert request.metrics()["ttft_s"] is None and request.metrics()["decode_ppl"] is None
    finish(engine, request)
    metrics = request.metrics()
    assert metrics["decode_steps"] == 3 * 4
    ttft, total, ppl = metrics["ttft_s"], metrics["total_s"], metrics["decode_ppl"]
    assert ttft is not None and total is not None and 0 < ttft <= total
    logprobs = [p for s in request.sequences for p in s.logprobs]
    assert ppl == pytest.approx(np.exp(-np.mean(logprobs)))
    names = ("num_cached_tokens", "drafted_tokens", "verified_tokens", "accepted_tokens")
    assert [metrics[name] for name in names] == [0] * 4
    means = ("accept_rate", "accepted_length", "verified_length", "confidence_error")
    assert [metrics[name] for name in means] == [None] * 4, "none is drafted"


def test_perplexity_of_the_impossible_is_no_number() -> None:
    assert perplexity([]) is None
    assert perplexity([-1e6]) is None
    assert perplexity([0.0, -2.0]) == pytest.approx(np.e)
