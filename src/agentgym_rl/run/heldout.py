"""Held-out evaluation: the same items every time for an agent, the same pairs for a reward model."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from agentgym_rl.errors import EnvError
from agentgym_rl.run.collectors import limits_of
from agentgym_rl.run.context import RunContext
from agentgym_rl.training.dpo import Preference
from agentgym_rl.training.metrics import attempt_metrics
from agentgym_rl.training.reward_model import accuracy
from agentgym_rl.training.rl import derive_seed
from agentgym_rl.types import Collect, Group, Sample, Task, Trajectory


async def evaluate(context: RunContext, collect: Collect, max_context: int, step: int) -> dict[str, Any]:
    """Play the recipe's held-out episodes, write them as those after `step`, and return how they went.

    `collect` plays the episodes of a task. `max_context` is the number of tokens that the engine can hold of one.

    {"step", "success", "episodes", "reward", "turns", "subsets": {name: {"success", "episodes"}}}, with the success of
    each attempt as "attempts" if the style has several.
    """
    config, settings = context.config, context.config.eval
    by_subset: dict[str, list[Trajectory]] = defaultdict(list)
    played: list[Group] = []
    for env in config.environments:
        limits = limits_of(config.agent, env.eval_max_turns or settings.max_turns, max_context, env)
        chosen = sample_per_subset(context.items.held_out[env.name], settings.episodes, "evaluation")
        tasks = [(name, Task(env.name, item)) for name, items in chosen.items() for item in items]
        groups = await collect([task for _, task in tasks], limits, derive_seed("evaluation", env.name))
        for (name, _), group in zip(tasks, groups, strict=True):
            by_subset[name if len(config.environments) == 1 else f"{env.name}/{name}"] += group.usable
            played.append(group)
            for trajectory in group.trajectories:
                context.log.write_trajectory(step, trajectory, "eval")
    attempts = {name.removeprefix("attempts/"): value for name, value in attempt_metrics(played).items()}
    return _result(step, by_subset) | ({"attempts": attempts} if attempts else {})


def held_out_pairs(step: int, pairs: list[Preference], scores: Callable[[list[Sample]], list[float]]) -> dict[str, Any]:
    """Return how often a reward model orders pairs that it was not trained on, in the form of `evaluate`."""
    found = scores([half for pair in pairs for half in (pair.chosen, pair.rejected)])
    margins = [chosen - rejected for chosen, rejected in zip(found[::2], found[1::2], strict=True)]
    return {
        "step": step,
        "success": accuracy(found),
        "episodes": len(pairs),
        "margin": sum(margins) / len(margins),
        "subsets": {},
    }


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
