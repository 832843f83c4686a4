"""A canonical key of the state, without the step count."""

from __future__ import annotations

import hashlib
from typing import Any


def open_cells(level: Any) -> list[int]:
    """Return the cells that can hold something: walls never change."""
    return [cell for cell, thing in enumerate(level.grid.grid) if thing is None or thing.type != "wall"]


def state_key(level: Any, inner: list[int]) -> str:
    """Return a key of grid, agent, carried object and mission progress. `inner` is the result of `open_cells`."""
    cells: list[Any] = level.grid.grid
    place_of = {id(cells[cell]): cell for cell in inner if cells[cell] is not None}
    if level.carrying is not None:
        place_of[id(level.carrying)] = -1
    parts = [
        [int(level.agent_pos[0]), int(level.agent_pos[1]), int(level.agent_dir)],
        _appearance(level.carrying),
        [(cell, _appearance(cells[cell])) for cell in place_of.values() if cell >= 0],
        _progress(level.instrs, place_of, level.carrying),
    ]
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _appearance(thing: Any) -> tuple[Any, ...] | None:
    if thing is None:
        return None
    if thing.type == "door":
        return thing.color, "door", thing.is_open, thing.is_locked
    return thing.color, thing.type, _appearance(thing.contains)


def _progress(instruction: Any, place_of: dict[int, int], held: Any) -> list[Any]:
    """Return the completed parts of the mission, and the positions of the objects that the rest depends on."""
    if hasattr(instruction, "instr_a"):
        done = (instruction.a_done == "success", instruction.b_done == "success")
        return [done, *(_progress(part, place_of, held) for part in (instruction.instr_a, instruction.instr_b))]
    # The mission may mean only one of two equal objects, so the position of each is part of the state. The verifier has
    # its own list of positions, updated only after a drop, and the object that it last saw being carried.
    parts: list[Any] = [getattr(instruction, "preCarrying", None) is held]
    for name in ("desc", "desc_move", "desc_fixed"):
        description = getattr(instruction, name, None)
        if description is not None:
            parts.append(sorted(place_of.get(id(thing), -2) for thing in description.obj_set))
            parts.append(sorted((int(x), int(y)) for x, y in description.obj_poss))
    return parts
