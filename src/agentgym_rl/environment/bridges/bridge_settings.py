"""Settings that the bridges share: task lists, import paths, tokens."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from agentgym_rl.errors import ConfigError

Tasks = Sequence[Mapping[str, Any]]


def load_tasks(tasks: str | Tasks, where: str) -> tuple[list[dict[str, Any]], dict[str, range]]:
    """Return tasks in the order of their items, and the items of each split. Raise ConfigError if they do not fit.

    `tasks` are dicts, or the path of a .jsonl file with one a line, or the import path of a list. Each has a `prompt`
    and may have a `split`, `train` by default.
    """
    rows = list(_read(tasks, where) if isinstance(tasks, str) else tasks)
    for number, row in enumerate(rows):
        prompt = row.get("prompt") if isinstance(row, Mapping) else None
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f"{where}: a task is an object with a prompt, task {number} is {row!r:.80}")
    names = dict.fromkeys(["train", "test", *(str(row.get("split", "train")) for row in rows)])
    ordered: list[dict[str, Any]] = []
    splits: dict[str, range] = {}
    for name in names:
        chosen = [dict(row) for row in rows if str(row.get("split", "train")) == name]
        if not chosen:
            raise ConfigError(
                f"{where}: {len(rows)} tasks, none of the split {name!r}: training and evaluation need other tasks, "
                f'give some "split": "{name}"'
            )
        splits[name] = range(len(ordered), len(ordered) + len(chosen))
        ordered += chosen
    return ordered, splits


def _read(source: str, where: str) -> Tasks:
    if not source.endswith(".jsonl"):
        return import_value(source, where, "tasks")
    try:
        lines = Path(source).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: tasks must be a .jsonl file with one JSON object a line: {error}") from error


def import_value(path: str, where: str, option: str) -> Any:
    """Return the value that an import path `my_module:name` in a recipe names, installed or in the current folder."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{where}: {option} must be an import path, such as my_module:name, got {path!r} ({error})"
        ) from error


def read_headers(token_variable: str | None, where: str) -> dict[str, str]:
    """Return the headers that carry the token in an environment variable; none without one."""
    if token_variable is None:
        return {}
    if not os.environ.get(token_variable):
        raise ConfigError(f"{where}: token_variable names {token_variable}, which should hold a token, it is not set")
    return {"Authorization": f"Bearer {os.environ[token_variable]}"}
