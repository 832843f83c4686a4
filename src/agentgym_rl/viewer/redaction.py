"""What of a run's files is for others: no paths of this computer, no names of machines, no addresses of servers."""

from __future__ import annotations

import re
from pathlib import PureWindowsPath
from typing import Any

_LEFT_OUT = re.compile(r"host|pid|(.*_)?url")
_PLACES = re.compile(r"path|folder|dir|file|chat_template|data|(.*_)(path|folder|dir|file)")
"""Names of values that are a path from their first absolute mark on, blanks included."""
_ABSOLUTE = r"(?:(?<=[\s\"'`(\[{<=:,;|])|^)(?:file://)?(?:~|[A-Za-z]:)?[/\\](?![/\\])"
_START = re.compile(_ABSOLUTE)
_LETTER = r"[^\s\"'`()\[\]{}<>|,;]"
_PATH = re.compile(rf"{_ABSOLUTE}{_LETTER}*[/\\]{_LETTER}*", re.MULTILINE)
"""In running text a path has two separators at least: "and /or" is none."""


def for_strangers(value: Any, name: str = "") -> Any:
    """A copy of what a file says, of which absolute paths keep their last part."""
    if isinstance(value, dict):
        # A table of such a name is that of a run or a scenario called so.
        kept = [key for key, some in value.items() if isinstance(some, dict) or not _LEFT_OUT.fullmatch(str(key))]
        return {key: for_strangers(value[key], str(key)) for key in kept}
    if isinstance(value, list | tuple):
        return [for_strangers(some, name) for some in value]
    if not isinstance(value, str):
        return value
    if _PLACES.fullmatch(name) and (found := _START.search(value)):
        return value[: found.start()] + _last_part(value[found.start() :])
    return without_paths(value)


def without_paths(text: str) -> str:
    """A message with every absolute path in it cut to its last part."""
    return _PATH.sub(lambda found: _last_part(found[0]), text)


def _last_part(path: str) -> str:
    # Of Windows, because it takes both kinds of separators.
    return PureWindowsPath(path.strip()).name
