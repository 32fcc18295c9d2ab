"""Byte-level BPE of the demo model, with the V4.1 special tokens (serving 1.2).

Ids: bos, eos and pad are 0, 1, 2; then 256 bytes, the merges, and the chat tokens. Ids from there up to VOCAB_SIZE are
spare rows of the embedding (the draft's noise token is the last of them). Digits are always single tokens, so that
arithmetic sees the same pieces whatever the number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.train_demo.words import KEYS, VALUES

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"  # ids 0, 1, 2
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK, DSML = "<think>", "</think>", "｜DSML｜"
MARKERS = (
    SYSTEM, USER, ASSISTANT, "<｜latest_reminder｜>", "<｜image｜>", "<｜ref｜>", "<｜/ref｜>", "<｜box｜>",
    "<｜/box｜>", "<｜point｜>", "<｜/point｜>", "<｜polygon｜>", "<｜/polygon｜>",
)  # fmt: skip
VISIBLE = (THINK, END_THINK, DSML)  # part of an answer's text: reasoning and tool calls are told apart by them

MERGES = 4300
VOCAB_SIZE = 4608  # 36 x 128; 4,575 tokens and spare rows
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TASK_WORDS = ("copy", "reverse", "sort", "calc", "note", "recall", "fact", "json")
WHOLE = (*(f" {w}" for w in (*KEYS, *VALUES)), *(f" {c}" for c in LETTERS), *TASK_WORDS, " ->", " ~", " =", ' {"')
EMPHASIS = 2500  # times each piece of WHOLE is shown, so that it becomes one token: the last merge is made ~1,000 times


def emphasis() -> Iterator[str]:
    """Training text in which every piece of WHOLE is frequent enough to become one token."""
    for piece in WHOLE:
        for _ in range(EMPHASIS // 50):
            yield "\n".join([piece] * 50)


def train(texts: Iterable[str]) -> Tokenizer:
    """The tokenizer for `texts` and the task pieces. The same texts give the same tokenizer.

    Raises ValueError when a piece of WHOLE did not become one token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3 + 256 + MERGES,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((t for part in (texts, emphasis()) for t in part), trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in MARKERS])
    tokenizer.add_tokens([AddedToken(s, special=False, normalized=False) for s in VISIBLE])
    if lost := split_pieces(tokenizer):
        raise ValueError(f"these pieces are not single tokens: {lost}; raise EMPHASIS ({EMPHASIS})")
    return tokenizer


def load(file: Path) -> Tokenizer:
    """One that `train` made. Raises FileNotFoundError, and ValueError for others."""
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; a tokenizer.json is asked for")
    try:
        found = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file} is not a tokenizer.json: {error}") from error
    special = [found.token_to_id(text) for text in (BOS, EOS, PAD)]
    if special != [BOS_ID, EOS_ID, PAD_ID] or found.get_vocab_size() > VOCAB_SIZE or split_pieces(found):
        raise ValueError(f"{file} is another tokenizer than the demo model's: special ids {special}, or pieces split")
    return found


def split_pieces(tokenizer: Tokenizer) -> list[str]:
    """Pieces of WHOLE that are not single tokens."""
    return [piece for piece in WHOLE if len(tokenizer.encode(piece, add_special_tokens=False).ids) != 1]


def settings() -> dict[str, Any]:
    """Content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 65536,
    }
