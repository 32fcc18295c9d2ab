"""scripts/train_demo/dataset.py: batches, and rows for measuring."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.train_demo.dataset import FRACTIONS, Batches, Data, Mix, teacher_forced, text_rows
from scripts.train_demo.tokenizer import EOS_ID, PAD_ID


def test_a_batch_depends_on_seed_and_step_alone(demo_data: Data) -> None:
    batches = Batches(demo_data, 3, 4, 128)
    first = [batch for batch, _ in zip(batches, range(4))]
    later = next(iter(Batches(demo_data, 3, 4, 128, start=3)))
    for key in ("tokens", "weights"):
        assert (first[3][key] == later[key]).all()
        assert not (first[0][key] == first[1][key]).all()
    assert not (Batches(demo_data, 4, 4, 128).at(0)["tokens"] == first[0]["tokens"]).all()


def test_shapes_and_types(demo_data: Data) -> None:
    batch = Batches(demo_data, 0, 5, 200).at(0)
    assert batch["tokens"].shape == (5, 201) and batch["tokens"].dtype == np.int32
    assert batch["weights"].shape == (5, 200) and batch["weights"].dtype == np.float32
    assert batch["tokens"].min() >= 0 and batch["tokens"].max() < demo_data.tasks.lexicon.tokenizer.get_vocab_size()
    assert set(np.unique(batch["weights"]).tolist()) <= {0.0, np.float32(0.05).item(), 1.0, 2.0}


def test_weights_belong_to_the_token_that_is_predicted(demo_data: Data) -> None:
    lex = demo_data.tasks.lexicon
    mix = Mix({"fact": 1.0}, prompt_weight=0.0, answer_weight=1.0)
    batch = Batches(demo_data, 0, 4, 120, mix).at(0)
    values = set(lex.values.tolist())
    for row, weights in zip(batch["tokens"], batch["weights"]):
        assert row[0] == lex.one("fact")  # a row begins with the beginning of an example
        for at, weight in enumerate(weights):
            after_arrow = row[at] == lex.arrow
            assert weight == float(after_arrow or (row[at] in values and row[at + 1] == EOS_ID))


def test_cut_ends_of_texts_have_no_loss(demo_data: Data) -> None:
    mix = Mix({"english": 1.0}, span=40, prompt_weight=0.5)
    batch = Batches(demo_data, 0, 4, 300, mix).at(0)
    ends = batch["tokens"][:, 1:] == EOS_ID
    ignored = batch["weights"] == 0
    assert ignored.any() and not (ignored & ~ends).any()
    assert (batch["weights"][:, 1:][ignored[:, :-1]] == 0.5).all()  # the beginning of what follows


def test_the_mix_is_kept(demo_data: Data) -> None:
    mix = Mix({"recall": 0.5, "sort": 0.5})
    recall = demo_data.tasks.lexicon.one("recall")
    batches = Batches(demo_data, 1, 6, 150, mix)
    rows = np.concatenate([batches.at(step)["tokens"] for step in range(20)])
    share = np.mean((rows == recall).any(axis=1))
    assert 0.4 < share < 0.6
    assert not (Batches(demo_data, 1, 6, 150, Mix({"sort": 1.0})).at(0)["tokens"] == recall).any()
    assert (Batches(demo_data, 1, 6, 150, Mix({"recall": 1.0})).at(0)["tokens"] == recall).any(axis=1).all()


def test_a_curriculum_is_a_function_of_the_step(demo_data: Data) -> None:
    def curriculum(step: int) -> Mix:
        return Mix({"recall": 1.0}, max_distance=10 if step < 5 else 150)

    lex, batches = demo_data.tasks.lexicon, Batches(demo_data, 0, 4, 200, curriculum)

    def longest(step: int) -> int:
        distances = [0]
        for row in batches.at(step)["tokens"].tolist():
            arrows = [i for i, t in enumerate(row[:-1]) if t == lex.arrow]
            distances += [b - a for a in arrows for b in arrows if b > a and row[a - 1] == row[b - 1]]
        return max(distances)

    assert 7 <= longest(0) <= 10 < longest(5) <= 150


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
