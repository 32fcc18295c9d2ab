"""The V4.1 chat encoding without deepseek-recipe, for machines that train: text and tool calls, no images.

`tests/train_demo/test_chat_format.py` holds it equal to the real encoder, id for id. Training data only: a prompt that
comes from outside is encoded by `di_jax.chat`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from scripts.train_demo.tokenizer import (
    ASSISTANT,
    BOS_ID,
    DSML,
    END_THINK,
    EOS_ID,
    SYSTEM,
    THINK,
    USER,
)

EFFORTS = {"low": 50, "high": 75, "max": 100}
EFFORT_TEXT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
TOOLS_TEXT = f"""

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{DSML} calls>" block like the following:

<{DSML} calls>
<{DSML} invoke name="$TOOL_NAME">
<{DSML} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML} parameter>
...
</{DSML} invoke>
<{DSML} invoke name="$TOOL_NAME2">
...
</{DSML} invoke>
</{DSML} calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

SCHEMAS

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""  # noqa: E501  (the format's own text)


@dataclass(frozen=True)
class Turn:
    """What the assistant says: reasoning (thinking only), text, and tool calls as (name, arguments)."""

    content: str
    reasoning: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()


@dataclass(frozen=True)
class Conversation:
    """history: ("user" | "tool", text) and ("assistant", Turn), ending before the assistant's `reply`. A past turn has
    one call at most, and its result follows.

    effort: a key of EFFORTS; None: not thinking. tools: function schemas (name, description, parameters).
    """

    history: tuple[tuple[str, str | Turn], ...]
    reply: Turn
    system: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    effort: str | None = None

    def messages(self) -> list[dict[str, Any]]:
        """The history as an OpenAI chat request states it."""
        made: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for role, said in self.history:
            if isinstance(said, Turn):
                made.append(assistant_message(said))
            elif role == "tool":
                made.append({"role": "tool", "tool_call_id": "call_0", "content": said})
            else:
                made.append({"role": role, "content": said})
        return made

    def tool_list(self) -> list[dict[str, Any]] | None:
        return [{"type": "function", "function": dict(t)} for t in self.tools] or None


def assistant_message(turn: Turn) -> dict[str, Any]:
    """One turn as a message of an OpenAI chat request."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for i, (name, arguments) in enumerate(turn.calls)
        ]
    return message


class ChatFormat:
    """Encodes conversations with one tokenizer; texts must hold no spelling of a special token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        spellings = (SYSTEM, USER, ASSISTANT, THINK, END_THINK, DSML)
        self._special = {s: i for s in spellings if (i := tokenizer.token_to_id(s)) is not None}

    def prompt(self, conversation: Conversation) -> list[int]:
        """Ids up to the open assistant turn, `<think>` or `</think>` included."""
        thinking = conversation.effort is not None
        ids = [BOS_ID]
        head = EFFORT_TEXT.format(EFFORTS[conversation.effort]) if conversation.effort is not None else ""
        head += conversation.system
        if conversation.tools:
            schemas = "\n".join(json.dumps(t, ensure_ascii=False) for t in conversation.tools)
            head += TOOLS_TEXT.replace("SCHEMAS", schemas)
        if head:
            ids += [self._special[SYSTEM], *self._text(head)]
        for role, said in conversation.history:
            if isinstance(said, Turn):
                # Reasoning of earlier turns stays in the prompt only where tools are offered.
                kept = thinking and bool(conversation.tools)
                ids += [self._special[ASSISTANT], *([self._special[THINK]] if kept else [])]
                ids += self.turn(said if kept else Turn(said.content, "", said.calls))
            else:
                text = f"<tool_result>{said}</tool_result>" if role == "tool" else said
                ids += [self._special[USER], *self._text(text)]
        return [*ids, self._special[ASSISTANT], self._special[THINK if thinking else END_THINK]]

    def answer(self, conversation: Conversation) -> list[int]:
        """Ids that the model is to continue with: the reply and the end token."""
        if conversation.effort is not None:
            return self.turn(conversation.reply)
        # The prompt already closed the reasoning.
        return self.turn(Turn(conversation.reply.content, "", conversation.reply.calls))[1:]

    def turn(self, turn: Turn) -> list[int]:
        """Reasoning, `</think>`, text, calls, end token."""
        calls = ""
        if turn.calls:
            blocks = "\n".join(self._call(name, arguments) for name, arguments in turn.calls)
            calls = f"\n\n<{DSML} calls>\n{blocks}\n</{DSML} calls>"
        return [
            *self._text(turn.reasoning),
            self._special[END_THINK],
            *self._text(turn.content + calls),
            EOS_ID,
        ]

    @staticmethod
    def _call(name: str, arguments: Mapping[str, Any]) -> str:
        lines = [f'<{DSML} invoke name="{name}">']
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value)
            kind = "true" if isinstance(value, str) else "false"
            lines.append(f'<{DSML} parameter name="{key}" string="{kind}">{text}</{DSML} parameter>')
        return "\n".join([*lines, f"</{DSML} invoke>"])

    def _text(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids
