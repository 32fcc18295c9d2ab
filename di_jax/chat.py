"""Chat messages to prompt ids, through deepseek-recipe's V4.1 encoding.

The only module that imports deepseek_recipe, and only when a chat is encoded: raw prompts need none of it.
A conversation is encoded as a whole (serving 1.4). Its rendered text is never tokenized, because a special token that
a user merely typed would then become that token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from di_jax.errors import UserError

MODEL_NAME = "DeepSeek-V4.1-Flash"  # selects the V4.1 prompt format inside deepseek_recipe


class ChatError(UserError):
    """Messages, tools or options that make no prompt, or a tokenizer that lacks a chat token; says which."""


class ChatEncoder:
    """Encodes conversations with the tokenizer of one checkpoint.

    tokenizer_path: `tokenizer.json`, or the folder that holds it. Raises ChatError when it is missing or unreadable;
    a tokenizer that lacks chat tokens is accepted, and each conversation that needs one is refused.
    """

    def __init__(self, tokenizer_path: str | Path) -> None:
        path = Path(tokenizer_path)
        self.path = path / "tokenizer.json" if path.is_dir() else path
        if not self.path.is_file():
            raise ChatError(f"{self.path}: no such file; chat messages need the checkpoint's tokenizer")
        import deepseek_recipe as recipe

        self._recipe = recipe
        try:
            text = self.path.read_text(encoding="utf-8")
            self._added = {token["content"] for token in json.loads(text).get("added_tokens") or []}
            tokenizer = recipe.Tokenizer.from_str(text)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ChatError(f"{self.path}: not a readable tokenizer ({error}); fetch the file again") from error
        self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(tokenizer)

    @property
    def missing_spellings(self) -> tuple[str, ...]:
        """Chat tokens that the tokenizer lacks; empty for a DeepSeek-V4.1 tokenizer."""
        kinds = [kind for name, kind in vars(self._recipe.SpecialToken).items() if name[0].isupper()]
        return tuple(sorted(s for kind in kinds if (s := kind.default_str()) not in self._added))

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        reasoning_effort: str | None = None,
    ) -> list[int]:
        """Prompt ids of a conversation, from the begin token to the open assistant turn.

        messages, tools: as in an OpenAI chat request. thinking: None keeps the format's default (on).
        reasoning_effort: none, minimal, low, medium, high, xhigh, ultra or max. Raises ChatError with the reason for
        malformed input, for images (text only here), and for a tokenizer that lacks a needed spelling.
        """
        conversation = self._conversation(messages, tools, thinking, reasoning_effort)
        images = [source.path for message in conversation.messages for source in message.image_sources]
        if images:
            raise ChatError(f"chat: {images[0].lstrip('.')} holds an image; only text is run here, remove the image")
        try:
            return self._encoding.encode(conversation)
        except RuntimeError as error:
            missing = self._missing_in(conversation)
            if not missing:
                raise ChatError(f"chat: {error}") from error
            raise ChatError(
                f"chat: {self.path.name} lacks the chat token{'s' * (len(missing) > 1)} {', '.join(missing)}; "
                "send this checkpoint raw text (prompt) or ids (prompt_token_ids)"
            ) from error

    def _conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        thinking: bool | None,
        reasoning_effort: str | None,
    ) -> Any:
        body: dict[str, Any] = {"model": MODEL_NAME, "messages": messages}
        if tools is not None:
            body["tools"] = tools
        if thinking is not None:
            body["thinking"] = {"type": "enabled" if thinking else "disabled"}
        if reasoning_effort is not None:
            body["reasoning_effort"] = reasoning_effort
        try:
            # Through JSON, so that any mapping or sequence is taken and recipe judges plain data only.
            request = self._recipe.ChatCompletionRequest(json.dumps(body, ensure_ascii=False, default=_plain))
            return request.convert(self._recipe.ConversionOptions()).conversation
        except UnicodeEncodeError as error:
            raise ChatError(f"chat: text is not valid Unicode ({error.reason})") from error
        except (ValueError, TypeError, RecursionError, self._recipe.ConversionError) as error:
            raise ChatError(f"chat: {error}") from error

    def _missing_in(self, conversation: Any) -> list[str]:
        """Special spellings that this conversation's format places and the tokenizer lacks, in order of use."""
        rendered = self._encoding.render_conversation(conversation)
        used = dict.fromkeys(rendered.prompt[start:end] for start, end in rendered.special_ranges)
        return [spelling for spelling in used if spelling not in self._added]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")
