"""Requests whose sampling asks for more than a temperature, through the whole engine."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from di_jax.commands.generate import output_record
from di_jax.config import Config
from di_jax.engine.extra_sampling import COUNT
from di_jax.llm import LLM, CompletionOutput, Logprob, SamplingParams, _known_job

PROMPT = {"prompt_token_ids": [5, 80, 33, 7, 61, 12]}


def answer(llm: LLM, prompt: Any = PROMPT, **sampling: Any) -> CompletionOutput:
    (output,) = llm.generate([prompt], sampling)
    assert output.error is None, output.error
    return output.outputs[0]


@pytest.fixture(autouse=True)
def nothing_compiles(llm: LLM) -> Any:
    """Whatever is asked for: warm-up covered it."""
    before = llm.engine.compiles_after_warmup
    yield
    assert llm.engine.compiles_after_warmup == before


def test_t17_logprobs_are_those_of_teacher_forcing(llm: LLM) -> None:
    """Of sampled tokens decoded one by one, against prompts that hold the answer so far."""
    made = answer(llm, temperature=1.5, top_p=0.9, seq_seed=11, logprobs=20, max_tokens=7)
    assert made.logprobs is not None and len(made.logprobs) == len(made.token_ids) == 7
    prompts = [{"prompt_token_ids": PROMPT["prompt_token_ids"] + made.token_ids[:at]} for at in range(7)]
    forced = [{"max_tokens": 1, "logprobs": 20, "forced_token_ids": [token]} for token in made.token_ids]
    for place, told, token in zip(llm.generate(prompts, forced), made.logprobs, made.token_ids, strict=True):
        assert place.outputs[0].logprobs is not None
        (want,) = place.outputs[0].logprobs
        assert next(iter(told)) == token, "the token itself comes first"
        assert 20 <= len(told) <= 21
        for other in told.keys() & want.keys():
            assert told[other].logprob == pytest.approx(want[other].logprob, abs=1e-3)
        best = [other for other in told if told[other].rank <= 18]
        assert set(best) <= want.keys()
        assert sorted(told[o].rank for o in told if o != token or told[o].rank <= 20) == list(range(1, 21))
    assert made.cumulative_logprob == pytest.approx(
        sum(told[token].logprob for told, token in zip(made.logprobs, made.token_ids)), abs=1e-4
    )


def test_logprobs_0_are_of_the_token_alone(llm: LLM) -> None:
    made = answer(llm, logprobs=0, max_tokens=3)
    assert made.logprobs is not None
    assert [list(told) for told in made.logprobs] == [[token] for token in made.token_ids]
    assert all(told[token].rank == 1 for told, token in zip(made.logprobs, made.token_ids))
    assert answer(llm, max_tokens=3).logprobs is None


def test_filters_that_leave_one_id_are_greedy(llm: LLM) -> None:
    want = answer(llm).token_ids
    for only in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert answer(llm, temperature=2.0, seq_seed=3, **only).token_ids == want
    assert answer(llm, temperature=2.0, seq_seed=3).token_ids != want


def test_filtered_answers_stay_inside(llm: LLM) -> None:
    """Every sampled token is among the k likeliest, and the filter matters."""
    outputs = llm.generate(
        [PROMPT] * 6, [{"temperature": 5.0, "top_k": 4, "logprobs": 4, "seq_seed": s} for s in range(6)]
    )
    ranks = [told[t].rank for o in outputs for told, t in zip(o.outputs[0].logprobs, o.outputs[0].token_ids)]  # type: ignore[arg-type]
    assert max(ranks) <= 4 and len(set(ranks)) == 4
    free = answer(llm, temperature=5.0, seq_seed=0, logprobs=0)
    assert max(told[t].rank for told, t in zip(free.logprobs, free.token_ids)) > 4  # type: ignore[arg-type]


def test_neighbours_of_such_requests_get_what_they_get_alone(llm: LLM) -> None:
    plain = [{"temperature": 1.0, "seq_seed": seed} for seed in range(4)]
    alone = [o.outputs[0] for o in llm.generate([PROMPT] * 4, plain)]
    shaped = [{"repetition_penalty": 3.0, "logprobs": 2}, {"top_p": 0.5, "temperature": 1.0, "seq_seed": 9}]
    mixed = llm.generate([PROMPT] * 6, [plain[0], shaped[0], plain[1], plain[2], shaped[1], plain[3]])
    neighbours = [mixed[at].outputs[0] for at in (0, 2, 3, 5)]
    assert [a.token_ids for a in neighbours] == [a.token_ids for a in alone]
    # Their rows moved, so the model's own rounding may differ.
    np.testing.assert_allclose(
        [a.cumulative_logprob for a in neighbours], [a.cumulative_logprob for a in alone], atol=1e-4
    )


def test_penalties_only_pass_over_what_was_said(llm: LLM) -> None:
    """Greedily: whatever the raw logits like better than an emitted token stands in the prompt or the answer so far."""
    numbers = {"presence_penalty": 0.5, "frequency_penalty": 0.75, "repetition_penalty": 1.5}
    made = answer(llm, max_tokens=40, logprobs=20, ignore_eos=True, **numbers)
    assert made.logprobs is not None
    passed = 0
    for at, (told, token) in enumerate(zip(made.logprobs, made.token_ids)):
        said = {*PROMPT["prompt_token_ids"], *made.token_ids[:at]}
        better = {other for other in told if told[other].rank < told[token].rank}
        assert better <= said, at
        passed += bool(better)
    assert passed, "the penalties changed something"
    # The slot counted what was said.
    state = llm.engine.runner._sampling.state
    assert state is not None
    counts = np.asarray(state.marks) & COUNT
    assert any((slot == np.bincount(made.token_ids, minlength=len(slot))).all() for slot in counts)


def test_a_strong_penalty_says_nothing_twice(llm: LLM) -> None:
    made = answer(
        llm, max_tokens=40, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=100.0, ignore_eos=True
    )
    assert len(set(made.token_ids)) == 40 and not set(made.token_ids) & set(PROMPT["prompt_token_ids"])
    free = answer(llm, max_tokens=40, ignore_eos=True)
    assert len(set(free.token_ids)) < 40


def test_a_bias_pulls_and_forbids(llm: LLM) -> None:
    assert answer(llm, logit_bias={"77": 100}, max_tokens=4).token_ids == [77] * 4
    free = answer(llm, max_tokens=4).token_ids
    out = answer(llm, logit_bias={free[0]: -100}, max_tokens=4).token_ids
    assert free[0] not in out


def test_only_allowed_ids_are_drawn(llm: LLM) -> None:
    (output,) = llm.generate([PROMPT], SamplingParams(allowed_token_ids=(9, 200, 311), max_tokens=12, seq_seed=1))
    assert set(output.outputs[0].token_ids) <= {9, 200, 311} and len(set(output.outputs[0].token_ids)) > 1


def test_min_tokens_hold_back_what_ends_an_answer(llm: LLM) -> None:
    """The end token, stop ids, and stop texts; after them the answer ends as ever."""
    free = answer(llm, max_tokens=6)
    stop = free.token_ids[2]
    early = answer(llm, max_tokens=6, stop_token_ids=[stop])
    assert early.finish_reason == "stop" and early.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    held = answer(llm, max_tokens=6, stop_token_ids=[stop], min_tokens=5)
    assert len(held.token_ids) >= 5 and stop not in held.token_ids[:5]
    text = llm.get_tokenizer().token_text(free.token_ids[0])
    assert len(answer(llm, max_tokens=6, stop=[text]).token_ids) == 1
    assert len(answer(llm, max_tokens=6, stop=[text], min_tokens=3).token_ids) > 3 or text not in free.text[len(text) :]


def test_bad_words_do_not_appear(llm: LLM) -> None:
    free = answer(llm, max_tokens=8)
    tokenizer = llm.get_tokenizer()
    word = tokenizer.token_text(free.token_ids[1])
    assert word.strip() and "\ufffd" not in word, "a token that is a text of its own"
    made = answer(llm, max_tokens=8, bad_words=[word])
    assert free.token_ids[1] not in made.token_ids and word not in made.text
    pair = tokenizer.decode(free.token_ids[1:3])
    made = answer(llm, max_tokens=8, bad_words=[pair])
    assert pair not in made.text and pair in free.text


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"bad_words": ["a b c d e f g h i j k"]}, "at most 8"),
        ({"bad_words": [f"{a} {b} x" for a in "abcdefgh" for b in "abcdefgh"]}, "at most 64"),
    ],
)
def test_words_that_cannot_be_kept_out_are_refused(llm: LLM, sampling: Any, words: str) -> None:
    (output,) = llm.generate([PROMPT], sampling)
    assert output.error is not None and words in output.error["message"], output.error


def test_a_request_that_forbids_everything_is_refused(llm: LLM) -> None:
    params = SamplingParams(allowed_token_ids=(9,), stop_token_ids=(9,), min_tokens=1, max_tokens=2)
    (output,) = llm.generate([PROMPT], params)
    assert output.error is not None and "leave none" in output.error["message"]


def test_choices_of_one_prompt_have_slots_of_their_own(llm: LLM) -> None:
    params = SamplingParams(n=3, frequency_penalty=2.0, seq_seed=5, max_tokens=8, logprobs=1)
    (output,) = llm.generate([PROMPT], params)
    assert len({tuple(a.token_ids) for a in output.outputs}) == 3
    alone = answer(llm, temperature=1.0, frequency_penalty=2.0, seq_seed=5, max_tokens=8)
    assert output.outputs[0].token_ids == alone.token_ids
    assert all(a.logprobs is not None and len(a.logprobs) == len(a.token_ids) for a in output.outputs)


def test_streamed_logprobs_grow_with_the_answer(llm: LLM) -> None:
    seen = [output.outputs[0] for output in llm.stream(PROMPT, {"max_tokens": 5, "logprobs": 2})]
    assert [len(a.logprobs or ()) for a in seen] == [len(a.token_ids) for a in seen]
    assert seen[-1].logprobs is not None and seen[0].logprobs == seen[-1].logprobs[:1]


def test_records_of_logprobs(llm: LLM) -> None:
    """As JSON, and back from another process."""
    (output,) = llm.generate([PROMPT], {"max_tokens": 2, "logprobs": 1})
    record = json.loads(json.dumps(output_record("a", output)))["outputs"][0]
    first = output.outputs[0].logprobs[0]  # type: ignore[index]
    assert record["logprobs"][0] == {str(token): dataclasses.asdict(known) for token, known in first.items()}
    assert all(set(known) == {"logprob", "rank", "decoded_token"} for known in record["logprobs"][0].values())
    known = _known_job(json.loads(json.dumps(dataclasses.asdict(output)))).output(llm.get_tokenizer())
    assert known.outputs == output.outputs
    (plain,) = llm.generate([PROMPT], {"max_tokens": 2})
    assert "logprobs" not in output_record("a", plain)["outputs"][0]
    assert isinstance(next(iter(first.values())), Logprob)


def test_defaults_of_the_config_count(llm: LLM, tiny_config: Config) -> None:
    """A config's `sampling` is every request's, unless it says otherwise."""
    defaults = tiny_config.with_values({"sampling.logit_bias": {"77": 100}}).sampling
    params = SamplingParams.from_dict({"max_tokens": 3}, defaults)
    assert llm.generate([PROMPT], params)[0].outputs[0].token_ids == [77] * 3
    params = SamplingParams.from_dict({"max_tokens": 3, "logit_bias": None}, defaults)
    assert llm.generate([PROMPT], params)[0].outputs[0].token_ids == answer(llm, max_tokens=3).token_ids
