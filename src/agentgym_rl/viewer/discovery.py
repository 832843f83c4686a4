"""Discovery of runs and evaluations below the given folders, and the state of each."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from agentgym_rl.errors import ConfigError
from agentgym_rl.viewer.encode import read_object, replace_surrogates
from agentgym_rl.viewer.validation import checked_status

MAX_DEPTH = 5
SKIPPED_FOLDERS = frozenset({"trajectories", "checkpoints", "reference", "tensorboard", "wandb", "model"})
"""Names of folders that contain no runs and may contain very many files."""
SILENCE_TIMEOUT_S = 600.0
"""Seconds without an update after which a process of unknown host counts as stopped."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder that holds a run or an evaluation."""

    id: str
    """Path below the given folder. It is stable and readable, and is only looked up, never joined to a path."""
    path: Path
    kind: Literal["run", "eval"]


def discover(roots: Iterable[Path]) -> dict[str, RunFolder]:
    """Return every run and evaluation below `roots` by id. A duplicate id gets its root's name as a prefix."""
    folders: dict[str, RunFolder] = {}
    for root in roots:
        for path, kind in _walk(root, 0, set()):
            relative = path.relative_to(root).as_posix()
            name = replace_surrogates(root.resolve().name)
            # On Linux a name may contain any bytes; an id must be text.
            relative = replace_surrogates(relative)
            run_id = name if relative == "." else relative
            if run_id in folders and folders[run_id].path != path:
                run_id = f"{name}/{relative}"
            number = 2
            while run_id in folders and folders[run_id].path != path:
                run_id = f"{name}/{relative} ({number})"
                number += 1
            folders[run_id] = RunFolder(run_id, path, kind)
    return folders


def require_roots(roots: Iterable[Path]) -> list[Path]:
    folders = [Path(root) for root in roots]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder: give a run directory, or a folder of runs such as runs/")
    return folders


def _walk(folder: Path, depth: int, seen: set[Path]) -> Iterator[tuple[Path, Literal["run", "eval"]]]:
    real = folder.resolve()
    if real in seen or depth > MAX_DEPTH:  # runs are often links to a larger disk, and links can form cycles
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
        if not name.startswith(".") and name not in SKIPPED_FOLDERS and entries[name].is_dir():
            yield from _walk(folder / name, depth + 1, seen)


def read_status(run: Path) -> tuple[dict[str, Any], list[str]]:
    """Return status.json and its problems. The state is `killed` if the process of a running run is gone."""
    status, problems = read_json(run / "status.json")
    if not problems:
        status, problems = checked_status(status)
    if "state" in status:
        status["state"] = current_state(status)
    return status, problems


def current_state(row: dict[str, Any], silent_s: float = 0.0) -> str:
    """Return the state in a file, or `killed` if its process is gone.

    If the file does not name its host, the process may run on another machine. The state is then `stopped` once
    `silent_s` exceeds SILENCE_TIMEOUT_S.
    """
    state, host, pid = row["state"], row.get("host"), row.get("pid")
    if state != "running" or not isinstance(pid, int) or not 0 < pid < 1 << 31 or _alive(pid):
        return str(state)
    if host == socket.gethostname():
        return "killed"
    return "stopped" if host is None and silent_s > SILENCE_TIMEOUT_S else str(state)


def open_inside(run: Path, path: Path, mode: str = "rb") -> BinaryIO:
    """Open a file of a run. Raise OSError if it is outside the run's folder or not a regular file.

    A run may come from an untrusted user. A link in it must not expose other files, and a pipe must not block.
    """
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(run)):
        raise PermissionError(errno.EACCES, "it is a link to a file outside the run's folder")

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0), 0o666)

    file = cast(BinaryIO, open(path, mode, opener=opener))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file")
    return file


def _content(path: Path) -> bytes:
    """Return the content of a file directly in the folder of a run."""
    with open_inside(path.parent, path) as file:
        return file.read()


def read_json(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return a JSON object and its problems. Both are empty if there is no such file."""
    try:
        return read_object(_content(path)), []
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError, TypeError) as error:
        return {}, [f"{path.name} cannot be read: {_reason(error)}"]


def read_toml(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        return tomllib.loads(_content(path).decode()), []
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"{path.name} cannot be read: {_reason(error)}"]


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a .jsonl file. Torn or damaged lines are skipped."""
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
    except OSError:  # a process of another user
        return True
    return True
