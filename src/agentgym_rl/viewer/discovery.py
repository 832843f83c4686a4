"""Which runs and evaluations there are below the folders given, and how each stands."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from agentgym_rl.errors import ConfigError
from agentgym_rl.viewer.encode import read_object, whole_characters
from agentgym_rl.viewer.validation import checked_status

MAX_DEPTH = 5
INSIDE_A_RUN = frozenset({"trajectories", "checkpoints", "reference", "tensorboard", "wandb", "model"})
"""Folders that hold no runs and may hold a great many files."""

SILENT_S = 600.0


@dataclass(frozen=True, slots=True)
class Place:
    """A folder with a run or an evaluation in it."""

    id: str
    """Its path below the folder given: stable, readable, and only ever looked up, never joined to a path."""
    path: Path
    kind: Literal["run", "eval"]


def discover(roots: Iterable[Path]) -> dict[str, Place]:
    """Every run and evaluation below `roots`, by id. An id taken twice gets its root's name before it."""
    found: dict[str, Place] = {}
    for root in roots:
        for path, kind in _walk(root, 0, set()):
            relative = path.relative_to(root).as_posix()
            name = whole_characters(root.resolve().name)
            # Linux lets a name hold any bytes; an id has to be a text.
            relative = whole_characters(relative)
            place_id = name if relative == "." else relative
            if place_id in found and found[place_id].path != path:
                place_id = f"{name}/{relative}"
            number = 2
            while place_id in found and found[place_id].path != path:
                place_id = f"{name}/{relative} ({number})"
                number += 1
            found[place_id] = Place(place_id, path, kind)
    return found


def require_roots(roots: Iterable[Path]) -> list[Path]:
    folders = [Path(root) for root in roots]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder: give a run directory or one that holds some, such as runs/")
    return folders


def _walk(folder: Path, depth: int, seen: set[Path]) -> Iterator[tuple[Path, Literal["run", "eval"]]]:
    real = folder.resolve()
    if real in seen or depth > MAX_DEPTH:  # runs are often links to a larger disk, and links can form rings
        return
    seen.add(real)
    try:
        entries = {entry.name: entry for entry in os.scandir(folder)}
    except OSError:
        return
    if "eval.json" in entries:
        yield folder, "eval"
    elif "config.toml" in entries and entries.keys() & {"status.json", "metrics.jsonl", "trajectories"}:
        yield folder, "run"
    for name in sorted(entries):
        if not name.startswith(".") and name not in INSIDE_A_RUN and entries[name].is_dir():
            yield from _walk(folder / name, depth + 1, seen)


def read_status(run: Path) -> tuple[dict[str, Any], list[str]]:
    """status.json and what is wrong with it; the state is `killed` where the process that should be running is gone."""
    status, problems = read_json(run / "status.json")
    if not problems:
        status, problems = checked_status(status)
    if "state" in status:
        status["state"] = state_now(status)
    return status, problems


def state_now(row: dict[str, Any], silent_s: float = 0.0) -> str:
    """The state a file tells, unless its process is gone: then `killed`.

    Where the file does not say on which machine it was written, a process unknown here may run elsewhere: only after
    `silent_s` of more than SILENT_S the state is `stopped`.
    """
    state, host, pid = row["state"], row.get("host"), row.get("pid")
    if state != "running" or not isinstance(pid, int) or not 0 < pid < 1 << 31 or _alive(pid):
        return str(state)
    if host == socket.gethostname():
        return "killed"
    return "stopped" if host is None and silent_s > SILENT_S else str(state)


def open_inside(run: Path, path: Path) -> BinaryIO:
    """Open a file of a run for reading. OSError where it leads out of the run's folder or is no regular file.

    A run may come from somebody else: a link in it must not show files of this computer, a pipe must not be waited for.
    """
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(run)):
        raise PermissionError(errno.EACCES, "it is a link that leads out of the run's folder")
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file")
    return file


def _content(path: Path) -> bytes:
    """All of a file that lies directly in the folder of a run."""
    with open_inside(path.parent, path) as file:
        return file.read()


def read_json(path: Path) -> tuple[dict[str, Any], list[str]]:
    """A JSON object and what is wrong; empty, and nothing wrong, when there is no such file."""
    try:
        return read_object(_content(path)), []
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError, TypeError) as error:
        return {}, [f"{path.name} cannot be read: {_told(error)}"]


def read_toml(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        return tomllib.loads(_content(path).decode()), []
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"{path.name} cannot be read: {_told(error)}"]


def _told(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a .jsonl file; lines that are none (a torn last one, a damaged one) are left out."""
    try:
        raw = _content(path)
    except OSError:
        return []
    rows = []
    for line in raw.splitlines():
        try:
            rows.append(read_object(line))
        except (ValueError, TypeError):
            continue
    return rows


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's process
        return True
    return True
