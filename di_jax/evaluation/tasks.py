"""Evaluation items: what is asked, and the answer that a judge compares with.

Items are JSON lines. Files of AIME, GPQA-Diamond and HLE, which the user supplies, are read in the columns under which
they are published (`load_aime`, `load_gpqa_diamond`, `load_hle`).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from di_jax.errors import UserError

logger = logging.getLogger(__name__)

LETTERS = "ABCDEFGHIJ"
# Levels of lists and objects in one value: what is read here is also written, and json.dumps gives up at some 1,500
# (Python 3.12), at another depth in every version.
MAX_NESTING = 200
AIME_PROMPT = "{}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
CHOICE_PROMPT = "{}\n\n{}\n\nPlease reason step by step, and end with the line 'Answer: X', where X is one letter."
HLE_PROMPT = "{}\n\nPlease reason step by step, and end with the line 'Answer: ' followed by your final answer."


class EvaluationError(UserError):
    """A file of items, a judge or an endpoint that cannot be used; the message says which, where, and what to do."""


@dataclass(frozen=True)
class EvalItem:
    """One question. Exactly one of prompt_token_ids, prompt and messages is what the engine is given.

    id: unique in its file. answer: text to compare with. meta: `judge` names the rule (`di_jax.evaluation.judges`),
    the rest is for tables. tools: with messages, as in an OpenAI chat request.
    """

    id: str
    task: str
    answer: str
    prompt_token_ids: tuple[int, ...] | None = None
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """What was asked, as text for a judging model; empty when only ids are known."""
        if self.prompt is not None:
            return self.prompt
        return "\n\n".join(str(m.get("content") or "") for m in self.messages or ())


def load_task(name: str, path: str | Path) -> list[EvalItem]:
    """Items of a task: `aime`, `gpqa_diamond` and `hle` in their published columns, other names as `load_items` has it.

    Each item's `task` is the name. Raises EvaluationError naming file and line.
    """
    if name == "hle":
        items, images = load_hle(path)
        if images:
            logger.warning("%s: %d questions with images are left out; only text is run here", path, images)
        if not items:
            raise EvaluationError(f"{path}: all of its {images} questions have images; only text is run here")
        return items
    if name in ("aime", "gpqa_diamond"):
        return load_aime(path) if name == "aime" else load_gpqa_diamond(path)
    return [dataclasses.replace(item, task=name) for item in load_items(path)]


def load_items(path: str | Path) -> list[EvalItem]:
    """Items of a JSON-lines file of this project: objects with `id`, `task`, `answer`, `meta` and one kind of prompt.

    Where a record has several kinds, ids win over messages, and messages over text. An answer is text or a number; with
    `meta.judge` json also an object, a list or a truth value. Raises EvaluationError naming file and line for invalid
    JSON, a missing or wrongly typed field, and an id that occurs twice.
    """
    items: list[EvalItem] = []
    seen: set[str] = set()
    for where, record in json_lines(path):
        item = parse_item(where, record)
        if item.id in seen:
            raise EvaluationError(f"{where}: id {item.id!r} occurs twice; ids tell answers apart")
        seen.add(item.id)
        items.append(item)
    return items


def parse_item(where: str, record: Mapping[str, Any]) -> EvalItem:
    """One record of `load_items`; `where` ("file:line") begins its errors."""
    given = {k: record[k] for k in ("prompt_token_ids", "messages", "prompt") if record.get(k) is not None}
    if not given:
        raise EvaluationError(f"{where}: needs prompt_token_ids, messages or prompt")
    kind, content = next(iter(given.items()))
    if kind == "prompt_token_ids" and not (content and _all(content, int)):
        raise EvaluationError(f"{where}: prompt_token_ids must be a list of ids")
    if kind == "messages" and not (content and _all(content, dict)):
        raise EvaluationError(f"{where}: messages must be a list of objects")
    if kind == "prompt" and not isinstance(content, str):
        raise EvaluationError(f"{where}: prompt must be text")
    meta = record.get("meta") or {}
    if not isinstance(meta, dict):
        raise EvaluationError(f"{where}: meta must be an object")
    tools = record.get("tools") if kind == "messages" else None
    if tools and not _all(tools, dict):
        raise EvaluationError(f"{where}: tools must be a list of objects")
    return EvalItem(
        str(_scalar(where, "id", _field(where, record, ("id",)))),
        str(_scalar(where, "task", _field(where, record, ("task",)))),
        _answer(where, _field(where, record, ("answer",)), meta),
        prompt_token_ids=tuple(content) if kind == "prompt_token_ids" else None,
        prompt=content if kind == "prompt" else None,
        messages=tuple(content) if kind == "messages" else None,
        tools=tuple(tools) if tools else None,
        meta=meta,
    )


def load_aime(path: str | Path) -> list[EvalItem]:
    """AIME problems: answers are integers from 0 to 999, judged by rule `number`.

    Columns, in the spellings that are published: `Problem`, `problem` or `question`; `Answer` or `answer`; optionally
    `ID`, `id` or `problem_idx`. Raises EvaluationError naming file and line.
    """
    items = []
    for number, (where, record) in enumerate(json_lines(path)):
        problem = _text(where, record, ("problem", "question"))
        answer = str(_field(where, record, ("answer",))).strip()
        # Some files write 025 or 25.0 for 25.
        whole = re.fullmatch(r"0*(\d{1,3})(?:\.0)?", answer)
        if whole is None:
            raise EvaluationError(f"{where}: answer is {answer[:40]!r}; an AIME answer is an integer from 0 to 999")
        name = _scalar(where, "id", _optional(record, ("id", "problem_idx"), number))
        items.append(_item("aime", name, number, AIME_PROMPT.format(problem), str(int(whole[1])), {"judge": "number"}))
    return items


def load_gpqa_diamond(path: str | Path, seed: int = 0) -> list[EvalItem]:
    """GPQA-Diamond questions with their four choices in an order drawn from (seed, place in the file); rule `choice`.

    Columns: `Question`, `Correct Answer`, `Incorrect Answer 1` to `3` (or the same in lower case with underscores),
    optionally `Record ID`, `High-level domain`, `Subdomain`. Raises EvaluationError naming file and line, also for a
    right answer that stands among the wrong ones: two letters would be right, and one of them counted as wrong.
    """
    items = []
    for number, (where, record) in enumerate(json_lines(path)):
        question = _text(where, record, ("question", "problem"))
        right = _text(where, record, ("correct_answer",))
        choices = [right, *(_text(where, record, (f"incorrect_answer_{n}",)) for n in (1, 2, 3))]
        if right in choices[1:]:
            wrong = f"incorrect_answer_{choices.index(right, 1)}"
            raise EvaluationError(
                f"{where}: correct_answer and {wrong} are both {right[:40]!r}; correct or drop the line"
            )
        order = random.Random(f"{seed}:{number}").sample(range(4), 4)
        shown = "\n".join(f"{letter}) {choices[i]}" for letter, i in zip(LETTERS, order))
        meta = {
            "judge": "choice",
            "choices": [choices[i] for i in order],
            "domain": str(_optional(record, ("high_level_domain", "domain"), "")),
        }
        name = _scalar(where, "id", _optional(record, ("record_id", "id"), number))
        prompt = CHOICE_PROMPT.format(question, shown)
        items.append(_item("gpqa_diamond", name, number, prompt, LETTERS[order.index(0)], meta))
    return items


def load_hle(path: str | Path) -> tuple[list[EvalItem], int]:
    """Text questions of Humanity's Last Exam, and how many with images were left out.

    Columns: `id`, `question`, `answer`, `answer_type` (`exactMatch` or `multipleChoice`; the choices are part of the
    question), `image`, optionally `category`. Choices are judged by rule `choice`; the other answers are free text
    that a model has to judge (`judges.EndpointJudge`); `exact_answer` is named for runs without one. Raises
    EvaluationError naming file and line.
    """
    items, images = [], 0
    for number, (where, record) in enumerate(json_lines(path)):
        if _optional(record, ("image",), None):
            images += 1
            continue
        kind = str(_field(where, record, ("answer_type",)))
        rules = {"exactmatch": "exact_answer", "multiplechoice": "choice"}
        if (rule := rules.get(_plain(kind).replace("_", ""))) is None:
            raise EvaluationError(f"{where}: answer_type is {kind!r}; expected exactMatch or multipleChoice")
        meta = {"judge": rule, "category": str(_optional(record, ("category",), ""))}
        prompt = HLE_PROMPT.format(_text(where, record, ("question",)))
        answer = _text(where, record, ("answer",))
        name = _scalar(where, "id", _optional(record, ("id",), number))
        items.append(_item("hle", name, number, prompt, answer, meta))
    return items, images


def pass_at_1(verdicts: Mapping[str, Sequence[bool]]) -> float:
    """Mean over items of the share of an item's samples that are right, in 0..1: Pass@1 estimated from n samples.

    Raises EvaluationError without items, and for an item without samples.
    """
    if not verdicts:
        raise EvaluationError("pass@1: no items were judged")
    for name, samples in verdicts.items():
        if not samples:
            raise EvaluationError(f"pass@1: item {name!r} has no samples; generate at least one")
    # fsum: the same number in whatever order the answers came.
    return math.fsum(sum(samples) / len(samples) for samples in verdicts.values()) / len(verdicts)


def _item(task: str, name: Any, number: int, prompt: str, answer: str, meta: Mapping[str, Any]) -> EvalItem:
    # The place in the file keeps ids apart where a file numbers two exams from 1 each.
    identity = f"{task}-{number:04d}" if name == number else f"{task}-{number:04d}-{name}"
    return EvalItem(identity, task, answer, messages=({"role": "user", "content": prompt},), meta=meta)


def json_lines(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file:line", object) of every line that is not blank. Raises EvaluationError naming file and line."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be read ({error.strerror}); expected a file of JSON lines") from error
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path}: is no UTF-8 text ({error}); expected JSON lines") from error
    found = False
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = parse_json(line)
        except ValueError as error:
            raise EvaluationError(f"{where}: not valid JSON ({error}); expected one object a line") from error
        if not isinstance(record, dict):
            raise EvaluationError(f"{where}: expected an object, found {type(record).__name__}")
        found = True
        yield where, record
    if not found:
        raise EvaluationError(f"{path}: holds no items")


def parse_json(text: str) -> Any:
    """The JSON value that a text is.

    Raises ValueError, and nothing else, for text that is no JSON, and for what can be no item's: NaN and infinite
    numbers, integers of more digits than Python reads (4,300 by default), more levels than MAX_NESTING.
    """
    too_deep = f"more than {MAX_NESTING} levels of lists and objects"
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise ValueError(f"an integer of more than {sys.get_int_max_str_digits()} digits") from error
    except RecursionError as error:
        raise ValueError(too_deep) from error
    level = [value]
    for _ in range(MAX_NESTING + 1):
        if any(type(x) is float and not math.isfinite(x) for x in level):
            raise ValueError("NaN or an infinite number, which JSON lacks; write null or leave the field out")
        inner = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        if not inner:
            return value
        level = [x for values in inner for x in values]
    raise ValueError(too_deep)


def _plain(name: str) -> str:
    """A column name without case, blanks and hyphens, which differ between published copies."""
    return name.strip().lower().replace(" ", "_").replace("-", "_")


def _optional(record: Mapping[str, Any], names: Sequence[str], default: Any) -> Any:
    plain = {_plain(key): value for key, value in record.items()}
    return next((plain[name] for name in names if plain.get(name) is not None), default)


def _field(where: str, record: Mapping[str, Any], names: Sequence[str]) -> Any:
    if (value := _optional(record, names, None)) is None:
        null = " that is not null" if any(_plain(key) in names for key in record) else ""
        has = ", ".join(sorted(record)) or "none"
        raise EvaluationError(f"{where}: no field {' or '.join(names)}{null}; it has {has}")
    return value


def _scalar(where: str, name: str, value: Any) -> str | int | float:
    """The value, of a kind that `str` spells as JSON does, unlike objects, lists, true and false."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise EvaluationError(f"{where}: {name} must be text or a number, found {json.dumps(value)[:40]}")
    return value


def _answer(where: str, value: Any, meta: Mapping[str, Any]) -> str:
    if isinstance(value, str):
        return value
    # The other rules compare characters, and an object has many spellings: only one of them would be right.
    if meta.get("judge") != "json" and not (type(value) is int or type(value) is float):
        raise EvaluationError(
            f"{where}: answer must be text or a number, found {json.dumps(value)[:40]}; with meta.judge: json it may "
            "be any JSON"
        )
    return json.dumps(value, ensure_ascii=False)


def _text(where: str, record: Mapping[str, Any], names: Sequence[str]) -> str:
    value = _field(where, record, names)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise EvaluationError(f"{where}: {' or '.join(names)} must be text that is not empty")
    return str(value).strip()


def _all(content: Any, kind: type) -> bool:
    return isinstance(content, list) and all(type(x) is kind for x in content)
