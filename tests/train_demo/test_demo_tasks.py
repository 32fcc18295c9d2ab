"""scripts/train_demo/tasks.py and chat_tasks.py: answers, splits, distances."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from scripts.train_demo import prepare
from scripts.train_demo.tasks import (
    BANDS,
    CLASSES,
    PROMPT,
    RAW_TASKS,
    RECALL,
    RECALL_END,
    SEGMENT,
    TEXT,
    Packed,
    Tasks,
    content_hash,
    in_split,
)
from scripts.train_demo.tokenizer import EOS_ID
from scripts.train_demo.words import KEYS, VALUES


def solve(prompt: str, tasks: Tasks) -> str:
    """The answer to a raw prompt, worked out from its text."""
    name, question = prompt.removesuffix(" ->").split(": ", 1)
    if name == "calc":
        a, sign, b = re.findall(r"\d+|[+-]", question)
        result = str(int(a) + int(b) if sign == "+" else int(a) - int(b))
        return f" ~{result[::-1]} = {result}"
    words = question.split(" ")
    if name == "fact":
        known = {tuple(KEYS[k] for k in row[:3] if k >= 0): VALUES[row[3]] for row in tasks.facts}
        return f" {known[tuple(words)]}"
    return " " + " ".join({"copy": words, "reverse": words[::-1], "sort": sorted(words)}[name])


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("task", RAW_TASKS)
def test_answers_are_right_and_texts_are_their_tokens(
    demo_tokenizer: Tokenizer, demo_tasks: Tasks, task: str, split
) -> None:
    made = demo_tasks.packed(task, np.random.default_rng(1), 120, split)
    assert len(made) == 120
    for i in range(120):
        example = made.example(i, task)
        prompt = demo_tokenizer.decode(example.prompt_ids)
        answer = demo_tokenizer.decode(example.answer_ids)
        assert answer == solve(prompt, demo_tasks)
        assert example.answer_ids[-1] == EOS_ID
        assert demo_tokenizer.encode(prompt).ids == example.prompt_ids
        assert demo_tokenizer.encode(answer).ids == example.answer_ids[:-1]


@pytest.mark.parametrize("task", ["copy", "reverse", "sort", "calc"])
def test_train_and_eval_prompts_never_meet(demo_tasks: Tasks, task: str) -> None:
    def prompts(seed: int, split, count: int) -> set[tuple[int, ...]]:
        made = demo_tasks.packed(task, np.random.default_rng(seed), count, split)
        return {tuple(made.example(i, task).prompt_ids) for i in range(count)}

    assert not prompts(0, "train", 3000) & prompts(1, "eval", 600)
    assert prompts(0, "train", 3000) & prompts(1, "train", 3000)  # the spaces are small enough to meet


@pytest.mark.parametrize("task", ["json", "chat", "tool"])
def test_text_tasks_are_split_by_content(demo_tokenizer: Tokenizer, task: str) -> None:
    def asked(seed: int, split) -> set[tuple[int, ...]]:
        made = itertools.islice(prepare.examples(task, demo_tokenizer, np.random.default_rng(seed), split), 300)
        return {tuple(e.prompt_ids) for e in made if e.meta.get("kind") != "small_talk"}

    assert not asked(0, "train") & asked(1, "eval")


def test_json_answers_hold_the_facts_of_the_sentence(demo_tokenizer: Tokenizer) -> None:
    made = prepare.examples("json", demo_tokenizer, np.random.default_rng(2), "train")
    for example in itertools.islice(made, 40):
        fields = json.loads(demo_tokenizer.decode(example.answer_ids))
        prompt = demo_tokenizer.decode(example.prompt_ids)
        assert fields["name"] and all(str(value) in prompt for value in fields.values())
        assert len(fields) == example.meta["fields"] == 2 + prompt.count(",") + prompt.count(" and ")


def test_triples_need_all_three_words(demo_tasks: Tasks) -> None:
    facts = demo_tasks.facts
    triples = facts[facts[:, 0] >= 0]
    pairs = {tuple(row[1:3]) for row in facts[facts[:, 0] < 0]}
    assert len(np.unique(facts[:, :3], axis=0)) == len(facts) == 3000
    shared, times = np.unique(triples[:, 1:3], axis=0, return_counts=True)
    assert (times == 3).all() and not {tuple(row) for row in shared} & pairs


@given(seed=st.integers(0, 2**32), distance=st.integers(SEGMENT, 700))
@settings(max_examples=60)
def test_recall_distance_is_exact(demo_tasks: Tasks, seed: int, distance: int) -> None:
    lex = demo_tasks.lexicon
    text = np.full(2000, lex.one("note"), np.uint16)  # no key, value or colon in it
    example = demo_tasks.recall(np.random.default_rng(seed), distance, text, "eval")
    ids = [*example.prompt_ids, *example.answer_ids]
    key, value = ids[-3], ids[-2]
    notes = [i for i in range(1, len(ids) - 3) if ids[i] == key and ids[i - 1] == lex.one(":")]
    assert len(notes) == 1 and ids[notes[0] + 1] == value
    assert (len(ids) - 2) - (notes[0] + 1) == distance
    assert len(example.answer_ids) == 2 and example.answer_ids[1] == EOS_ID


def test_recall_refuses_what_does_not_fit(demo_tasks: Tasks) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="distance 5"):
        demo_tasks.recall(rng, SEGMENT - 1, np.zeros(100, np.uint16))
    with pytest.raises(ValueError, match="text of 224"):
        demo_tasks.recall(rng, 200, np.zeros(200, np.uint16))


@given(
    seed=st.integers(0, 2**32),
    length=st.integers(60, 900),
    top=st.integers(20, 1500),
    density=st.floats(0.01, 1.0),
)
@settings(max_examples=60)
def test_recall_rows_ask_what_was_noted(demo_tasks: Tasks, seed: int, length: int, top: int, density: float) -> None:
    lex = demo_tasks.lexicon
    text = (10 + np.arange(3000) % 7).astype(np.uint16)
    row = demo_tasks.recall_row(np.random.default_rng(seed), length, top, text, density)
    ids, classes = row.tokens.astype(int), row.classes
    assert len(ids) == len(classes) == length
    names = {lex.one("note"): "note", lex.one("recall"): "recall"}
    noted: dict[int, int] = {}
    seen: dict[int, int] = {}
    for at in (1 + np.flatnonzero((ids == lex.one(":")) & (classes == PROMPT))).tolist():
        key, value = ids[at], ids[at + 1]
        if names[ids[at - 2]] == "note":
            assert key not in noted and classes[at + 1] == PROMPT
            noted[key] = value
        else:
            distance = at - seen[key]
            assert value == noted[key] and ids[at + 2] == EOS_ID and classes[at + 2] == RECALL_END
            assert SEGMENT <= distance <= top
            assert classes[at + 1] == RECALL + sum(distance >= band for band in BANDS)
        seen[key] = at
    assert np.sum(classes >= RECALL_END) == 2 * np.sum(classes == RECALL_END)
    assert np.sum(classes != TEXT) % SEGMENT == 0 and noted
    # The text runs on around the segments.
    plain = ids[classes == TEXT]
    assert (np.diff(plain) % 7 == 1).all()


def test_recall_rows_ask_at_all_distances(demo_tasks: Tasks) -> None:
    text = np.full(9000, 10, np.uint16)
    rows = [demo_tasks.recall_row(np.random.default_rng(i), 4096, 4096, text, 0.3) for i in range(20)]
    counts = np.bincount(np.concatenate([r.classes for r in rows]), minlength=len(CLASSES))[RECALL:]
    assert (counts > 0.1 * counts.sum()).all()


def test_held_out_pairs_are_never_trained(demo_tasks: Tasks) -> None:
    key_at = {k: i for i, k in enumerate(demo_tasks.lexicon.keys.tolist())}
    value_at = {v: i for i, v in enumerate(demo_tasks.lexicon.values.tolist())}
    for split in ("train", "eval"):
        keys, values = demo_tasks._pairs(np.random.default_rng(3), 150, split)
        pairs = np.array([[key_at[k], value_at[v]] for k, v in zip(keys.tolist(), values.tolist())])
        assert in_split(content_hash(5, pairs), split).all()
        assert len(set(keys.tolist())) == 150


def test_packed_keeps_examples_apart() -> None:
    made = Packed.from_matrix(np.array([[5, 6, -1, 7, 1], [5, -1, 8, 9, 1]]), 3)
    assert made.tokens.tolist() == [5, 6, 7, 1, 5, 8, 9, 1] and made.starts.tolist() == [0, 4, 8]
    turned = Packed.join([made.select(np.array([1, 0])), made])
    assert [turned.example(i, "t").prompt_ids for i in range(4)] == [[5, 8], [5, 6], [5, 6], [5, 8]]
    assert [turned.example(i, "t").answer_ids for i in range(4)] == [[9, 1], [7, 1], [7, 1], [9, 1]]
    again = Packed.of([turned.example(i, "t") for i in range(4)])
    assert (again.tokens == turned.tokens).all() and (again.classes == turned.classes).all()
