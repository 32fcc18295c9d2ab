"""Sampling fields: defaults, checks, and seeds of choices."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.config import SamplingGroup
from di_jax.errors import UserError
from di_jax.sampling_params import SamplingError, SamplingParams, choice_seed


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.max_tokens, params.top_p, params.top_k) == (1, 1.0, 16, 1.0, 0)
    assert (params.stop, params.stop_token_ids, params.seq_seed, params.forced_token_ids) == (None,) * 4
    assert (params.ignore_eos, params.include_stop_str_in_output) == (False, False)
    assert (params.skip_special_tokens, params.detokenize) == (True, True)


def test_a_request_completes_the_configs_defaults() -> None:
    defaults = SamplingGroup(temperature=0.5, max_tokens=9, stop=("end",), seq_seed=3)
    params = SamplingParams.from_dict({"max_tokens": 4, "n": 2, "stop": "x"}, defaults)
    assert (params.temperature, params.max_tokens, params.seq_seed, params.n) == (0.5, 4, 3, 2)
    assert params.stop == params.stop_texts == ("x",)
    assert SamplingParams.from_dict({}, defaults).stop_texts == ("end",)
    assert SamplingParams.from_dict({"stop": None}, defaults).stop_texts == ()


def test_every_field_of_the_config_is_one_of_a_request() -> None:
    group, params = ({f.name for f in dataclasses.fields(c)} for c in (SamplingGroup, SamplingParams))
    assert group <= params
    assert params - group == {
        "include_stop_str_in_output", "skip_special_tokens", "detokenize", "allowed_token_ids",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [("prompt_logprobs", 1), ("so_args", {"schema_type": "regex"})])
def test_what_is_to_come_is_refused_and_its_off_value_taken(name: str, value: Any) -> None:
    with pytest.raises(SamplingError, match=rf"^sampling\.{name}: .* is not available yet"):
        SamplingParams.from_dict({name: value})
    assert getattr(SamplingParams.from_dict({name: getattr(SamplingParams(), name)}), name) == getattr(
        SamplingParams(), name
    )


def test_ids_of_a_bias_may_be_text_as_json_has_them() -> None:
    params = SamplingParams.from_dict({"logit_bias": {"5": 1, 7: -2.5}})
    assert params.logit_bias == {5: 1.0, 7: -2.5}
    assert SamplingParams(logit_bias={}).logit_bias == {} and SamplingParams().logit_bias is None


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"temprature": 0}, "sampling.temprature: unknown key; the nearest known key is sampling.temperature"),
        ({"detokenise": False}, "the nearest known key is sampling.detokenize"),
        ({"temperature": -1}, "sampling.temperature: -1.0 is out of range"),
        ({"temperature": 1e-9}, "sampling.temperature: 1e-09 is out of range; expected 0 (greedy) or 0.0001 to 10000"),
        ({"temperature": 1e9}, "sampling.temperature: 1000000000.0 is out of range"),
        ({"temperature": float("nan")}, "sampling.temperature: nan has the wrong type; expected a number"),
        ({"temperature": "0"}, "sampling.temperature: '0' has the wrong type"),
        ({"max_tokens": 0}, "sampling.max_tokens: 0 is out of range; expected at least 1"),
        ({"max_tokens": None}, "sampling.max_tokens: null has the wrong type"),
        ({"n": 0}, "sampling.n: 0 is out of range"),
        ({"n": True}, "sampling.n: true has the wrong type"),
        ({"stop": ["a", ""]}, "sampling.stop: ('a', '') holds an empty text"),
        ({"stop": ""}, "sampling.stop: ('',) holds an empty text"),
        ({"stop": [3]}, "sampling.stop: [3] has the wrong type"),
        ({"stop": "a", "detokenize": False}, "sampling.stop: needs sampling.detokenize"),
        ({"stop_token_ids": [-1]}, "sampling.stop_token_ids: [-1] is out of range"),
        ({"stop_token_ids": 5}, "sampling.stop_token_ids: 5 has the wrong type"),
        ({"forced_token_ids": [3, -2]}, "sampling.forced_token_ids: [3, -2] is out of range; expected at least -1"),
        ({"seq_seed": 1.5}, "sampling.seq_seed: 1.5 has the wrong type"),
        ({"top_p": 0}, "sampling.top_p: 0.0 is out of range; expected more than 0"),
        ({"top_p": 1.01}, "sampling.top_p: 1.01 is out of range; expected at most 1"),
        ({"top_k": -2}, "sampling.top_k: -2 is out of range; expected at least -1"),
        ({"min_p": 1.5}, "sampling.min_p: 1.5 is out of range"),
        ({"presence_penalty": 2.5}, "sampling.presence_penalty: 2.5 is out of range"),
        ({"frequency_penalty": -3}, "sampling.frequency_penalty: -3.0 is out of range"),
        ({"repetition_penalty": 0}, "sampling.repetition_penalty: 0.0 is out of range; expected more than 0"),
        ({"min_tokens": 17}, "sampling.min_tokens: 17 is more than sampling.max_tokens = 16"),
        ({"logprobs": 21}, "sampling.logprobs: 21 is out of range; expected at most 20"),
        ({"logit_bias": [5]}, "sampling.logit_bias: [5] has the wrong type; expected a mapping"),
        ({"logit_bias": {"five": 1}}, "sampling.logit_bias: five is not a token id"),
        ({"logit_bias": {"-5": 1}}, "sampling.logit_bias: '-5' is not a token id"),
        ({"logit_bias": {"5": 101}}, "sampling.logit_bias.5: 101 is not a number from -100 to 100"),
        ({"logit_bias": {"5": float("nan")}}, "sampling.logit_bias.5: nan is not a number"),
        ({"bad_words": ["a", ""]}, "sampling.bad_words: ['a', ''] holds an empty text"),
        ({"allowed_token_ids": []}, "sampling.allowed_token_ids: is empty"),
        ({"allowed_token_ids": [-1]}, "sampling.allowed_token_ids: [-1] is out of range"),
        ([], "sampling: expected an object of fields, found list"),
    ],
)
def test_wrong_fields_are_named(raw: Any, words: str) -> None:
    with pytest.raises(SamplingError) as caught:
        SamplingParams.from_dict(raw)
    assert words in str(caught.value)
    assert isinstance(caught.value, UserError | ValueError)


def test_the_constructor_checks_too() -> None:
    with pytest.raises(SamplingError, match=r"sampling\.max_tokens"):
        SamplingParams(max_tokens=-1)
    with pytest.raises(SamplingError, match=r"sampling\.top_p"):
        dataclasses.replace(SamplingParams(), top_p=1.5)


def test_seeds_are_64_bit_and_drawn_when_missing() -> None:
    assert SamplingParams(seq_seed=5).resolved_seed() == 5
    assert SamplingParams(seq_seed=2**64 + 5).resolved_seed() == 5
    assert SamplingParams(seq_seed=-1).resolved_seed() == 2**64 - 1
    drawn = {SamplingParams().resolved_seed() for _ in range(20)}
    assert len(drawn) == 20 and all(0 <= seed < 2**64 for seed in drawn)


@given(st.integers(0, 2**64 - 1))
def test_choices_have_seeds_of_their_own(seed: int) -> None:
    seeds = [choice_seed(seed, index) for index in range(32)]
    assert seeds[0] == seed and len(set(seeds)) == 32
    assert all(0 <= s < 2**64 for s in seeds)
    assert choice_seed((seed + 1) % 2**64, 1) != seeds[1]
