"""Errors of a recipe in one line, in the words of TOML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from datetime import date, time
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ValidationError

from agentgym_rl.errors import did_you_mean

UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
PLAIN = {
    "missing": "is needed, and not given",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "model_type": "must be a section",
    "dataclass_type": "must be a section",
    "dict_type": "must be a section",
    "string_type": "must be text",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_parsing_size": "must be an integer of fewer digits",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "finite_number": "must be a finite number",
    "literal_error": "must be {expected}",
    "too_short": "needs at least {min_length}",
    "too_long": "takes at most {max_length}",
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be less than or equal to {le:g}",
}
"""Messages by pydantic's kind of error. Its own messages name Python types."""
SHOWN = 60
"""Most characters of a value that an error repeats."""


def first_error(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the first error and the number of others. An unknown key comes first: a missing key may be under it."""
    errors = error.errors()
    places = [e["loc"] for e in errors]
    errors = [e for e in errors if e["type"] != "too_short" or not _has_others_inside(e["loc"], places)]
    first = min(errors, key=lambda e: e["type"] not in UNKNOWN_KEY)
    place = ".".join(map(str, first["loc"])) or "recipe"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    if first["type"] in UNKNOWN_KEY:
        return f"{place}: unknown key{_meant(first['loc'], model)}{more}"
    return f"{place}: {reason(dict(first))}{more}"


def reason(error: dict[str, Any]) -> str:
    """Return the error of one value, without its key."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    text = PLAIN[kind].format(**context) if kind in PLAIN else error["msg"].removeprefix("Value error, ")
    name = next((part for part in reversed(error["loc"]) if isinstance(part, str)), "")
    if text == "must be a list" and isinstance(value, dict):
        return f"{text}: write [[{name}]] instead of [{name}]"
    if text == "must be a section" and isinstance(value, list):
        return f"{text}: write [{name}] instead of [[{name}]]"
    if text == "must be a list" and isinstance(value, str):
        text += f', such as ["{value}"]'
    if kind == "missing" or isinstance(value, dict):
        return text
    hint = did_you_mean(value, _quoted(context.get("expected", ""))) if isinstance(value, str) else ""
    return f"{text}, got {_shown(value)}{hint}"


def _quoted(text: str) -> list[str]:
    """Return the quoted words of a text such as `'a', 'b' or 'c'`."""
    return text.split("'")[1::2]


def _shown(value: Any) -> str:
    """Return a value as TOML writes it."""
    text = str(value) if isinstance(value, date | time) else repr(value)
    text = text.lower() if isinstance(value, bool) else text
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _has_others_inside(place: tuple[int | str, ...], places: list[tuple[int | str, ...]]) -> bool:
    """Return whether the error counts valid entries of a list only. Invalid ones are reported themselves."""
    return any(len(other) > len(place) and other[: len(place)] == place for other in places)


def _meant(place: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """Return a similar key of the same section, or the same key of another section if there are few."""
    *parents, name = (part for part in place if isinstance(part, str))
    fields = _fields(model)
    for part in parents:
        fields = _fields(fields.get(part))
    similar = did_you_mean(name, fields)
    if similar:
        return similar
    same = [path for path in _paths(model) if path.rpartition(".")[2] == name]
    near = [path for path in same if path.startswith(".".join([*parents, ""]))] if parents else []
    chosen = near or same
    return f" here; did you mean {' or '.join(chosen)}?" if 0 < len(chosen) <= 3 else ""


def _fields(annotation: Any) -> dict[str, Any]:
    """Return the keys of a section and their types."""
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return {name: field.annotation for name, field in part.model_fields.items()}
        if is_dataclass(part):
            hints = get_type_hints(part)
            return {name: hints[name] for name in part.__dataclass_fields__}
    return {}


def _paths(annotation: Any, prefix: str = "") -> Iterator[str]:
    for name, inner in _fields(annotation).items():
        yield f"{prefix}{name}"
        yield from _paths(inner, f"{prefix}{name}.")
