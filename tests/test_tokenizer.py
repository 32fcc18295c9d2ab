"""Tokenizer loading, streamed text and stop strings."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from di_jax.errors import UserError
from di_jax.tokenizer import IncrementalDetokenizer, StopStrings, Tokenizer, TokenizerError

DEMO = Path(str(resources.files("di_jax.checkpoint") / "demo_data"))
TINY = Path(__file__).parent / "golden" / "tiny-v41-fp8"
TOKENIZER = Tokenizer.from_folder(DEMO)
MIXED = "naïve 👩‍👩‍👧 🏳️‍🌈 สวัสดีครับ 深度求索，你好 été\t\n def f(x): return x"


def byte_tokenizer(**special: bool) -> RawTokenizer:
    """One token per byte: the hardest splits. Keyword names become added tokens, special or not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    for name, is_special in special.items():
        raw.add_tokens([AddedToken(f"<｜{name} ｜>", special=is_special, normalized=False)])
    return raw


BYTES = Tokenizer(byte_tokenizer(hidden=True, shown=False), 0, 1)
HIDDEN, SHOWN = (next(iter(BYTES.raw.encode(f"<｜{name} ｜>").ids)) for name in ("hidden", "shown"))


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int] | None = None, **options: object) -> list[str]:
    """Text of each push; the last entry is the flush. `cuts`: sizes of the pushes, default one id each."""
    detokenizer = IncrementalDetokenizer(tokenizer, **options)  # type: ignore[arg-type]
    pieces, rest = [], list(ids)
    for size in cuts or [1] * len(ids):
        pieces.append(detokenizer.push(rest[:size]))
        rest = rest[size:]
    pieces += [detokenizer.push(rest), detokenizer.flush()]
    assert detokenizer.text == "".join(pieces)
    return pieces


# ---- loading and whole texts ----


def test_round_trip_of_mixed_scripts() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(MIXED)) == MIXED


def test_ids_come_from_the_config_and_specials_are_parsed() -> None:
    assert (TOKENIZER.bos_id, TOKENIZER.eos_id) == (0, 1)
    ids = TOKENIZER.encode("<｜begin▁of▁sentence｜>a<｜User｜>")
    assert ids[0] == 0 and len(ids) == 3 and ids[2] in TOKENIZER.special_ids
    assert TOKENIZER.decode(ids) == "a"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "<｜begin▁of▁sentence｜>a<｜User｜>"


def test_vocab_size_counts_added_tokens() -> None:
    assert TOKENIZER.vocab_size == TOKENIZER.raw.get_vocab_size(with_added_tokens=True) == 4575
    assert Tokenizer.from_folder(TINY).vocab_size == 512


@pytest.mark.parametrize("setting", [{}, {"add_bos_token": False}, {"add_bos_token": None}, {"add_bos_token": True}])
def test_begin_token_only_where_the_settings_ask_for_it(tmp_path: Path, setting: dict[str, object]) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO / name, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(setting))
    ids = Tokenizer.from_folder(tmp_path).encode("hello")
    assert (ids[0] == 0) is bool(setting.get("add_bos_token"))
    assert ids[-len(TOKENIZER.encode("hello")) :] == TOKENIZER.encode("hello")


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    shutil.copy(DEMO / "config.json", tmp_path)
    raw = RawTokenizer.from_file(str(DEMO / "tokenizer.json"))
    raw.enable_truncation(2)
    raw.enable_padding(length=4)
    raw.save(str(tmp_path / "tokenizer.json"))
    assert len(raw.encode("a b c d e f").ids) != 6  # the file does cut and pad
    assert Tokenizer.from_folder(tmp_path).encode("a b c d e f") == TOKENIZER.encode("a b c d e f")


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    shutil.copy(DEMO / "config.json", tmp_path)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file") as error:
        Tokenizer.from_folder(tmp_path)
    assert isinstance(error.value, UserError)
    assert "prompts of ids need too" in str(error.value)  # the engine does not start without


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"{}", b'{"model": {"type": "BPE"}}', b"[]"])
def test_corrupt_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    shutil.copy(DEMO / "config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a readable tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", '{"add_bos_token": "yes"}'])
def test_corrupt_settings_are_named(tmp_path: Path, content: str) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO / name, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_tokenizer_that_is_not_byte_level_is_refused() -> None:
    raw = byte_tokenizer()
    raw.decoder = decoders.Metaspace()
    with pytest.raises(TokenizerError, match="decoder is 'Metaspace'"):
        Tokenizer(raw, 0, 1)
    with pytest.raises(TokenizerError, match="decoder is None"):
        Tokenizer(RawTokenizer(models.BPE()), 0, 1)


def test_text_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(TokenizerError, match="prompt: not valid Unicode at character 1"):
        TOKENIZER.encode("a\ud800")


# ---- streaming ----


@pytest.mark.parametrize("text", ["👩‍👩‍👧", "สวัสดี", "深度求索", "é", "a👍b"])
def test_characters_split_over_tokens_come_out_whole(text: str) -> None:
    pieces = stream(BYTES, BYTES.encode(text))
    assert len(BYTES.encode(text)) == len(text.encode())
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    # Each character appears with its last byte, not later.
    ends = [len(text[: n + 1].encode()) - 1 for n in range(len(text))]
    assert [n for n, piece in enumerate(pieces) if piece] == ends


def test_a_bytes_run_that_is_no_character_is_replaced_once() -> None:
    ids = BYTES.encode("é")[:1] + BYTES.encode("ab")
    assert stream(BYTES, ids) == ["", "\ufffda", "b", "", ""]


def test_an_unfinished_character_appears_at_the_flush_only() -> None:
    assert stream(BYTES, BYTES.encode("深")[:2]) == ["", "", "", "\ufffd"]


def test_an_answer_that_starts_inside_a_character_shows_no_prompt_text() -> None:
    prompt, answer = BYTES.encode("secret 深")[:-1], BYTES.encode("深")[-1:] + BYTES.encode("ok")
    assert BYTES.decode(prompt + answer) == "secret 深ok"
    assert "".join(stream(BYTES, answer)) == "\ufffdok" == BYTES.decode(answer)


def test_special_tokens_are_skipped_or_spelled() -> None:
    ids = BYTES.encode("a") + [HIDDEN] + BYTES.encode("b") + [SHOWN]
    assert "".join(stream(BYTES, ids)) == "ab<｜shown ｜>" == BYTES.decode(ids)
    assert "".join(stream(BYTES, ids, skip_special_tokens=False)) == "a<｜hidden ｜>b<｜shown ｜>"


def test_ids_past_the_tokenizer_add_no_text() -> None:
    assert "".join(stream(TOKENIZER, [4590, *TOKENIZER.encode("ok"), 4607])) == "ok"


def test_a_second_flush_adds_nothing() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    detokenizer.push(BYTES.encode("深")[:1])
    assert [detokenizer.flush(), detokenizer.flush()] == ["\ufffd", ""]


@given(ids=st.lists(st.integers(0, BYTES.vocab_size + 3), max_size=40), skip=st.booleans())
def test_stream_of_any_bytes_equals_the_whole_decode(ids: list[int], skip: bool) -> None:
    """Arbitrary bytes, invalid ones included: the replacement rule is the tokenizer's own."""
    assert "".join(stream(BYTES, ids, skip_special_tokens=skip)) == BYTES.decode(ids, skip)


@given(ids=st.lists(st.integers(0, 2303), max_size=40), data=st.data())
def test_stream_of_any_demo_ids_equals_the_whole_decode(ids: list[int], data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=12))
    assert "".join(stream(TOKENIZER, ids, cuts)) == TOKENIZER.decode(ids)


@given(text=st.text(max_size=30))
def test_text_survives_the_stream(text: str) -> None:
    ids = TOKENIZER.raw.encode(text, add_special_tokens=False).ids
    assert "".join(stream(TOKENIZER, ids, skip_special_tokens=False)) == text


# ---- stop strings ----


def test_stop_string_over_token_boundaries() -> None:
    ids = BYTES.encode("one STOP two")
    detokenizer = IncrementalDetokenizer(BYTES, ["STOP"])
    pieces = [detokenizer.push([i]) for i in ids]
    assert "".join(pieces) == detokenizer.text == "one "
    assert detokenizer.stopped == "STOP" and detokenizer.num_ids == len("one STOP")
    assert detokenizer.flush() == ""


def test_stop_string_inside_one_push_ends_it_there() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, ["深"])
    assert detokenizer.push(BYTES.encode("a深b")) == "a"
    assert detokenizer.num_ids == 4 and detokenizer.push(BYTES.encode("c")) == ""


def test_include_stop_str_keeps_it() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, ["ST", "xx"], include_stop_str=True)
    assert detokenizer.push(BYTES.encode("one STOP two")) == "one ST"


def test_a_false_start_is_released() -> None:
    stops = StopStrings(["abcd"])
    assert [stops.push(c) for c in "abcabcx"] == ["", "", "", "abc", "", "", "abcx"]
    assert stops.found is None and stops.flush() == ""


def test_held_text_comes_with_the_flush() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, ["abcd"])
    assert [detokenizer.push(BYTES.encode("xabc")), detokenizer.flush()] == ["x", "abc"]


def test_a_stop_string_may_be_the_replaced_tail() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, ["\ufffd"])
    assert detokenizer.push(BYTES.encode("a深")[:-1]) == "a"
    assert detokenizer.flush() == "" and detokenizer.stopped == "\ufffd"


def test_unchecked_text_takes_part_in_no_match() -> None:
    stops = StopStrings(["ab"])
    assert stops.push("xab", check=False) == "xab" and stops.found is None
    assert stops.push("a", check=False) == "a"
    assert stops.push("b") == "b" and stops.found is None
    assert stops.push("ab") == "" and stops.found == "ab"


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(UserError, match="stop"):
        StopStrings(["a", ""])


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(text=st.text("abc", max_size=30), stops=STOPS, include=st.booleans(), data=st.data())
def test_result_is_the_first_completed_stop_however_the_text_is_cut(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    matches = [(at + len(s), at, s) for s in stops for at in range(len(text)) if text.startswith(s, at)]
    end, start, expected = min(matches, default=(len(text), len(text), None))
    searcher, seen, released = StopStrings(stops, include=include), 0, ""
    while seen < len(text):
        size = data.draw(st.integers(1, 5))
        released += searcher.push(text[seen : seen + size])
        seen = min(seen + size, len(text))
        if searcher.found is None:
            held = seen - len(released)
            assert 0 <= held <= max((len(s) - 1 for s in stops), default=0)
    released += searcher.flush()
    assert searcher.found == expected
    assert released == text[: end if include else start]
