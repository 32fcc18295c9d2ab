"""The bundled checkpoint answers as the README shows, and a chat turn as `messages` equals its markup."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from di_jax.config import load_config
from di_jax.llm import LLM
from di_jax.sampling_params import SamplingParams

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    few = ["engine.prefill_buckets=[512]", "engine.decode_buckets=[16]", "cache.compile_dir=null"]
    with LLM(load_config("quickstart", few)) as llm:
        yield llm


def shown() -> dict[str, str]:
    """Prompt -> answer of the README's block of demo output."""
    block = re.search(r"```text\n(.*?)```", README, re.DOTALL)
    assert block is not None
    lines = block[1].splitlines()
    return {prompt: answer[4:].split("    ")[0] for prompt, answer in zip(lines[::2], lines[1::2], strict=True)}


def test_the_answers_are_those_that_the_readme_shows(demo: LLM) -> None:
    prompts = demo.config.generate.prompts
    assert prompts is not None
    answers = dict(zip(prompts, demo.generate(list(prompts), GREEDY), strict=True))
    assert len(shown()) >= 5
    for prompt, expected in shown().items():
        (whole,) = [p for p in prompts if p.endswith(prompt)]
        text = answers[whole].outputs[0].text
        assert text.startswith(expected.removesuffix("...")), prompt
        assert expected.endswith("...") or text == expected, prompt


def test_messages_are_rendered_to_the_markup(demo: LLM) -> None:
    turn = {"messages": [{"role": "user", "content": "Please sort: n f d"}]}
    (output,) = demo.generate([turn], GREEDY)
    assert output.error is None
    assert output.outputs[0].text == "I sort the letters.</think>d f n"
    assert output.outputs[0].finish_reason == "stop"


def test_learnt_tasks_beyond_the_readme(demo: LLM) -> None:
    asked = {"copy: t n i p ->": " t n i p", "reverse: z a o ->": " o a z", "sort: k b z c ->": " b c k z"}
    outputs = demo.generate(list(asked), GREEDY)
    assert [o.outputs[0].text for o in outputs] == list(asked.values())
