"""Thoughts of reasoning models: text up to `</think>`, which neither the environment nor later turns need."""

from __future__ import annotations

import re

OPEN, CLOSE = "<think>", "</think>"
_LEADING = re.compile(rf"\s*{OPEN}(.*?){CLOSE}\s*", re.DOTALL)


def without_thought(text: str) -> str:
    """Return the text after the last thought. A text without the end of a thought is returned as it is."""
    _, closed, answer = text.rpartition(CLOSE)
    return answer.lstrip("\n") if closed else text


def split_thought(text: str) -> tuple[str, str]:
    """Return the thought that a text begins with, without its tags, and the rest. The thought may be empty."""
    thought = _LEADING.match(text)
    return (thought[1].strip(), text[thought.end() :]) if thought else ("", text)
