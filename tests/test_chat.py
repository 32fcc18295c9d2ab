"""Chat encoding: prompt format, refused input, missing spellings, and typed special tokens staying text."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.chat import ChatEncoder, ChatError
from di_jax.errors import UserError
from di_jax.tokenizer import Tokenizer

DEMO = Path(str(resources.files("di_jax.checkpoint") / "demo_data"))
TINY = Path(__file__).parent / "golden" / "tiny-v41-fp8"
ENCODER = ChatEncoder(DEMO)
TOKENIZER = Tokenizer.from_folder(DEMO)
SPELLINGS = sorted(json.loads((DEMO / "tokenizer.json").read_text())["added_tokens"], key=lambda t: t["id"])
IDS = {token["content"]: token["id"] for token in SPELLINGS}
BOS, EOS = IDS["<｜begin▁of▁sentence｜>"], IDS["<｜end▁of▁sentence｜>"]
USER, ASSISTANT, SYSTEM = IDS["<｜User｜>"], IDS["<｜Assistant｜>"], IDS["<｜System｜>"]
THINK, ANSWER = IDS["<think>"], IDS["</think>"]


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def specials(ids: list[int]) -> list[int]:
    return [i for i in ids if i in IDS.values()]


def test_plain_turn_without_thinking() -> None:
    ids = ENCODER.encode(user("hello there"), thinking=False)
    assert ids == [BOS, USER, *TOKENIZER.encode("hello there"), ASSISTANT, ANSWER]


def test_thinking_is_the_default_and_opens_a_thought() -> None:
    ids = ENCODER.encode(user("hello"))
    assert ids == ENCODER.encode(user("hello"), thinking=True)
    assert specials(ids) == [BOS, SYSTEM, USER, ASSISTANT, THINK]


def test_reasoning_effort_is_written_into_the_system_text() -> None:
    def number(effort: str) -> str:
        text = TOKENIZER.decode(ENCODER.encode(user("hi"), reasoning_effort=effort))
        return text.partition("Reasoning Effort: ")[2].split(" ")[0]

    assert [number(e) for e in ("low", "high", "max")] == ["50", "75", "100"]
    assert specials(ENCODER.encode(user("hi"), reasoning_effort="none"))[-1] == ANSWER


def test_several_turns_and_a_system_message() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        *user("a"),
        {"role": "assistant", "content": "b"},
        *user("c"),
    ]
    ids = ENCODER.encode(messages, thinking=False)
    assert specials(ids) == [BOS, SYSTEM, USER, ASSISTANT, ANSWER, EOS, USER, ASSISTANT, ANSWER]


def test_tools_reach_the_prompt() -> None:
    tool = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}
    ids = ENCODER.encode(user("q"), tools=[tool], thinking=False)
    assert '"name": "lookup"' in TOKENIZER.decode(ids)


def test_any_mapping_and_sequence_will_do() -> None:
    messages = tuple(MappingProxyType(m) for m in user("hello"))
    assert ENCODER.encode(messages) == ENCODER.encode(user("hello"))


def test_file_and_folder_are_both_accepted() -> None:
    assert ChatEncoder(DEMO / "tokenizer.json").encode(user("x")) == ENCODER.encode(user("x"))
    assert ENCODER.missing_spellings == ()


@given(st.lists(st.sampled_from([*IDS, "plain", " ", "\n"]), max_size=6).map("".join))
def test_typed_special_tokens_stay_text(text: str) -> None:
    """serving 1.4. The contrast: the raw encoder does turn a typed spelling into the token."""
    clean = specials(ENCODER.encode(user("x"), thinking=False))
    ids = ENCODER.encode(user(text), thinking=False)
    assert specials(ids) == clean
    assert TOKENIZER.decode(ids[2:-2], skip_special_tokens=False) == text


def test_the_raw_encoder_parses_spellings() -> None:
    assert TOKENIZER.encode("<｜User｜>") == [USER]


def test_a_tokenizer_without_the_spellings_is_refused_per_conversation() -> None:
    encoder = ChatEncoder(TINY)
    assert {"<think>", "<｜User｜>"} <= set(encoder.missing_spellings)
    with pytest.raises(ChatError, match=r"tokenizer\.json lacks the chat tokens .*<｜User｜>.*<think>") as error:
        encoder.encode(user("hello"))
    assert isinstance(error.value, UserError)


def test_the_one_missing_spelling_is_named(tmp_path: Path) -> None:
    raw = json.loads((DEMO / "tokenizer.json").read_text())
    raw["added_tokens"] = [t for t in raw["added_tokens"] if t["content"] != "<think>"]
    # Ids of added tokens must stay gapless after the removal.
    for n, token in enumerate(t for t in raw["added_tokens"] if t["id"] > 2):
        token["id"] = 2259 + n
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    encoder = ChatEncoder(tmp_path)
    assert encoder.missing_spellings == ("<think>",)
    with pytest.raises(ChatError, match=r"lacks the chat token <think>; "):
        encoder.encode(user("hello"))
    assert encoder.encode(user("hello"), thinking=False)[0] == BOS  # needs no <think>


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "Empty input messages"),
        ("hello", "expected a sequence"),
        (["hello"], "chat: "),
        ([{"role": "oracle", "content": "x"}], "unknown variant `oracle`"),
        ([{"role": "user", "content": 3}], "content should be a string or a list"),
        ([{"role": "user"}], "content"),
        ([{"content": "x"}], "role"),
        ([{"role": "tool", "content": "x"}], "tool_call_id"),
        ([{"role": "user", "content": {1, 2}}], "set is not a JSON value"),
        ([{"role": "user", "content": "\ud800"}], "not valid Unicode"),
        (None, "expected a sequence"),
    ],
)
def test_bad_messages_are_refused_with_the_reason(messages: Any, reason: str) -> None:
    with pytest.raises(ChatError, match=reason):
        ENCODER.encode(messages)


def test_deeply_nested_messages_are_refused() -> None:
    nested: Any = "x"
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ChatError, match="chat: "):
        ENCODER.encode(nested)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ChatError, match="unknown variant `huge`"):
        ENCODER.encode(user("x"), reasoning_effort="huge")
    with pytest.raises(ChatError, match=r"tools\[0\]\.function\.name"):
        ENCODER.encode(user("x"), tools=[{"type": "function", "function": {"name": "a b", "parameters": {}}}])


def test_images_are_refused() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    with pytest.raises(ChatError, match=r"messages\[0\].* image"):
        ENCODER.encode([{"role": "user", "content": parts}])


@pytest.mark.parametrize("content", ["{", "{}", '{"added_tokens": []}', "[]", '{"added_tokens": [1]}'])
def test_unreadable_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ChatError, match=r"tokenizer\.json: not a readable tokenizer"):
        ChatEncoder(tmp_path)


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match=r"tokenizer\.json: no such file"):
        ChatEncoder(tmp_path / "tokenizer.json")


def test_importing_the_module_does_not_import_the_recipe() -> None:
    code = "import sys, di_jax.chat; sys.exit('deepseek_recipe' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=False).returncode == 0
