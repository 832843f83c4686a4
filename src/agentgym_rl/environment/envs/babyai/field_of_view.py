"""The agent's view (7x7 cells ahead of it) and the shortest paths through it.

Cells are numbered in the agent's own frame: cell = forward * 7 + (side + 3), with side negative to the left.
A pose is cell * 4 + heading, heading 0 ahead, 1 right, 2 back, 3 left. The agent is in pose START.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

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
FACING = tuple(tuple(pose for pose in range(NUM_CELLS * 4) if AHEAD[pose] == cell) for cell in range(NUM_CELLS))


@dataclass(frozen=True, slots=True)
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

    things: list[Any]
    """Object in each of NUM_CELLS cells, visible or not; None in a free cell."""
    visible: list[bool]
    """Whether each of NUM_CELLS cells is visible."""
    sightings: list[Sighting]
    """Nearest first, then nearest the line of sight, then left to right."""


def look(level: Any) -> View:
    """Return the current view of a minigrid level, by minigrid's own rules of sight."""
    grid, width, height = level.grid.grid, level.grid.width, level.grid.height
    agent_x, agent_y = int(level.agent_pos[0]), int(level.agent_pos[1])
    ahead_x, ahead_y = DIRECTIONS[level.agent_dir]
    things: list[Any] = [None] * NUM_CELLS
    clear = [False] * NUM_CELLS
    for cell in range(NUM_CELLS):
        forward, side = cell // SIZE, cell % SIZE - HALF
        x, y = agent_x + forward * ahead_x - side * ahead_y, agent_y + forward * ahead_y + side * ahead_x
        if 0 <= x < width and 0 <= y < height:
            thing = things[cell] = grid[y * width + x]
            clear[cell] = thing is None or thing.see_behind()
    visible = _sight(clear)
    return View(things, visible, _name_sightings(things, visible))


def _sight(clear: list[bool]) -> list[bool]:
    """Return the visible cells. A clear visible cell shows its neighbours beside, ahead and diagonally ahead."""
    visible = [False] * NUM_CELLS
    visible[AGENT_CELL] = True
    for row in range(0, NUM_CELLS, SIZE):
        for columns, sideways in ((range(SIZE - 1), 1), (range(SIZE - 1, 0, -1), -1)):
            for column in columns:
                cell = row + column
                if visible[cell] and clear[cell]:
                    visible[cell + sideways] = True
                    if row + SIZE < NUM_CELLS:
                        visible[cell + SIZE] = visible[cell + SIZE + sideways] = True
    return visible


_NEAREST_FIRST = sorted(
    (cell for cell in range(NUM_CELLS) if cell != AGENT_CELL),
    key=lambda cell: (cell // SIZE + abs(cell % SIZE - HALF), abs(cell % SIZE - HALF), cell),
)


def _name_sightings(things: list[Any], visible: list[bool]) -> list[Sighting]:
    sightings: list[Sighting] = []
    counts: dict[str, int] = {}
    for cell in _NEAREST_FIRST:
        thing = things[cell]
        if visible[cell] and thing is not None and thing.type != "wall":
            kind = f"{thing.color} {thing.type}"
            counts[kind] = counts.get(kind, 0) + 1
            sightings.append(Sighting(f"{kind} {counts[kind]}", thing, cell))
    return sightings


class Paths:
    """Shortest paths, in moves, from the agent to every pose it can reach through cells it sees."""

    def __init__(self, view: View) -> None:
        free = [seen and (t is None or t.can_overlap()) for seen, t in zip(view.visible, view.things, strict=True)]
        self._came_from: list[tuple[int, Move] | None] = [None] * (NUM_CELLS * 4)
        self._distance = [-1] * (NUM_CELLS * 4)
        self._distance[START] = 0
        queue = [START]
        for pose in queue:
            cell, heading = pose >> 2, pose & 3
            ahead = AHEAD[pose]
            reached = [(cell * 4 + (heading + 3) % 4, Move.LEFT), (cell * 4 + (heading + 1) % 4, Move.RIGHT)]
            if ahead >= 0 and free[ahead]:
                reached.insert(0, (ahead * 4 + heading, Move.FORWARD))
            for following, move in reached:
                if self._distance[following] < 0:
                    self._distance[following] = self._distance[pose] + 1
                    self._came_from[following] = (pose, move)
                    queue.append(following)

    def to_face(self, cell: int) -> tuple[Move, ...] | None:
        """Return the moves that end next to `cell` and facing it, or None if no path of visible cells leads there."""
        poses = [pose for pose in FACING[cell] if self._distance[pose] >= 0]
        if not poses:
            return None
        pose = min(poses, key=lambda pose: (self._distance[pose], pose))
        moves: list[Move] = []
        while (step := self._came_from[pose]) is not None:
            pose = step[0]
            moves.append(step[1])
        return tuple(reversed(moves))
