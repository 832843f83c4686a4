"""How the order of episodes within their groups changes when they are scored again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from agentgym_rl.types import Trajectory

TIE = 1e-9
"""Scores that differ by less are equal."""


@dataclass(frozen=True, slots=True)
class Rescored:
    """One episode with its training reward before and after, and its place in the group, 1 for the best."""

    step: int
    trajectory: Trajectory
    before: float
    after: float
    rank_before: float
    rank_after: float
    group_size: int

    def row(self) -> dict[str, Any]:
        """Return the line for a file."""
        task, judged = self.trajectory.task, self.trajectory.verdicts
        verdicts = [
            {"source": v.source, "weight": v.weight, "score": sum(v.scores), "reason": v.reason} for v in judged
        ]
        names = ("before", "after", "rank_before", "rank_after", "group_size")
        head = {"step": self.step, "id": self.trajectory.id, "env": task.env, "item": task.item}
        return head | {name: getattr(self, name) for name in names} | {"verdicts": verdicts}


def ranks(scores: Sequence[float]) -> list[float]:
    """Return the place of each score, 1 for the highest. Equal scores share the mean of their places."""
    better = [sum(other > score + TIE for other in scores) for score in scores]
    equal = [sum(abs(other - score) <= TIE for other in scores) for score in scores]
    return [1 + b + (e - 1) / 2 for b, e in zip(better, equal, strict=True)]


def compare(step: int, trajectories: Sequence[Trajectory], before: Sequence[float]) -> list[Rescored]:
    """Return the episodes of one group, which have been scored again, with what they were paid before."""
    after = [t.training_reward for t in trajectories]
    rows = zip(trajectories, before, after, ranks(before), ranks(after), strict=True)
    return [Rescored(step, *row, len(trajectories)) for row in rows]


def summary(groups: Sequence[Sequence[Rescored]]) -> dict[str, Any]:
    """Return counts and shares over all groups of at least two episodes.

    `reversed_pairs` is the share of pairs that were ordered before and are now ordered the other way; `best_changed`
    the share of groups with one best episode before and another one now.
    """
    compared = [group for group in groups if len(group) > 1]
    pairs = [(a, b) for group in compared for a, b in combinations(group, 2) if abs(a.before - b.before) > TIE]
    reversed_pairs = [(a.before - b.before) * (a.after - b.after) < 0 for a, b in pairs]
    tied_pairs = [abs(a.after - b.after) <= TIE for a, b in pairs]
    best_changed = [
        max(group, key=lambda e: e.before).rank_after > min(e.rank_after for e in group)
        for group in compared
        if min(e.rank_before for e in group) == 1
    ]
    episodes = [episode for group in groups for episode in group]
    return {
        "groups": len(groups),
        "episodes": len(episodes),
        "before": _mean([e.before for e in episodes]),
        "after": _mean([e.after for e in episodes]),
        "pairs": len(pairs),
        "reversed_pairs": _mean(reversed_pairs),
        "tied_pairs": _mean(tied_pairs),
        "best_changed": _mean(best_changed),
        "mean_rank_change": _mean([abs(e.rank_after - e.rank_before) for e in episodes]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return fmean(map(float, values)) if values else None
