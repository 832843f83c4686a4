"""The plan of an evaluation, down to item numbers. Together with the agent it identifies the evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from agentgym_rl.types import Limits, Task


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """One column of the table, with its items."""

    scenario: str
    name: str
    env: str
    split: str
    subset: str | None
    items: tuple[int, ...]
    max_turns: int
    """Longest horizon played."""
    style: str
    max_context: int
    data: str
    """Description of the items, for the report."""
    own_data: bool = False
    """True if this project's own questions or sites replace those of a published benchmark."""
    missing: str = ""
    """Reason why the task is not played, or an empty string."""
    heading: str = ""

    @property
    def key(self) -> str:
        return f"{self.scenario}/{self.name}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"items": list(self.items)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> TaskPlan:
        return cls(**{**row, "items": tuple(row["items"])})


GAME = {"environment": "arguments of the environment", "role": "role", "opponent": "opponent"}
"""Keys of an evaluation's config that change the game itself, with their names for people."""


def game_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment arguments, role and opponent of an evaluation, as text by name. Missing ones are empty.

    An opponent's text includes the weights that it had.
    """
    game = {name: json.dumps(config[key], sort_keys=True) if key in config else "" for key, name in GAME.items()}
    if "opponent_weights" in config:
        game[GAME["opponent"]] += f" with weights {json.dumps(config['opponent_weights'], sort_keys=True)}"
    return game


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode to play."""

    task: Task
    sample: int
    """Index among the k samples of the item."""
    limits: Limits
    style: str
    columns: tuple[str, ...]
    """Keys of the table columns it counts in. An item may belong to several subsets."""

    @property
    def key(self) -> tuple[str, int, int]:
        return self.task.env, self.task.item, self.sample


def episodes_of(plans: Iterable[TaskPlan], samples: int, max_new_tokens: int) -> list[Episode]:
    """Return every episode once, first samples first, so that a stopped evaluation covers all items."""
    plans_by_item: dict[tuple[str, int], list[TaskPlan]] = {}
    for plan in plans:
        for item in plan.items:
            plans_by_item.setdefault((plan.env, item), []).append(plan)
    return [
        Episode(
            Task(env, item),
            sample,
            Limits(item_plans[0].max_turns, max_new_tokens, item_plans[0].max_context),
            item_plans[0].style,
            tuple(plan.key for plan in item_plans),
        )
        for sample in range(samples)
        for (env, item), item_plans in plans_by_item.items()
    ]
