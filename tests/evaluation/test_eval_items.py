"""di_jax/evaluation/tasks.py: item files, user-supplied benchmarks, Pass@1."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from di_jax.evaluation.tasks import (
    EvaluationError,
    load_aime,
    load_gpqa_diamond,
    load_hle,
    load_items,
    load_task,
    pass_at_1,
)

Write = Callable[..., Path]
GPQA = {
    "Question": "Which?",
    "Correct Answer": "right ",
    "Incorrect Answer 1": "w1",
    "Incorrect Answer 2": "w2",
    "Incorrect Answer 3": "w3",
    "Record ID": "rec1",
    "High-level domain": "Physics",
}
HLE = {"id": "h1", "question": "What?", "answer": "B", "answer_type": "multipleChoice", "image": "", "category": "Math"}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def lines(*records: Any) -> Path:
        path = tmp_path / "items.jsonl"
        path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records), encoding="utf-8")
        return path

    return lines


def test_items_of_every_kind(write: Write) -> None:
    path = write(
        {"id": "a", "task": "t", "answer": "1", "prompt_token_ids": [1, 2], "messages": [{"role": "user"}]},
        "",
        {"id": "b", "task": "t", "answer": "1", "messages": [{"role": "user", "content": "Hi"}], "tools": [{"x": 1}]},
        {"id": "c", "task": "t", "answer": 7, "prompt": "Say it", "meta": {"judge": "number"}},
    )
    a, b, c = load_items(path)
    assert (a.prompt_token_ids, a.messages, a.prompt, a.question) == ((1, 2), None, None, "")
    assert b.messages == ({"role": "user", "content": "Hi"},) and b.tools == ({"x": 1},) and b.question == "Hi"
    assert (c.prompt, c.question, c.answer, c.meta) == ("Say it", "Say it", "7", {"judge": "number"})


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (["{"], r"items\.jsonl:1: not valid JSON"),
        (["[]"], r":1: expected an object, found list"),
        (["", {"id": "a", "task": "t", "prompt": "x"}], r":2: no field answer; it has id, prompt, task"),
        ([{"id": "a", "task": "t", "answer": "x"}], "needs prompt_token_ids, messages or prompt"),
        ([{"id": "a", "task": "t", "answer": "x", "prompt_token_ids": ["1"]}], "must be a list of ids"),
        ([{"id": "a", "task": "t", "answer": "x", "prompt_token_ids": []}], "must be a list of ids"),
        ([{"id": "a", "task": "t", "answer": "x", "messages": "hi"}], "messages must be a list of objects"),
        ([{"id": "a", "task": "t", "answer": "x", "prompt": 3}], "prompt must be text"),
        ([{"id": "a", "task": "t", "answer": "x", "prompt": "p", "meta": 3}], "meta must be an object"),
        ([{"id": "a", "task": "t", "answer": "x", "messages": [{}], "tools": 3}], "tools must be a list of objects"),
        ([{"id": "a", "task": "t", "answer": "x", "prompt": "p"}] * 2, r":2: id 'a' occurs twice"),
        ([], "holds no items"),
    ],
)
def test_faults_name_file_and_line(write: Write, records: list[Any], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        load_items(write(*records))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"none\.jsonl: cannot be read"):
        load_items(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    "record",
    [
        {"ID": "2024-I-1", "Problem": "Find x.", "Solution": "...", "Answer": 33},
        {"id": 60, "problem": "Find x.", "answer": "033"},
        {"question": "Find x.", "answer": "33"},
        {"problem_idx": 1, "problem": "Find x.", "answer": 33.0},
    ],
)
def test_aime_columns(write: Write, record: dict[str, Any]) -> None:
    (item,) = load_aime(write(record))
    assert item.task == "aime" and item.answer == "33" and item.meta == {"judge": "number"}
    assert item.question.startswith("Find x.") and "\\boxed{}" in item.question


@pytest.mark.parametrize("answer", ["1000", "-3", "x", "3.5"])
def test_aime_answers_are_small_integers(write: Write, answer: str) -> None:
    with pytest.raises(EvaluationError, match=r":1: answer is .* an integer from 0 to 999"):
        load_aime(write({"problem": "p", "answer": answer}))


def test_two_exams_in_one_file_keep_their_ids_apart(write: Write) -> None:
    items = load_aime(write(*({"id": 1, "problem": "p", "answer": 1} for _ in range(2))))
    assert len({item.id for item in items}) == 2


def test_gpqa_choices_are_shuffled_by_seed(write: Write) -> None:
    records = [{**GPQA, "Question": f"Which {i}?"} for i in range(40)]
    items = load_gpqa_diamond(write(*records), seed=1)
    assert items == load_gpqa_diamond(write(*records), seed=1)
    assert {item.answer for item in items} == {"A", "B", "C", "D"}
    assert [i.answer for i in items] != [i.answer for i in load_gpqa_diamond(write(*records), seed=2)]
    for item in items:
        right = item.meta["choices"]["ABCD".index(item.answer)]
        assert right == "right" and f"{item.answer}) right" in item.question
        assert sorted(item.meta["choices"]) == ["right", "w1", "w2", "w3"]
        assert item.meta["judge"] == "choice" and item.meta["domain"] == "Physics"


def test_gpqa_in_lower_case(write: Write) -> None:
    record = {key.lower().replace(" ", "_").replace("-", "_"): value for key, value in GPQA.items()}
    assert load_gpqa_diamond(write(record)) == load_gpqa_diamond(write(GPQA))
    with pytest.raises(EvaluationError, match=r":1: no field correct_answer"):
        load_gpqa_diamond(write({"Question": "Which?"}))


def test_hle(write: Write) -> None:
    text = {**HLE, "id": "h2", "answer_type": "exactMatch", "answer": "42"}
    items, images = load_hle(write(HLE, text, {**HLE, "id": "h3", "image": "data:image/png;base64,AA"}))
    assert images == 1
    assert [(i.id, i.answer, i.meta["judge"]) for i in items] == [
        ("hle-0000-h1", "B", "choice"),
        ("hle-0001-h2", "42", "exact_answer"),
    ]
    with pytest.raises(EvaluationError, match="answer_type is 'essay'"):
        load_hle(write({**HLE, "answer_type": "essay"}))


def test_pass_at_1_is_a_mean_of_means() -> None:
    assert pass_at_1({"a": [True, False], "b": [True] * 4}) == 0.75
    assert pass_at_1({"a": [False]}) == 0.0
    with pytest.raises(EvaluationError, match="'a' has no samples"):
        pass_at_1({"a": []})
    with pytest.raises(EvaluationError, match="no items"):
        pass_at_1({})


def test_tasks_have_their_loaders(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    own = write({"id": "a", "task": "other", "answer": "1", "prompt": "Say it"})
    assert [(item.id, item.task) for item in load_task("mine", own)] == [("a", "mine")]
    assert load_task("aime", write({"problem": "?", "answer": 7}))[0].answer == "7"
    assert load_task("gpqa_diamond", write(GPQA))[0].meta["judge"] == "choice"
    assert not caplog.text
    assert [item.task for item in load_task("hle", write({**HLE, "image": "data:"}, HLE))] == ["hle"]
    assert "items.jsonl: 1 questions with images are left out" in caplog.text
    with pytest.raises(EvaluationError, match="all of its 1 questions have images"):
        load_task("hle", write({**HLE, "image": "data:"}))
