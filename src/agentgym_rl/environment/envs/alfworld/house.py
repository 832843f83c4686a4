"""Rooms, places, things and the tasks in them, drawn from the item's seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache

TASKS = (
    "pick_and_place",
    "pick_clean_then_place",
    "pick_heat_then_place",
    "pick_cool_then_place",
    "look_at_obj_in_light",
    "pick_two_obj_and_place",
)
SPLITS = {"train": range(3000), "test": range(3000, 3200), "validation": range(3200, 3300)}
_HELD_OUT = 7
"""Every seventh goal, a thing and a kind of place in a kind of room, is of the test and validation splits only."""
CLOSED = frozenset(("cabinet", "drawer", "fridge", "microwave", "safe", "wardrobe"))
"""Places that are closed at first."""
TOOLS = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
"""Place that each treatment needs."""
STATES = {"clean": "clean", "heat": "hot", "cool": "cool"}
_OPPOSITES = {"hot": "cool", "cool": "hot"}


@dataclass(frozen=True, slots=True)
class Room:
    places: tuple[tuple[str, int], ...]
    """(kind, most of them) of each place."""
    things: tuple[str, ...]
    cleanable: tuple[str, ...] = ()
    heatable: tuple[str, ...] = ()
    coolable: tuple[str, ...] = ()


_FOOD = ("apple", "potato", "tomato", "bread", "egg")
_WARE = ("mug", "cup", "plate", "bowl")
ROOMS: dict[str, Room] = {
    "kitchen": Room(
        (
            ("cabinet", 6),
            ("countertop", 3),
            ("drawer", 3),
            ("shelf", 2),
            ("diningtable", 1),
            ("fridge", 1),
            ("microwave", 1),
            ("sinkbasin", 1),
            ("stoveburner", 2),
            ("coffeemachine", 1),
            ("garbagecan", 1),
        ),
        (*_FOOD, *_WARE, "knife", "fork", "spoon", "spatula", "pan", "peppershaker", "dishsponge"),
        (*_WARE, "apple", "potato", "tomato", "knife", "fork", "spoon", "spatula", "pan"),
        (*_FOOD, *_WARE),
        (*_FOOD, *_WARE, "pan"),
    ),
    "bathroom": Room(
        (
            ("cabinet", 4),
            ("countertop", 1),
            ("shelf", 2),
            ("drawer", 2),
            ("sinkbasin", 2),
            ("toilet", 1),
            ("bathtub", 1),
            ("towelholder", 1),
            ("garbagecan", 1),
        ),
        ("soapbar", "cloth", "towel", "toiletpaper", "spraybottle", "candle", "toothbrush"),
        ("soapbar", "cloth"),
    ),
    "bedroom": Room(
        (
            ("bed", 1),
            ("desk", 2),
            ("drawer", 5),
            ("shelf", 4),
            ("dresser", 1),
            ("sidetable", 2),
            ("wardrobe", 1),
            ("safe", 1),
            ("garbagecan", 1),
        ),
        ("book", "pen", "pencil", "cd", "cellphone", "creditcard", "keychain", "alarmclock", "pillow", "laptop"),
    ),
    "living room": Room(
        (
            ("sofa", 1),
            ("armchair", 2),
            ("coffeetable", 1),
            ("sidetable", 2),
            ("drawer", 4),
            ("shelf", 3),
            ("cabinet", 2),
            ("garbagecan", 1),
        ),
        ("book", "pillow", "remotecontrol", "newspaper", "vase", "statue", "watch", "keychain", "box", "laptop"),
    ),
}
LAMP = "desklamp 1"
_LIT_ROOMS = ("bedroom", "living room")


@dataclass(slots=True)
class House:
    """The state of one episode."""

    item: int
    task: str
    thing: str
    """Kind of the thing that the task names."""
    goal_place: str
    """Kind of the place to put it. Empty for a look in the light."""
    places: tuple[str, ...]
    location: dict[str, str]
    """Place of each thing. The thing in the hand is at `hand`."""
    lamp_place: str
    states: dict[str, set[str]] = field(default_factory=dict)
    """States of each thing: clean, hot, cool."""
    open_places: set[str] = field(default_factory=set)
    here: str = ""
    """Place in front of the player, or nothing in the middle of the room."""
    lamp_on: bool = False

    @property
    def treatment(self) -> str:
        """The treatment that the task asks for: clean, heat, cool or nothing."""
        return self.task.split("_")[1] if self.task.endswith("_then_place") else ""

    @property
    def held(self) -> str:
        return next((thing for thing, place in self.location.items() if place == "hand"), "")

    @property
    def goal(self) -> str:
        """The task in words."""
        if self.task == "look_at_obj_in_light":
            return f"look at the {self.thing} under the desklamp."
        if self.task == "pick_two_obj_and_place":
            return f"put two {self.thing} in/on {self.goal_place}."
        state = f"{STATES[self.treatment]} " if self.treatment else ""
        return f"put a {state}{self.thing} in/on {self.goal_place}."

    def is_accessible(self, place: str) -> bool:
        return kind_of(place) not in CLOSED or place in self.open_places

    def things_at(self, place: str) -> list[str]:
        return [thing for thing, where in self.location.items() if where == place]

    def treat(self, thing: str, verb: str) -> None:
        states = self.states.setdefault(thing, set())
        states.discard(_OPPOSITES.get(STATES[verb], ""))
        states.add(STATES[verb])

    def fits(self, thing: str) -> bool:
        """Return whether a thing is of the right kind and in the right state."""
        wanted = STATES.get(self.treatment)
        return kind_of(thing) == self.thing and (wanted is None or wanted in self.states.get(thing, ()))

    def placed(self) -> list[str]:
        """Return the fitting things that are where they should be."""
        return [t for t, place in self.location.items() if kind_of(place) == self.goal_place and self.fits(t)]

    @property
    def is_solved(self) -> bool:
        if self.task == "look_at_obj_in_light":
            return self.lamp_on and self.here == self.lamp_place and kind_of(self.held) == self.thing
        return len(self.placed()) >= (2 if self.task == "pick_two_obj_and_place" else 1)


def kind_of(name: str) -> str:
    """Return `cabinet` for `cabinet 3`."""
    return name.rpartition(" ")[0]


def task_of(item: int) -> str:
    return TASKS[item % len(TASKS)]


@lru_cache(maxsize=16)
def _goals(task: str, *, held_out: bool) -> tuple[tuple[str, str, str], ...]:
    """Return (room, thing, place) of every goal of a task in training, or of those held out from it."""
    goals = []
    for name, room in ROOMS.items():
        by_task = {TASKS[1]: room.cleanable, TASKS[2]: room.heatable, TASKS[3]: room.coolable}
        things = by_task.get(task, room.things)
        tool = TOOLS.get(task.split("_")[1], "") if task.endswith("_then_place") else ""
        places = [kind for kind, _ in room.places if kind != tool]
        if task == "look_at_obj_in_light":
            places = [""] if name in _LIT_ROOMS else []
        goals += [(name, thing, place) for thing in things for place in places]
    return tuple(goal for number, goal in enumerate(goals) if (number % _HELD_OUT == 0) == held_out)


def build(item: int) -> House:
    """Return the house of an item at the start of an episode."""
    rng = random.Random(f"alfworld {item}")
    task = task_of(item)
    room_name, thing, goal_place = rng.choice(_goals(task, held_out=item not in SPLITS["train"]))
    room = ROOMS[room_name]
    places = [f"{kind} {n}" for kind, most in room.places for n in range(1, rng.randint((most + 1) // 2, most) + 1)]
    needed = 2 if task == "pick_two_obj_and_place" else 1
    counts = {kind: rng.randint(1, 2) for kind in rng.sample(room.things, min(8, len(room.things)))}
    counts[thing] = max(needed, counts.get(thing, 1))
    location: dict[str, str] = {}
    for kind, count in sorted(counts.items()):
        # The thing of the task never starts where it should go.
        possible = [place for place in places if kind != thing or kind_of(place) != goal_place]
        location |= {f"{kind} {n}": rng.choice(possible) for n in range(1, count + 1)}
    surfaces = [place for place in places if kind_of(place) in ("desk", "sidetable", "dresser", "coffeetable")]
    lamp_place = rng.choice(surfaces) if room_name in _LIT_ROOMS else ""
    return House(item, task, thing, goal_place, tuple(places), location, lamp_place)
