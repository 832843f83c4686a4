"""Learners of a team whose roles have adapters of their own: each role is compared and trained on its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentgym_rl.training.rl_learner import RLLearner
from agentgym_rl.types import Group

REPORTED = {"entropy/mean": "entropy", "kl/reference": "kl"}
"""Metrics that are also logged for each role with adapters of its own."""
Metrics = Mapping[str, float | str]


@dataclass(frozen=True, slots=True)
class RoleLearners:
    """One learner per role with adapters of its own, and one of the weights that the other roles share."""

    own: dict[str, RLLearner]
    """Learners by role."""
    shared: RLLearner | None
    """Learner of the other roles; None if the learner plays no other."""

    def split(self, groups: list[Group]) -> list[tuple[str, RLLearner, list[Group]]]:
        """Return (role, its learner, its groups); the role of the shared learner is an empty string."""
        by_role: dict[str, list[Group]] = {role: [] for role in (*self.own, "")}
        for group in groups:
            role = group.trajectories[0].role
            by_role[role if role in self.own else ""].append(group)
        learners = [*self.own.items(), *([("", self.shared)] if self.shared is not None else [])]
        return [(role, learner, by_role[role]) for role, learner in learners if by_role[role]]

    def state(self) -> dict[str, Any]:
        shared = None if self.shared is None else self.shared.state()
        return {"roles": {role: learner.state() for role, learner in self.own.items()}, "shared": shared}

    def restore(self, state: dict[str, Any]) -> None:
        for role, learner in self.own.items():
            learner.restore(state["roles"][role])
        if self.shared is not None:
            self.shared.restore(state["shared"])


def joined_metrics(parts: Sequence[tuple[str, int, Metrics]]) -> dict[str, float | str]:
    """Return the metrics of a step from (role, number of groups, metrics) of its learners: means over groups."""
    joined: dict[str, float | str] = {}
    for name in dict.fromkeys(name for _, _, metrics in parts for name in metrics):
        values = [(metrics[name], count) for _, count, metrics in parts if name in metrics]
        numbers = [(value, count) for value, count in values if not isinstance(value, str)]
        if name == "samples":
            joined[name] = sum(value for value, _ in numbers)
        elif name == "staleness/max":
            joined[name] = max(value for value, _ in numbers)
        elif numbers:
            joined[name] = sum(value * count for value, count in numbers) / sum(count for _, count in numbers)
        else:
            joined[name] = values[0][0]
    for role, _, metrics in parts:
        joined |= {
            f"roles/{role}_{short}": metrics[name] for name, short in REPORTED.items() if role and name in metrics
        }
    return joined
