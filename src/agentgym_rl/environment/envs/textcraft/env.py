"""TextCraft as a text game."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from agentgym_rl.environment.base import check_item
from agentgym_rl.environment.envs.textcraft import problems
from agentgym_rl.environment.envs.textcraft.oracle_thoughts import think
from agentgym_rl.environment.envs.textcraft.picture import draw
from agentgym_rl.environment.envs.textcraft.planner import best_plan, fill, next_action, take
from agentgym_rl.environment.envs.textcraft.recipe_book import (
    GATHERED_KINDS,
    OTHER_NAMES,
    Recipe,
    craft_command,
    load_book,
)
from agentgym_rl.environment.plain_text import plain
from agentgym_rl.environment.tools import Tool
from agentgym_rl.errors import EnvError
from agentgym_rl.types import Step

INSTRUCTION = """\
You play a crafting game with Minecraft's recipes. The first message lists crafting commands and ends with a goal. \
You start with nothing; make the goal item, and the game is won.

Give exactly one command a turn. There are three:
- get N ITEM: take N of an item from the world, for example: get 3 sugar cane. Only raw items can be taken; an item \
that has a recipe cannot be found and must be crafted.
- craft N ITEM using N INGREDIENT, N INGREDIENT, ...: use up ingredients you hold and receive the item, for example: \
craft 3 paper using 3 sugar cane. Use the listed commands, with exactly the amounts they give; to make more, craft \
again.
- inventory: see what you hold.

Some commands name a kind of ingredient instead of one item, such as planks, oak logs, wool or coals. Any item of that \
kind will do: for craft 4 stick using 2 planks you may write craft 4 stick using 2 birch planks. Not every listed \
command is useful for the goal, and some ingredients have to be crafted from others first."""

_COUNT = {"type": "integer", "description": "How many."}
_ITEM = {"type": "string", "description": "Name of the item, such as oak log."}
TOOLS = (
    Tool("get", "Take raw items from the world.", "get {count} {item}", {"count": _COUNT, "item": _ITEM}),
    Tool(
        "craft",
        "Craft an item by one of the listed commands, with exactly the amounts it gives.",
        "craft {count} {item} using {ingredients}",
        {
            "count": _COUNT,
            "item": _ITEM,
            "ingredients": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Amount and name of each ingredient, such as 3 sugar cane.",
            },
        },
    ),
    Tool("inventory", "See what you hold.", "inventory"),
)


_MAX_COUNT = 1000
"""Largest amount of one command. No goal needs half as many of any item."""
_MAX_CHARS = 500
"""Longest command. Useful ones have under 200 characters."""
_GET = re.compile(r"get ([0-9]+) (.+)")
_CRAFT = re.compile(r"craft (?:[0-9]+ )?(.+?) using (.+)")
_PART = re.compile(r"([0-9]+) (.+)")


class _Refused(Exception):
    """The action is malformed or impossible. The message is the game's answer."""


class TextCraft:
    """544 goals over Minecraft's recipes, one to four crafting levels deep, and the training goals under other names.
    Implements TextEnv."""

    name: ClassVar[str] = "textcraft"
    instruction: ClassVar[str] = INSTRUCTION
    splits: ClassVar[Mapping[str, range]] = {**problems.SPLITS, "renamed": problems.RENAMED}
    subsets: ClassVar[tuple[str, ...]] = tuple(f"depth{depth}" for depth in problems.DEPTHS)
    cheap: ClassVar[bool] = True

    def __init__(self) -> None:
        self._book = load_book()
        self._item = -1
        self._problem: problems.Problem
        self._held: dict[str, int] = {}
        self._playing = False

    @classmethod
    def tools(cls) -> Sequence[Tool]:
        return TOOLS

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return (f"depth{load_book().depth[problems.goals()[problems.original(check_item(cls, item))]]}",)

    def fork(self) -> TextCraft:
        """Return a copy that shares the recipes, which never change."""
        other = copy.copy(self)
        other._held = dict(self._held)
        return other

    def reset(self, item: int) -> str:
        self._problem = problems.problem(check_item(self, item))
        self._book = self._problem.book
        self._item = item
        self._held = {}
        self._playing = True
        return self._problem.observation

    def step(self, text: str) -> Step:
        self._require_playing()
        try:
            return self._act(_normalise(text))
        except _Refused as refusal:
            return Step(str(refusal), info={"valid": False})

    def close(self) -> None:
        self._playing = False

    def actions(self) -> list[str]:
        """Return the possible actions that serve the listed commands, sorted; none when the episode is over."""
        if not self._playing:
            return []
        counts: dict[str, set[int]] = {}
        actions = {"inventory"}
        for recipe in self._problem.commands:
            parts = fill(self._book, recipe, self._held)
            if parts is not None:
                actions.add(craft_command(recipe, parts))
            for name, count in recipe.needs:
                raw = self._raw(name)
                if raw is not None:
                    counts.setdefault(raw, set()).add(count)
        for name, count in best_plan(self._book, self._problem.goal, self._held, self._problem.favourites).gets.items():
            counts.setdefault(name, set()).add(count)
        actions.update(f"get {count} {name}" for name, amounts in counts.items() for count in amounts)
        return sorted(actions)

    def oracle(self) -> str:
        self._require_playing()
        return next_action(self._book, self._problem.goal, self._held, self._problem.favourites)

    def thought(self) -> str:
        self._require_playing()
        return think(best_plan(self._book, self._problem.goal, self._held, self._problem.favourites), self._held)

    def state_key(self) -> str:
        """Return `12|1 oak log,4 stick`: the item and the inventory, sorted."""
        return f"{self._item}|" + ",".join(f"{count} {name}" for name, count in sorted(self._held.items()))

    def render(self) -> str:
        """Return an SVG of the goal, the inventory and the goal's recipe tree with the held items highlighted."""
        if self._item < 0:
            raise EnvError("textcraft has nothing to draw yet: call reset first")
        return draw(self._book, self._problem, self._held)

    def _require_playing(self) -> None:
        if not self._playing:
            raise EnvError("textcraft needs a running episode: call reset first")

    def _act(self, action: str) -> Step:
        if action == "inventory":
            return Step(self._inventory(), info={"valid": True})
        if match := _GET.fullmatch(action):
            return self._get(match[1], match[2])
        if match := _CRAFT.fullmatch(action):
            return self._craft(match[1], match[2])
        raise _Refused(
            f"Could not execute {plain(action)}. Commands: get N item; craft N item using N item, N item; inventory."
        )

    def _inventory(self) -> str:
        held = " ".join(f"[{name}] ({count})" for name, count in sorted(self._held.items()))
        return f"Inventory: {held or 'You are not carrying anything.'}"

    def _get(self, digits: str, name: str) -> Step:
        raw = GATHERED_KINDS.get(name) or self._raw(OTHER_NAMES.get(name, name))
        if raw is None:
            raise _Refused(f"Could not find {plain(name)}")
        count = _count(digits)
        self._held[raw] = self._held.get(raw, 0) + count
        return Step(f"Got {count} {raw}", info={"valid": True})

    def _raw(self, name: str) -> str | None:
        """Return the raw item for `name`: itself, or the usual member of a kind. None if it must be crafted."""
        return next((n for n in self._book.generics.get(name, (name,)) if self._book.depth.get(n) == 0), None)

    def _craft(self, output: str, ingredients: str) -> Step:
        given = _parts(ingredients)
        if output not in self._book.recipes:
            raise _Refused(f"Could not find a recipe for {plain(output)}")
        for recipe in self._book.recipes[output]:
            wanted = self._match(recipe, given)
            if wanted is not None:
                break
        else:
            raise _Refused(f"Could not find a valid recipe for {output} with these ingredients")
        if any(self._held.get(name, 0) < count for name, count in wanted.items()):
            raise _Refused(f"Could not find enough items to craft {output}")
        for name, count in wanted.items():
            self._held[name] -= count
            if not self._held[name]:
                del self._held[name]
        self._held[output] = self._held.get(output, 0) + recipe.count
        success = output == self._problem.goal
        self._playing = not success
        info = {"valid": True, "success": True} if success else {"valid": True}
        return Step(f"Crafted {recipe.count} {output}", float(success), success, info)

    def _match(self, recipe: Recipe, given: Mapping[str, int]) -> dict[str, int] | None:
        """Return the items to use up if `given` fits this recipe, else None.

        Members of a generic ingredient may be mixed. A generic name in `given` uses held items of that kind.
        """
        generics = self._book.generics
        wanted: dict[str, int] = {}
        num_matched = 0
        for name, count in recipe.needs:
            members = generics.get(name, (name,))
            named = {member: given[member] for member in members if member in given}
            kinds = [kind for kind in given if kind in generics and set(generics[kind]) <= set(members)]
            if sum(named.values()) + sum(given[kind] for kind in kinds) != count:
                return None
            num_matched += len(named) + len(kinds)
            wanted |= named
            for kind in kinds:
                self._take_kind(kind, given[kind], wanted)
        return wanted if num_matched == len(given) else None

    def _take_kind(self, kind: str, count: int, wanted: dict[str, int]) -> None:
        members = self._book.generics[kind]
        pool = {member: self._held.get(member, 0) - wanted.get(member, 0) for member in members}
        for member, used in take(pool, count):
            wanted[member] = wanted.get(member, 0) + used
            count -= used
        if count:  # more than is held: the caller refuses it
            wanted[members[0]] = wanted.get(members[0], 0) + count


def _normalise(text: str) -> str:
    """Return the text in lower case with single spaces. Item ids such as minecraft:oak_log become oak log."""
    if len(text) > _MAX_CHARS:
        raise _Refused(f"Could not execute a command of {len(text)} characters. Give one short command.")
    lines = text.strip().splitlines()
    if len(lines) > 1:
        raise _Refused(f"Could not execute {len(lines)} lines. Give one command a turn.")
    return " ".join(text.lower().replace("minecraft:", "").replace("_", " ").split()).rstrip(" .")


def _parts(ingredients: str) -> dict[str, int]:
    given: dict[str, int] = {}
    for part in ingredients.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise _Refused(f"Wrong item format: {plain(part.strip())}. Write an amount and a name, like 2 oak planks.")
        name = OTHER_NAMES.get(match[2], match[2])
        given[name] = given.get(name, 0) + _count(match[1])
    return given


def _count(digits: str) -> int:
    count = int(digits) if len(digits) <= 8 else _MAX_COUNT + 1
    if not 1 <= count <= _MAX_COUNT:
        raise _Refused(f"Could not handle an amount of {plain(digits)}. Amounts go from 1 to {_MAX_COUNT}.")
    return count
