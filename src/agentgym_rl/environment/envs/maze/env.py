"""Maze as a text game."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from agentgym_rl.environment.base import check_item
from agentgym_rl.environment.envs.maze import layout
from agentgym_rl.environment.envs.maze.picture import draw
from agentgym_rl.environment.plain_text import plain_action
from agentgym_rl.environment.tools import Tool
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.types import Step

INSTRUCTION = """\
You are in a maze of square rooms and look for the goal. Each turn you are told where the goal is, where you are, \
and on which sides of you there are walls. Rows are counted from the top, columns from the left, both from 1. \
You cannot see further than your own room, so remember where you have been.

Reply with exactly one of these actions: move up, move down, move left, move right. Moving up makes the row smaller, \
moving left makes the column smaller. Where there is a wall you stay where you are."""

TOOLS = (
    Tool(
        "move",
        "Move one room in a direction.",
        "move {direction}",
        {"direction": {"type": "string", "enum": ["up", "down", "left", "right"]}},
    ),
)

_SIDES = {"up": "above you", "down": "below you", "left": "to your left", "right": "to your right"}
_MAX_CHARS = 200


class Maze:
    """101,000 mazes of five sizes. Implements TextEnv.

    With `mazes` = n an episode is a tour of n mazes of one size, the item's first. Each goal is worth 1/n.
    """

    name: ClassVar[str] = "maze"
    instruction: ClassVar[str] = INSTRUCTION
    splits: ClassVar[Mapping[str, range]] = layout.SPLITS
    subsets: ClassVar[tuple[str, ...]] = layout.SUBSETS
    cheap: ClassVar[bool] = True

    def __init__(self, mazes: int = 1) -> None:
        if mazes < 1:
            raise ConfigError(f"mazes must be at least 1, got {mazes}")
        self._mazes = mazes
        self._reached = 0
        """Goals reached in this episode."""
        self._item = -1
        """Item of the current maze."""
        self._layout: layout.Layout
        self._path: list[layout.Cell] = []
        """Cells the player has visited, including the current one."""
        self._playing = False

    @classmethod
    def tools(cls) -> Sequence[Tool]:
        return TOOLS

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return (f"size{layout.size_of(check_item(cls, item))}",)

    def reset(self, item: int) -> str:
        self._enter(check_item(self, item))
        self._reached = 0
        self._playing = True
        return self._observation()

    def step(self, text: str) -> Step:
        self._require_playing()
        way = _read_move(text)
        if way is None:
            names = ", ".join(map(_action, layout.MOVES))
            reason = f"Could not understand {plain_action(text)}. The actions are: {names}."
            return Step(f"{reason}\n{self._observation()}", info={"valid": False})
        if way not in self._layout.exits[self._path[-1]]:
            reason = f"There is a wall {_SIDES[way]}: you stay where you are."
            return Step(f"{reason}\n{self._observation()}", info={"valid": False})
        self._path.append(layout.neighbour(self._path[-1], way))
        if self._path[-1] != self._layout.goal:
            return Step(self._observation(), info={"valid": True})
        self._reached += 1
        if self._reached < self._mazes:
            self._enter(_next_of_size(self._item))
            text = f"You reached goal {self._reached} of {self._mazes} and are in a new maze."
            return Step(f"{text}\n{self._observation()}", 1 / self._mazes, info={"valid": True})
        self._playing = False
        return Step("You reached the goal.", 1 / self._mazes, True, {"valid": True, "success": True})

    def close(self) -> None:
        self._playing = False

    def actions(self) -> list[str]:
        """Return the moves that no wall blocks; none when the episode is over."""
        return [_action(way) for way in self._layout.exits[self._path[-1]]] if self._playing else []

    def oracle(self) -> str:
        """Return the next move of a shortest way, found with knowledge of the whole maze."""
        self._require_playing()
        here, distance = self._path[-1], self._layout.distance
        return _action(min(self._layout.exits[here], key=lambda way: distance[layout.neighbour(here, way)]))

    def state_key(self) -> str:
        """Return `12|3,1`: the item and the player's row and column."""
        if self._item < 0:
            raise EnvError("maze has no state yet: call reset first")
        row, column = self._path[-1]
        return f"{self._item}|{row + 1},{column + 1}"

    def render(self) -> str:
        """Return an SVG of the maze from above, the way walked so far and the goal."""
        if self._item < 0:
            raise EnvError("maze has nothing to draw yet: call reset first")
        return draw(self._item, self._layout, self._path)

    def _enter(self, item: int) -> None:
        self._item, self._layout = item, layout.layout(item)
        self._path = [self._layout.start]

    def _require_playing(self) -> None:
        if not self._playing:
            raise EnvError("maze needs a running episode: call reset first")

    def _observation(self) -> str:
        here = self._path[-1]
        walls = [side for way, side in _SIDES.items() if way not in self._layout.exits[here]]
        *most, last = walls or ["nowhere around you"]
        where = f"{', '.join(most)} and {last}" if most else last
        return f"The goal is at {_place(self._layout.goal)}. You are at {_place(here)}. There are walls {where}."


def _next_of_size(item: int) -> int:
    """Return the next item of the same size and split, after the last one the first."""
    split = next(split for split in layout.SPLITS.values() if item in split)
    return split.start + (item - split.start + len(layout.SIZES)) % len(split)


def _place(cell: layout.Cell) -> str:
    return f"row {cell[0] + 1}, column {cell[1] + 1}"


def _action(way: str) -> str:
    return f"move {way}"


def _read_move(text: str) -> str | None:
    if len(text) > _MAX_CHARS:
        return None
    words = text.strip().strip("\"'`. ").lower().split()
    return words[1] if len(words) == 2 and words[0] == "move" and words[1] in layout.MOVES else None
