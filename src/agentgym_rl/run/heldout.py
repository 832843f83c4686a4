"""Held-out evaluation: the same items every time, whatever is trained."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

from agentgym_rl.config import Config
from agentgym_rl.errors import EnvError
from agentgym_rl.run import build
from agentgym_rl.run.log import RunLog
from agentgym_rl.training.rl import derive_seed
from agentgym_rl.types import Collect, Task, Trajectory


async def evaluate(
    config: Config, items: build.Items, log: RunLog, collect: Collect, room: int, step: int
) -> dict[str, Any]:
    """Play the recipe's held-out episodes, write them down as those after `step`, and say how they went.

    `collect` plays one episode of a task; `room` is what an engine can hold of it.

    {"step", "success", "episodes", "reward", "turns", "subsets": {name: {"success", "episodes"}}}
    """
    settings = config.eval
    by_subset: dict[str, list[Trajectory]] = defaultdict(list)
    for env in config.environments:
        limits = build.limits_of(config.agent, env.eval_max_turns or settings.max_turns, room, env)
        chosen = spread(items.held_out[env.name], settings.episodes, "evaluation")
        tasks = [(name, Task(env.name, item)) for name, some in chosen.items() for item in some]
        groups = await collect([task for _, task in tasks], limits, derive_seed("evaluation", env.name))
        for (name, _), group in zip(tasks, groups, strict=True):
            by_subset[name if len(config.environments) == 1 else f"{env.name}/{name}"] += group.usable
            for trajectory in group.trajectories:
                log.write_trajectory(step, trajectory, "eval")
    return _result(step, by_subset)


def spread(subsets: dict[str, list[int]], count: int, seed: str) -> dict[str, list[int]]:
    """About `count` items, the same number of each subset, chosen by `seed`; fewer where a subset has fewer."""
    each = -(-count // len(subsets))
    return {
        name: random.Random(f"{seed}/{name}").sample(items, min(each, len(items))) for name, items in subsets.items()
    }


def _result(step: int, by_subset: dict[str, list[Trajectory]]) -> dict[str, Any]:
    everything = [t for some in by_subset.values() for t in some]
    if not everything:
        raise EnvError("evaluation: every episode failed; see the eval file among the run's trajectories for why")

    def rate(some: list[Trajectory]) -> dict[str, Any]:
        return {"success": sum(t.success for t in some) / max(1, len(some)), "episodes": len(some)}

    return {
        "step": step,
        **rate(everything),
        "reward": sum(t.reward for t in everything) / len(everything),
        "turns": sum(t.num_turns for t in everything) / len(everything),
        "subsets": {name: rate(some) for name, some in by_subset.items()},
    }
