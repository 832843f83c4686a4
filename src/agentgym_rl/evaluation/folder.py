"""The folder of one evaluation. After a kill at any moment, the same command resumes it.

    <root>/eval.json                  config (what is measured), settings, state and results
    <root>/report.md, turns.png       written at the end
    <root>/trajectories/<env>.jsonl   every attempt at every episode, one line each, in the format of a run

Each line is appended with one write, so a kill leaves at most one torn line, the last. A resumed evaluation drops that
line and plays its episode again.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentgym_rl.agent.engines.openai import Tokens
from agentgym_rl.common.files import lock_folder, write_atomically
from agentgym_rl.errors import ConfigError
from agentgym_rl.evaluation.plan import Episode
from agentgym_rl.evaluation.records import Record, record_from_row, record_of, usage_to_json
from agentgym_rl.evaluation.schema import require_valid
from agentgym_rl.types import Trajectory

FORMAT = 1
_FIELDS = {"config", "settings", "state", "started", "seconds", "results"}
Key = tuple[str, int, int]


class Folder:
    """The writer of one evaluation. Use it as a context manager."""

    def __init__(self, root: Path, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Create the folder, or resume its evaluation if `config` equals the saved one. `settings` may differ."""
        self.root = root
        self.records: dict[Key, list[Record]] = {}
        """Every attempt on disk, in order, by episode key."""
        self._row: dict[str, Any] = {
            "format": FORMAT,
            "state": "running",
            "config": _as_json(config),
            "results": None,
        }
        self._row |= {"settings": _as_json(settings), "started": round(time.time(), 3), "seconds": 0.0}
        with explain_write_errors(root):
            self._open()

    def _open(self) -> None:
        root = self.root
        saved = _read_saved(root)
        if saved is not None:
            _require_same(root, saved["config"], self._row["config"])
            self._row |= {name: saved[name] for name in ("started", "seconds", "results")}
        self.resumed = saved is not None
        self._began = time.monotonic() - self._row["seconds"]
        self.trajectories_dir.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(root)
        for path in sorted(self.trajectories_dir.glob("*.jsonl")):
            for record in _read_and_repair(path):
                self.records.setdefault(record.key, []).append(record)
        self.save()

    @property
    def trajectories_dir(self) -> Path:
        return self.root / "trajectories"

    def finished(self, key: Key) -> bool:
        """Return whether an attempt at the episode ended without an error. If all failed, it is played again."""
        return any(not record.failed for record in self.records.get(key, ()))

    def write(
        self, episode: Episode, trajectory: Trajectory, attempt: int, usage: Sequence[Tokens] | None, step: int
    ) -> Record:
        """Append one attempt. `step` is the training step of the weights, or 0."""
        metadata = {
            "step": step,
            "kind": "eval",
            "sample": episode.sample,
            "attempt": attempt,
            "columns": episode.columns,
            "usage": usage_to_json(usage),
        }
        line = f"{json.dumps(metadata)[:-1]}, {trajectory.to_json()[1:]}\n"
        path = self.trajectories_dir / f"{episode.task.env.replace('/', '-')}.jsonl"  # openenv:http://... has slashes
        data = line.encode()
        with explain_write_errors(path), path.open("ab", buffering=0) as file:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        record = record_of(trajectory, episode.sample, episode.columns, usage)
        self.records.setdefault(record.key, []).append(record)
        return record

    def save(self, results: Sequence[Mapping[str, Any]] | None = None, state: str | None = None) -> None:
        """Replace eval.json. A value that is not given remains unchanged."""
        if results is not None:
            self._row["results"] = _as_json(results)
        if state is not None:
            self._row["state"] = state
        self._row |= {"seconds": round(time.monotonic() - self._began, 1), "updated": round(time.time(), 3)}
        self._row |= {"pid": os.getpid(), "host": platform.node()}
        path = self.root / "eval.json"
        with explain_write_errors(path):
            write_atomically(path, (json.dumps(self._row, indent=1, ensure_ascii=False) + "\n").encode())

    @property
    def row(self) -> dict[str, Any]:
        """The content of eval.json."""
        return self._row

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self.save(state="failed" if issubclass(kind, Exception) else "stopped")
        if self._lock is not None:
            self._lock.close()


def default_root(parent: Path, name: str, config: Mapping[str, Any]) -> Path:
    """Return the folder to evaluate into: `parent/name`, or `name-2` and so on if that holds something else.

    A folder that holds an evaluation of the same `config` is returned, to be resumed.
    """
    number = 1
    while True:
        root = parent / (name if number == 1 else f"{name}-{number}")
        try:
            saved = _read_saved(root)
        except ConfigError:
            number += 1
            continue
        if saved is None or saved["config"] == _as_json(config):
            return root
        number += 1


def read_evaluation(root: Path) -> dict[str, Any]:
    """Return the content of an evaluation's eval.json. Raise ConfigError if there is none."""
    row = _read_saved(root)
    if row is None:
        raise ConfigError(f"{root} holds no evaluation (eval.json is missing): give the folder of `agentgym-rl eval`")
    if row["results"] is None:
        raise ConfigError(f"{root} holds an evaluation without results yet: run its command again to finish it")
    require_valid(root / "eval.json", row)
    return row


def read_records(root: Path) -> dict[Key, list[Record]]:
    """Return every attempt of an evaluation by episode key, without changing the folder."""
    records: dict[Key, list[Record]] = {}
    for path in sorted((root / "trajectories").glob("*.jsonl")):
        for record in _read(path)[0]:
            records.setdefault(record.key, []).append(record)
    return records


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a ConfigError of one line."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror or error}): fix that, or choose another folder with --out"
        ) from error


def _read(path: Path) -> tuple[list[Record], int]:
    """Return the records of a file's complete lines, and the byte offset at which they end."""
    records: list[Record] = []
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break  # a torn line, always the last
            try:
                row = json.loads(line)
                records.append(record_from_row(row, Trajectory.from_json(line.decode())))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{path} line {number} is not an episode ({type(error).__name__}: {error}): remove that line, "
                    "or evaluate into another folder"
                ) from error
            end += len(line)
    return records, end


def _read_and_repair(path: Path) -> list[Record]:
    records, end = _read(path)
    if end < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(end)
    return records


def _read_saved(root: Path) -> dict[str, Any] | None:
    path = root / "eval.json"
    if not path.is_file():
        # A kill before eval.json was written leaves only hidden files and an empty trajectories folder.
        foreign = [p for p in root.glob("[!.]*") if p.name != "trajectories"] if root.is_dir() else []
        played = any((root / "trajectories").glob("*")) if root.is_dir() else False
        if foreign or played or (root.exists() and not root.is_dir()):
            raise ConfigError(f"{root} exists and holds no evaluation (no eval.json): choose another folder")
        return None
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        is_valid = isinstance(row, dict) and row.get("format") == FORMAT and row.keys() >= _FIELDS
        is_valid = is_valid and isinstance(row["config"], dict)
    except ValueError as error:
        raise ConfigError(f"{path} is not readable JSON ({error}): choose another folder") from error
    if not is_valid:
        raise ConfigError(f"{path} is not an evaluation of this version (format {FORMAT}): choose another folder")
    return row


def _require_same(root: Path, saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    old, new = _flatten(saved), _flatten(given)
    changed = [
        f"{name} (saved {_short(old.get(name, 'nothing'))}, given {_short(new.get(name, 'nothing'))})"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]
    if changed:
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        raise ConfigError(
            f"{root} holds an evaluation with other settings: {', '.join(changed[:4])}{more}: give the saved "
            "settings to resume it, or choose another folder with --out"
        )


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {k: v for name, part in value.items() for k, v in _flatten(part, f"{prefix}.{name}".strip(".")).items()}
    if isinstance(value, list) and value and all(isinstance(part, Mapping) for part in value):
        names = [f"{prefix}.{part.get('name', position)}" for position, part in enumerate(value)]
        return {k: v for name, part in zip(names, value, strict=True) for k, v in _flatten(part, name).items()}
    return {prefix: value}


def _short(value: Any) -> str:
    text = repr(value)
    if isinstance(value, list) and len(text) > 40:
        return f"{len(value)} values, {text[:24]}…"
    return text if len(text) <= 60 else f"{text[:57]}…"


def _as_json(value: Any) -> Any:
    """Return `value` as JSON reads it back, so that it can be compared with a saved value."""
    return json.loads(json.dumps(value))
