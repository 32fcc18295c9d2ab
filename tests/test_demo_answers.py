"""The bundled checkpoint answers what `make demo` asks as the README shows, and more tasks that it has learnt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from di_jax.commands.generate import output_record, readable, summary_of
from di_jax.commands.records import read_records
from di_jax.config import load_config
from di_jax.llm import LLM
from di_jax.sampling_params import SamplingParams

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    few = ["engine.prefill_buckets=[512]", "engine.decode_buckets=[16]", "engine.context_buckets=[4096]"]
    with LLM(load_config("quickstart", [*few, "cache.compile_dir=null"])) as llm:
        yield llm


def without_times(text: str) -> list[str]:
    """Lines of the demo's output; seconds and tokens/s are the machine's."""
    return re.sub(r"[\d,]+\.\d+ (s\b|tokens/s)", r"# \1", text.strip("\n")).splitlines()


def test_make_demo_prints_what_the_readme_shows(demo: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    block = re.search(r"```text\n(.*?)```", README, re.DOTALL)
    assert block is not None and "configs/demo.jsonl" in (ROOT / "Makefile").read_text(encoding="utf-8")
    records = read_records(ROOT / "configs" / "demo.jsonl")
    outputs = demo.generate([r.prompt for r in records], SamplingParams.from_dict({}, demo.config.sampling))
    results = [output_record(record.id, output) for record, output in zip(records, outputs, strict=True)]
    printed = readable(records, results, summary_of(results, 1.0, 0))
    assert without_times(block[1]) == without_times(printed)
    assert without_times(block[1]) != without_times(printed.replace("a", "o"))


def test_the_recall_question_is_beyond_the_window_and_held_out(demo: LLM) -> None:
    (record,) = [r for r in read_records(ROOT / "configs" / "demo.jsonl") if r.id == "recall"]
    note, question = re.match(r"\nnote: (\w+) (\w+)\n", record.prompt["prompt"]), record.prompt["prompt"].split()[-1]
    assert note is not None and question == note[1]
    (answer,) = demo.generate([record.prompt], GREEDY)
    assert len(answer.prompt_token_ids) > 3000
    assert answer.outputs[0].text == f" {note[2]}"
    # The answer follows the note, not the text: another value, another answer.
    (other,) = demo.generate([{"prompt": record.prompt["prompt"].replace(note[2], "goose", 1)}], GREEDY)
    assert other.outputs[0].text == " goose"


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
