"""Groups that start at most `max_staleness` steps before they are learned from.

The groups of step s start when the learner begins step s - max_staleness, and are learned from in step s at the latest.
A step takes those that are due and, among the others, those that ended first. So slow episodes have several steps to
end in, are not underrepresented, and nothing that was sampled is thrown away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentgym_rl.types import Collect, Group, Limits, Task, Trajectory


@dataclass(slots=True, eq=False)
class QueuedGroup:
    """A group that was started and has not been learned from."""

    task: Task
    turns: int
    """Horizon of its episodes."""
    seed: int
    due: int
    """The last step that may learn from it."""
    group: Group | None = None
    """Its episodes, once all have ended."""

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: of a group that is being played, only how to play it again."""
        return {
            "env": self.task.env,
            "item": self.task.item,
            "turns": self.turns,
            "seed": self.seed,
            "due": self.due,
            "trajectories": None if self.group is None else [str(line, "utf-8") for line in self.group.lines()],
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> QueuedGroup:
        task, lines = Task(row["env"], row["item"]), row["trajectories"]
        group = None if lines is None else Group(task, [Trajectory.from_json(line) for line in lines])
        # Checkpoints of earlier versions have no "due": their groups are learned from in the order of their start.
        return cls(task, row["turns"], row["seed"], row.get("due", 0), group)


@dataclass(slots=True)
class GroupQueue:
    """Plays groups in the background. `limits` are by environment; the horizon of each group overrides max_turns."""

    collect: Collect
    limits: Mapping[str, Limits]
    groups: list[QueuedGroup]
    """Groups in the order of their start; the state of a run holds the same list."""
    _playing: dict[QueuedGroup, asyncio.Task[None]] = field(default_factory=dict)
    _ended: list[QueuedGroup] = field(init=False)
    """Groups whose episodes have ended, in the order in which they did."""

    def __post_init__(self) -> None:
        self._ended = [queued for queued in self.groups if queued.group is not None]

    async def __aenter__(self) -> GroupQueue:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel the episodes under way."""
        for task in self._playing.values():
            task.cancel()
        await asyncio.gather(*self._playing.values(), return_exceptions=True)

    def play(self) -> None:
        """Start every group that has not ended and is not being played."""
        for queued in self.groups:
            if queued.group is None and queued not in self._playing:
                self._playing[queued] = asyncio.create_task(self._play(queued))

    async def take(self, count: int, step: int) -> list[Group]:
        """Remove and return `count` groups, in the order of their start: those due by `step` and the first to end."""
        due = [queued for queued in self.groups if queued.due <= step][:count]
        while any(queued.group is None for queued in due) or len(self._ended) < count:
            ended, _ = await asyncio.wait(self._playing.values(), return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # raises what the collector raised
            self._playing = {queued: task for queued, task in self._playing.items() if task not in ended}
        others = [queued for queued in self._ended if queued not in due]
        chosen = due + others[: count - len(due)]
        taken = [queued for queued in self.groups if queued in chosen]
        self.groups[:] = [queued for queued in self.groups if queued not in chosen]
        self._ended = [queued for queued in self._ended if queued not in chosen]
        return [queued.group for queued in taken if queued.group is not None]

    async def _play(self, queued: QueuedGroup) -> None:
        limits = replace(self.limits[queued.task.env], max_turns=queued.turns)
        (queued.group,) = await self.collect([queued.task], limits, queued.seed)
        self._ended.append(queued)
