"""Text in and out: the checkpoint's tokenizer, text as it streams, and stop strings.

DeepSeek tokenizers are byte-level: every token is a run of bytes, and a character may be spread over several tokens.
Streaming therefore works on bytes and releases whole characters only.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from di_jax.errors import UserError
from di_jax.model.config import ModelConfig


class TokenizerError(UserError):
    """A tokenizer folder that cannot be read, or text that cannot be encoded; the message names the file."""


def _byte_alphabet() -> dict[str, int]:
    """Byte of each character of the byte-level alphabet: printable Latin-1 bytes stand for themselves, the other 68
    are numbered upwards from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + n): b for n, b in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """The tokenizer of one checkpoint folder.

    vocab_size: ids that it knows, added tokens included (the model's embedding may have more rows).
    bos_id, eos_id: from `config.json`. add_bos: whether a raw text prompt starts with bos_id.
    """

    def __init__(self, raw: RawTokenizer, bos_id: int, eos_id: int, *, add_bos: bool = False) -> None:
        decoder = json.loads(raw.to_str())["decoder"]
        if (decoder or {}).get("type") != "ByteLevel":
            raise TokenizerError(
                f"tokenizer.json: decoder is {decoder and decoder.get('type')!r}; this engine reads byte-level "
                "tokenizers ('ByteLevel'), as DeepSeek-V4.1 has"
            )
        # A file may carry the truncation and padding of whoever saved it; they would silently alter prompts.
        raw.no_truncation()
        raw.no_padding()
        self.raw = raw
        self.bos_id, self.eos_id, self.add_bos = bos_id, eos_id, add_bos
        self.vocab_size = raw.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, token in raw.get_added_tokens_decoder().items() if token.special)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: str | Path, config: ModelConfig | None = None) -> Tokenizer:
        """Reads `tokenizer.json` and, when there, `tokenizer_config.json` of a checkpoint folder.

        Without `config` the begin and end ids come from the folder's `config.json`. Raises TokenizerError naming the
        file, ModelConfigError for that config.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{path}: no such file; put the checkpoint's tokenizer there, which prompts of ids need too (answers "
                "become text, and the Engram map follows from it)"
            )
        config = config or ModelConfig.from_file(folder)
        try:
            raw = RawTokenizer.from_str(path.read_text(encoding="utf-8"))
        # The package raises bare Exception for every fault of the file.
        except Exception as error:
            raise TokenizerError(f"{path}: not a readable tokenizer ({error}); fetch the file again") from error
        settings = _read_settings(folder / "tokenizer_config.json")
        add_bos = settings.get("add_bos_token", False)
        if not isinstance(add_bos, bool | None):
            raise TokenizerError(f"{folder / 'tokenizer_config.json'}: add_bos_token must be true or false")
        try:
            return cls(raw, config.bos_token_id, config.eos_token_id, add_bos=bool(add_bos))
        except TokenizerError as error:
            raise TokenizerError(f"{folder}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of a raw text prompt. Spellings of special tokens become these tokens (a chat must not pass here:
        `di_jax.chat`); the begin token comes first only where tokenizer_config.json says `add_bos_token`.

        Raises TokenizerError for text that is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"prompt: not valid Unicode at character {error.start} ({error.reason})") from error
        ids = self.raw.encode(text, add_special_tokens=False).ids
        return [self.bos_id, *ids] if self.add_bos else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that form no character become U+FFFD, ids that the tokenizer lacks nothing."""
        return self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id adds to the text, special tokens by their spelling; empty for an unknown id."""
        found = self._bytes.get(token_id)
        if found is None:
            piece = self.raw.id_to_token(token_id) or ""
            # Added tokens are stored as plain text: one that leaves the alphabet stands for its UTF-8 bytes.
            mapped = [_BYTE_OF.get(c) for c in piece]
            known = [b for b in mapped if b is not None]
            found = bytes(known) if len(known) == len(mapped) else piece.encode()
            self._bytes[token_id] = found
        return found

    def token_text(self, token_id: int) -> str:
        """One id as text, special tokens by their spelling; U+FFFD for bytes that are no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(settings, dict):
        raise TokenizerError(f"{path}: expected a JSON object, found {type(settings).__name__}")
    return settings


class StopStrings:
    """Finds stop strings in text that arrives in pieces, holding back only what may become one.

    The stop string that is complete first wins (of two complete at once, the longer), so the result does not depend
    on how the text was cut. Never holds more than the longest stop string less one character.
    """

    def __init__(self, stops: Iterable[str], *, include: bool = False) -> None:
        self.stops = tuple(dict.fromkeys(stops))
        if not all(isinstance(s, str) and s for s in self.stops):
            raise UserError(f"stop: every stop string needs at least one character, found {list(self.stops)!r}")
        self.include = include
        self.found: str | None = None
        self._held = ""

    def push(self, text: str, check: bool = True) -> str:
        """The text that is safe to release; nothing more once `found` is set. Text pushed with `check` off is
        released as it is and takes part in no match (answers shorter than min_tokens)."""
        if self.found is not None:
            return ""
        if not check:
            released, self._held = self._held + text, ""
            return released
        seen = self._held + text
        # (end, start): earliest end first, and of equal ends the earliest start.
        ends = [(at + len(s), at, s) for s in self.stops if (at := seen.find(s)) >= 0]
        if ends:
            end, start, self.found = min(ends)
            self._held = ""
            return seen[: end if self.include else start]
        keep = self._prefix_length(seen)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep]

    def flush(self) -> str:
        """What was held back, released because no more text comes."""
        released, self._held = self._held, ""
        return released

    def _prefix_length(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(max((len(s) for s in self.stops), default=1) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self.stops)), 0)


class IncrementalDetokenizer:
    """Text of one answer as its tokens arrive.

    Only generated ids are pushed, so no prompt text can appear. An answer that begins inside a character (a prompt of
    ids that ends within one) shows U+FFFD for the bytes that came without their beginning. All released text together
    equals `Tokenizer.decode` of the pushed ids, cut at the stop string.

    stopped: the stop string that ended the answer, or None. num_ids: ids consumed, up to the one that completed the
    stop string; later ones are ignored. text: everything released so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Iterable[str] = (),
        *,
        include_stop_str: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopStrings(stop, include=include_stop_str)
        self._released: list[str] = []
        self.num_ids = 0

    @property
    def stopped(self) -> str | None:
        return self._stops.found

    @property
    def text(self) -> str:
        return "".join(self._released)

    def push(self, ids: Iterable[int], check_stop: bool = True) -> str:
        """Takes the next ids and returns the new text: whole characters that no stop string can swallow."""
        pieces = []
        for token_id in ids:
            if self.stopped is not None:
                break
            self.num_ids += 1
            if token_id not in self._skip:
                text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
                pieces.append(self._stops.push(text, check_stop))
        return self._release("".join(pieces))

    def flush(self) -> str:
        """The rest at the end of the answer: held text, and U+FFFD for a character that was never finished."""
        if self.stopped is not None:
            return ""
        tail = self._utf8.decode(b"", final=True)
        return self._release(self._stops.push(tail) + self._stops.flush())

    def _release(self, text: str) -> str:
        if text:
            self._released.append(text)
        return text
