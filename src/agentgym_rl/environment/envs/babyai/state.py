"""A canonical key of everything that decides what happens next, the step count left out."""

from __future__ import annotations

import hashlib
from typing import Any


def state_key(level: Any) -> str:
    """Equal for equal grid, agent, carried object and mission progress. Walls never change, so they are not told."""
    cells: list[Any] = level.grid.grid
    place_of = {id(thing): cell for cell, thing in enumerate(cells) if thing is not None and thing.type != "wall"}
    if level.carrying is not None:
        place_of[id(level.carrying)] = -1
    parts = [
        [int(level.agent_pos[0]), int(level.agent_pos[1]), int(level.agent_dir)],
        _looks(level.carrying),
        [(cell, _looks(cells[cell])) for cell in place_of.values() if cell >= 0],
        _progress(level.instrs, place_of, level.carrying),
    ]
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _looks(thing: Any) -> tuple[Any, ...] | None:
    if thing is None:
        return None
    if thing.type == "door":
        return thing.color, "door", thing.is_open, thing.is_locked
    return thing.color, thing.type, _looks(thing.contains)


def _progress(instruction: Any, place_of: dict[int, int], held: Any) -> list[Any]:
    """What is done, and where the objects are that the rest of the mission follows."""
    if hasattr(instruction, "instr_a"):
        done = (instruction.a_done == "success", instruction.b_done == "success")
        return [done, *(_progress(part, place_of, held) for part in (instruction.instr_a, instruction.instr_b))]
    # Of two objects that look alike only one may be meant, so which is where belongs to the state. The verifier keeps
    # its own list of positions, renewed only when something is dropped, and what it last saw being carried.
    parts: list[Any] = [getattr(instruction, "preCarrying", None) is held]
    for name in ("desc", "desc_move", "desc_fixed"):
        description = getattr(instruction, name, None)
        if description is not None:
            parts.append(sorted(place_of.get(id(thing), -2) for thing in description.obj_set))
            parts.append(sorted((int(x), int(y)) for x, y in description.obj_poss))
    return parts
