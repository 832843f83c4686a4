"""Plans for a goal: a function of the recipe book, the goal and the inventory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentgym_rl.environment.envs.textcraft.recipe_book import Book, Recipe, craft_command

Choices = dict[str, int]
"""Index of the recipe to follow by craftable item, and of the member to make by generic ingredient. Default 0."""


@dataclass(slots=True)
class Plan:
    gets: dict[str, int] = field(default_factory=dict)
    """Missing amount of each raw item."""
    crafts: dict[str, tuple[Recipe, int]] = field(default_factory=dict)
    """Recipe and number of crafts of each item, deepest first."""
    lacking: dict[str, int] = field(default_factory=dict)
    """Missing amount of each item of `crafts`."""
    set_aside: dict[str, dict[str, int]] = field(default_factory=dict)
    """Held items reserved for each generic ingredient."""
    members: dict[str, str] = field(default_factory=dict)
    """Member to get or make of each generic ingredient that is missing."""
    forks: dict[str, int] = field(default_factory=dict)
    """Number of options by name, for each name with more than one."""

    @property
    def num_actions(self) -> int:
        return len(self.gets) + sum(times for _, times in self.crafts.values())


class _Planner:
    """Plans from the goal down, rank by rank, so that each item is planned once for all recipes that need it.

    Recipes only use items of lower rank, so all demand for a rank is known when the planner reaches it.
    """

    def __init__(self, book: Book, held: Mapping[str, int], choices: Choices) -> None:
        self.book = book
        self.held = held
        self.choices = choices
        self.plan = Plan()
        self.needed: dict[str, int] = {}
        self.taken: dict[str, int] = {}
        """Held items reserved for generic ingredients."""
        self.levels: list[list[str]] = []

    def run(self, goal: str) -> Plan:
        self.levels = [[] for _ in range(self.book.rank[goal] + 1)]
        self.need(goal, 1)
        for level in reversed(self.levels):
            # Generic ingredients first: the chosen member may have the same rank.
            for name in [name for name in level if name in self.book.members]:
                self.plan_generic(name)
            for name in level:
                if name not in self.book.members:
                    self.plan_item(name)
        return self.plan

    def need(self, name: str, count: int) -> None:
        if name not in self.needed:
            self.levels[self.book.rank[name]].append(name)
        self.needed[name] = self.needed.get(name, 0) + count

    def choose(self, name: str, among: int) -> int:
        if among > 1:
            self.plan.forks[name] = among
        return self.choices.get(name, 0)

    def plan_item(self, name: str) -> None:
        missing = self.needed[name] - self.held.get(name, 0) + self.taken.get(name, 0)
        if missing <= 0:
            return
        recipes = self.book.recipes.get(name)
        if recipes is None:
            self.plan.gets[name] = missing
            return
        recipe = recipes[self.choose(name, len(recipes))]
        times = -(-missing // recipe.count)
        self.plan.crafts[name] = (recipe, times)
        self.plan.lacking[name] = missing
        for ingredient, count in recipe.needs:
            self.need(ingredient, count * times)

    def plan_generic(self, name: str) -> None:
        """Reserve held members that are not needed by name, and add the chosen member for the rest."""
        missing = self.needed[name]
        aside: dict[str, int] = {}
        for member in self.book.generics[name]:
            free = self.held.get(member, 0) - self.taken.get(member, 0) - self.needed.get(member, 0)
            used = min(free, missing)
            if used > 0:
                aside[member] = used
                self.taken[member] = self.taken.get(member, 0) + used
                missing -= used
        self.plan.set_aside[name] = aside
        if missing > 0:
            members = self.book.members[name]
            # Prefer a member that is needed anyway: leftovers are shared.
            shared = next((member for member in members if member in self.needed), None)
            member = shared or members[self.choose(name, len(members))]
            self.plan.members[name] = member
            self.need(member, missing)


def best_plan(book: Book, goal: str, held: Mapping[str, int], favourites: Choices) -> Plan:
    """Return the shortest plan found by changing one choice at a time. Ties keep `favourites`."""
    choices = dict(favourites)
    plan = _Planner(book, held, choices).run(goal)
    tried: set[str] = set()
    while fork := next((name for name in plan.forks if name not in tried), None):
        tried.add(fork)
        for option in range(plan.forks[fork]):
            other = _Planner(book, held, {**choices, fork: option}).run(goal)
            if other.num_actions < plan.num_actions:
                plan = other
                choices[fork] = option
    return plan


def next_action(book: Book, goal: str, held: Mapping[str, int], favourites: Choices) -> str:
    """Return the next action: first get each missing raw item, then craft, shallowest item first."""
    plan = best_plan(book, goal, held, favourites)
    if plan.gets:
        name, count = next(iter(plan.gets.items()))
        return f"get {count} {name}"
    recipe, _ = next(reversed(plan.crafts.values()))
    parts = []
    for name, count in recipe.needs:
        if name in plan.set_aside:
            parts += take(plan.set_aside[name], count)
        else:
            parts.append((name, count))
    return craft_command(recipe, parts)


def fill(book: Book, recipe: Recipe, held: Mapping[str, int]) -> list[tuple[str, int]] | None:
    """Return the held items that make `recipe`, or None if there are not enough."""
    parts: list[tuple[str, int]] = []
    for name, count in recipe.needs:
        members = book.generics.get(name, (name,))
        used = take({member: held[member] for member in members if member in held}, count)
        if sum(amount for _, amount in used) < count:
            return None
        parts += used
    return parts


def take(pool: Mapping[str, int], count: int) -> list[tuple[str, int]]:
    """Take up to `count` from the pool, most plentiful first so that few kinds are mixed."""
    parts = []
    for name, amount in sorted(pool.items(), key=lambda entry: -entry[1]):
        used = min(amount, count)
        if used > 0:
            parts.append((name, used))
            count -= used
    return parts
