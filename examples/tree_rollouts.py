"""Play one tree of rollouts by hand and print it: which turns are shared, and what each path earns.

python examples/tree_rollouts.py
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from typing import ClassVar

from agentgym_rl.agent.policy import RandomPolicy
from agentgym_rl.agent.trees import Branching, TreeCollector
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.types import Limits, Step, Task


class Steps:
    """Walk from 0 to 4 on a line of numbers in as few turns as possible."""

    name: ClassVar[str] = "steps"
    instruction: ClassVar[str] = "Walk to 4. Actions: forward, back."
    splits: ClassVar[Mapping[str, range]] = {"train": range(10), "test": range(10, 12)}
    subsets: ClassVar[tuple[str, ...]] = ()
    cheap: ClassVar[bool] = True

    def __init__(self) -> None:
        self.place = 0

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return ()

    def fork(self) -> Steps:
        """Return a copy. A branch continues from it instead of replaying the game."""
        return copy.copy(self)

    def reset(self, item: int) -> str:
        self.place = 0
        return "You are at 0."

    def step(self, text: str) -> Step:
        self.place += 1 if text == "forward" else -1
        done = self.place == 4
        return Step(f"You are at {self.place}.", float(done), done, {"success": done} if done else {})

    def actions(self) -> list[str]:
        return ["forward", "forward", "back"]

    def state_key(self) -> str:
        return str(self.place)

    def close(self) -> None: ...


async def main() -> None:
    pool = LocalPool({"steps": Steps})
    collect = TreeCollector(Branching(roots=1, branches=2, depth=2), pool, RandomPolicy, 1, 8)
    (group,) = await collect([Task("steps", 0)], Limits(max_turns=8, max_new_tokens=8, max_context=512), seed=3)
    for path in group.trajectories:
        replies = [message.content for message in path.messages if message.is_reply]
        shared = ["·" * len(reply) for reply in replies[: path.shared_turns]]
        print(f"reward {path.reward:g}  {' '.join([*shared, *replies[path.shared_turns :]])}")
    await pool.close()


if __name__ == "__main__":
    asyncio.run(main())
