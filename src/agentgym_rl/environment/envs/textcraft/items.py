"""Which goal an item number stands for, and which commands its first observation lists."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache, lru_cache

from agentgym_rl.environment.envs.textcraft.planner import Choices, best_plan
from agentgym_rl.environment.envs.textcraft.recipes import Book, Recipe, load_book
from agentgym_rl.environment.envs.textcraft.renaming import NUM_VARIATIONS, new_names, renamed_book
from agentgym_rl.errors import ConfigError

DEPTHS = (1, 2, 3, 4)
SPLITS = {"train": range(374), "test": range(374, 474), "validation": range(474, 544)}
"""Sizes of the published train and test sets; validation is what those leave over."""
RENAMED = range(544, 544 + NUM_VARIATIONS * len(SPLITS["train"]))
"""The goals of train under other names, all of them in one variation after the other."""
_GOALS_PER_DEPTH = {
    "test": {1: 31, 2: 41, 3: 25, 4: 3},
    "validation": {1: 14, 2: 40, 3: 14, 4: 2},
}
"""Train gets the rest. The test set's are the published ones; validation is proportioned like train."""
_MAX_TURNS = 30
"""Goals that need more than the published limit are only trained on: two of them, netherite block and anvil."""
_NUM_DISTRACTORS = 10
_NUM_MEMBERS_LISTED = 3
"""A generic ingredient stands for up to 32 items: the recipes of a few of them are listed."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One item, worked out."""

    book: Book
    goal: str
    observation: str
    """The first one."""
    commands: tuple[Recipe, ...]
    """What the first observation lists: every recipe a solution may need, and distractors, shuffled."""
    favourites: Choices
    """The oracle's choices between equally short ways; they differ from item to item, for variety."""


@cache
def goals() -> tuple[str, ...]:
    """Item number -> goal. The shuffle is seeded and starts from sorted names."""
    book = load_book()
    by_depth = {depth: [name for name in sorted(book.recipes) if book.depth[name] == depth] for depth in DEPTHS}
    found = sum(map(len, by_depth.values()))
    if found != len(book.recipes) or found != sum(map(len, SPLITS.values())):
        raise ConfigError(
            f"TextCraft needs the 544 goals of depth 1 to 4 that minecraft_data 3.20 leads to, got {found} of "
            f"{len(book.recipes)}: install that version, another one numbers the items differently"
        )
    drawn: dict[str, list[str]] = {split: [] for split in SPLITS}
    for depth, names in by_depth.items():
        random.Random(f"textcraft goals of depth {depth}").shuffle(names)
        names.sort(key=lambda name: best_plan(book, name, {}, {}).num_actions <= _MAX_TURNS)  # stable: long ones first
        for split, counts in _GOALS_PER_DEPTH.items():
            drawn[split] += [names.pop() for _ in range(counts[depth])]
        drawn["train"] += names
    for split, names in drawn.items():
        random.Random(f"textcraft order of {split}").shuffle(names)
    return tuple(name for split in SPLITS for name in drawn[split])


def original(item: int) -> int:
    """The item whose goal this is, under whatever name."""
    return (item - RENAMED.start) % len(SPLITS["train"]) if item in RENAMED else item


def _told(item: int) -> tuple[Book, str]:
    """The book of this item, and its goal's name in it."""
    goal = goals()[original(item)]
    if item not in RENAMED:
        return load_book(), goal
    variation, kept = (item - RENAMED.start) // len(SPLITS["train"]), goals()[len(SPLITS["train"]) :]
    return renamed_book(variation, kept), new_names(load_book(), variation, kept).get(goal, goal)


@lru_cache(maxsize=1024)
def problem(item: int) -> Problem:
    book, goal = _told(item)
    rng = random.Random(f"textcraft item {item}")
    favourites = {name: rng.randrange(len(members)) for name, members in book.members.items() if book.depth[name]}
    useful = _useful_recipes(book, goal, favourites, rng)
    candidates = sorted(
        {user for recipe in useful for name, _ in recipe.needs for user in book.uses[name]} - set(useful),
        key=lambda recipe: recipe.command,
    )
    # Recipes that make the goal are all useful ones, so no distractor reaches it.
    commands = [*useful, *rng.sample(candidates, min(len(candidates), _NUM_DISTRACTORS))]
    rng.shuffle(commands)
    listing = "\n".join(recipe.command for recipe in commands)
    return Problem(book, goal, f"Crafting commands:\n{listing}\n\nGoal: craft {goal}.", tuple(commands), favourites)


def _useful_recipes(book: Book, goal: str, favourites: Choices, rng: random.Random) -> list[Recipe]:
    """All recipes of the goal and of what they need, down to gathered items."""
    planned = best_plan(book, goal, {}, favourites).crafts
    useful: dict[Recipe, None] = {}
    seen = {goal}
    waiting = [goal]
    while waiting:
        for recipe in book.recipes.get(waiting.pop(0), ()):
            useful[recipe] = None
            for name, _ in recipe.needs:
                if name in seen:
                    continue
                seen.add(name)
                members = [name]
                if name in book.members:
                    unseen = [member for member in book.members[name] if member not in seen]
                    # Shuffled, then the planned ones first: the sort is stable.
                    members = sorted(rng.sample(unseen, len(unseen)), key=lambda member: member not in planned)
                    members = members[:_NUM_MEMBERS_LISTED]
                seen.update(members)
                waiting += members
    return list(useful)
