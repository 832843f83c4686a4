"""Text views of Gymnasium's toy-text environments: rules, names of the actions, and each state in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class View:
    """Text view of a Gymnasium environment."""

    rules: str
    actions: tuple[str, ...]
    """Names of the actions, in the order of their numbers."""
    describe: Callable[[Any, Any], str]
    """Returns an observation in words; takes the observation and the unwrapped environment."""
    success_reward: float
    """Least reward of the last step of a success."""


def frozen_lake(observation: Any, env: Any) -> str:
    row, column = divmod(int(observation), env.ncol)
    lines = [[cell.decode() for cell in cells] for cells in env.desc]
    lines[row][column] = "P"
    grid = "\n".join(" ".join(cells) for cells in lines)
    return f"You are at {_place(row, column)}.\n{grid}"


def cliff_walking(observation: Any, env: Any) -> str:
    rows, columns = env.shape
    row, column = divmod(int(observation), columns)
    return (
        f"You are at {_place(row, column)} of {rows} rows and {columns} columns. The goal is at "
        f"{_place(rows - 1, columns - 1)}. The cliff is in row {rows}, columns 2 to {columns - 1}."
    )


TAXI_STANDS = ("red", "green", "yellow", "blue")


def taxi(observation: Any, env: Any) -> str:
    row, column, passenger, destination = env.decode(int(observation))
    stands = [f"the {name} stand ({_place(*place)})" for name, place in zip(TAXI_STANDS, env.locs, strict=True)]
    where = "is in the taxi" if passenger == len(stands) else f"waits at {stands[passenger]}"
    cells = env.desc[1 + row]
    walls = [side for side, wall in (("east", cells[2 * column + 2]), ("west", cells[2 * column])) if wall == b"|"]
    blocked = f" There is a wall to the {' and the '.join(walls)}." if walls else ""
    return (
        f"The taxi is at {_place(row, column)} of 5 rows and 5 columns.{blocked} The passenger {where} and wants to "
        f"go to {stands[destination]}."
    )


def blackjack(observation: Any, env: Any) -> str:
    total, dealer, usable_ace = (int(value) for value in observation)
    ace = "an ace that counts as 11" if usable_ace else "no ace that counts as 11"
    return f"Your cards sum to {total}, with {ace}. The dealer shows {'an ace' if dealer == 1 else dealer}."


def _place(row: int, column: int) -> str:
    return f"row {row + 1}, column {column + 1}"


GRID = "Rows are counted from the top, columns from the left, both from 1."
VIEWS = {
    "FrozenLake": View(
        "You cross a frozen lake from the start S to the goal G. Tiles F are frozen, tiles H are holes: a step into a "
        "hole ends the game. Unless the lake is set not to be slippery, a move may slide to either side. The map shows "
        f"you as P. {GRID}",
        ("move left", "move down", "move right", "move up"),
        frozen_lake,
        1.0,
    ),
    "CliffWalking": View(
        "You walk over a grid to the goal. A step onto the cliff costs 100 and takes you back to the start; every "
        f"other step costs 1. {GRID}",
        ("move up", "move right", "move down", "move left"),
        cliff_walking,
        -1.0,
    ),
    "Taxi": View(
        "You drive a taxi. Fetch the passenger and bring him to the stand where he wants to go. A step costs 1, a "
        f"pickup or dropoff at the wrong place 10, and the right dropoff pays 20. {GRID} North is up.",
        ("drive south", "drive north", "drive east", "drive west", "pick up", "drop off"),
        taxi,
        20.0,
    ),
    "Blackjack": View(
        "You play blackjack against a dealer. Get closer to 21 than the dealer without going over. Face cards count "
        "10, an ace 11 or 1. The dealer draws to 17.",
        ("stick", "hit"),
        blackjack,
        1.0,
    ),
}
"""Views by the name of the environment without its version."""
