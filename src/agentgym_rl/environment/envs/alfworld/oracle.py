"""The next command of a solution from any state, found with knowledge of where everything is."""

from __future__ import annotations

from agentgym_rl.environment.envs.alfworld.house import LAMP, TOOLS, House, kind_of


def next_command(house: House) -> str:
    """Return the next command. One thing is fetched, treated and placed at a time."""
    held = house.held
    if not held:
        return _fetch(house, _wanted(house))
    if kind_of(held) != house.thing:
        return _put_down(house, held)
    if house.task == "look_at_obj_in_light":
        return f"use {LAMP}" if house.here == house.lamp_place else f"go to {house.lamp_place}"
    if not house.fits(held):
        tool = next(place for place in house.places if kind_of(place) == TOOLS[house.treatment])
        return f"{house.treatment} {held} with {tool}" if house.here == tool else f"go to {tool}"
    return _reach(house, _goal_place(house)) or f"put {held} in/on {house.here}"


def _wanted(house: House) -> str:
    """Return a thing of the right kind that is not yet where it should be, the nearest first."""
    placed = house.placed()
    things = [thing for thing in house.location if kind_of(thing) == house.thing and thing not in placed]
    return min(things, key=lambda thing: (not house.fits(thing), house.location[thing] != house.here, thing))


def _goal_place(house: House) -> str:
    places = [place for place in house.places if kind_of(place) == house.goal_place]
    return house.here if house.here in places else places[0]


def _fetch(house: House, thing: str) -> str:
    place = house.location[thing]
    return _reach(house, place) or f"take {thing} from {place}"


def _put_down(house: House, thing: str) -> str:
    """Put a thing away here, or at the first place that is open."""
    place = house.here or next(place for place in house.places if house.is_accessible(place))
    return _reach(house, place) or f"put {thing} in/on {place}"


def _reach(house: House, place: str) -> str:
    """Return the command that leads to an open `place`, or nothing if the player is there."""
    if house.here != place:
        return f"go to {place}"
    return "" if house.is_accessible(place) else f"open {place}"
