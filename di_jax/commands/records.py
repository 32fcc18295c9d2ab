"""Request records: one JSON object a line (cli-contract, generate).

A line that is no record fails alone: its neighbours are answered.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from di_jax.errors import UserError
from di_jax.prompts import PROMPT_FIELDS

FIELDS = (*PROMPT_FIELDS, "id", "sampling")


class RecordError(UserError):
    """A line that is not a request record; names the field and what is expected."""


@dataclass(frozen=True)
class Record:
    """One request. prompt: {field: value} with one of PROMPT_FIELDS; empty when `error` says why there is none."""

    id: str
    prompt: dict[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def records_of_texts(texts: Sequence[str]) -> list[Record]:
    """Records of plain prompts, with their index as id."""
    return [Record(str(index), {"prompt": text}) for index, text in enumerate(texts)]


def read_records(path: Path) -> list[Record]:
    """Every line of a .jsonl file that is not blank, in order. Raises UserError when the file cannot be read."""
    try:
        lines = [line for line in path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    except OSError as error:
        raise UserError(f"input {path}: cannot be read: {error.strerror}; give a file of request records") from error
    return [parse_record(line, index) for index, line in enumerate(lines)]


def parse_record(line: bytes, index: int) -> Record:
    """One line. What is wrong with it becomes the record's error; its id is kept when it could be read."""
    default = str(index)
    try:
        raw = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return Record(default, error=f"line of record {index}: not readable as JSON: {error}")
    if not isinstance(raw, dict):
        return Record(default, error=f"line of record {index}: expected an object, found {type(raw).__name__}")
    identity = raw.get("id", default)
    if type(identity) not in (str, int):
        return Record(default, error=f"id: expected text, found {type(identity).__name__}")
    try:
        _check_fields(raw)
    except RecordError as error:
        return Record(str(identity), error=str(error))
    prompt = {name: raw[name] for name in PROMPT_FIELDS if name in raw}
    sampling = raw.get("sampling")
    return Record(str(identity), prompt, {} if sampling is None else sampling)


def _check_fields(raw: dict[str, Any]) -> None:
    for name in raw:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            raise RecordError(
                f"{name}: unknown field; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(FIELDS)}")
            )
    given = [name for name in PROMPT_FIELDS if name in raw]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise RecordError(f"record: expected one of {', '.join(PROMPT_FIELDS)}, found {found}")
    if not isinstance(raw.get("sampling"), dict | None):
        raise RecordError(f"sampling: expected an object, found {type(raw['sampling']).__name__}")
