"""Judges: whether an answer is right, by rule or by asking a model behind an OpenAI-compatible endpoint.

A rule sees the text after the reasoning (`</think>`), stripped. Rules by name, as an item's `meta["judge"]` has them:

    exact         the text equals the answer
    exact_answer  the text after the last "Answer:" equals the answer, ignoring case and a final full stop
    number        the last number (that of the last \\boxed{} if there is one) equals the answer's last number
    choice        the last "Answer: X", or \\boxed{X}, or else a lone letter, is the answer's letter
    json          the text is one JSON value equal to the answer's (objects: in any order of fields)
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from di_jax.evaluation.tasks import EvalItem, EvaluationError, parse_json

END_THINK = "</think>"
# A sign belongs to the number only where no digit or bracket comes before it (7-3).
NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?")
LETTER = r"\(?\**([A-Z])\**\)?"
# What a request can be sent to: labels of 1 to 63 characters, or an IPv6 address in brackets; a path of ASCII without
# blanks. No ? and no #: the path goes on after it.
URL = re.compile(
    r"https?://(?:(?:[\w-]{1,63}\.)*[\w-]{1,63}\.?|\[(?P<ipv6>[\dA-Fa-f:.]+(?:%\w+)?)\])"
    r"(?::(?P<port>\d{1,5}))?(?:/[!\"$->@-~]*)?",
    re.ASCII,
)
JUDGE_PROMPT = """Judge whether the response to the question is correct, given the correct answer.

Question: {question}

Response: {response}

Correct answer: {answer}

Compare only the final answer of the response. Small differences in format or rounding are accepted; a response
without a final answer is not correct. Reply with one line: "correct: yes" or "correct: no"."""


class UndecidedError(EvaluationError):
    """A judging model that was asked about one answer and gave no verdict; others may fare better."""


@dataclass(frozen=True)
class Verdict:
    """correct: the judgement. found: what was compared, None where the text held nothing to compare."""

    correct: bool
    found: str | None


Judge = Callable[[EvalItem, str], Verdict]


def final_text(text: str) -> str:
    """The answer without its reasoning, stripped; reasoning that never ends leaves nothing."""
    if END_THINK in text:
        return text.rsplit(END_THINK, 1)[1].strip()
    return "" if text.lstrip().startswith("<think>") else text.strip()


def judge_exact(item: EvalItem, text: str) -> Verdict:
    found = final_text(text)
    return Verdict(found == final_text(item.answer), found)


def judge_exact_answer(item: EvalItem, text: str) -> Verdict:
    found = re.split(r"answer:", final_text(text), flags=re.IGNORECASE)[-1].strip().strip("*").strip()
    return Verdict(_folded(found) == _folded(item.answer), found or None)


def judge_number(item: EvalItem, text: str) -> Verdict:
    wanted, found = last_number(item.answer), last_number(final_text(text))
    if wanted is None:
        raise EvaluationError(f"item {item.id}: its answer {item.answer!r} has no number; judge it by another rule")
    return Verdict(found == wanted, None if found is None else str(found))


def judge_choice(item: EvalItem, text: str) -> Verdict:
    wanted = re.fullmatch(LETTER + r"\.?", item.answer.strip())
    if wanted is None:
        raise EvaluationError(f"item {item.id}: its answer {item.answer!r} is no letter; judge it by another rule")
    said = final_text(text)
    patterns = (rf"(?i:answer)\**\s*(?i:is)?\s*:?\s*\**\s*{LETTER}(?![a-zA-Z])", r"\\boxed\{\s*(?:\\text\{)?" + LETTER)
    at = [m for pattern in patterns for m in re.finditer(pattern, said)]
    # Whichever comes last: models correct themselves.
    match = max(at, key=lambda m: m.start()) if at else re.fullmatch(LETTER + r"[.):]?", said)
    return Verdict(match is not None and match[1] == wanted[1], match[1] if match else None)


def judge_json(item: EvalItem, text: str) -> Verdict:
    try:
        wanted = parse_json(item.answer)
    except ValueError as error:
        raise EvaluationError(f"item {item.id}: its answer is no JSON ({error}); judge it by another rule") from error
    found = final_text(text)
    try:
        value = parse_json(found)
    except ValueError:
        return Verdict(False, None)
    # As text, so that 1, 1.0 and true stay apart.
    return Verdict(_canonical(value) == _canonical(wanted), found)


RULES: dict[str, Judge] = {
    "exact": judge_exact,
    "exact_answer": judge_exact_answer,
    "number": judge_number,
    "choice": judge_choice,
    "json": judge_json,
}


def judge_by_rule(item: EvalItem, text: str) -> Verdict:
    """By the rule that the item names (default exact). Raises EvaluationError for an unknown rule."""
    name = item.meta.get("judge", "exact")
    if not isinstance(name, str) or name not in RULES:
        raise EvaluationError(f"item {item.id}: unknown judge {name!r}; known are {', '.join(RULES)}")
    return RULES[name](item, text)


def last_number(text: str) -> Decimal | None:
    """The last number of a text, that of the last \\boxed{...} when there is one; None without a number."""
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    numbers = NUMBER.findall(boxed[-1]) if boxed else []
    numbers = numbers or NUMBER.findall(text)
    try:
        return Decimal(numbers[-1].replace(",", "")).normalize() if numbers else None
    except ArithmeticError:
        return None


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _is_url(text: str) -> bool:
    match = URL.fullmatch(text)
    if match is None or not 0 < int(match["port"] or 80) < 2**16:
        return False
    try:
        return match["ipv6"] is None or bool(ipaddress.IPv6Address(match["ipv6"]))
    except ValueError:
        return False


def _folded(text: str) -> str:
    return " ".join(text.strip().removesuffix(".").casefold().split())


@dataclass(frozen=True)
class EndpointJudge:
    """Asks a chat model whether an answer is right: POST {base_url}/chat/completions, as OpenAI defines it.

    key_file: a file whose first line is the key; None sends none. timeout: seconds of one try. tries: at 429, 5xx and
    broken connections, with a growing pause. Raises EvaluationError naming the endpoint, never the key; UndecidedError
    where the model answered, but with no verdict.
    """

    base_url: str
    model: str
    key_file: Path | None = None
    timeout: float = 120.0
    tries: int = 3
    pause: float = 1.0
    max_tokens: int = 4096

    def check(self) -> None:
        """Raises EvaluationError for a URL or a key file that cannot be used; asks nothing."""
        if not self.base_url.startswith(("http://", "https://")):
            raise EvaluationError(f"{self.base_url}: a judge's base_url starts with http:// or https://")
        if "@" in self.base_url.split("/")[2]:  # not shown: what stands before the @ is a secret
            raise EvaluationError("a judge's base_url holds no user and no password; a key goes into its key file")
        if not _is_url(self.base_url):
            raise EvaluationError(
                f"{self.base_url}: a judge's base_url is http(s)://HOST, HOST:PORT or [IPV6]:PORT and a path without "
                "blanks, ? and #, such as http://localhost:8000/v1"
            )
        if self.key_file is not None:
            self._key(self.key_file)

    def __call__(self, item: EvalItem, text: str) -> Verdict:
        prompt = JUDGE_PROMPT.format(question=item.question, response=final_text(text), answer=item.answer)
        said = final_text(self._ask(prompt))
        verdicts = re.findall(r"correct\W*\s*(yes|no)\b", said, flags=re.IGNORECASE)
        if not verdicts:
            raise UndecidedError(
                f"{self.base_url}: judge {self.model!r} said neither 'correct: yes' nor 'correct: no' about item "
                f"{item.id} but {said[:80]!r}; use another model or more max_tokens"
            )
        return Verdict(verdicts[-1].lower() == "yes", said)

    def _ask(self, prompt: str) -> str:
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        self.check()
        headers = {"Content-Type": "application/json"}
        if self.key_file is not None:
            headers["Authorization"] = f"Bearer {self._key(self.key_file)}"
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
        for attempt in range(1, self.tries + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    answer = json.load(response)
                return str(answer["choices"][0]["message"]["content"] or "")
            except urllib.error.HTTPError as error:
                detail = error.read(500).decode("utf-8", "replace")
                if attempt == self.tries or not (error.code == 429 or error.code >= 500):
                    raise EvaluationError(f"{url}: judge answered {error.code} ({detail.strip()[:200]})") from error
            except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
                raise EvaluationError(f"{url}: judge's answer is no chat completion ({error!r})") from error
            except (OSError, http.client.HTTPException) as error:  # no connection, or it broke or timed out
                if attempt == self.tries:
                    raise EvaluationError(
                        f"{url}: judge cannot be reached in {self.tries} tries ({error}); check its URL and the network"
                    ) from error
            time.sleep(self.pause * 2 ** (attempt - 1))
        raise EvaluationError(f"{url}: tries is {self.tries}; at least one is needed")

    @staticmethod
    def _key(path: Path) -> str:
        try:
            key = path.read_text(encoding="utf-8").split("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise EvaluationError(f"{path}: the judge's key cannot be read ({type(error).__name__})") from error
        if not key or not key.isascii():
            raise EvaluationError(f"{path}: its first line must be the judge's key")
        return key
