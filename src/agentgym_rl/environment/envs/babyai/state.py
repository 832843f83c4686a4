"""A canonical key of the state, without the step count."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from agentgym_rl.environment.envs.babyai.moves import front_of


class StateKeys:
    """Keys of the states of one level: the grid, the agent, the carried object and the mission's progress.

    What depends on the grid is kept as text until `grid_changed` is called.
    """

    def __init__(self, level: Any) -> None:
        self._level = level
        cells = enumerate(level.grid.grid)
        self._things = {cell: thing for cell, thing in cells if thing is not None and thing.type != "wall"}
        """Everything in the grid but walls, which never change, by cell."""
        self._appearances = ""
        self._targets: list[str] = []
        """Positions of the objects that each part of the mission depends on."""
        self._has_changed = True

    def grid_changed(self) -> None:
        """Read the cell in front of the agent again. Call it after every move except turns and steps."""
        grid, (x, y) = self._level.grid, front_of(self._level)
        cell = y * grid.width + x
        self._things.pop(cell, None)
        if grid.grid[cell] is not None and grid.grid[cell].type != "wall":
            self._things[cell] = grid.grid[cell]
        self._has_changed = True

    def key(self) -> str:
        level = self._level
        if self._has_changed:
            self._read_things()
        agent = [int(level.agent_pos[0]), int(level.agent_pos[1]), int(level.agent_dir)]
        progress = self._progress(level.instrs, iter(self._targets))
        text = f"[{agent}, {_appearance(level.carrying)}, {self._appearances}, {progress}]"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _read_things(self) -> None:
        level = self._level
        things = sorted(self._things.items())
        self._appearances = str([(cell, _appearance(thing)) for cell, thing in things])
        place_of = {id(thing): cell for cell, thing in things}
        if level.carrying is not None:
            place_of[id(level.carrying)] = -1
        self._targets = [_targets(descriptions, place_of) for descriptions in mission_parts(level.instrs)]
        self._has_changed = False

    def _progress(self, instruction: Any, targets: Iterator[str]) -> str:
        """Return the completed parts of the mission, and the positions of the objects that the rest depends on."""
        if hasattr(instruction, "instr_a"):
            done = (instruction.a_done == "success", instruction.b_done == "success")
            first, second = (self._progress(part, targets) for part in (instruction.instr_a, instruction.instr_b))
            return f"[{done}, {first}, {second}]"
        # The verifier has the object that it last saw being carried.
        return f"[{getattr(instruction, 'preCarrying', None) is self._level.carrying}, {next(targets)}]"


def _appearance(thing: Any) -> tuple[Any, ...] | None:
    if thing is None:
        return None
    if thing.type == "door":
        return thing.color, "door", thing.is_open, thing.is_locked
    return thing.color, thing.type, _appearance(thing.contains)


def mission_parts(instruction: Any) -> list[list[Any]]:
    """Return the descriptions of objects of each part of a mission."""
    if hasattr(instruction, "instr_a"):
        return [*mission_parts(instruction.instr_a), *mission_parts(instruction.instr_b)]
    descriptions = (getattr(instruction, name, None) for name in ("desc", "desc_move", "desc_fixed"))
    return [[description for description in descriptions if description is not None]]


def _targets(descriptions: list[Any], place_of: dict[int, int]) -> str:
    # The mission may mean only one of two equal objects, so the position of each is part of the state. The verifier has
    # its own list of positions, updated only after a drop.
    positions: list[Any] = []
    for description in descriptions:
        positions.append(sorted(place_of.get(id(thing), -2) for thing in description.obj_set))
        positions.append(sorted((int(x), int(y)) for x, y in description.obj_poss))
    return ", ".join(map(str, positions))
