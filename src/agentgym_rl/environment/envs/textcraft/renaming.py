"""The training goals under other names: games whose recipes a model cannot know by heart.

A variation permutes the names of items at random in the whole book, so that paper may be made of three anvils. Amounts,
depths and solutions remain. Generic ingredients and their members keep their names, which show how they are related.
The goals of test and validation keep theirs too, so that none of them becomes the goal of a renamed game.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache

from agentgym_rl.environment.envs.textcraft.recipe_book import Book, Recipe, load_book

NUM_VARIATIONS = 32


def new_names(book: Book, variation: int, kept: Collection[str]) -> dict[str, str]:
    """Return the new name in this variation of each name that changes."""
    unchanged = {*kept, *book.generics, *(member for members in book.generics.values() for member in members)}
    old_names = sorted(name for name in book.depth if name not in unchanged)
    permuted = random.Random(f"textcraft names {variation}").sample(old_names, len(old_names))
    return dict(zip(old_names, permuted, strict=True))


@lru_cache(maxsize=NUM_VARIATIONS)
def renamed_book(variation: int, kept: tuple[str, ...]) -> Book:
    book = load_book()
    return rename(book, new_names(book, variation, kept))


def rename(book: Book, names: Mapping[str, str]) -> Book:
    """Return the book with other names. Each item's recipes keep their order, because choices use their index."""

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
