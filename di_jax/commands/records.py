"""Request records, one JSON object a line, and what the commands share about input and output (cli-contract, generate).

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
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UserError(f"input {path}: cannot be read: {error.strerror}; give a file of request records") from error
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    return [parse_record(line, index, number) for index, (number, line) in enumerate(filled)]


def refuse_input_as_output(path: Path, source: str | Path | None) -> None:
    """Raises UserError when the output `path` is the file that the records are read from, under whatever name."""
    try:
        same = source is not None and path.exists() and path.samefile(source)
    except OSError as error:
        raise UserError(f"output {path}: cannot be written: {error.strerror}") from error
    if same:
        raise UserError(f"output {path}: is also the input; give another file")


def print_result(text: str) -> None:
    """Prints a line to stdout at once. Raises UserError when stdout is full; BrokenPipeError stays what it is."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"stdout: cannot be written: {error.strerror}") from error


def printable(text: str) -> str:
    """The text with half surrogate pairs spelled out: an id may hold one, which no stream can encode."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def parse_record(line: bytes, index: int, number: int) -> Record:
    """A line of a file, its `number` counted from 1. What is wrong with it becomes the record's error; its id is kept
    when it could be read, and is the record's index when it has none."""
    default = str(index)
    try:
        raw = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return Record(default, error=f"line {number}: not readable as JSON: {error}")
    if not isinstance(raw, dict):
        return Record(default, error=f"line {number}: expected an object, found {type(raw).__name__}")
    identity = default if raw.get("id") is None else raw["id"]
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
