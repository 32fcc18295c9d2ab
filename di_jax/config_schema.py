"""How config groups are declared and checked: keys with allowed values, nearest-name errors, YAML 1.1 pitfalls.

Policy only: which keys there are is in config.py. Every error is a ConfigError that names the dotted key, the value
and what is expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar, Self

import yaml

from di_jax.errors import ConfigError


def key(
    default: Any,
    *,
    only: tuple[Any, ...] = (),
    choices: tuple[Any, ...] = (),
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    booleans: Mapping[bool, str] | None = None,
) -> Any:
    """A config key. `only`: the values until its feature exists; `choices`: the known values.

    Bounds, for each element of a list: low <= value <= high, value > above. `booleans`: the text that an unquoted off
    or on stands for, which YAML 1.1 makes a boolean.
    """
    names = {"only": only, "choices": choices, "low": low, "above": above, "high": high, "booleans": booleans or {}}
    return dataclasses.field(default=default, metadata=names)


@dataclass(frozen=True)
class Group:
    """A group of keys; `PATH` is its dotted name."""

    PATH: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = _checked(field, _hints(type(self))[field.name], getattr(self, field.name), self.dotted(field.name))
            object.__setattr__(self, field.name, value)

    @classmethod
    def dotted(cls, name: object) -> str:
        return f"{cls.PATH}.{name}" if cls.PATH else str(name)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """The group from plain YAML data; left-out keys and `null` groups have their defaults. Raises ConfigError."""
        values: dict[str, Any] = {}
        for name, value in raw.items():
            hint = known(cls, name)
            if not _is_group(hint):
                values[name] = value
            elif isinstance(value, Mapping):
                values[name] = hint.from_dict(value)
            elif value is not None:
                raise ConfigError(f"{cls.dotted(name)}: {show(value)} is not a group of keys")
        return cls(**values)


def _checked(field: dataclasses.Field[Any], hint: Any, value: Any, dotted: str) -> Any:
    """The value in its field's type, or ConfigError."""
    rules = field.metadata
    if isinstance(value, bool):
        value = rules.get("booleans", {}).get(value, value)
    only = rules.get("only", ())
    try:
        converted = _convert(hint, value)
    except _MismatchError:
        if only:
            raise _unavailable(dotted, value, only) from None
        hint_text = " (unquoted yes, no, on, off, dates and numbers are not text in YAML: quote it)"
        advice = hint_text if "text" in _expected(hint) and not isinstance(value, Mapping | list | tuple) else ""
        raise ConfigError(f"{dotted}: {show(value)} has the wrong type; expected {_expected(hint)}{advice}") from None
    if only and not any(_same(converted, allowed) for allowed in only):
        raise _unavailable(dotted, converted, only)
    choices = rules.get("choices", ())
    if choices and not any(_same(converted, choice) for choice in choices):
        names = ", ".join(show(choice) for choice in choices)
        raise ConfigError(f"{dotted}: {show(converted)} is not known; expected one of {names}")
    for number in converted if isinstance(converted, tuple) else (converted,):
        if isinstance(number, int | float) and not isinstance(number, bool):
            for bound, words, holds in (
                (rules.get("low"), "at least", lambda x, b: x >= b),
                (rules.get("above"), "more than", lambda x, b: x > b),
                (rules.get("high"), "at most", lambda x, b: x <= b),
            ):
                if bound is not None and not holds(number, bound):
                    raise ConfigError(f"{dotted}: {show(converted)} is out of range; expected {words} {bound}")
    return converted


def _unavailable(dotted: str, value: Any, only: tuple[Any, ...]) -> ConfigError:
    values = "the only value is" if len(only) == 1 else "the only values are"
    allowed = " and ".join(show(choice) for choice in only)
    return ConfigError(f"{dotted}: {show(value)} is not available yet; {values} {allowed}")


class _MismatchError(Exception):
    """A value that is not of its key's type."""


# YAML 1.1 reads a number in scientific notation as text unless it has both a point and a signed exponent.
_SCIENTIFIC = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]{1,3}")


def _convert(hint: Any, value: Any) -> Any:
    """The value as the type `hint`: exact numbers convert, nothing else does. Raises _MismatchError."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        for arm in typing.get_args(hint):
            try:
                return _convert(arm, value)
            except _MismatchError:
                continue
    elif origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(typing.get_args(hint)[0], item) for item in value)
    elif hint in (int, float) and not isinstance(value, bool):
        if isinstance(value, str) and _SCIENTIFIC.fullmatch(value):
            value = Decimal(value)
        if isinstance(value, int | float | Decimal) and math.isfinite(value):
            try:
                number = hint(value)
            except OverflowError as error:
                raise _MismatchError from error
            if math.isfinite(number) and (number == value or (hint is float and isinstance(value, Decimal))):
                return number
    elif origin is Mapping and isinstance(value, Mapping):
        return dict(value)
    elif type(value) is hint:
        return value
    raise _MismatchError


def _expected(hint: Any) -> str:
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false", types.NoneType: "null"}
    if hint in names:
        return names[hint]
    if typing.get_origin(hint) is tuple:
        return {int: "a list of integers", float: "a list of numbers"}.get(typing.get_args(hint)[0], "a list of text")
    if _is_group(hint):
        return f"a {hint.__name__}"
    arms = [_expected(arm) for arm in typing.get_args(hint)]
    return " or ".join(arms) if typing.get_origin(hint) in (types.UnionType, typing.Union) else "a mapping"


def _same(value: Any, other: Any) -> bool:
    """Equality that keeps True and 1 apart."""
    return type(value) is type(other) and bool(value == other)


def show(value: Any) -> str:
    """A value for an error message, as YAML would have it, cut to one short line."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, str) and re.fullmatch(r"(?!true$|false$|null$)[A-Za-z_][A-Za-z0-9_./-]*", value):
        return value
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def check_ascending(dotted: str, sizes: tuple[int, ...]) -> None:
    """Raises ConfigError unless there are sizes and each is larger than the one before."""
    if not sizes or any(small >= large for small, large in itertools.pairwise(sizes)):
        raise ConfigError(f"{dotted}: {show(sizes)} is not a list of ascending sizes")


def _is_group(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Group)


def _hints(group: Any) -> dict[str, Any]:
    """Types of the keys of a Group class, by name."""
    return _cached_hints(group)


@functools.cache
def _cached_hints(group: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(group)
    return {field.name: hints[field.name] for field in dataclasses.fields(group)}


def known_keys(group: type[Group]) -> Iterator[str]:
    """Dotted names of every key below a group, without the groups themselves."""
    for name, hint in _hints(group).items():
        if _is_group(hint):
            yield from known_keys(hint)
        else:
            yield group.dotted(name)


def known(group: type[Group], name: object) -> Any:
    """The type of a group's key. Raises ConfigError with the nearest known key."""
    hints = _hints(group)
    if name in hints:
        return hints[str(name)]
    everywhere = [dotted for other in Group.__subclasses__() for dotted in known_keys(other)]
    misplaced = [dotted for dotted in everywhere if dotted.rpartition(".")[2] == name]
    beside = [group.dotted(close) for close in difflib.get_close_matches(str(name), hints, n=1)]
    anywhere = difflib.get_close_matches(group.dotted(name), everywhere, n=1, cutoff=0.0)
    nearest = (misplaced + beside + anywhere)[0]
    raise ConfigError(f"{group.dotted(name)}: unknown key; the nearest known key is {nearest}")


def assigned(group: type[Group], raw: Mapping[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    """A copy of the plain tree `raw` with the key `dotted`, counted from `group`, set to a value."""
    name, dot, rest = dotted.partition(".")
    hint = known(group, name)
    if not dot and not _is_group(hint):
        return {**raw, name: value}
    path = group.dotted(name)
    if not _is_group(hint):
        raise ConfigError(f"{path}.{rest}: {path} is a key, not a group of keys")
    if not rest:
        raise ConfigError(f"{path}: is a group of keys; set one of them, such as {next(known_keys(hint))}")
    inner = raw.get(name)
    if not isinstance(inner, Mapping | None):
        raise ConfigError(f"{path}: {show(inner)} is not a group of keys")
    return {**raw, name: assigned(hint, inner or {}, rest, value)}


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice in one mapping, which YAML forbids and PyYAML lets win silently."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # While composing, before merge keys (<<) are expanded: what overrides a merged key is not a duplicate.
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"the key {key_node.value!r} is written twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return node


def parse_yaml(text: str, source: str) -> Any:
    """YAML text as plain data. Raises ConfigError that names the source and the line."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(f"{source}{line}: not readable as YAML: {problem}") from error


class _Dumper(yaml.SafeDumper):
    """SafeDumper that writes Unicode line breaks as escapes: unescaped, they read back as a space."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump_yaml(plain: Any) -> str:
    """Plain data as YAML text in the order of its keys; `parse_yaml` reads it back equal."""
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
