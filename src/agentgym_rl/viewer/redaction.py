"""Redaction of a run's files for others: removes paths of this computer, host names and server addresses."""

from __future__ import annotations

import re
from pathlib import PureWindowsPath
from typing import Any

_REMOVED_KEYS = re.compile(r"host|pid|(.*_)?url")
_PATH_KEYS = re.compile(r"path|folder|dir|file|chat_template|data|(.*_)(path|folder|dir|file)")
"""Keys whose values are a path from the first absolute prefix to the end, including spaces."""
_ABSOLUTE = r"(?:(?<=[\s\"'`(\[{<=:,;|])|^)(?:file://)?(?:~|[A-Za-z]:)?[/\\](?![/\\])"
_PATH_START = re.compile(_ABSOLUTE)
_LETTER = r"[^\s\"'`()\[\]{}<>|,;]"
_PATH = re.compile(rf"{_ABSOLUTE}{_LETTER}*[/\\]{_LETTER}*", re.MULTILINE)
"""A path in running text. It has at least two separators, so that "and /or" is not one."""


def redact(value: Any, name: str = "") -> Any:
    """Return a redacted copy of a file's content. Absolute paths keep only their last part."""
    if isinstance(value, dict):
        # A table under such a key belongs to a run or a scenario of that name.
        kept = [key for key, item in value.items() if isinstance(item, dict) or not _REMOVED_KEYS.fullmatch(str(key))]
        return {key: redact(value[key], str(key)) for key in kept}
    if isinstance(value, list | tuple):
        return [redact(item, name) for item in value]
    if not isinstance(value, str):
        return value
    if _PATH_KEYS.fullmatch(name) and (match := _PATH_START.search(value)):
        return value[: match.start()] + _last_part(value[match.start() :])
    return without_paths(value)


def without_paths(text: str) -> str:
    """Return a message in which every absolute path is cut to its last part."""
    return _PATH.sub(lambda match: _last_part(match[0]), text)


def _last_part(path: str) -> str:
    # A Windows path accepts both kinds of separators.
    return PureWindowsPath(path.strip()).name
