"""Parser of lists and objects written as text, as in question files converted from tables."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from typing import Any

import orjson

_CLOSING = {"[": "]", "(": ")", "{": "}"}
_ARRAY = re.compile(r"(?:np\.|numpy\.)?array\(\s*[\[(]")
_SEPARATOR = re.compile(r"""['"]\s*,\s*['"]""")
"""Separator of two strings in a list."""


def read_literal(text: str, key: str) -> Any:
    """Return the value of `["a", "b"]`, `('a', 'b')` or the like in JSON or Python notation. Nothing is executed.

    A set is returned as a sorted list.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        tree = ast.parse(text, mode="eval")
        value = ast.literal_eval(tree)
        num_strings = sum(isinstance(node, ast.Constant) and isinstance(node.value, str) for node in ast.walk(tree))
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        # Python reads ['a' 'b'], numpy's format, as one string.
        if sum(token.type == tokenize.STRING for token in tokens) != num_strings:
            raise ValueError("commas are missing between its parts")
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, tokenize.TokenError) as error:
        raise ValueError(
            f"{key} looks like a list or object written as text, but cannot be read ({error}); needed JSON or Python "
            f'notation such as ["a", "b"], got {text[:80]!r}: correct it, or use a real list'
        ) from error
    return sorted(value, key=str) if isinstance(value, set) else value


def looks_like_list(text: str, one_answer: bool) -> bool:
    """Return whether a text is meant as a list. With `one_answer` it may also be an answer that contains brackets."""
    text = text.strip()
    if _ARRAY.match(text):
        return True
    if not text.startswith(("[", "(", "{")):
        return False
    inside = text[1:].lstrip()
    quoted, closed = inside.startswith(("'", '"')), text.endswith(_CLOSING[text[0]])
    if text[0] == "[" and not one_answer:
        return quoted or closed
    if text[0] == "(" and closed and not _SEPARATOR.search(text) and not text[:-1].rstrip().endswith(","):
        return False  # ("Heroes") is not a tuple in Python either
    return quoted and (closed or _SEPARATOR.search(text) is not None)
