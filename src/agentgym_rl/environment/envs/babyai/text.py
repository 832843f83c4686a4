"""The text of the game: the observation, the menu of actions, and the answers to impossible actions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agentgym_rl.environment.envs.babyai.field_of_view import (
    AGENT_CELL,
    NUM_CELLS,
    SIZE,
    Move,
    Sighting,
    View,
    paths_through,
)
from agentgym_rl.environment.tools import Tool

INSTRUCTION = """\
You are in rooms of a grid and reach a goal by actions. You see the cells ahead of you. Reply with one action:
turn left, turn right, move forward: one step.
go to OBJECT: walk until you face it. pick up OBJECT: go to it and take it. drop: put what you carry in front of you.
toggle: open or close the door in front of you, or open the box.
go through DOOR: walk through an open door. toggle and go through DOOR: open it first; a locked door needs the key of \
its colour in your hands.
OBJECT and DOOR are names like red ball 1 or blue door 2. The available actions are listed each time."""

_OBJECT = {"object": {"type": "string", "description": "Name as it is listed, such as red ball 1."}}
_DOOR = {"door": {"type": "string", "description": "Name as it is listed, such as blue door 2."}}
TOOLS = (
    Tool("turn", "Turn by 90 degrees.", "turn {side}", {"side": {"type": "string", "enum": ["left", "right"]}}),
    Tool("move_forward", "Move one step ahead.", "move forward"),
    Tool("go_to", "Walk until you face an object.", "go to {object}", _OBJECT),
    Tool("pick_up", "Go to an object and take it.", "pick up {object}", _OBJECT),
    Tool("drop", "Put what you carry in front of you.", "drop"),
    Tool("toggle", "Open or close the door in front of you, or open the box.", "toggle"),
    Tool("go_through", "Walk through an open door.", "go through {door}", _DOOR),
    Tool("toggle_and_go_through", "Open a door and walk through it.", "toggle and go through {door}", _DOOR),
)

CHECK_ACTIONS = "check available actions"
"""AgentGym's action that asks for the list of actions. Here every observation has that list."""
_FRONT_CELL = AGENT_CELL + SIZE
_DOOR_STATES = ("open", "closed", "locked")
_DOOR_WITH_STATE = re.compile(r"(go to|go through|toggle and go through) (\w+) (\w+) door ([0-9]{1,4})")


def build_menu(level: Any, view: View) -> dict[str, tuple[Move, ...]]:
    """Return every action that is possible now, with its moves."""
    menu: dict[str, tuple[Move, ...]] = {"turn left": (Move.LEFT,), "turn right": (Move.RIGHT,)}
    front = view.things[_FRONT_CELL]
    if front is None or front.can_overlap():
        menu["move forward"] = (Move.FORWARD,)
    paths = paths_through(view.free) if view.sightings else None
    for sighting in view.sightings:
        moves = paths.to_face(sighting.cell) if paths else None
        if moves is not None:
            _add_object_actions(menu, level, sighting, moves)
    if level.carrying is not None and front is None:
        menu["drop"] = (Move.DROP,)
    if front is not None and (front.type == "box" or (front.type == "door" and _can_toggle(level, front))):
        menu["toggle"] = (Move.TOGGLE,)
    return menu


def _add_object_actions(
    menu: dict[str, tuple[Move, ...]], level: Any, sighting: Sighting, moves: tuple[Move, ...]
) -> None:
    name, thing = sighting.name, sighting.thing
    if moves:
        menu[f"go to {name}"] = moves
    if thing.type != "door":
        if level.carrying is None:
            menu[f"pick up {name}"] = (*moves, Move.PICKUP)
    elif thing.is_open:
        menu[f"go through {name}"] = (*moves, Move.FORWARD, Move.FORWARD)
    elif _can_toggle(level, thing):
        menu[f"toggle and go through {name}"] = (*moves, Move.TOGGLE, Move.FORWARD, Move.FORWARD)


def _can_toggle(level: Any, door: Any) -> bool:
    held = level.carrying
    return not door.is_locked or (held is not None and held.type == "key" and held.color == door.color)


def describe(level: Any, view: View, menu: dict[str, tuple[Move, ...]]) -> str:
    """Return the observation: goal, objects in view, wall ahead, carried object, available actions."""
    sentences = [_describe_sighting(sighting) for sighting in view.sightings]
    for cell in range(_FRONT_CELL, NUM_CELLS, SIZE):
        thing = view.things[cell]
        if view.visible[cell] and thing is not None and thing.type == "wall":
            sentences.append(f"There is a wall {cell // SIZE} steps in front of you.")
            break
    held = level.carrying
    sentences.append("You carry nothing." if held is None else f"You carry a {held.color} {held.type}.")
    listed = ", ".join(f'"{action}"' for action in menu)
    return f"Your goal: {level.mission}.\n{' '.join(sentences)}\nThe available actions are: {listed}."


def _describe_sighting(sighting: Sighting) -> str:
    name, forward, side = sighting.name, sighting.forward, sighting.side
    if sighting.thing.type == "door":
        name = f"{_door_state(sighting.thing)} {name}"
    if side == 0:
        return f"There is a {name} right in front of you {forward} steps away."
    beside = f"{abs(side)} steps to your {'left' if side < 0 else 'right'}."
    ahead = f"{forward} steps in front of you and " if forward else ""
    return f"There is a {name} {ahead}{beside}"


def _door_state(door: Any) -> str:
    if door.is_open:
        return "open"
    return "locked" if door.is_locked else "closed"


def normalise(text: str) -> str:
    """Return the text in lower case with single spaces, without quotes around it or a full stop after it."""
    return " ".join(text[:200].lower().split()).strip("\"'` .")


def read_action(view: View, menu: Mapping[str, tuple[Move, ...]], action: str) -> tuple[str, tuple[Move, ...] | None]:
    """Return the menu's name of `action` and its moves, or None as moves if it is not on the menu.

    Accepts the observation's names of doors (`closed red door 2`) and AgentGym's names: `pickup red ball 1`, and
    `red closed door 1` for the first closed red door. An AgentGym action through a door ends in the doorway, as it does
    in AgentGym, and keeps its own name.
    """
    name = re.sub("^pickup ", "pick up ", action)
    in_agentgym_order = False
    if match := _DOOR_WITH_STATE.fullmatch(name):
        verb, first, second, number = match.groups()
        in_agentgym_order = second in _DOOR_STATES
        if in_agentgym_order:
            matching = [door for door in _doors(view, second) if door.thing.color == first]
            doors = matching[int(number) - 1 : int(number)]
        else:
            doors = [door for door in _doors(view, first) if door.name == f"{second} door {number}"]
        if doors:
            name = f"{verb} {doors[0].name}"
    moves = menu.get(name)
    if moves is not None and in_agentgym_order and "through" in name:
        return action, moves[:-1]
    return name, moves


def _doors(view: View, state: str) -> list[Sighting]:
    return [seen for seen in view.sightings if seen.thing.type == "door" and _door_state(seen.thing) == state]


def refuse(level: Any, view: View, action: str) -> str:
    """Return why `action`, which is not on the menu, is impossible."""
    front = view.things[_FRONT_CELL]
    if action == "move forward":
        return "The way is blocked."
    if action == "drop":
        return "You carry nothing." if level.carrying is None else "There is no room to drop it."
    if action == "toggle":
        return "The door is locked." if front is not None and front.type == "door" else "There is nothing to toggle."
    for verb in ("go to ", "pick up ", "go through ", "toggle and go through "):
        if action.startswith(verb):
            return _refuse_object(level, view, verb, action.removeprefix(verb))
    return "That is not an action."


def _refuse_object(level: Any, view: View, verb: str, name: str) -> str:
    sighting = next((sighting for sighting in view.sightings if sighting.name == name), None)
    if sighting is None:
        return "You do not see that."
    thing = sighting.thing
    if verb == "pick up " and thing.type == "door":
        return "You cannot pick up a door."
    if verb == "pick up " and level.carrying is not None:
        return "You already carry something."
    if "through" in verb:
        if thing.type != "door":
            return "That is not a door."
        if verb == "go through " and not thing.is_open:
            return "The door is not open."
        if verb != "go through " and thing.is_open:
            return "The door is already open."
        if thing.is_locked and not _can_toggle(level, thing):
            return "The door is locked."
    if sighting.cell == _FRONT_CELL:
        return "You already face it."
    return "The way is blocked."
