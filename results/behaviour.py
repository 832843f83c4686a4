"""Behaviour of agents from stored episodes: distinct action sequences and states, loops, and recoveries.

    python results/behaviour.py runs/evidence/qwen-staged-textcraft-0 [--by 10]

prints the metrics of a run's training episodes, averaged over blocks of steps, and of its held-out episodes.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
MEANINGS = {
    "episodes": "number of episodes without an error",
    "sequences_per_episode": "distinct action sequences of an item / its episodes, mean over items with two or more",
    "states_per_item": "distinct states that the episodes of an item visit together, mean over items",
    "states_per_episode": "distinct states of an episode",
    "loops": "share of turns that repeat an action in a state where the episode took it before",
    "refused": "share of turns that the environment refused",
    "recovered": "share of refused turns, not the last of an episode, whose next turn is not refused",
    "success_after_refusal": "success of episodes with at least one refused turn",
}


@dataclass(frozen=True, slots=True)
class Episode:
    """Actions and states of one episode."""

    item: str
    """Environment and number, such as textcraft/12."""
    actions: tuple[str, ...]
    states: tuple[str, ...]
    """State in which each action was taken. Empty texts if the environment reports none."""
    valid: tuple[bool, ...]
    success: bool


def action_of(reply: str) -> str:
    """Return the action of a reply: the text after the last `Action:`, or after the last thought, on one line."""
    for mark in ("Action:", "</think>"):
        if mark in reply:
            reply = reply.rsplit(mark, 1)[1]
            break
    return " ".join(reply.split())


def episode_of(row: Row) -> Episode:
    """Return the episode of a line of a trajectory file."""
    infos = row["infos"]
    replies = [message["content"] for message in row["messages"] if message["role"] == "assistant"][: len(infos)]
    success = row["stop"] == "done" and bool(infos) and bool(infos[-1].get("success", sum(row["rewards"]) >= 1.0))
    return Episode(
        f"{row['env']}/{row['item']}",
        tuple(map(action_of, replies)),
        tuple(str(info.get("state_key", "")) for info in infos),
        tuple(bool(info.get("valid", True)) for info in infos),
        success,
    )


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the lines of a trajectory file that ended without an error; .xz files are decompressed."""
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n") and (row := json.loads(line))["stop"] != "error":
                yield row


def read_episodes(path: Path) -> list[Episode]:
    return [episode_of(row) for row in read_rows(path)]


def behaviour(episodes: Sequence[Episode]) -> dict[str, float | None]:
    """Return the metrics that MEANINGS describes. None if there is nothing to average."""
    by_item: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        by_item[episode.item].append(episode)
    groups = list(by_item.values())
    known = [[e for e in group if any(e.states)] for group in groups]
    refused = [index for e in episodes for index in _refusals(e)]
    followed = [e.valid[i + 1] for e in episodes for i in _refusals(e) if i + 1 < len(e.valid)]
    turns = sum(len(e.actions) for e in episodes)
    return {
        "episodes": len(episodes),
        "sequences_per_episode": _mean(len({e.actions for e in g}) / len(g) for g in groups if len(g) > 1),
        "states_per_item": _mean(len({s for e in g for s in e.states}) for g in known if g),
        "states_per_episode": _mean(len(set(e.states)) for g in known for e in g),
        "loops": _mean(looped for e in episodes for looped in _loops(e)),
        "refused": len(refused) / turns if turns else None,
        "recovered": _mean(followed),
        "success_after_refusal": _mean(e.success for e in episodes if _refusals(e)),
    }


def _refusals(episode: Episode) -> list[int]:
    return [index for index, valid in enumerate(episode.valid) if not valid]


def _loops(episode: Episode) -> Iterator[bool]:
    """Yield for each turn whether the episode took this action in this state before."""
    seen: set[tuple[str, str]] = set()
    for pair in zip(episode.states, episode.actions, strict=True):
        yield pair in seen
        seen.add(pair)


def _mean(values: Iterable[float]) -> float | None:
    numbers = [float(value) for value in values]
    return statistics.fmean(numbers) if numbers else None


def by_step(folder: Path, kind: str = "step") -> dict[int, dict[str, float | None]]:
    """Return the metrics of each step's training episodes (kind `step`) or of each evaluation (kind `eval`)."""
    paths = sorted((folder / "trajectories").glob(f"{kind}_*.jsonl"))
    return {int(path.stem.rsplit("_", 1)[1]): behaviour(read_episodes(path)) for path in paths}


def blocks(steps: dict[int, dict[str, float | None]], size: int) -> dict[int, dict[str, float | None]]:
    """Return means over blocks of `size` steps, by the last step of each block."""
    averaged: dict[int, dict[str, float | None]] = {}
    numbers = sorted(steps)
    for start in range(0, len(numbers), size):
        block = numbers[start : start + size]
        averaged[block[-1]] = {
            name: _mean(value for n in block if (value := steps[n][name]) is not None) for name in MEANINGS
        }
    return averaged


def table(rows: dict[int, dict[str, float | None]]) -> list[str]:
    """Return a Markdown table with a row per step."""
    lines = [f"| step | {' | '.join(MEANINGS)} |", "|---|" + "---|" * len(MEANINGS)]
    for step, values in rows.items():
        cells = ["" if (value := values[name]) is None else f"{value:.3g}" for name in MEANINGS]
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--by", type=int, default=10, help="steps averaged into one row")
    options = parser.parse_args()
    for kind, title in (("step", "training episodes"), ("eval", "held-out episodes")):
        if steps := by_step(options.run, kind):
            print("\n".join([title, "", *table(blocks(steps, options.by if kind == "step" else 1)), ""]))


if __name__ == "__main__":
    main()
