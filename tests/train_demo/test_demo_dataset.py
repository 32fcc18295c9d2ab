"""scripts/train_demo/dataset.py: batches, and rows for measuring."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.train_demo.dataset import FRACTIONS, POOLS, Batches, Data, Mix, loss_weights, teacher_forced, text_rows
from scripts.train_demo.tasks import ANSWER, CALC, CLASSES, IGNORE, PROMPT, RECALL, TEXT
from scripts.train_demo.tokenizer import EOS_ID, PAD_ID


def test_a_batch_depends_on_seed_and_step_alone(demo_data: Data) -> None:
    batches = Batches(demo_data, 3, 4, 128)
    first = [batch for batch, _ in zip(batches, range(4))]
    later = next(iter(Batches(demo_data, 3, 4, 128, start=3)))
    for key in ("tokens", "classes"):
        assert (first[3][key] == later[key]).all()
        assert not (first[0][key] == first[1][key]).all()
    assert not (Batches(demo_data, 4, 4, 128).at(0)["tokens"] == first[0]["tokens"]).all()


def test_shapes_and_types(demo_data: Data) -> None:
    batch = Batches(demo_data, 0, 5, 200).at(0)
    assert batch["tokens"].shape == (5, 201) and batch["tokens"].dtype == np.int32
    assert batch["classes"].shape == (5, 200) and batch["classes"].dtype == np.uint8
    assert batch["tokens"].min() >= 0 and batch["tokens"].max() < demo_data.tasks.lexicon.tokenizer.get_vocab_size()
    assert batch["classes"].max() < len(CLASSES)


def test_loss_weights_name_every_class() -> None:
    weights = loss_weights()
    assert weights.shape == (len(CLASSES),) and weights[IGNORE] == 0
    assert (weights[RECALL:] > weights[TEXT]).all() and weights[CALC] > weights[TEXT] > weights[PROMPT] > 0


def test_classes_belong_to_the_token_that_is_predicted(demo_data: Data) -> None:
    lex = demo_data.tasks.lexicon
    batch = Batches(demo_data, 0, 4, 120, Mix({"fact": 1.0})).at(0)
    values = set(lex.values.tolist())
    for row, classes in zip(batch["tokens"], batch["classes"]):
        assert row[0] == lex.one("fact")  # a row begins with the beginning of an example
        for at, token_class in enumerate(classes):
            after_arrow = row[at] == lex.arrow
            answers = after_arrow or (row[at] in values and row[at + 1] == EOS_ID)
            assert token_class == (ANSWER if answers else PROMPT)


def test_cut_ends_of_texts_have_no_loss(demo_data: Data) -> None:
    mix = Mix({"english": 1.0}, span=40)
    batch = Batches(demo_data, 0, 4, 300, mix).at(0)
    ends = batch["tokens"][:, 1:] == EOS_ID
    ignored = batch["classes"] == IGNORE
    assert ignored.any() and not (ignored & ~ends).any()
    assert (batch["classes"][:, 1:][ignored[:, :-1]] == PROMPT).all()  # the beginning of what follows


def test_the_mix_is_kept(demo_data: Data) -> None:
    mix = Mix({"recall": 0.5, "sort": 0.5})
    recall = demo_data.tasks.lexicon.one("recall")
    batches = Batches(demo_data, 1, 6, 150, mix)
    rows = np.concatenate([batches.at(step)["tokens"] for step in range(20)])
    share = np.mean((rows == recall).any(axis=1))
    assert 0.4 < share < 0.6
    assert not (Batches(demo_data, 1, 6, 150, Mix({"sort": 1.0})).at(0)["tokens"] == recall).any()
    assert (
        (Batches(demo_data, 1, 6, 150, Mix({"recall": 1.0}, density=(0.5, 1.0))).at(0)["tokens"] == recall)
        .any(axis=1)
        .all()
    )


def test_a_curriculum_is_a_function_of_the_step(demo_data: Data) -> None:
    def curriculum(step: int) -> Mix:
        return Mix({"recall": 1.0}, max_distance=20 if step < 5 else 150, density=(0.9, 1.0))

    lex, batches = demo_data.tasks.lexicon, Batches(demo_data, 0, 4, 200, curriculum)

    def longest(step: int) -> int:
        distances = [0]
        for row in batches.at(step)["tokens"].tolist():
            seen: dict[int, int] = {}
            for at in (i + 2 for i, t in enumerate(row[:-2]) if t in (lex.one("note"), lex.one("recall"))):
                distances.append(at - seen.get(row[at], at))
                seen[row[at]] = at
        return max(distances)

    assert 6 <= longest(0) <= 20 < longest(5) <= 150


def test_more_recall_leaves_the_other_sources_in_proportion() -> None:
    mix = Mix().with_recall(0.45)
    assert sum(mix.fractions.values()) == pytest.approx(1.0) and mix.fractions["recall"] == 0.45
    assert mix.fractions["calc"] / mix.fractions["english"] == pytest.approx(FRACTIONS["calc"] / FRACTIONS["english"])


def test_dense_rows_are_full_of_questions(demo_data: Data) -> None:
    def share(density: tuple[float, float]) -> float:
        batches = Batches(demo_data, 0, 8, 400, Mix({"recall": 1.0}, density=density))
        return float(np.mean(np.stack([batches.at(i)["classes"] for i in range(4)]) >= RECALL))

    assert share((0.95, 1.0)) > 1 / 16 > 2 * share((0.02, 0.1))


def test_held_out_batches_share_nothing_with_training(demo_data: Data) -> None:
    """The same mix from the other split: contents of the generated tasks, pairs of notes, texts, pools."""
    lex = demo_data.tasks.lexicon
    folder = demo_data.folder
    (folder / "eval").mkdir(exist_ok=True)
    for name in POOLS:
        item = {"id": "0", "task": name, "prompt_token_ids": [5, 6], "answer_token_ids": [7, EOS_ID]}
        (folder / "eval" / f"{name}.jsonl").write_text(json.dumps(item) + "\n", encoding="utf-8")
    held_out = Data(folder, "eval")
    assert not np.array_equal(held_out.text["english"], demo_data.text["english"])
    assert held_out.pools["json"].tokens.tolist() == [5, 6, 7, EOS_ID]

    def contents(data: Data) -> set[tuple[int, ...]]:
        """(key, value) of notes, and the letters of sorts."""
        notes = Batches(data, 0, 4, 300, Mix({"recall": 1.0}, density=(1.0, 1.0)))
        sorts = Batches(data, 0, 4, 300, Mix({"sort": 1.0}))
        found: set[tuple[int, ...]] = set()
        for row in np.concatenate([notes.at(step)["tokens"] for step in range(3)]).tolist():
            found |= {(row[i + 2], row[i + 3]) for i, t in enumerate(row[:-3]) if t == lex.one("note")}
        for row in np.concatenate([sorts.at(step)["tokens"] for step in range(3)]).tolist():
            heads = [i for i, t in enumerate(row) if t == lex.one("sort")]
            found |= {tuple(row[i:j]) for i, j in itertools.pairwise(heads)}
        return found

    train, evaluated = contents(demo_data), contents(held_out)
    assert len(train) > 100 < len(evaluated) and not train & evaluated


def test_calc_answers_have_their_own_class(demo_data: Data) -> None:
    classes = Batches(demo_data, 0, 4, 200, Mix({"calc": 1.0})).at(0)["classes"]
    assert (classes == CALC).any() and not (classes == ANSWER).any()


def test_unknown_sources_and_folders_are_named(demo_data: Data, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown source 'verse'; sources are english"):
        Batches(demo_data, 0, 2, 64, Mix({"verse": 1.0})).at(0)
    with pytest.raises(FileNotFoundError, match=r"not prepared; run python -m scripts\.train_demo\.prepare"):
        Data(tmp_path)
    assert sum(FRACTIONS.values()) == pytest.approx(1.0)


def test_teacher_forced_counts_answers() -> None:
    items = [
        {"id": "a", "prompt_token_ids": [5, 6, 7], "answer_token_ids": [8, EOS_ID]},
        {"id": "b", "prompt_token_ids": [5], "answer_token_ids": [9, 9, EOS_ID]},
    ]
    made = teacher_forced(items, 5)
    assert made["tokens"].tolist() == [[5, 6, 7, 8, 1, PAD_ID], [5, 9, 9, 1, PAD_ID, PAD_ID]]
    assert made["weights"].tolist() == [[0, 0, 1, 1, 0], [1, 1, 1, 0, 0]]
    with pytest.raises(ValueError, match="item a: 5 tokens, the rows hold 4"):
        teacher_forced(items, 3)


@given(count=st.integers(2, 200), length=st.integers(2, 40), data=st.data())
@settings(max_examples=60)
def test_text_rows_predict_every_token_once(count: int, length: int, data: st.DataObject) -> None:
    context = data.draw(st.integers(0, length - 1))
    text = np.arange(100, 100 + count)
    made = text_rows(text, length, context)
    predicted = made["tokens"][:, 1:][made["weights"] > 0]
    assert sorted(predicted.tolist()) == text[1:].tolist()
    # A row continues the text, so each counted token has at least `context` tokens of its own text before it.
    for row, weights in zip(made["tokens"][1:], made["weights"][1:]):
        assert weights[:context].sum() == 0 and (np.diff(row[row >= 100]) == 1).all()
