"""JSON in and out for files that may hold anything: what plain JSON has no room for is replaced, never fatal."""

from __future__ import annotations

import json
from typing import Any

import orjson

MAX_DEPTH = 100
_LARGEST = 1 << 63


def read_object(raw: bytes) -> dict[str, Any]:
    """A JSON object; ValueError or TypeError for everything else.

    Python's own parser takes the NaN and the halves of characters that orjson refuses; the halves become U+FFFD.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        value = _read_lenient(raw)
    if not isinstance(value, dict):
        raise TypeError(f"a JSON object is needed, got {type(value).__name__}")
    return value


def _read_lenient(raw: bytes) -> Any:
    try:
        value = json.loads(raw)
        if b"\\ud" in raw.lower():
            value = json.loads(whole_characters(json.dumps(value, ensure_ascii=False)))
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error
    return value


def whole_characters(text: str) -> str:
    """Halves of surrogate pairs joined where both are there, else replaced: they cannot be written as UTF-8."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def to_json(value: Any) -> bytes:
    """As orjson writes it; texts, numbers and depths that it refuses are replaced first."""
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return orjson.dumps(_writable(value, 0), option=orjson.OPT_NON_STR_KEYS)


def _writable(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, int) and abs(value) >= _LARGEST:
        return str(value)
    if isinstance(value, dict | list | tuple) and depth >= MAX_DEPTH:
        return "…"
    if isinstance(value, dict):
        return {_writable(str(name), depth): _writable(some, depth + 1) for name, some in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(some, depth + 1) for some in value]
    return value
