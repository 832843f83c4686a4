"""The training goals under other names: as many games as one likes in which no recipe can be known by heart.

A variation of the book exchanges the names of items at random, the same way everywhere, so that a paper may be made of
three anvils. Amounts, depths and solutions stay. Kinds of ingredient and their members keep their names, which say what
stands for what, and so do the goals of test and validation: none of them becomes the goal of a renamed game.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache

from agentgym_rl.environment.envs.textcraft.recipes import Book, Recipe, load_book

NUM_VARIATIONS = 32


def new_names(book: Book, variation: int, kept: Collection[str]) -> dict[str, str]:
    """Every name that changes -> what it is called in this variation."""
    bound = {*kept, *book.generics, *(member for members in book.generics.values() for member in members)}
    free = sorted(name for name in book.depth if name not in bound)
    drawn = random.Random(f"textcraft names {variation}").sample(free, len(free))
    return dict(zip(free, drawn, strict=True))


@lru_cache(maxsize=NUM_VARIATIONS)
def renamed_book(variation: int, kept: tuple[str, ...]) -> Book:
    book = load_book()
    return rename(book, new_names(book, variation, kept))


def rename(book: Book, names: Mapping[str, str]) -> Book:
    """The same book with other names. Each item's recipes stay in their order: choices between them are by number."""

    def new(name: str) -> str:
        return names.get(name, name)

    def all_new(recipes: tuple[Recipe, ...]) -> tuple[Recipe, ...]:
        return tuple(
            replace(recipe, output=new(recipe.output), needs=tuple((new(name), count) for name, count in recipe.needs))
            for recipe in recipes
        )

    return Book(
        recipes={new(output): all_new(known) for output, known in book.recipes.items()},
        depth={new(name): depth for name, depth in book.depth.items()},
        generics=book.generics,
        uses={new(name): all_new(users) for name, users in book.uses.items()},
        rank={new(name): rank for name, rank in book.rank.items()},
        members=book.members,
    )
