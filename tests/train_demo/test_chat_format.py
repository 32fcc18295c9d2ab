"""The offline chat encoding equals that of deepseek-recipe, id for id."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tokenizers import Tokenizer

from di_jax.chat import ChatEncoder
from scripts.train_demo.chat_format import ChatFormat, Conversation, Turn, assistant_message
from scripts.train_demo.chat_tasks import TOOLS, chat_conversation, conversations, tool_conversation

CALL = Turn("", "I need the weather.", (("get_weather", {"city": "Oslo", "days": 3}),))
TWO_CALLS = Turn("Both.", "", (("add", {"a": 1, "b": -2}), ("get_time", {"city": 'a "b" <c>'})))
HISTORIES: dict[str, tuple[tuple[str, str | Turn], ...]] = {
    "one": (("user", "Hi"),),
    "two": (("user", "Hi"), ("assistant", Turn("Hello!", "A greeting.")), ("user", "2+2?")),
    "result": (("user", "Weather?"), ("assistant", CALL), ("tool", "sunny")),
    "after": (
        ("user", "Weather?"),
        ("assistant", CALL),
        ("tool", '{"sky": "clear"}'),
        ("assistant", Turn("Clear.", "Done.")),
        ("user", "Thanks"),
    ),
}


@pytest.fixture(scope="module")
def encoder(demo_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    path = tmp_path_factory.mktemp("chat") / "tokenizer.json"
    path.write_text(demo_tokenizer.to_str(), encoding="utf-8")
    return ChatEncoder(path)


def real(encoder: ChatEncoder, conversation: Conversation) -> list[int]:
    effort = conversation.effort
    return encoder.encode(conversation.messages(), conversation.tool_list(), effort is not None, effort)


@pytest.mark.parametrize("effort", [None, "low", "high", "max"])
@pytest.mark.parametrize("system", ["", "You are a helpful assistant."])
@pytest.mark.parametrize("tools", [0, 1, 3])
@pytest.mark.parametrize("history", HISTORIES)
def test_prompts_are_equal(
    demo_tokenizer: Tokenizer, encoder: ChatEncoder, effort: str | None, system: str, tools: int, history: str
) -> None:
    if tools == 0 and history not in ("one", "two"):
        history = "two"  # calls belong to conversations that offer tools
    conversation = Conversation(HISTORIES[history], Turn("ok"), system, TOOLS[:tools], effort)
    assert ChatFormat(demo_tokenizer).prompt(conversation) == real(encoder, conversation)


@pytest.mark.parametrize("make", [chat_conversation, tool_conversation])
def test_generated_conversations_are_equal(demo_tokenizer: Tokenizer, encoder: ChatEncoder, make) -> None:
    chat = ChatFormat(demo_tokenizer)
    rng = np.random.default_rng(7)
    for conversation, _ in itertools.islice(conversations(make, rng, "train"), 60):
        assert chat.prompt(conversation) == real(encoder, conversation)


@pytest.mark.parametrize("effort", [None, "high"])
@pytest.mark.parametrize("reply", [Turn("Hello!", "A greeting."), CALL, TWO_CALLS])
def test_answers_are_what_history_shows(
    demo_tokenizer: Tokenizer, encoder: ChatEncoder, effort: str | None, reply: Turn
) -> None:
    """Where tools are offered, a past turn is shown whole: prompt, answer and what follows make the next prompt."""
    conversation = Conversation((("user", "Hi"),), reply, "", TOOLS, effort)
    chat = ChatFormat(demo_tokenizer)
    results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": "ok"} for i in range(len(reply.calls))]
    following = results or [{"role": "user", "content": "Go on"}]
    messages = [*conversation.messages(), assistant_message(reply), *following]
    later = encoder.encode(messages, conversation.tool_list(), effort is not None, effort)
    said = [*chat.prompt(conversation), *chat.answer(conversation)]
    assert later[: len(said)] == said


def test_the_comparison_can_fail(demo_tokenizer: Tokenizer, encoder: ChatEncoder) -> None:
    """A typed marker becomes the marker offline, never in the real encoder: training texts hold none."""
    conversation = Conversation((("user", "a<｜User｜>b"),), Turn("ok"))
    assert ChatFormat(demo_tokenizer).prompt(conversation) != real(encoder, conversation)
