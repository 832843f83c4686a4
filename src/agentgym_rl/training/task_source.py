"""The order of tasks: a seeded, endless shuffle whose position is saved with the run."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Task


class TaskSource:
    """Draws an environment by weight, then its next item. Every item is drawn once before any is drawn again.

    The order depends only on the seed and the number of tasks drawn.
    """

    def __init__(self, items: Mapping[str, list[int]], seed: int, weights: Mapping[str, float] | None = None) -> None:
        empty = [env for env, numbers in items.items() if not numbers]
        if empty or not items:
            raise ConfigError(f"training needs at least one item{' in ' + ', '.join(empty) if empty else ''}, got none")
        self._items, self._seed = dict(items), seed
        self._weights = [1.0 if weights is None else weights[env] for env in self._items]
        self._drawn = 0
        self._drawn_of = dict.fromkeys(self._items, 0)
        self._orders: dict[str, tuple[int, list[int]]] = {}

    def take(self, count: int) -> list[Task]:
        return [self._next() for _ in range(count)]

    def _next(self) -> Task:
        chooser = random.Random(f"{self._seed}/environment/{self._drawn}")
        env = chooser.choices(list(self._items), self._weights)[0]
        epoch, position = divmod(self._drawn_of[env], len(self._items[env]))
        self._drawn += 1
        self._drawn_of[env] += 1
        return Task(env, self._order(env, epoch)[position])

    def _order(self, env: str, epoch: int) -> list[int]:
        """Return this epoch's permutation, cached until the next epoch."""
        if self._orders.get(env, (-1, []))[0] != epoch:
            order = list(self._items[env])
            random.Random(f"{self._seed}/{env}/{epoch}").shuffle(order)
            self._orders[env] = (epoch, order)
        return self._orders[env][1]

    def state(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "drawn_of": dict(self._drawn_of)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._drawn, self._drawn_of = state["drawn"], dict(state["drawn_of"])
