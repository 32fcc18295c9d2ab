"""scripts/train_demo/tokenizer.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from di_jax.chat import ChatEncoder
from di_jax.checkpoint.demo import demo_checkpoint
from di_jax.tokenizer import Tokenizer as EngineTokenizer
from scripts.train_demo import tokenizer


def test_special_ids_come_first(demo_tokenizer: Tokenizer) -> None:
    assert [demo_tokenizer.token_to_id(s) for s in (tokenizer.BOS, tokenizer.EOS, tokenizer.PAD)] == [0, 1, 2]
    assert demo_tokenizer.get_vocab_size() < tokenizer.VOCAB_SIZE
    assert tokenizer.VOCAB_SIZE % 128 == 0
    # With all its merges the tokenizer leaves spare rows, the last of which is the draft's noise token.
    added = len(tokenizer.MARKERS) + len(tokenizer.VISIBLE)
    assert 3 + 256 + tokenizer.MERGES + added < tokenizer.VOCAB_SIZE


def test_the_same_texts_give_the_same_file(demo_tokenizer: Tokenizer, demo_texts: tuple[str, ...]) -> None:
    assert tokenizer.train(demo_texts).to_str() == demo_tokenizer.to_str()
    assert tokenizer.train((*demo_texts, "zyzzyva " * 3000)).to_str() != demo_tokenizer.to_str()


@pytest.mark.parametrize("text", ["345+27", "In 1599", "x2", "1000000"])
def test_every_digit_is_one_token(demo_tokenizer: Tokenizer, text: str) -> None:
    tokens = demo_tokenizer.encode(text).tokens
    assert sum(t.isdigit() for t in tokens) == sum(c.isdigit() for c in text)


@pytest.mark.parametrize("text", ["naïve\n\n  Réné 42 ->", "def f(x):\n\treturn x\r\n", "日本 🙂"])
def test_any_text_comes_back(demo_tokenizer: Tokenizer, text: str) -> None:
    assert demo_tokenizer.decode(demo_tokenizer.encode(text).ids) == text


def test_the_engine_and_the_chat_encoder_accept_it(demo_tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(demo_tokenizer.to_str(), encoding="utf-8")
    assert ChatEncoder(tmp_path).missing_spellings == ()
    engine = EngineTokenizer(demo_tokenizer, 0, 1)
    assert engine.decode(engine.encode("fact: amber falcon -> river")) == "fact: amber falcon -> river"
    assert demo_tokenizer.token_to_id(tokenizer.THINK) not in engine.special_ids  # reasoning stays visible
    assert demo_tokenizer.token_to_id(tokenizer.USER) in engine.special_ids


def test_a_piece_that_is_lost_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "EMPHASIS", 50)
    monkeypatch.setattr(tokenizer, "MERGES", 100)
    with pytest.raises(ValueError, match=r"not single tokens: .*raise EMPHASIS"):
        tokenizer.train(["abc"])


def test_the_tokenizer_of_a_checkpoint_is_taken_as_it_is(tmp_path: Path) -> None:
    file = demo_checkpoint() / "tokenizer.json"
    assert tokenizer.load(file).to_str() == Tokenizer.from_file(str(file)).to_str()
    with pytest.raises(FileNotFoundError, match=r"none\.json: no such file"):
        tokenizer.load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"text\.json is not a tokenizer\.json"):
        tokenizer.load(tmp_path / "text.json")
    Tokenizer(models.BPE()).save(str(tmp_path / "empty.json"))
    with pytest.raises(ValueError, match=r"empty\.json is another tokenizer"):
        tokenizer.load(tmp_path / "empty.json")
