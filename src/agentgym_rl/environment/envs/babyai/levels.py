"""The 40 levels, the mapping from items to levels, and the construction from minigrid's classes."""

from __future__ import annotations

import os
import pickle
from functools import lru_cache
from types import MethodType
from typing import Any

from agentgym_rl.environment.envs.babyai.oracle import NoWayError, Planner
from agentgym_rl.environment.envs.babyai.state import mission_parts
from agentgym_rl.errors import ConfigError

MAX_PLACEMENTS = 1000
"""Places tried for the agent in a row, of which a room has a few dozen."""

# Level n is LEVELS[n - 1]: its name, minigrid's class, and the arguments minigrid registers that name with.
LEVELS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("GoToRedBallGrey", "GoToRedBallGrey", {}),
    ("GoToRedBall", "GoToRedBall", {}),
    ("GoToRedBallNoDists", "GoToRedBallNoDists", {}),
    ("GoToObjS6", "GoToObj", {"room_size": 6}),
    ("GoToLocalS8N7", "GoToLocal", {"room_size": 8, "num_dists": 7}),
    ("GoToObjMazeS7", "GoTo", {"num_dists": 1, "room_size": 7}),
    ("GoToImpUnlock", "GoToImpUnlock", {}),
    ("GoToSeqS5R2", "GoToSeq", {"room_size": 5, "num_rows": 2, "num_cols": 2, "num_dists": 4}),
    ("GoToRedBlueBall", "GoToRedBlueBall", {}),
    ("GoToDoor", "GoToDoor", {}),
    ("GoToObjDoor", "GoToObjDoor", {}),
    ("Open", "Open", {}),
    ("OpenRedDoor", "OpenRedDoor", {}),
    ("OpenDoorLoc", "OpenDoor", {"select_by": "loc"}),
    ("OpenRedBlueDoorsDebug", "OpenTwoDoors", {"first_color": "red", "second_color": "blue", "strict": True}),
    ("OpenDoorsOrderN4Debug", "OpenDoorsOrder", {"debug": True, "num_doors": 4}),
    ("Pickup", "Pickup", {}),
    ("UnblockPickup", "UnblockPickup", {}),
    ("PickupLoc", "PickupLoc", {}),
    ("PickupDistDebug", "PickupDist", {"debug": True}),
    ("PickupAbove", "PickupAbove", {}),
    ("PutNextLocalS6N4", "PutNextLocal", {"room_size": 6, "num_objs": 4}),
    ("PutNextS7N4Carrying", "PutNext", {"room_size": 7, "objs_per_room": 4, "start_carrying": True}),
    ("Unlock", "Unlock", {}),
    ("UnlockLocalDist", "UnlockLocal", {"distractors": True}),
    ("KeyInBox", "KeyInBox", {}),
    ("UnlockPickupDist", "UnlockPickup", {"distractors": True}),
    ("BlockedUnlockPickup", "BlockedUnlockPickup", {}),
    ("UnlockToUnlock", "UnlockToUnlock", {}),
    ("ActionObjDoor", "ActionObjDoor", {}),
    ("FindObjS7", "FindObjS5", {"room_size": 7}),
    ("KeyCorridorS6R3", "KeyCorridor", {"room_size": 6, "num_rows": 3}),
    ("OneRoomS20", "OneRoomS8", {"room_size": 20}),
    ("MoveTwoAcrossS8N9", "MoveTwoAcross", {"room_size": 8, "objs_per_room": 9}),
    ("SynthS5R2", "Synth", {"room_size": 5, "num_rows": 2}),
    ("SynthLoc", "SynthLoc", {}),
    ("SynthSeq", "SynthSeq", {}),
    ("MiniBossLevel", "MiniBossLevel", {}),
    ("BossLevel", "BossLevel", {}),
    ("BossLevelNoUnlock", "BossLevelNoUnlock", {}),
)

NUM_LEVELS = len(LEVELS)

# The six published subsets. Level 17 has the name of the subset of levels 17 to 19, so its own subset is PickupLevel17.
_PUBLISHED: dict[str, range] = {
    "GoTo": range(1, 12),
    "Pickup": range(17, 20),
    "ActionObjDoor": range(30, 31),
    "FindObjS7": range(31, 32),
    "OneRoomS20": range(33, 34),
    "SynthLoc": range(36, 37),
}


def _subsets_of_level(number: int) -> tuple[str, ...]:
    own_subset = "PickupLevel17" if number == 17 else LEVELS[number - 1][0]
    published = [name for name, levels in _PUBLISHED.items() if number in levels and name != own_subset]
    return (*published, own_subset)


SUBSETS_OF_LEVEL = tuple(_subsets_of_level(number) for number in range(1, NUM_LEVELS + 1))
SUBSETS = tuple(dict.fromkeys([*_PUBLISHED, *(name for names in SUBSETS_OF_LEVEL for name in names)]))


def level_and_seed(item: int) -> tuple[int, int]:
    """Return the level number (from 1) and the seed of an item."""
    return item % NUM_LEVELS + 1, item // NUM_LEVELS


def minigrid_levels() -> Any:
    """Import minigrid's module of BabyAI levels, silenced. Imported here so that other commands do not need it."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        from minigrid.envs import babyai
        from minigrid.envs.babyai.core import roomgrid_level, verifier
    except ImportError as error:
        raise ConfigError(
            f"BabyAI needs minigrid, which cannot be imported ({error}): install agentgym-rl[babyai]"
        ) from error
    # The generator prints each rejected layout, but standard output belongs to the caller.
    roomgrid_level.print = lambda *_: None
    # With BABYAI_DONE_ACTIONS set, missions end only on a "done" action, which this environment does not have.
    verifier.use_done_actions = False
    return babyai


def fresh_level(item: int) -> Any:
    """Return a new minigrid level of `item`."""
    level = pickle.loads(_pickled_level(item))
    _ignore_first_door(level.instrs)
    return level


@lru_cache(maxsize=512)
def _pickled_level(item: int) -> bytes:
    """Return the pickled level, a few kB. Episodes of a group share a level, and unpickling is several times faster
    than generating. Spaces and random numbers are left out: moves need neither, and they take half of the time."""
    level = _generate(minigrid_levels(), item)
    # Imported here, after the error that a missing minigrid causes.
    from agentgym_rl.environment.envs.babyai.instructions import use_fast_instructions

    use_fast_instructions(level.instrs)
    level.observation_space = level.action_space = level.np_random = None
    _share_walls(level)
    return pickle.dumps(level, pickle.HIGHEST_PROTOCOL)


def _share_walls(level: Any) -> None:
    """Let all walls be one object, which halves the time of unpickling. Not if a mission's target may be a wall: for
    minigrid, "a grey object" includes grey walls."""
    targets = [thing for part in mission_parts(level.instrs) for description in part for thing in description.obj_set]
    cells = level.grid.grid
    walls: dict[str, Any] = {}
    if all(thing.type != "wall" for thing in targets):
        for cell, thing in enumerate(cells):
            if thing is not None and thing.type == "wall":
                cells[cell] = walls.setdefault(thing.color, thing)


def _generate(module: Any, item: int) -> Any:
    number, seed = level_and_seed(item)
    _, class_name, arguments = LEVELS[number - 1]
    level = getattr(module, class_name)(**arguments)
    # Minigrid encodes an image after every move, which takes most of the step time. The text needs only the grid.
    level.gen_obs = dict
    _bound_placements(level)
    level.reset(seed=seed)
    # Three levels may generate a layout that cannot be won. The next one of the same random stream replaces it.
    while class_name in _WINNABLE_CHECKS and not _WINNABLE_CHECKS[class_name](level):
        level.reset()
    del level.place_obj
    return level


def _bound_placements(level: Any) -> None:
    """End minigrid's search for a place of the agent, which is endless in a room without one. On a RecursionError
    minigrid generates the next layout of the same random stream."""
    place, tries = level.place_obj, 0

    def bounded(thing: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal tries
        tries = tries + 1 if thing is None else 0
        if tries > MAX_PLACEMENTS:
            tries = 0
            raise RecursionError("no place for the agent")
        return place(thing, *args, **kwargs)

    level.place_obj = bounded


def _key_is_reachable(level: Any) -> bool:
    """Return whether a key of the locked door's colour is on the agent's side. Objects in between can be moved.

    The two levels try to keep the key out of the locked room, but compare room numbers by identity.
    """
    width, cells = level.grid.width, level.grid.grid
    color = next(thing.color for thing in cells if thing is not None and thing.type == "door" and thing.is_locked)
    start = int(level.agent_pos[1]) * width + int(level.agent_pos[0])
    reached, queue = {start}, [start]
    for cell in queue:
        thing = cells[cell]
        if thing is not None and (thing.type, thing.color) == ("key", color):
            return True
        if thing is None or not (thing.type == "wall" or (thing.type == "door" and thing.is_locked)):
            neighbours = {cell + 1, cell - 1, cell + width, cell - width} - reached
            reached |= neighbours
            queue += sorted(neighbours)
    return False


def _target_is_reachable(level: Any) -> bool:
    """Return whether the object can be picked up. In a strict mission no other object may be moved."""
    try:
        Planner(level, level.instrs).moves()
    except NoWayError:
        return False
    return True


_WINNABLE_CHECKS = {"Unlock": _key_is_reachable, "GoToImpUnlock": _key_is_reachable, "PickupDist": _target_is_reachable}


def _ignore_first_door(instruction: Any) -> None:
    """Keep `open A, then open B` winnable if opening a wrong door loses the mission.

    Minigrid passes the move that opens A to both halves, and the second half treats A as a wrong door.
    """
    second = {"BeforeInstr": "instr_b", "AfterInstr": "instr_a"}.get(type(instruction).__name__)
    later: Any = getattr(instruction, second) if second else None
    if type(later).__name__ == "OpenInstr" and later.strict:
        # A bound method, so that a copy of the level changes its own instruction.
        later.verify = MethodType(_continue_once, later)


def _continue_once(instruction: Any, _: int) -> str:
    """Stand in for an instruction's `verify` in its first call."""
    del instruction.verify
    return "continue"
