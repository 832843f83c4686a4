"""The items that a run trains on and is evaluated on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentgym_rl.config import EnvironmentConfig
from agentgym_rl.errors import ConfigError
from agentgym_rl.training.task_source import TaskSource
from agentgym_rl.types import EnvPool


@dataclass(frozen=True, slots=True)
class Items:
    """Items by environment and subset."""

    train: dict[str, dict[str, list[int]]]
    held_out: dict[str, dict[str, list[int]]]

    def task_source(self, environments: Iterable[EnvironmentConfig], seed: int) -> TaskSource:
        """Return the order in which training items are drawn."""
        numbers = {env: [item for items in subsets.values() for item in items] for env, subsets in self.train.items()}
        return TaskSource(numbers, seed, {env.name: env.weight for env in environments})


async def all_items(pool: EnvPool, environments: tuple[EnvironmentConfig, ...]) -> Items:
    """Return the items of the splits and subsets that the recipe names."""
    return Items(
        {env.name: await _items_by_subset(pool, env, env.split) for env in environments},
        {env.name: await _items_by_subset(pool, env, env.eval_split) for env in environments},
    )


async def _items_by_subset(pool: EnvPool, env: EnvironmentConfig, split: str) -> dict[str, list[int]]:
    """Return the items of each subset of the recipe, or all items under the environment's name."""
    if not env.subsets:
        return {env.name: await pool.items(env.name, split)}
    by_subset = {subset: await pool.items(env.name, split, subset) for subset in env.subsets}
    empty = [subset for subset, items in by_subset.items() if not items]
    if empty:
        raise ConfigError(f"{env.name} has no items of {', '.join(empty)} in its split {split!r}: leave them out")
    return by_subset
