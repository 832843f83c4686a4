"""What is still to be done for a goal, given what is held: a function of the book, the goal and the inventory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentgym_rl.environment.envs.textcraft.recipes import Book, Recipe, craft_command

Choices = dict[str, int]
"""Craftable item -> which of its recipes to follow; generic ingredient -> which of its members to make. 0 if absent."""


@dataclass(slots=True)
class Plan:
    gets: dict[str, int] = field(default_factory=dict)
    """Gathered item -> how many are missing."""
    crafts: dict[str, tuple[Recipe, int]] = field(default_factory=dict)
    """Item -> (recipe, how often), deepest first."""
    lacking: dict[str, int] = field(default_factory=dict)
    """Item of `crafts` -> how many are missing."""
    set_aside: dict[str, dict[str, int]] = field(default_factory=dict)
    """Generic ingredient -> held items that are to stand for it."""
    members: dict[str, str] = field(default_factory=dict)
    """Generic ingredient of which there is not enough -> the member to get or make."""
    forks: dict[str, int] = field(default_factory=dict)
    """Where one could choose otherwise -> among how many."""

    @property
    def num_actions(self) -> int:
        return len(self.gets) + sum(times for _, times in self.crafts.values())


class _Planning:
    """One walk from the goal down, rank by rank, so that each thing is planned once for all that need it.

    Recipes only use things of lower rank, so all demand for a rank is known when the walk reaches it.
    """

    def __init__(self, book: Book, held: Mapping[str, int], choices: Choices) -> None:
        self.book = book
        self.held = held
        self.choices = choices
        self.plan = Plan()
        self.needed: dict[str, int] = {}
        self.taken: dict[str, int] = {}
        """Held items set aside for generic ingredients."""
        self.levels: list[list[str]] = []

    def run(self, goal: str) -> Plan:
        self.levels = [[] for _ in range(self.book.rank[goal] + 1)]
        self.need(goal, 1)
        for level in reversed(self.levels):
            # Generic ingredients first: the member they choose may be of this same rank.
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
        """Set aside held members that nobody asked for by name, and ask for the chosen member to fill the rest."""
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
            # More of what is made anyway, if there is such a member: leftovers are shared.
            shared = next((member for member in members if member in self.needed), None)
            member = shared or members[self.choose(name, len(members))]
            self.plan.members[name] = member
            self.need(member, missing)


def best_plan(book: Book, goal: str, held: Mapping[str, int], favourites: Choices) -> Plan:
    """The shortest plan that changing one choice at a time finds; equal ones go to `favourites`."""
    choices = dict(favourites)
    plan = _Planning(book, held, choices).run(goal)
    tried: set[str] = set()
    while fork := next((name for name in plan.forks if name not in tried), None):
        tried.add(fork)
        for option in range(plan.forks[fork]):
            other = _Planning(book, held, {**choices, fork: option}).run(goal)
            if other.num_actions < plan.num_actions:
                plan = other
                choices[fork] = option
    return plan


def next_action(book: Book, goal: str, held: Mapping[str, int], favourites: Choices) -> str:
    """Gather what is missing, each thing at once; then craft, the shallowest first."""
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
    """Held items that make `recipe`, or None when there are not enough."""
    parts: list[tuple[str, int]] = []
    for name, count in recipe.needs:
        members = book.generics.get(name, (name,))
        found = take({member: held[member] for member in members if member in held}, count)
        if sum(amount for _, amount in found) < count:
            return None
        parts += found
    return parts


def take(pool: Mapping[str, int], count: int) -> list[tuple[str, int]]:
    """Up to `count` from the pool, the most plentiful first so that few kinds are mixed."""
    parts = []
    for name, amount in sorted(pool.items(), key=lambda entry: -entry[1]):
        used = min(amount, count)
        if used > 0:
            parts.append((name, used))
            count -= used
    return parts
