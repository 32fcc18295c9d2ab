"""di_jax/evaluation/tasks.py: item files, user-supplied benchmarks, Pass@1."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from di_jax.evaluation.judges import judge_by_rule
from di_jax.evaluation.tasks import (
    MAX_NESTING,
    EvaluationError,
    load_aime,
    load_gpqa_diamond,
    load_hle,
    load_items,
    load_task,
    parse_json,
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
TEXT = {"id": "a", "task": "t", "answer": "x", "prompt": "p"}
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
        ([TEXT, "[" * 20_000], r":2: not valid JSON \(more than 200 levels.*\); expected one object a line"),
        ([TEXT, '{"meta": ' * 201 + "1" + "}" * 201], r":2: not valid JSON \(more than 200 levels"),
        ([TEXT, '{"id": ' + "7" * 5000 + "}"], r":2: not valid JSON \(an integer of more than \d+ digits\); expected"),
        ([TEXT, {**TEXT, "id": float("nan")}], r":2: not valid JSON \(NaN or an infinite number.*write null"),
        ([TEXT, {**TEXT, "answer": float("-inf")}], r":2: not valid JSON \(NaN or an infinite number"),
        ([TEXT, '{"meta": [{"a": 1e999}]}'], r":2: not valid JSON \(NaN or an infinite number"),
        ([TEXT, {**TEXT, "id": {"n": 1}}], r":2: id must be text or a number, found \{\"n\": 1\}"),
        ([TEXT, {**TEXT, "id": True}], r":2: id must be text or a number, found true"),
        ([TEXT, {**TEXT, "task": ["t"]}], r":2: task must be text or a number, found \[\"t\"\]"),
        (
            [TEXT, {**TEXT, "answer": {"b": 1}}],
            r":2: answer must be text or a number, found \{\"b\": 1\}; with meta.judge",
        ),
        (
            [TEXT, {**TEXT, "answer": [3], "meta": {"judge": "number"}}],
            r":2: answer must be text or a number, found \[3\]",
        ),
        ([TEXT, {**TEXT, "answer": True}], r":2: answer must be text or a number, found true"),
        ([TEXT, {**TEXT, "answer": None}], r":2: no field answer that is not null; it has answer, id, prompt, task"),
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


@pytest.mark.parametrize("answer", [33, 1.5, {"b": "é", "a": [1, None]}, ["x"], True, False, {}])
def test_answers_of_the_json_rule_are_any_json(write: Write, answer: Any) -> None:
    (item,) = load_items(write({**TEXT, "answer": answer, "meta": {"judge": "json"}}))
    assert item.answer == json.dumps(answer, ensure_ascii=False)
    assert judge_by_rule(item, json.dumps(answer)).correct
    assert not judge_by_rule(item, str([answer])).correct
    (text,) = load_items(write({**TEXT, "answer": '{"a": 1}', "meta": {"judge": "json"}}))
    assert text.answer == '{"a": 1}', "text is JSON already, and not quoted again"


def test_json_nests_up_to_a_limit_and_is_finite() -> None:
    deepest = "[" * MAX_NESTING + "1.5" + "]" * MAX_NESTING
    assert json.dumps(parse_json(deepest)) == deepest
    for text in (f"[{deepest}]", f'{{"a": {deepest}}}', "[" * 20_000 + "]" * 20_000):
        with pytest.raises(ValueError, match=f"more than {MAX_NESTING} levels"):
            parse_json(text)
    for text in ("NaN", "[Infinity]", '{"a": [-Infinity]}', deepest.replace("1.5", "1e999")):
        with pytest.raises(ValueError, match="NaN or an infinite number"):
            parse_json(text)
    assert parse_json('["NaN", 1e308, 17]') == ["NaN", 1e308, 17]


@pytest.mark.parametrize(("answer", "wanted"), [("0007", "7"), ("0" * 5000 + "25.0", "25"), (0, "0"), ("999", "999")])
def test_aime_answers_with_zeros_before_them(write: Write, answer: Any, wanted: str) -> None:
    assert load_aime(write({"problem": "p", "answer": answer}))[0].answer == wanted


@pytest.mark.parametrize("answer", ["1000", "-3", "x", "3.5", "", "7" * 5000, True, [33]])
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


@pytest.mark.parametrize(("right", "wrong"), [("w2", " w2"), (7, "7"), ("7 ", 7)])
def test_gpqa_with_the_right_answer_among_the_wrong_is_refused(write: Write, right: Any, wrong: Any) -> None:
    record = {**GPQA, "Correct Answer": right, "Incorrect Answer 2": wrong}
    with pytest.raises(
        EvaluationError, match=r":2: correct_answer and incorrect_answer_2 are both '(w2|7)'; correct or"
    ):
        load_gpqa_diamond(write(GPQA, record))
    # Letter case tells some answers apart: a unit, a gene.
    assert load_gpqa_diamond(write({**GPQA, "Correct Answer": "MW", "Incorrect Answer 2": "mW"}))


@pytest.mark.parametrize("value", [{"a": 1}, ["a"], True])
def test_published_columns_are_text_or_numbers(write: Write, value: Any) -> None:
    shown = re.escape(json.dumps(value))
    for load, record in (
        (load_aime, {"problem": "p", "answer": 1, "id": value}),
        (load_gpqa_diamond, {**GPQA, "Record ID": value}),
        (load_hle, {**HLE, "id": value}),
    ):
        with pytest.raises(EvaluationError, match=rf":1: id must be text or a number, found {shown}"):
            load(write(record))
    with pytest.raises(EvaluationError, match=":1: answer must be text that is not empty"):
        load_hle(write({**HLE, "answer": value}))


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
