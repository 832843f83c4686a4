"""Lists and objects that a question file holds as text, because it once was a table with text in every cell."""

from __future__ import annotations

import ast
import io
import tokenize
from typing import Any

import orjson


def read_literal(text: str, key: str) -> Any:
    """The value of `["a", "b"]`, `['a', 'b']` or the like, as JSON or as Python writes it; nothing is ever executed."""
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
    return value
