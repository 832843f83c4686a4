"""Text of a player, safe to repeat in an answer."""

from __future__ import annotations

import re

MAX_ACTION_CHARS = 200
"""Longest action that is repeated, in part."""
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]+")


def plain(text: str, limit: int = 60) -> str:
    """Return a text in printable ASCII, cut to `limit` characters."""
    text = _UNPRINTABLE.sub("?", text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def plain_action(text: str) -> str:
    """Return an action that was not understood, or only the length of a very long one."""
    return f"{len(text)} characters" if len(text) > MAX_ACTION_CHARS else plain(text.strip()) or "nothing"
