"""What is to be played, resolved down to item numbers: with the agent it is an evaluation's identity."""

from __future__ import annotations

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
    """The longest horizon that is played."""
    style: str
    max_context: int
    data: str
    """What the items are, in words."""
    own_data: bool = False
    """True where the questions or sites are ours and stand in for those of a published benchmark."""
    missing: str = ""
    """Why it is not played; empty when it is."""
    heading: str = ""

    @property
    def key(self) -> str:
        return f"{self.scenario}/{self.name}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"items": list(self.items)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> TaskPlan:
        return cls(**{**row, "items": tuple(row["items"])})


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode to play."""

    task: Task
    sample: int
    """Which of the k samples of the item."""
    limits: Limits
    style: str
    columns: tuple[str, ...]
    """Keys of the columns it counts in: an item may belong to several subsets."""

    @property
    def key(self) -> tuple[str, int, int]:
        return self.task.env, self.task.item, self.sample


def episodes_of(plans: Iterable[TaskPlan], samples: int, max_new_tokens: int) -> list[Episode]:
    """Every episode once, all first samples before the second ones, so that a stopped evaluation covers all items."""
    columns: dict[tuple[str, int], list[TaskPlan]] = {}
    for plan in plans:
        for item in plan.items:
            columns.setdefault((plan.env, item), []).append(plan)
    return [
        Episode(
            Task(env, item),
            sample,
            Limits(found[0].max_turns, max_new_tokens, found[0].max_context),
            found[0].style,
            tuple(plan.key for plan in found),
        )
        for sample in range(samples)
        for (env, item), found in columns.items()
    ]
