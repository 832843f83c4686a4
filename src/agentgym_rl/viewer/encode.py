"""JSON for files of any content. Values that plain JSON cannot represent are replaced, never fatal."""

from __future__ import annotations

import json
from typing import Any

import orjson

MAX_DEPTH = 100
_INTEGER_LIMIT = 1 << 63


def read_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raise ValueError or TypeError for anything else.

    Python's parser accepts NaN and unpaired surrogates, which orjson rejects. Surrogates become U+FFFD.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        value = _read_lenient(raw)
    if not isinstance(value, dict):
        raise TypeError(f"needs a JSON object, got {type(value).__name__}")
    return value


def _read_lenient(raw: bytes) -> Any:
    try:
        value = json.loads(raw)
        if b"\\ud" in raw.lower():
            value = json.loads(replace_surrogates(json.dumps(value, ensure_ascii=False)))
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error
    return value


def replace_surrogates(text: str) -> str:
    """Join surrogate pairs and replace unpaired surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def to_json(value: Any) -> bytes:
    """Encode as JSON. Texts, numbers and depths that orjson rejects are replaced."""
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return orjson.dumps(_encodable(value, 0), option=orjson.OPT_NON_STR_KEYS)


def _encodable(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, int) and abs(value) >= _INTEGER_LIMIT:
        return str(value)
    if isinstance(value, dict | list | tuple) and depth >= MAX_DEPTH:
        return "…"
    if isinstance(value, dict):
        return {_encodable(str(name), depth): _encodable(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(item, depth + 1) for item in value]
    return value
