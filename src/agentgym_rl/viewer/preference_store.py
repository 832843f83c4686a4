"""Preferences of people: which of two episodes of an item is better, who says so and when.

    <run>/preferences.jsonl     one JSON object per click, with both episodes whole, so that it can be trained on

A later click of the same person on the same pair replaces an earlier one; readers keep the last.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import orjson

from agentgym_rl.errors import ConfigError
from agentgym_rl.viewer.discovery import RunFolder, open_inside
from agentgym_rl.viewer.encode import read_object, to_json

NAME = "preferences.jsonl"
CHOICES = ("left", "right", "equal")
MAX_NAME = 80
"""Longest name of a person, in characters."""
_writing = threading.Lock()


def store_preference(
    folder: RunFolder, left: tuple[str, dict[str, Any]], right: tuple[str, dict[str, Any]], better: str, by: str
) -> dict[str, Any]:
    """Append one preference to the run of the left episode; return it without the episodes.

    `left` and `right` are (run, whole episode).
    """
    by = by.strip()
    if better not in CHOICES:
        raise ConfigError(f"better must be {', '.join(CHOICES)}, got {better!r:.40}")
    if not by or len(by) > MAX_NAME or not by.isprintable():
        raise ConfigError(f"a preference needs the name of who gives it, 1 to {MAX_NAME} characters, got {by!r:.100}")
    (left_run, first), (right_run, second) = left, right
    if (first["env"], first["item"]) != (second["env"], second["item"]):
        raise ConfigError("a preference compares two episodes of one item, these are of different items")
    if (left_run, first["id"], first.get("step")) == (right_run, second["id"], second.get("step")):
        raise ConfigError("a preference compares two episodes, this is one and the same")
    head = {"time": round(time.time(), 3), "by": by, "better": better}
    sides = {"left": {"run": left_run, "episode": first}, "right": {"run": right_run, "episode": second}}
    try:
        _append(folder, to_json(head | sides) + b"\n")
    except OSError as error:
        raise ConfigError(f"{NAME} of {folder.id} cannot be written: {error.strerror or error}") from error
    return head


def _append(folder: RunFolder, line: bytes) -> None:
    with _writing, open_inside(folder.path, _path(folder), "a+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        if file.read(1) not in (b"", b"\n"):  # this line must not continue the last one
            file.seek(0)
            whole = file.read()
            start = whole.rfind(b"\n") + 1
            if _is_whole(whole[start:]):  # an editor may leave out the last line's end
                line = b"\n" + line
            else:  # a kill or a full disk tore it
                file.truncate(start)
        file.write(line)


def _is_whole(line: bytes) -> bool:
    try:
        read_object(line)
    except (ValueError, TypeError):
        return False
    return True


def preferences_of(left: tuple[RunFolder, str], right: tuple[RunFolder, str]) -> list[dict[str, Any]]:
    """Return what people said last about a pair of episodes, as {time, by, better} seen from the left.

    Each episode is given as (run, id). A choice is in the file of the run that was on the left when it was made.
    """
    turned: dict[str, str] = {"left": "right", "right": "left"}
    said: dict[str, dict[str, Any]] = {}
    wanted = _named([(folder.id, episode) for folder, episode in (left, right)])
    paths = dict.fromkeys(_path(folder) for folder, _ in (left, right))
    for line in (line for path in paths if path.is_file() for line in path.read_bytes().splitlines()):
        try:
            row = read_object(line)
            sides = _named([(row[side]["run"], row[side]["episode"]["id"]) for side in ("left", "right")])
            by, better, when = str(row["by"]), str(row["better"]), float(row["time"])
        except (ValueError, TypeError, KeyError, orjson.JSONDecodeError):
            continue  # torn by a kill, or not ours
        if sides not in (wanted, wanted[::-1]) or (by in said and said[by]["time"] > when):
            continue
        said[by] = {"time": when, "by": by, "better": better if sides == wanted else turned.get(better, better)}
    return list(said.values())


def _named(sides: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return (run, id) of both sides, without a run that is the same: it may be viewed under another name later."""
    return [("", episode) for _, episode in sides] if sides[0][0] == sides[1][0] else sides


def _path(folder: RunFolder) -> Path:
    path = folder.path / NAME
    if path.is_symlink():
        raise ConfigError(f"{NAME} of {folder.id} is a link: preferences are written into the run only")
    return path
