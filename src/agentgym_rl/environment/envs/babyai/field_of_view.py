"""The agent's view (7x7 cells ahead of it) and the shortest paths through it.

Cells are numbered in the agent's own frame: cell = forward * 7 + (side + 3), with side negative to the left.
A pose is cell * 4 + heading, heading 0 ahead, 1 right, 2 back, 3 left. The agent is in pose START.

A set of cells is an integer with bit `cell` for each of them. What follows from such a set alone is cached, because
episodes of a group see the same rooms.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from operator import itemgetter
from threading import Lock
from typing import Any, NamedTuple

SIZE = 7
HALF = SIZE // 2
NUM_CELLS = SIZE * SIZE
AGENT_CELL = HALF
START = AGENT_CELL * 4
DIRECTIONS = ((1, 0), (0, 1), (-1, 0), (0, -1))
_HEADINGS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # (forward, side)


class Move(IntEnum):
    """Minigrid's low-level actions, by its numbers."""

    LEFT = 0
    RIGHT = 1
    FORWARD = 2
    PICKUP = 3
    DROP = 4
    TOGGLE = 5


def _ahead(cell: int, heading: int) -> int:
    """Return the cell one step from `cell` along `heading`, or -1 outside the view."""
    forward, side = cell // SIZE + _HEADINGS[heading][0], cell % SIZE + _HEADINGS[heading][1]
    return forward * SIZE + side if 0 <= forward < SIZE and 0 <= side < SIZE else -1


AHEAD = tuple(_ahead(pose // 4, pose % 4) for pose in range(NUM_CELLS * 4))
_TURNS = tuple(
    ((pose & ~3 | (pose + 3) & 3, Move.LEFT), (pose & ~3 | (pose + 1) & 3, Move.RIGHT)) for pose in range(NUM_CELLS * 4)
)
FACING = tuple(tuple(pose for pose in range(NUM_CELLS * 4) if AHEAD[pose] == cell) for cell in range(NUM_CELLS))


@dataclass(slots=True)
class Sighting:
    """One object in view."""

    name: str
    """Colour, kind and number among equal objects, nearest first: `red ball 1`."""
    thing: Any
    """Minigrid's object."""
    cell: int

    @property
    def forward(self) -> int:
        return self.cell // SIZE

    @property
    def side(self) -> int:
        return self.cell % SIZE - HALF


@dataclass(slots=True)
class View:
    """The cells ahead of the agent."""

    things: tuple[Any, ...]
    """Object in each of NUM_CELLS cells, visible or not; None in a free cell."""
    visible: tuple[bool, ...]
    """Whether each of NUM_CELLS cells is visible."""
    sightings: list[Sighting]
    """Nearest first, then nearest the line of sight, then left to right."""
    free: int
    """Set of the visible cells that the agent can enter."""


_NEAREST_FIRST = sorted(
    (cell for cell in range(NUM_CELLS) if cell != AGENT_CELL),
    key=lambda cell: (cell // SIZE + abs(cell % SIZE - HALF), abs(cell % SIZE - HALF), cell),
)


def look(level: Any) -> View:
    """Return the current view of a minigrid level, by minigrid's own rules of sight."""
    grid, (agent_x, agent_y) = level.grid, level.agent_pos
    pick, inside = _cells_ahead(grid.width, grid.height, int(agent_x), int(agent_y), level.agent_dir)
    things = pick([*grid.grid, None])
    opaque = 0
    for cell, thing in enumerate(things):
        if thing is not None and not thing.see_behind():
            opaque |= 1 << cell
    sight = _see(inside & ~opaque)
    sightings: list[Sighting] = []
    counts: dict[str, int] = {}
    free = sight.cells
    for cell in sight.nearest_first:
        thing = things[cell]
        if thing is None:
            continue
        if not thing.can_overlap():
            free &= ~(1 << cell)
        if thing.type != "wall":
            kind = f"{thing.color} {thing.type}"
            counts[kind] = number = counts.get(kind, 0) + 1
            sightings.append(Sighting(f"{kind} {number}", thing, cell))
    return View(things, sight.visible, sightings, free)


@lru_cache(maxsize=4096)
def _cells_ahead(width: int, height: int, agent_x: int, agent_y: int, direction: int) -> tuple[itemgetter[Any], int]:
    """Return what picks the view's cells from a grid's list of cells, and the set of those inside the grid. The picker
    takes a cell outside from the list's end, after the grid's own cells."""
    ahead_x, ahead_y = DIRECTIONS[direction]
    places, inside = [width * height] * NUM_CELLS, 0
    for cell in range(NUM_CELLS):
        forward, side = cell // SIZE, cell % SIZE - HALF
        x, y = agent_x + forward * ahead_x - side * ahead_y, agent_y + forward * ahead_y + side * ahead_x
        if 0 <= x < width and 0 <= y < height:
            places[cell] = y * width + x
            inside |= 1 << cell
    return itemgetter(*places), inside


class _Sight(NamedTuple):
    """The visible cells."""

    visible: tuple[bool, ...]
    cells: int
    """The same as a set."""
    nearest_first: tuple[int, ...]
    """The same in the order of sightings, without the agent's own."""


@lru_cache(maxsize=4096)
def _see(clear: int) -> _Sight:
    """Return the visible cells. A clear visible cell shows its neighbours beside, ahead and diagonally ahead."""
    visible = [False] * NUM_CELLS
    visible[AGENT_CELL] = True
    for row in range(0, NUM_CELLS, SIZE):
        for columns, sideways in ((range(SIZE - 1), 1), (range(SIZE - 1, 0, -1), -1)):
            for column in columns:
                cell = row + column
                if visible[cell] and clear >> cell & 1:
                    visible[cell + sideways] = True
                    if row + SIZE < NUM_CELLS:
                        visible[cell + SIZE] = visible[cell + SIZE + sideways] = True
    nearest_first = tuple(cell for cell in _NEAREST_FIRST if visible[cell])
    return _Sight(tuple(visible), sum(1 << cell for cell in range(NUM_CELLS) if visible[cell]), nearest_first)


class Paths:
    """Shortest paths, in moves, from the agent to every pose it can reach through a set of free cells. They are found
    nearest first, as far as somebody asks. Threads may share them."""

    def __init__(self, free: int) -> None:
        self._free = free
        self._came_from: list[tuple[int, Move] | None] = [None] * (NUM_CELLS * 4)
        self._distance = [-1] * (NUM_CELLS * 4)
        self._distance[START] = 0
        self._frontier = [START]
        """The poses that are furthest away so far."""
        self._to_face: dict[int, tuple[Move, ...] | None] = {}
        self._lock = Lock()

    def to_face(self, cell: int) -> tuple[Move, ...] | None:
        """Return the moves that end next to `cell` and facing it, or None if no path of free cells leads there."""
        if cell not in self._to_face:
            with self._lock:
                self._to_face[cell] = self._find(cell)
        return self._to_face[cell]

    def _find(self, cell: int) -> tuple[Move, ...] | None:
        facing, distance = FACING[cell], self._distance
        while not (poses := [pose for pose in facing if distance[pose] >= 0]):
            if not self._frontier:
                return None
            self._advance()
        pose = min(poses, key=lambda pose: (distance[pose], pose))
        moves: list[Move] = []
        while (step := self._came_from[pose]) is not None:
            pose = step[0]
            moves.append(step[1])
        return tuple(reversed(moves))

    def _advance(self) -> None:
        """Find the poses one move further away."""
        distance, came_from, free = self._distance, self._came_from, self._free
        further = distance[self._frontier[0]] + 1
        reached: list[int] = []
        for pose in self._frontier:
            ahead = AHEAD[pose]
            if ahead >= 0 and free >> ahead & 1 and distance[following := ahead * 4 | pose & 3] < 0:
                distance[following] = further
                came_from[following] = pose, Move.FORWARD
                reached.append(following)
            for following, move in _TURNS[pose]:
                if distance[following] < 0:
                    distance[following] = further
                    came_from[following] = pose, move
                    reached.append(following)
        self._frontier = reached


paths_through = lru_cache(maxsize=1024)(Paths)
"""Return the paths through a set of free cells."""
