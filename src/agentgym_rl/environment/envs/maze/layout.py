"""Mazes from seeds: the openings between rooms, the start and the goal."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import lru_cache

SIZES = (3, 4, 5, 6, 8)
SPLITS = {"train": range(1000, 101_000), "test": range(1000)}
SUBSETS = tuple(f"size{size}" for size in SIZES)
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_BACK = {"up": "down", "down": "up", "left": "right", "right": "left"}
_TEST_SHARE = 0.25
"""Share of all wall patterns that is reserved for test items."""

Cell = tuple[int, int]
"""Row and column, from 0 at the top left."""


@dataclass(frozen=True, slots=True)
class Layout:
    size: int
    exits: dict[Cell, tuple[str, ...]]
    """Directions without a wall, in the order of MOVES."""
    start: Cell
    goal: Cell
    distance: dict[Cell, int]
    """Moves from each cell to the goal."""


def neighbour(cell: Cell, direction: str) -> Cell:
    row, column = MOVES[direction]
    return cell[0] + row, cell[1] + column


def size_of(item: int) -> int:
    """Return the size of an item's maze: SIZES[item % 5]."""
    return SIZES[item % len(SIZES)]


@lru_cache(maxsize=2048)
def layout(item: int) -> Layout:
    """Return the maze of an item. Wall patterns are drawn until one belongs to the item's split.

    A hash of the walls decides the split, so that no test maze occurs in training, however small it is.
    """
    size = size_of(item)
    rng = random.Random(f"maze item {item}")
    while True:
        exits = _carve(size, rng)
        if _for_test(exits) == (item in SPLITS["test"]):
            break
    while True:
        start = (rng.randrange(size), rng.randrange(size))
        far = sorted(cell for cell, moves in _distances(exits, start).items() if moves >= size)
        if far:
            goal = rng.choice(far)
            return Layout(size, exits, start, goal, _distances(exits, goal))


def _carve(size: int, rng: random.Random) -> dict[Cell, tuple[str, ...]]:
    """Return a spanning tree, made by a random walk with backtracking, with a few more openings for loops."""
    joined: dict[Cell, set[str]] = {(row, column): set() for row in range(size) for column in range(size)}
    trail = [(rng.randrange(size), rng.randrange(size))]
    seen = set(trail)
    while trail:
        cell = trail[-1]
        ways = [way for way in MOVES if neighbour(cell, way) in joined and neighbour(cell, way) not in seen]
        if not ways:
            trail.pop()
            continue
        way = rng.choice(ways)
        _join(joined, cell, way)
        trail.append(neighbour(cell, way))
        seen.add(trail[-1])
    inner = [(cell, way) for cell in joined for way in ("down", "right") if neighbour(cell, way) in joined]
    walls = [(cell, way) for cell, way in inner if way not in joined[cell]]
    for cell, way in rng.sample(walls, size // 2):
        _join(joined, cell, way)
    return {cell: tuple(way for way in MOVES if way in ways) for cell, ways in joined.items()}


def _join(joined: dict[Cell, set[str]], cell: Cell, way: str) -> None:
    joined[cell].add(way)
    joined[neighbour(cell, way)].add(_BACK[way])


def _for_test(exits: dict[Cell, tuple[str, ...]]) -> bool:
    text = ";".join(",".join(ways) for _, ways in sorted(exits.items()))
    return hashlib.sha256(text.encode()).digest()[0] < 256 * _TEST_SHARE


def _distances(exits: dict[Cell, tuple[str, ...]], origin: Cell) -> dict[Cell, int]:
    distances = {origin: 0}
    queue = [origin]
    for cell in queue:  # grows during the loop: breadth first
        for way in exits[cell]:
            following = neighbour(cell, way)
            if following not in distances:
                distances[following] = distances[cell] + 1
                queue.append(following)
    return distances
