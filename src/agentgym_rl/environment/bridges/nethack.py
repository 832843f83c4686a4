"""Text view of NetHack's environments (NLE, MiniHack): the screen, and names of the commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy

DIRECTIONS = {
    **{"N": "north", "E": "east", "S": "south", "W": "west"},
    **{"NE": "northeast", "SE": "southeast", "SW": "southwest", "NW": "northwest"},
}


def is_nethack(observation: Any) -> bool:
    return isinstance(observation, Mapping) and {"chars", "message", "blstats"} <= observation.keys()


def set_seeds(env: Any, seed: int) -> None:
    """Set the seeds of NetHack's next game, if the environment is one: `reset` ignores its own."""
    if hasattr(env, "nethack"):
        env.seed(core=seed, disp=seed, reseed=False)


def describe_screen(observation: Mapping[str, Any]) -> str:
    """Return the terminal's screen, or the message and the map. Empty lines are left out."""
    if "tty_chars" in observation:
        rows = [_line(row) for row in observation["tty_chars"]]
    else:
        rows = [_line(observation["message"]), *(_line(row) for row in observation["chars"])]
    return "\n".join(row for row in rows if row) or "(nothing)"


def command_names(actions: Sequence[Any]) -> tuple[str, ...] | None:
    """Return a name for each of NetHack's commands, such as `move north` and `search`. None if two are the same."""
    names = tuple(_name(type(action).__name__, action.name) for action in actions)
    return names if len(set(names)) == len(names) else None


def _name(kind: str, name: str) -> str:
    verb = {"CompassDirection": "move", "CompassDirectionLonger": "run"}.get(kind, "")
    return f"{verb} {DIRECTIONS[name]}" if verb else name.lower().replace("_", " ")


def _line(row: Any) -> str:
    return numpy.asarray(row, dtype=numpy.uint8).tobytes().decode("latin-1").replace("\0", " ").rstrip()
