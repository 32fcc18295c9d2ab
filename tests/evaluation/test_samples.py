"""di_jax/evaluation/samples.py: records that read back equal, faults of a dump, scores in any order."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.evaluation.judges import judge_by_rule
from di_jax.evaluation.samples import Sample, TaskScore, read_samples, score_samples
from di_jax.evaluation.tasks import EvalItem, EvaluationError

FAILURE = {"type": "model_error", "message": "not finite"}
text = st.text(max_size=4)
prompts = st.one_of(
    st.builds(lambda ids: {"prompt_token_ids": tuple(ids)}, st.lists(st.integers(0, 9), min_size=1, max_size=3)),
    st.builds(lambda t: {"prompt": t}, text),
    st.builds(lambda t: {"messages": ({"role": "user", "content": t},)}, text),
    st.builds(lambda t: {"messages": ({"role": "user", "content": t},), "tools": ({"x": t},)}, text),
)
items = st.builds(lambda answer, meta, prompt: ("i", "t", answer, prompt, meta), text, st.just({"a": [1]}), prompts)
answers = st.one_of(
    st.just({"error": FAILURE}),
    st.fixed_dictionaries(
        {
            "text": text,
            "token_ids": st.lists(st.integers(0, 9), max_size=3).map(tuple),
            "finish_reason": st.sampled_from(["stop", "length"]),
            "thinking": st.booleans(),
            "seq_seed": st.integers(0, 2**64 - 1),
        }
    ),
)


def item(name: str, task: str = "t") -> EvalItem:
    return EvalItem(name, task, "right", prompt="?")


@given(items, answers, st.integers(0, 9))
def test_samples_read_back_equal(tmp_path_factory: Any, made: Any, answer: dict[str, Any], index: int) -> None:
    name, task, wanted, prompt, meta = made
    sample = Sample(EvalItem(name, task, wanted, meta=meta, **prompt), index, sampling={"n": 2}, **answer)
    path = tmp_path_factory.getbasetemp() / "samples.jsonl"
    path.write_text(json.dumps(sample.record()) + "\n")
    assert read_samples(path) == [sample]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample": None}, "d.jsonl:1: sample must be a number from 0; expected a line that eval --dump wrote"),
        ({"sample": -1}, "sample must be a number from 0"),
        ({"sample": True}, "sample must be a number from 0"),
        ({"text": None}, "d.jsonl:1: needs text or error"),
        ({"token_ids": 3}, "token_ids must be a list of ids"),
        ({"sampling": 3}, "sampling must be an object"),
        ({"error": "no"}, "error must be an object"),
        ({"prompt": None}, "d.jsonl:1: needs prompt_token_ids, messages or prompt"),
        ({"answer": None}, "d.jsonl:1: no field answer"),
    ],
)
def test_faults_name_file_and_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    record = {**Sample(item("a"), 0, "right").record(), **change}
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(EvaluationError, match=message):
        read_samples(path)


def test_a_sample_that_occurs_twice_or_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    line = json.dumps(Sample(item("a"), 0, "right").record())
    path.write_text(f"{line}\n{line}\n")
    with pytest.raises(EvaluationError, match=r"d.jsonl:2: sample 0 of t a occurs twice"):
        read_samples(path)
    path.write_text(f"{line}\n{line[:-9]}")
    with pytest.raises(EvaluationError, match=r"d.jsonl:2: not valid JSON"):
        read_samples(path)
    for damaged in ("[" * 20_000, line.replace("right", "7" * 5000).replace(f'"{"7" * 5000}"', "7" * 5000)):
        path.write_text(f"{line}\n{damaged}\n")
        with pytest.raises(EvaluationError, match=r"d.jsonl:2: not valid JSON .*; expected one object a line"):
            read_samples(path)


def test_failures_count_as_wrong_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    samples = [
        Sample(item("a"), 0, "right"),
        Sample(item("a"), 1, error=FAILURE),
        Sample(item("b"), 0, "wrong"),
        Sample(item("b"), 1, "right"),
        Sample(item("a", "u"), 0, "right"),
    ]
    assert score_samples(samples, judge_by_rule) == {"t": TaskScore(2, 4, 1, 0.5), "u": TaskScore(1, 1, 0, 1.0)}
    assert [r.getMessage() for r in caplog.records] == ["t: item a, sample 1: not finite"]


def test_a_dump_that_is_not_whole_is_told(caplog: pytest.LogCaptureFixture) -> None:
    score_samples([Sample(item("a"), 0, "x"), Sample(item("a"), 1, "x"), Sample(item("b"), 0, "x")], judge_by_rule)
    assert "t: items have from 1 to 2 samples; is the dump whole?" in caplog.text
    with pytest.raises(EvaluationError, match="no samples"):
        score_samples([], judge_by_rule)


def test_the_score_does_not_depend_on_the_order() -> None:
    """Samples of one item need not stand together: they come as requests are finished."""
    samples = [Sample(item(str(i)), k, "right" if k < i % 4 else "no") for i in range(40) for k in range(3)]
    scores = set()
    for seed in range(20):
        random.Random(seed).shuffle(samples)
        scores.add(score_samples(samples, judge_by_rule)["t"].score)
    assert scores == {0.5}
