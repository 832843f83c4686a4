"""Pairs of episodes of one item that people have ordered in the viewer.

<run>/preferences.jsonl     one JSON object per click: time, by, better (left, right or equal), left, right
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym_rl.common.files import write_atomically
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Trajectory

NAME = "preferences.jsonl"


@dataclass(frozen=True, slots=True)
class PreferredPair:
    """One person's choice between two episodes of an item."""

    chosen: Trajectory
    rejected: Trajectory
    by: str
    time: float
    """Seconds since 1970."""


def find_preferences(patterns: Iterable[str]) -> list[Path]:
    """Return the files that paths and run directories name."""
    paths = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        path = path / NAME if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(f"preferences: {path} does not exist: choose between episodes with `agentgym-rl view`")
        paths.append(path)
    return paths


def read_preferences(paths: Iterable[Path]) -> list[PreferredPair]:
    """Return each person's last choice about each pair, in order of time, without pairs called equal."""
    said: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            if number == len(lines) and not line.endswith("\n"):
                continue  # torn by a kill
            try:
                row = json.loads(line)
                names = [(row[side]["run"], row[side]["episode"]["id"]) for side in ("left", "right")]
                said[row["by"], *sorted(names)] = (row["better"], row)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path} line {number} is not a preference ({error}): remove that line") from error
    pairs = []
    for better, row in said.values():
        if better != "equal":
            other = {"left": "right", "right": "left"}[better]
            chosen, rejected = (Trajectory.from_json(json.dumps(row[side]["episode"])) for side in (better, other))
            pairs.append(PreferredPair(chosen, rejected, row["by"], row["time"]))
    return sorted(pairs, key=lambda pair: pair.time)


def export_pairs(patterns: Iterable[str], out: Path) -> int:
    """Write pairs as DPO trainers read them: prompt, chosen and rejected as messages. Return how many."""
    pairs = read_preferences(find_preferences(patterns))
    write_atomically(out, "".join(json.dumps(_row(pair), ensure_ascii=False) + "\n" for pair in pairs).encode())
    return len(pairs)


def _row(pair: PreferredPair) -> dict[str, Any]:
    chosen, rejected = ([{"role": m.role, "content": m.text} for m in t.messages] for t in (pair.chosen, pair.rejected))
    start = next((i for i, m in enumerate(chosen) if m["role"] == "assistant"), len(chosen))
    task = pair.chosen.task
    about = {"env": task.env, "item": task.item, "by": pair.by, "time": pair.time}
    return {"prompt": chosen[:start], "chosen": chosen[start:], "rejected": rejected[start:]} | about
