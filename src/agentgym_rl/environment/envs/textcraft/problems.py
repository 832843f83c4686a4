"""The goal of each item, and the commands that its first observation lists."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache, lru_cache

from agentgym_rl.environment.envs.textcraft.planner import Choices, best_plan
from agentgym_rl.environment.envs.textcraft.recipe_book import Book, Recipe, load_book
from agentgym_rl.environment.envs.textcraft.renaming import NUM_VARIATIONS, new_names, renamed_book
from agentgym_rl.errors import ConfigError

DEPTHS = (1, 2, 3, 4)
SPLITS = {"train": range(374), "test": range(374, 474), "validation": range(474, 544)}
"""Items by split. Train and test have the published sizes; validation has the remaining goals."""
RENAMED = range(544, 544 + NUM_VARIATIONS * len(SPLITS["train"]))
"""The training goals under other names: all goals of the first variation, then of the next."""
_GOALS_PER_DEPTH = {
    "test": {1: 31, 2: 41, 3: 25, 4: 3},
    "validation": {1: 14, 2: 40, 3: 14, 4: 2},
}
"""Goals per depth. Test has the published counts, validation the proportions of train, and train gets the rest."""
_MAX_TURNS = 30
"""Published limit of turns. The two goals that need more (netherite block, anvil) are in train."""
_NUM_DISTRACTORS = 10
_NUM_MEMBERS_LISTED = 3
"""Members of a generic ingredient (up to 32) whose recipes are listed."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The game of one item."""

    book: Book
    goal: str
    observation: str
    """The first observation."""
    commands: tuple[Recipe, ...]
    """Commands in the first observation: every recipe that a solution may need, and distractors, shuffled."""
    favourites: Choices
    """The oracle's choices between equally short solutions. They differ between items for variety."""


@cache
def goals() -> tuple[str, ...]:
    """Return the goals by item number. The shuffle is seeded and starts from sorted names."""
    book = load_book()
    by_depth = {depth: [name for name in sorted(book.recipes) if book.depth[name] == depth] for depth in DEPTHS}
    num_goals = sum(map(len, by_depth.values()))
    if num_goals != len(book.recipes) or num_goals != sum(map(len, SPLITS.values())):
        raise ConfigError(
            f"TextCraft needs the 544 goals of depth 1 to 4 of minecraft_data 3.20, got {num_goals} of "
            f"{len(book.recipes)}: install that version, other versions number the items differently"
        )
    names_of: dict[str, list[str]] = {split: [] for split in SPLITS}
    for depth, names in by_depth.items():
        random.Random(f"textcraft goals of depth {depth}").shuffle(names)
        names.sort(key=lambda name: best_plan(book, name, {}, {}).num_actions <= _MAX_TURNS)  # stable, long goals first
        for split, counts in _GOALS_PER_DEPTH.items():
            names_of[split] += [names.pop() for _ in range(counts[depth])]
        names_of["train"] += names
    for split, names in names_of.items():
        random.Random(f"textcraft order of {split}").shuffle(names)
    return tuple(name for split in SPLITS for name in names_of[split])


def original(item: int) -> int:
    """Return the item whose goal this is under its original name."""
    return (item - RENAMED.start) % len(SPLITS["train"]) if item in RENAMED else item


def _book_and_goal(item: int) -> tuple[Book, str]:
    """Return the recipe book of this item, and its goal's name in that book."""
    goal = goals()[original(item)]
    if item not in RENAMED:
        return load_book(), goal
    variation, kept = (item - RENAMED.start) // len(SPLITS["train"]), goals()[len(SPLITS["train"]) :]
    return renamed_book(variation, kept), new_names(load_book(), variation, kept).get(goal, goal)


@lru_cache(maxsize=1024)
def problem(item: int) -> Problem:
    book, goal = _book_and_goal(item)
    rng = random.Random(f"textcraft item {item}")
    favourites = {name: rng.randrange(len(members)) for name, members in book.members.items() if book.depth[name]}
    useful = _useful_recipes(book, goal, favourites, rng)
    candidates = sorted(
        {user for recipe in useful for name, _ in recipe.needs for user in book.uses[name]} - set(useful),
        key=lambda recipe: recipe.command,
    )
    # All recipes that make the goal are among the useful ones, so no distractor makes it.
    commands = [*useful, *rng.sample(candidates, min(len(candidates), _NUM_DISTRACTORS))]
    rng.shuffle(commands)
    listing = "\n".join(recipe.command for recipe in commands)
    return Problem(book, goal, f"Crafting commands:\n{listing}\n\nGoal: craft {goal}.", tuple(commands), favourites)


def _useful_recipes(book: Book, goal: str, favourites: Choices, rng: random.Random) -> list[Recipe]:
    """Return all recipes of the goal and of its ingredients, down to raw items."""
    planned = best_plan(book, goal, {}, favourites).crafts
    useful: dict[Recipe, None] = {}
    seen = {goal}
    queue = [goal]
    while queue:
        for recipe in book.recipes.get(queue.pop(0), ()):
            useful[recipe] = None
            for name, _ in recipe.needs:
                if name in seen:
                    continue
                seen.add(name)
                members = [name]
                if name in book.members:
                    unseen = [member for member in book.members[name] if member not in seen]
                    # Shuffle, then put planned members first: the sort is stable.
                    members = sorted(rng.sample(unseen, len(unseen)), key=lambda member: member not in planned)
                    members = members[:_NUM_MEMBERS_LISTED]
                seen.update(members)
                queue += members
    return list(useful)
