"""Groups that start at most `max_staleness` steps before they are learned from.

The groups of step s start when the learner begins step s - max_staleness, and are learned from in that order. So slow
episodes have several steps to end in, are not underrepresented, and nothing that was sampled is thrown away.
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
    group: Group | None = None
    """Its episodes, once all have ended."""

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: of a group that is being played, only how to play it again."""
        return {
            "env": self.task.env,
            "item": self.task.item,
            "turns": self.turns,
            "seed": self.seed,
            "trajectories": None if self.group is None else [str(line, "utf-8") for line in self.group.lines()],
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> QueuedGroup:
        task, lines = Task(row["env"], row["item"]), row["trajectories"]
        group = None if lines is None else Group(task, [Trajectory.from_json(line) for line in lines])
        return cls(task, row["turns"], row["seed"], group)


@dataclass(slots=True)
class GroupQueue:
    """Plays groups in the background. `limits` are by environment; the horizon of each group overrides max_turns."""

    collect: Collect
    limits: Mapping[str, Limits]
    groups: list[QueuedGroup]
    """Groups in the order of their start; the state of a run holds the same list."""
    _playing: dict[QueuedGroup, asyncio.Task[None]] = field(default_factory=dict)

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

    async def take(self, count: int) -> list[Group]:
        """Remove and return the first `count` groups, after their last episode has ended."""
        while any(queued.group is None for queued in self.groups[:count]):
            ended, _ = await asyncio.wait(self._playing.values(), return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # raises what the collector raised
            self._playing = {queued: task for queued, task in self._playing.items() if task not in ended}
        taken = self.groups[:count]
        del self.groups[:count]
        return [queued.group for queued in taken if queued.group is not None]

    async def _play(self, queued: QueuedGroup) -> None:
        limits = replace(self.limits[queued.task.env], max_turns=queued.turns)
        (queued.group,) = await self.collect([queued.task], limits, queued.seed)
