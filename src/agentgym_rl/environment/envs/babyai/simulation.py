"""A light copy of a level for planning: moves without minigrid, and cheapest routes over the whole grid.

Cells are numbered y * width + x. A pose is cell * 4 + direction, by minigrid's directions (right, down, left, up).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any

from agentgym_rl.environment.envs.babyai.field_of_view import Move

Cost = Callable[[int], int | None]
"""Function of a cell: its cost beyond one move, or None if the cell is not allowed."""


class Simulation:
    """The grid, the agent and the object it holds. `moves` and `events` record its history."""

    def __init__(self, level: Any) -> None:
        self.width: int = level.grid.width
        self.cells: list[Any] = list(level.grid.grid)
        self.door_states = {
            cell: "open" if thing.is_open else "locked" if thing.is_locked else "closed"
            for cell, thing in enumerate(self.cells)
            if thing is not None and thing.type == "door"
        }
        self.offsets = (1, self.width, -1, -self.width)
        self.pose = (int(level.agent_pos[1]) * self.width + int(level.agent_pos[0])) * 4 + level.agent_dir
        self.held: Any = level.carrying
        self.moves: list[Move] = []
        self.events: tuple[tuple[Move, int], ...] = ()
        """Every change of the grid, as the move and the changed cell."""

    def copy(self) -> Simulation:
        copy = Simulation.__new__(Simulation)
        copy.width, copy.offsets, copy.pose, copy.held = self.width, self.offsets, self.pose, self.held
        copy.cells, copy.door_states = list(self.cells), dict(self.door_states)
        copy.moves, copy.events = list(self.moves), self.events
        return copy

    @property
    def signature(self) -> tuple[Any, ...]:
        """Key of the state. Copies of one simulation with equal signatures are equal."""
        return self.pose, self.events

    def ahead(self, pose: int) -> int:
        return (pose >> 2) + self.offsets[pose & 3]

    @property
    def front(self) -> int:
        return self.ahead(self.pose)

    def is_free(self, cell: int) -> bool:
        return self.cells[cell] is None or self.door_states.get(cell) == "open"

    def has_key_for(self, door_cell: int) -> bool:
        return self.held is not None and self.held.type == "key" and self.held.color == self.cells[door_cell].color

    def find(self, things: Iterable[Any]) -> list[int]:
        """Return the cells that contain one of `things`."""
        wanted = {id(thing) for thing in things}
        return [cell for cell, thing in enumerate(self.cells) if thing is not None and id(thing) in wanted]

    def do(self, move: Move) -> bool:
        """Make a move. Return whether it had an effect."""
        self.moves.append(move)
        if move is Move.LEFT or move is Move.RIGHT:
            self.pose = self.pose & ~3 | (self.pose + (1 if move is Move.RIGHT else 3)) & 3
            return True
        if move is Move.FORWARD:
            free = self.is_free(self.front)
            if free:
                self.pose = self.front * 4 | self.pose & 3
            return free
        return self._handle(move, self.front)

    def _handle(self, move: Move, front: int) -> bool:
        thing, state = self.cells[front], self.door_states.get(front)
        if move is Move.PICKUP and self.held is None and thing is not None and thing.can_pickup():
            self.held, self.cells[front] = thing, None
        elif move is Move.DROP and self.held is not None and thing is None:
            self.held, self.cells[front] = None, self.held
        elif move is Move.TOGGLE and state is not None and (state != "locked" or self.has_key_for(front)):
            self.door_states[front] = "closed" if state == "open" else "open"
        elif move is Move.TOGGLE and thing is not None and thing.type == "box":
            self.cells[front] = thing.contains
        else:
            return False
        self.events += ((move, front),)
        return True

    def trace(self, moves: Iterable[Move]) -> tuple[list[int], int]:
        """Return the cells that `moves` enter if nothing blocks them, and the cell in front at the end."""
        pose, cells = self.pose, []
        for move in moves:
            if move is Move.FORWARD:
                pose = self.ahead(pose) * 4 | pose & 3
                cells.append(pose >> 2)
            else:
                pose = pose & ~3 | (pose + (1 if move is Move.RIGHT else 3)) & 3
        return cells, self.ahead(pose)

    def route(self, entry_cost: Cost, target_cost: Cost) -> list[Move] | None:
        """Return the cheapest moves to face a target cell, or None. Each entered cell adds its `entry_cost`."""
        counter = 0
        queue: list[tuple[int, int, int]] = [(0, 0, self.pose)]
        cost_of = {self.pose: 0}
        came_from: dict[int, tuple[int, Move]] = {}
        while queue:
            cost, _, pose = heapq.heappop(queue)
            if pose < 0:
                return _retrace(came_from, ~pose)
            if cost > cost_of[pose]:
                continue
            front = self.ahead(pose)
            extra = target_cost(front)
            reached = [(pose & ~3 | (pose + 3) & 3, 1, Move.LEFT), (pose & ~3 | (pose + 1) & 3, 1, Move.RIGHT)]
            entry = entry_cost(front)
            if entry is not None:
                reached.append((front * 4 | pose & 3, 1 + entry, Move.FORWARD))
            for following, price, move in reached:
                if cost + price < cost_of.get(following, 1 << 30):
                    cost_of[following] = cost + price
                    came_from[following] = (pose, move)
                    counter += 1
                    heapq.heappush(queue, (cost + price, counter, following))
            if extra is not None:
                counter += 1
                heapq.heappush(queue, (cost + extra, counter, ~pose))
        return None


def _retrace(came_from: dict[int, tuple[int, Move]], pose: int) -> list[Move]:
    moves: list[Move] = []
    while pose in came_from:
        pose, move = came_from[pose]
        moves.append(move)
    return moves[::-1]
