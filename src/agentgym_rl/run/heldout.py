"""Held-out evaluation: the same items every time, for every method."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

from agentgym_rl.errors import EnvError
from agentgym_rl.run.collectors import limits_of
from agentgym_rl.run.context import RunContext
from agentgym_rl.training.rl import derive_seed
from agentgym_rl.types import Collect, Task, Trajectory


async def evaluate(context: RunContext, collect: Collect, max_context: int, step: int) -> dict[str, Any]:
    """Play the recipe's held-out episodes, write them as those after `step`, and return how they went.

    `collect` plays one episode of a task. `max_context` is the number of tokens that the engine can hold of it.

    {"step", "success", "episodes", "reward", "turns", "subsets": {name: {"success", "episodes"}}}
    """
    config, settings = context.config, context.config.eval
    by_subset: dict[str, list[Trajectory]] = defaultdict(list)
    for env in config.environments:
        limits = limits_of(config.agent, env.eval_max_turns or settings.max_turns, max_context, env)
        chosen = sample_per_subset(context.items.held_out[env.name], settings.episodes, "evaluation")
        tasks = [(name, Task(env.name, item)) for name, items in chosen.items() for item in items]
        groups = await collect([task for _, task in tasks], limits, derive_seed("evaluation", env.name))
        for (name, _), group in zip(tasks, groups, strict=True):
            by_subset[name if len(config.environments) == 1 else f"{env.name}/{name}"] += group.usable
            for trajectory in group.trajectories:
                context.log.write_trajectory(step, trajectory, "eval")
    return _result(step, by_subset)


def sample_per_subset(subsets: dict[str, list[int]], count: int, seed: str) -> dict[str, list[int]]:
    """Return about `count` items, as many of each subset, chosen by `seed`; fewer if a subset has fewer."""
    each = -(-count // len(subsets))
    return {
        name: random.Random(f"{seed}/{name}").sample(items, min(each, len(items))) for name, items in subsets.items()
    }


def _result(step: int, by_subset: dict[str, list[Trajectory]]) -> dict[str, Any]:
    everything = [trajectory for trajectories in by_subset.values() for trajectory in trajectories]
    if not everything:
        raise EnvError("evaluation: every episode failed; see the eval file among the run's trajectories for why")

    def rate(trajectories: list[Trajectory]) -> dict[str, Any]:
        successes = sum(trajectory.success for trajectory in trajectories)
        return {"success": successes / max(1, len(trajectories)), "episodes": len(trajectories)}

    return {
        "step": step,
        **rate(everything),
        "reward": sum(t.reward for t in everything) / len(everything),
        "turns": sum(t.num_turns for t in everything) / len(everything),
        "subsets": {name: rate(trajectories) for name, trajectories in by_subset.items()},
    }
