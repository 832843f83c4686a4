"""Lists and objects that a question file holds as text, because it once was a table with text in every cell."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from typing import Any

import orjson

_CLOSING = {"[": "]", "(": ")", "{": "}"}
_ARRAY = re.compile(r"(?:np\.|numpy\.)?array\(\s*[\[(]")
_BETWEEN = re.compile(r"""['"]\s*,\s*['"]""")
"""Between two strings of a list."""


def read_literal(text: str, key: str) -> Any:
    """The value of `["a", "b"]`, `('a', 'b')` or the like, as JSON or as Python writes it; nothing is ever executed.

    A set comes back as a sorted list.
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
        # ['a' 'b'], as numpy prints a list, is one string to Python.
        if sum(token.type == tokenize.STRING for token in tokens) != num_strings:
            raise ValueError("commas are missing between its parts")
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, tokenize.TokenError) as error:
        raise ValueError(
            f"{key} looks like a list or object written as text, but cannot be read ({error}); needed JSON or Python "
            f'notation such as ["a", "b"], got {text[:80]!r}: mend it, or give a real list'
        ) from error
    return sorted(value, key=str) if isinstance(value, set) else value


def looks_like_a_list(text: str, one_answer: bool) -> bool:
    """Whether a text is, or was meant to be, a list; with `one_answer` it may also be an answer with brackets in it."""
    text = text.strip()
    if _ARRAY.match(text):
        return True
    if not text.startswith(("[", "(", "{")):
        return False
    inside = text[1:].lstrip()
    quoted, closed = inside.startswith(("'", '"')), text.endswith(_CLOSING[text[0]])
    if text[0] == "[" and not one_answer:
        return quoted or closed
    if text[0] == "(" and closed and not _BETWEEN.search(text) and not text[:-1].rstrip().endswith(","):
        return False  # ("Heroes") is no tuple to Python either
    return quoted and (closed or _BETWEEN.search(text) is not None)
