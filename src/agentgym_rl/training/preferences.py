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
    held_out: bool = False
    """Whether an episode of it is an evaluation's, so that its item is held out."""


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
    """Return each person's last choice about each pair, in order of time, without pairs called equal.

    An episode is known by its id and its text: a run may be viewed under several names, and runs of one seed have the
    same ids.
    """
    said: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}
    for path in paths:
        # Only \n ends a line: texts may hold other separators, such as U+2028. A kill may tear the last line.
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
            try:
                row = json.loads(line)
                pair = sorted(_identity(row[side]["episode"]) for side in ("left", "right"))
                earlier = said.get((row["by"], *pair))
                if earlier is None or earlier[1]["time"] <= row["time"]:  # it may come from another file
                    said[row["by"], *pair] = (row["better"], row)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path} line {number} is not a preference ({error}): remove that line") from error
    pairs = []
    for better, row in said.values():
        if better != "equal":
            other = {"left": "right", "right": "left"}[better]
            chosen, rejected = (Trajectory.from_json(json.dumps(row[side]["episode"])) for side in (better, other))
            held_out = any(row[side]["episode"].get("kind") == "eval" for side in (better, other))
            pairs.append(PreferredPair(chosen, rejected, row["by"], row["time"], held_out))
    return sorted(pairs, key=lambda pair: pair.time)


def _identity(episode: dict[str, Any]) -> str:
    return json.dumps([episode["id"], [[m["role"], m["content"]] for m in episode["messages"]]])


def export_pairs(patterns: Iterable[str], out: Path) -> tuple[int, int]:
    """Write pairs as DPO trainers read them: prompt, chosen and rejected as messages.

    Return (number of pairs, number of those of held-out items). Pairs in which an episode has no reply are left out, as
    in training.
    """
    pairs = [
        p for p in read_preferences(find_preferences(patterns)) if _first_reply(p.chosen) and _first_reply(p.rejected)
    ]
    write_atomically(out, "".join(json.dumps(_row(pair), ensure_ascii=False) + "\n" for pair in pairs).encode())
    return len(pairs), sum(pair.held_out for pair in pairs)


def _row(pair: PreferredPair) -> dict[str, Any]:
    chosen, rejected = ([{"role": m.role, "content": m.text} for m in t.messages] for t in (pair.chosen, pair.rejected))
    start, other_start = _first_reply(pair.chosen), _first_reply(pair.rejected)
    task = pair.chosen.task
    about = {"env": task.env, "item": task.item, "held_out": pair.held_out, "by": pair.by, "time": pair.time}
    return {"prompt": chosen[:start], "chosen": chosen[start:], "rejected": rejected[other_start:]} | about


def _first_reply(trajectory: Trajectory) -> int:
    """Return the number of messages before the first reply; 0 if there is no reply."""
    return next((i for i, m in enumerate(trajectory.messages) if m.role == "assistant"), 0)
