"""The player's commands: which are possible, and what they do."""

from __future__ import annotations

import re
from collections.abc import Callable

from agentgym_rl.environment.envs.alfworld.house import CLOSED, LAMP, STATES, TOOLS, House, kind_of

_NAME = r"[a-z]+ \d{1,2}"
_PATTERNS = {
    "go to": rf"go to ({_NAME})",
    "open": rf"open ({_NAME})",
    "close": rf"close ({_NAME})",
    "examine": rf"examine ({_NAME})",
    "take": rf"take ({_NAME}) from ({_NAME})",
    "put": rf"put ({_NAME}) (?:in/on|in|on) ({_NAME})",
    "treat": rf"(clean|heat|cool) ({_NAME}) with ({_NAME})",
    "use": rf"(?:use|toggle) ({_NAME})",
    "look": r"(look)",
    "inventory": r"(inventory)",
}
NOTHING = "Nothing happens."


def possible(house: House) -> list[str]:
    """Return the commands that do something now."""
    here, held = house.here, house.held
    commands = [f"go to {place}" for place in house.places if place != here]
    if here:
        commands.append(f"examine {here}")
        if kind_of(here) in CLOSED:
            commands.append(f"{'close' if here in house.open_places else 'open'} {here}")
        if house.is_accessible(here):
            commands += [f"take {thing} from {here}" for thing in house.things_at(here) if not held]
            commands += [f"put {held} in/on {here}"] if held else []
        if held:
            commands += [f"{verb} {held} with {here}" for verb, tool in TOOLS.items() if kind_of(here) == tool]
        commands += [f"use {LAMP}"] if here == house.lamp_place else []
    return [*commands, "inventory", "look"]


def run(house: House, text: str) -> str:
    """Carry out a command and return the answer. NOTHING if it is not possible."""
    for verb, pattern in _PATTERNS.items():
        match = re.fullmatch(pattern, text)
        if match is not None:
            return _HANDLERS[verb](house, *match.groups())
    return NOTHING


def describe(house: House, place: str) -> str:
    if not house.is_accessible(place):
        return f"The {place} is closed."
    things = [*house.things_at(place), *([LAMP] if place == house.lamp_place else [])]
    where = f"The {place} is open. In it," if kind_of(place) in CLOSED else f"On the {place},"
    return f"{where} you see {listed(things)}."


def listed(names: list[str]) -> str:
    """Return `a mug 1, and a cup 2`."""
    if not names:
        return "nothing"
    parts = [f"{'an' if name[0] in 'aeiou' else 'a'} {name}" for name in names]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, and {parts[-1]}"


def _go(house: House, place: str) -> str:
    if place not in house.places or place == house.here:
        return NOTHING
    house.here = place
    return describe(house, place)


def _open(house: House, place: str) -> str:
    if place != house.here or house.is_accessible(place):
        return NOTHING
    house.open_places.add(place)
    return f"You open the {place}. {describe(house, place)}"


def _close(house: House, place: str) -> str:
    if place != house.here or place not in house.open_places:
        return NOTHING
    house.open_places.discard(place)
    return f"You close the {place}."


def _examine(house: House, name: str) -> str:
    if name == house.here:
        return describe(house, name)
    if name == house.held:
        states = sorted(house.states.get(name, ()))
        return f"This is a {' '.join([*states, name])}." if states else f"There's nothing special about {name}."
    return NOTHING


def _take(house: House, thing: str, place: str) -> str:
    at_hand = place == house.here and house.is_accessible(place) and house.location.get(thing) == place
    if house.held or not at_hand:
        return NOTHING
    house.location[thing] = "hand"
    return f"You pick up the {thing} from the {place}."


def _put(house: House, thing: str, place: str) -> str:
    if thing != house.held or place != house.here or not house.is_accessible(place):
        return NOTHING
    house.location[thing] = place
    return f"You put the {thing} in/on the {place}."


def _treat(house: House, verb: str, thing: str, place: str) -> str:
    if thing != house.held or place != house.here or kind_of(place) != TOOLS[verb]:
        return NOTHING
    house.treat(thing, verb)
    return f"You {verb} the {thing} using the {place}. It is {STATES[verb]} now."


def _use(house: House, name: str) -> str:
    if name != LAMP or not house.here or house.here != house.lamp_place:
        return NOTHING
    house.lamp_on = True
    return f"You turn on the {LAMP}."


def _look(house: House, _: str) -> str:
    where = f"You are facing the {house.here}. " if house.here else "You are in the middle of a room. "
    return where + (describe(house, house.here) if house.here else f"Around you, you see {listed(list(house.places))}.")


def _inventory(house: House, _: str) -> str:
    return f"You are carrying: {listed([house.held]) if house.held else 'nothing'}."


_HANDLERS: dict[str, Callable[..., str]] = {
    "go to": _go,
    "open": _open,
    "close": _close,
    "examine": _examine,
    "take": _take,
    "put": _put,
    "treat": _treat,
    "use": _use,
    "look": _look,
    "inventory": _inventory,
}
