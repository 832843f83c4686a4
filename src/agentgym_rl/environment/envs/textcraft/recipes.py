"""The recipe book: Minecraft 1.16.5's crafting recipes with generic ingredients put back together."""

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
"""minecraft_data serves the recipes of its 1.16.2 folder for 1.16.2 to 1.16.5; nothing was changed between these."""

_WOODS = ("oak", "birch", "spruce", "jungle", "acacia", "dark oak")
_FUNGI = ("crimson", "warped")
_COLOURS = (
    *("black", "blue", "brown", "cyan", "gray", "green", "light blue", "light gray"),
    *("lime", "magenta", "orange", "pink", "purple", "red", "white", "yellow"),
)


def _generics() -> dict[str, tuple[str, ...]]:
    """What the game calls tags: the package spells every member out as a recipe of its own, without the tag's name.

    The usual member comes first.
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
"""AgentGym's name for a generic ingredient -> the name here. The package cannot tell the two apart: equal members."""
GATHERED_KINDS: Mapping[str, str] = {"wooden slabs": "oak slab"}
"""Generic ingredient that AgentGym's game hands out although its members are crafted -> the member to hand out."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """`count` of `output` from `needs`: (name, count) pairs, a name being an item or a generic ingredient."""

    output: str
    count: int
    needs: tuple[tuple[str, int], ...]

    @property
    def command(self) -> str:
        return craft_command(self, self.needs)


def craft_command(recipe: Recipe, parts: Sequence[tuple[str, int]]) -> str:
    """The action that crafts `recipe` from `parts`."""
    return f"craft {recipe.count} {recipe.output} using " + ", ".join(f"{count} {name}" for name, count in parts)


@dataclass(frozen=True, slots=True)
class Book:
    """Every recipe, and how deep each item is: 0 for what is gathered, else 1 + its deepest ingredient."""

    recipes: Mapping[str, tuple[Recipe, ...]]
    """Craftable item -> its recipes, the shallowest first, then by command."""
    depth: Mapping[str, int]
    """Item or generic ingredient -> height of its lowest crafting tree."""
    generics: Mapping[str, tuple[str, ...]]
    """Generic ingredient -> the items that may stand for it, the usual one first."""
    uses: Mapping[str, tuple[Recipe, ...]]
    """Ingredient as written in recipes -> recipes that use it."""
    rank: Mapping[str, int]
    """Item or generic ingredient -> height of its highest tree: above everything any of its recipes may need."""
    members: Mapping[str, tuple[str, ...]]
    """Generic ingredient -> its shallowest members."""


@cache
def load_book() -> Book:
    """Read once per process (about 60 ms); the result is shared and never changed."""
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
    """The package's rows by output, and its item names by number."""
    data = minecraft_data(VERSION)
    return data.recipes, {number: row["name"].replace("_", " ") for number, row in data.items.items()}


def parse_recipes(rows: Mapping[str, list[dict[str, Any]]], names: Mapping[int, str]) -> dict[str, list[Recipe]]:
    """Fold the rows that differ only in which member fills a slot into one recipe each."""
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
    """Name the slots whose alternatives are a generic ingredient.

    Alternatives without a name are kept apart in shapeless recipes (dyes: each flower is a recipe of its own in the
    game) and reduced to the first in shaped ones (`sand or red sand`), as the known TextCraft tree does.
    """
    slots = [tuple(dict.fromkeys(column)) for column in zip(*variants, strict=True)]
    if prod(len(slot) for slot in slots) == len(variants):
        generic = [_GENERIC_OF.get(frozenset(slot)) for slot in slots]
        variants = list(
            dict.fromkeys(tuple(name or kind for name, kind in zip(generic, kinds, strict=True)) for kinds in variants)
        )
    return variants[:1] if shaped else variants


def _without_cycles(recipes: dict[str, list[Recipe]]) -> dict[str, list[Recipe]]:
    """Drop what turns a block back into what it is made of, so that the unpacked thing is gathered.

    Two rules, which give the known tree of 544 goals: a recipe whose only ingredient is called a block goes, and so
    does one that makes more of an item than it takes of something which is packed from that item alone (ingot to
    nuggets, honey block to bottles).
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
        for name, standing_for in GENERICS.items():
            if name not in depth and any(member in depth for member in standing_for):
                depth[name] = level
        level += 1
        found = [
            output
            for output, known in recipes.items()
            if output not in depth and any(all(name in depth for name, _ in r.needs) for r in known)
        ]
        if not found:
            return depth
        depth.update(dict.fromkeys(found, level))


def rank_recipes(recipes: Mapping[str, list[Recipe]]) -> dict[str, int]:
    """Height of the highest tree of everything; a cycle raises."""
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
