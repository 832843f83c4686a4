"""Episodes of an environment with a slow reset: opened ahead of the play, resets do not keep the agent waiting.

python slow_environments.py
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import ClassVar

from agentgym_rl.agent.collect import Collector
from agentgym_rl.agent.policy import RandomPolicy
from agentgym_rl.agent.stages import Stages
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.types import Limits, Step, Task

RESET_S, STEP_S = 0.1, 0.05


class Slow:
    """A game of two turns whose reset takes as long as the play."""

    name: ClassVar[str] = "slow"
    instruction: ClassVar[str] = "Say yes twice."
    splits: ClassVar[Mapping[str, range]] = {"train": range(80), "test": range(80, 100)}
    subsets: ClassVar[tuple[str, ...]] = ()
    cheap: ClassVar[bool] = False

    def __init__(self) -> None:
        self._turns = 0

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return ()

    def reset(self, item: int) -> str:
        time.sleep(RESET_S)
        self._turns = 0
        return "Ready."

    def step(self, text: str) -> Step:
        time.sleep(STEP_S)
        self._turns += 1
        done = self._turns == 2
        return Step("Go on.", float(done), done, {"success": True} if done else {})

    def actions(self) -> list[str]:
        return ["yes"]

    def close(self) -> None:
        pass


async def main() -> None:
    """Play the same 16 episodes two at a time, without and with two environments opened ahead."""
    limits = Limits(max_turns=2, max_new_tokens=8, max_context=512)
    for ahead in (0, 2):
        pool = LocalPool({"slow": Slow})
        collect = Collector(pool, RandomPolicy, 1, Stages(2, ahead, {"slow": 4}))
        started = time.perf_counter()
        groups = await collect([Task("slow", item) for item in range(16)], limits, seed=0)
        solved = sum(group.trajectories[0].success for group in groups)
        print(f"{ahead} opened ahead: {solved} episodes in {time.perf_counter() - started:.1f} s")
        await pool.close()


if __name__ == "__main__":
    asyncio.run(main())
