"""Thoughts of reasoning models: text up to `</think>`, which neither the environment nor later turns need."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def without_thought(text: str) -> str:
    """Return the text after the last thought. A text without the end of a thought is returned as it is."""
    _, closed, answer = text.rpartition(CLOSE)
    return answer.lstrip("\n") if closed else text
