"""The recipe book: Minecraft 1.16.5's crafting recipes with generic ingredients restored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import minecraft_data

from agentgym_rl.errors import ConfigError

VERSION = "1.16.5"
"""Minecraft's version. minecraft_data has the same recipes for 1.16.2 to 1.16.5."""

_WOODS = ("oak", "birch", "spruce", "jungle", "acacia", "dark oak")
_FUNGI = ("crimson", "warped")
_COLOURS = (
    *("black", "blue", "brown", "cyan", "gray", "green", "light blue", "light gray"),
    *("lime", "magenta", "orange", "pink", "purple", "red", "white", "yellow"),
)


def _generics() -> dict[str, tuple[str, ...]]:
    """Return the members of each generic ingredient (a tag in the game), the usual member first.

    The package lists one recipe for each member, without the tag's name.
    """
    generics: dict[str, tuple[str, ...]] = {}
    for wood in _WOODS:
        generics[f"{wood} logs"] = (f"{wood} log", f"{wood} wood", f"stripped {wood} log", f"stripped {wood} wood")
    for wood in _FUNGI:
        generics[f"{wood} stems"] = (
            *(f"{wood} stem", f"{wood} hyphae"),
            *(f"stripped {wood} stem", f"stripped {wood} hyphae"),
        )
    generics["logs"] = tuple(member for members in generics.values() for member in members)
    generics["planks"] = tuple(f"{wood} planks" for wood in _WOODS + _FUNGI)
    generics["wooden slabs"] = tuple(f"{wood} slab" for wood in _WOODS + _FUNGI)
    generics["wool"] = tuple(f"{colour} wool" for colour in _COLOURS)
    generics["coals"] = ("coal", "charcoal")
    generics["stone crafting materials"] = ("cobblestone", "blackstone")
    generics["soul fire base blocks"] = ("soul sand", "soul soil")
    return generics


GENERICS: Mapping[str, tuple[str, ...]] = _generics()
_GENERIC_OF = {frozenset(members): name for name, members in GENERICS.items()}
OTHER_NAMES: Mapping[str, str] = {"stone tool materials": "stone crafting materials"}
"""Names here by AgentGym's names of generic ingredients. The package cannot distinguish the two: equal members."""
GATHERED_KINDS: Mapping[str, str] = {"wooden slabs": "oak slab"}
"""Members to give for generic ingredients that AgentGym's `get` provides although their members are crafted."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Makes `count` of `output` from `needs`: pairs of a name (an item or a generic ingredient) and a count."""

    output: str
    count: int
    needs: tuple[tuple[str, int], ...]

    @property
    def command(self) -> str:
        return craft_command(self, self.needs)


def craft_command(recipe: Recipe, parts: Sequence[tuple[str, int]]) -> str:
    """Return the action that crafts `recipe` from `parts`."""
    return f"craft {recipe.count} {recipe.output} using " + ", ".join(f"{count} {name}" for name, count in parts)


@dataclass(frozen=True, slots=True)
class Book:
    """All recipes, and the depth of each item: 0 for a raw item, else 1 + its deepest ingredient."""

    recipes: Mapping[str, tuple[Recipe, ...]]
    """Recipes of each craftable item, shallowest first, then by command."""
    depth: Mapping[str, int]
    """Height of the lowest crafting tree of each item and generic ingredient."""
    generics: Mapping[str, tuple[str, ...]]
    """Members of each generic ingredient, the usual one first."""
    uses: Mapping[str, tuple[Recipe, ...]]
    """Recipes that use each ingredient, by its name in recipes."""
    rank: Mapping[str, int]
    """Height of the highest tree of each item and generic ingredient. All ingredients have a lower rank."""
    members: Mapping[str, tuple[str, ...]]
    """Shallowest members of each generic ingredient."""


@cache
def load_book() -> Book:
    """Return the recipe book, read once per process (about 60 ms) and shared. Do not change it."""
    recipes = _without_cycles(parse_recipes(*read_package()))
    depth = _depths(recipes)
    unreachable = sorted(set(recipes) - set(depth))
    if unreachable:
        raise ConfigError(f"TextCraft needs recipes that lead back to gathered items, but these do not: {unreachable}")
    uses: dict[str, list[Recipe]] = {}
    for output in sorted(recipes):
        for recipe in recipes[output]:
            for name, _ in recipe.needs:
                uses.setdefault(name, []).append(recipe)
    return Book(
        recipes={
            output: tuple(sorted(known, key=lambda r: (max(depth[name] for name, _ in r.needs), r.command)))
            for output, known in sorted(recipes.items())
        },
        depth=depth,
        generics=GENERICS,
        uses={name: tuple(users) for name, users in uses.items()},
        rank=rank_recipes(recipes),
        members={
            name: tuple(member for member in members if depth.get(member) == depth[name])
            for name, members in GENERICS.items()
        },
    )


def read_package() -> tuple[dict[str, list[dict[str, Any]]], dict[int, str]]:
    """Return the package's rows by output, and its item names by number."""
    data = minecraft_data(VERSION)
    return data.recipes, {number: row["name"].replace("_", " ") for number, row in data.items.items()}


def parse_recipes(rows: Mapping[str, list[dict[str, Any]]], names: Mapping[int, str]) -> dict[str, list[Recipe]]:
    """Merge rows that differ only in the member that fills a slot into one recipe each."""
    grouped: dict[tuple[str, int, tuple[int, ...]], list[tuple[str, ...]]] = {}
    shaped_keys = set()
    for row in (row for rows_of_output in rows.values() for row in rows_of_output):
        cells = row["ingredients"] if "ingredients" in row else [cell for line in row["inShape"] for cell in line]
        filled = [names[cell] for cell in cells if cell is not None]
        kinds = tuple(dict.fromkeys(filled))
        layout = tuple(-1 if cell is None else kinds.index(names[cell]) for cell in cells)
        key = (names[row["result"]["id"]], row["result"]["count"], layout)
        grouped.setdefault(key, []).append(kinds)
        if "inShape" in row:
            shaped_keys.add(key)
    recipes: dict[str, list[Recipe]] = {}
    for key in sorted(grouped):
        output, count, layout = key
        amounts = [amount for kind, amount in sorted(Counter(layout).items()) if kind >= 0]
        for kinds in _fold(grouped[key], shaped=key in shaped_keys):
            recipes.setdefault(output, []).append(Recipe(output, count, tuple(zip(kinds, amounts, strict=True))))
    return recipes


def _fold(variants: list[tuple[str, ...]], *, shaped: bool) -> list[tuple[str, ...]]:
    """Replace alternatives by the name of their generic ingredient.

    Unnamed alternatives remain separate in shapeless recipes (dyes: the game has a recipe for each flower). In shaped
    recipes only the first remains (`sand or red sand`), as in the known TextCraft tree.
    """
    slots = [tuple(dict.fromkeys(column)) for column in zip(*variants, strict=True)]
    if prod(len(slot) for slot in slots) == len(variants):
        generic = [_GENERIC_OF.get(frozenset(slot)) for slot in slots]
        variants = list(
            dict.fromkeys(tuple(name or kind for name, kind in zip(generic, kinds, strict=True)) for kinds in variants)
        )
    return variants[:1] if shaped else variants


def _without_cycles(recipes: dict[str, list[Recipe]]) -> dict[str, list[Recipe]]:
    """Drop the recipes that turn a block back into its ingredients, which are gathered instead.

    Two rules give the known tree of 544 goals. They drop a recipe whose only ingredient is named a block, and one that
    unpacks an item: it makes more of something than it uses of an item made from that alone (ingot to nuggets, honey
    block to bottles).
    """
    packed_from = {
        (recipe.output, recipe.needs[0][0])
        for known in recipes.values()
        for recipe in known
        if len(recipe.needs) == 1 and recipe.needs[0][1] > recipe.count
    }

    def unpacks(recipe: Recipe) -> bool:
        if len(recipe.needs) == 1 and recipe.needs[0][0].endswith(" block"):
            return True
        return any((name, recipe.output) in packed_from and recipe.count > amount for name, amount in recipe.needs)

    kept = {output: [recipe for recipe in known if not unpacks(recipe)] for output, known in recipes.items()}
    return {output: known for output, known in kept.items() if known}


def _depths(recipes: Mapping[str, list[Recipe]]) -> dict[str, int]:
    ingredients = {name for known in recipes.values() for recipe in known for name, _ in recipe.needs}
    members = {member for name in ingredients for member in GENERICS.get(name, ())}
    depth = {name: 0 for name in sorted(ingredients | members) if name not in recipes and name not in GENERICS}
    level = 0
    while True:
        for name, alternatives in GENERICS.items():
            if name not in depth and any(member in depth for member in alternatives):
                depth[name] = level
        level += 1
        reached = [
            output
            for output, known in recipes.items()
            if output not in depth and any(all(name in depth for name, _ in r.needs) for r in known)
        ]
        if not reached:
            return depth
        depth.update(dict.fromkeys(reached, level))


def rank_recipes(recipes: Mapping[str, list[Recipe]]) -> dict[str, int]:
    """Return the height of the highest tree of each name. Raise ConfigError for a cycle."""
    ranks: dict[str, int] = {}
    open_names: set[str] = set()

    def rank(name: str) -> int:
        if name in open_names:
            raise ConfigError(f"TextCraft needs recipes without cycles, but {name} is needed to make {name}")
        if name not in ranks:
            open_names.add(name)
            if name in GENERICS:
                below = [rank(member) for member in GENERICS[name]]
            else:
                below = [1 + rank(part) for recipe in recipes.get(name, ()) for part, _ in recipe.needs]
            open_names.discard(name)
            ranks[name] = max(below, default=0)
        return ranks[name]

    for name in [*recipes, *GENERICS]:
        rank(name)
    return ranks
