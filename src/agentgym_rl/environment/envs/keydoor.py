"""KeyDoor: fetch the key of the right door. Small enough that a model learns it from scratch in a minute."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from agentgym_rl.environment.tools import Tool
from agentgym_rl.errors import EnvError
from agentgym_rl.types import Step

INSTRUCTION = """\
A treasure is behind one of the doors of the hall. The hall has a door for each key, of the key's colour, and beside \
it there is one more room. Fetch the key of the right door, open that door and take the treasure. You carry one key \
at a time: taking another one puts the first one down. Behind every other door there is a trap that ends the game.

Reply with exactly one action: take COLOUR key, open COLOUR door, go to ROOM, or take treasure."""

COLOURS = ("red", "green", "blue", "yellow")
ROOMS = ("kitchen", "cellar", "garden", "attic")
"""Rooms beside the hall. A game has one of them."""
HALL = "hall"
SUBSETS = ("near", "middle", "far")
"""Subsets by the number of turns of the shortest solution: 3, 4, 5."""
NUM_TEST = 152


_COLOUR = {"type": "string", "enum": list(COLOURS)}
TOOLS = (
    Tool("take_key", "Take the key of a colour. It must be in this room.", "take {colour} key", {"colour": _COLOUR}),
    Tool("open_door", "Open the door of a colour with its key.", "open {colour} door", {"colour": _COLOUR}),
    Tool("go_to", "Go to the other room.", "go to {room}", {"room": {"type": "string", "enum": [*ROOMS, HALL]}}),
    Tool("take_treasure", "Take the treasure behind the open door.", "take treasure"),
)


@dataclass(frozen=True, slots=True)
class Layout:
    goal: str
    """Colour of the right door."""
    keys: tuple[tuple[str, str], ...]
    """(colour, room) of each of the two or three keys, in the order they are named."""
    side: str
    """The room beside the hall."""
    start: str


def _all_layouts() -> tuple[Layout, ...]:
    """Return every layout once, in a fixed random order. All items differ, so no test layout occurs in training."""
    layouts = [
        Layout(goal, tuple(zip(colours, places, strict=True)), side, start)
        for count in (2, 3)
        for colours in itertools.combinations(COLOURS, count)
        for goal in colours
        for side in ROOMS
        for start in (HALL, side)
        for places in itertools.product((HALL, side), repeat=count)
    ]
    random.Random("keydoor").shuffle(layouts)
    return tuple(layouts)


LAYOUTS = _all_layouts()


class KeyDoor:
    """1,152 layouts of two rooms, two or three keys and as many doors. Implements TextEnv."""

    name: ClassVar[str] = "keydoor"
    instruction: ClassVar[str] = INSTRUCTION
    splits: ClassVar[Mapping[str, range]] = {
        "train": range(NUM_TEST, len(LAYOUTS)),
        "test": range(NUM_TEST),
    }
    subsets: ClassVar[tuple[str, ...]] = SUBSETS
    cheap: ClassVar[bool] = True

    def __init__(self) -> None:
        self._item = -1
        self._layout: Layout
        self._room = HALL
        self._keys: dict[str, str] = {}
        """Room of each key by colour, without the carried key."""
        self._carried: str | None = None
        self._open = False
        self._ending = ""
        self._playing = False

    @classmethod
    def tools(cls) -> Sequence[Tool]:
        return TOOLS

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        layout = _layout_of(item)
        place = dict(layout.keys)[layout.goal]
        moves = (place != layout.start) + (place != HALL)
        return (SUBSETS[moves],)

    def reset(self, item: int) -> str:
        self._layout = _layout_of(item)
        self._item, self._room, self._keys = item, self._layout.start, dict(self._layout.keys)
        self._carried, self._open, self._ending, self._playing = None, False, "", True
        return self._observation()

    def step(self, text: str) -> Step:
        self._require_playing()
        action = " ".join(text[:100].strip(" \t\n\"'`.").lower().split())
        if action not in self.actions():
            return Step(f"That is not possible now. {self._observation()}", info={"valid": False})
        verb, _, rest = action.partition(" ")
        if action == "take treasure":
            return self._end("You have the treasure.", success=True)
        if verb == "go":
            self._room = rest.removeprefix("to ")
        elif verb == "take":
            if self._carried is not None:
                self._keys[self._carried] = self._room
            self._carried = rest.removesuffix(" key")
            del self._keys[self._carried]
        elif self._carried == self._layout.goal:
            self._open = True
        else:
            return self._end(f"Behind the {self._carried} door is a trap.", success=False)
        return Step(self._observation(), info={"valid": True})

    def close(self) -> None:
        self._playing = False

    def actions(self) -> list[str]:
        """Return every possible action, including the trap; none when the episode is over."""
        if not self._playing:
            return []
        actions = [*(f"take {colour} key" for colour in self._keys_here()), f"go to {self._next_room()}"]
        if self._room == HALL and self._open:
            actions.append("take treasure")
        elif self._room == HALL and self._carried is not None:
            actions.append(f"open {self._carried} door")
        return actions

    def oracle(self) -> str:
        """Return the next action of a shortest solution from here."""
        self._require_playing()
        return self._towards(self._layout.goal)

    def _towards(self, goal: str) -> str:
        """Return the next action on the way through the door of a colour."""
        if self._carried == goal or self._open:
            if self._room != HALL:
                return f"go to {HALL}"
            return "take treasure" if self._open else f"open {goal} door"
        place = self._keys[goal]
        return f"take {goal} key" if place == self._room else f"go to {place}"

    def state_key(self) -> str:
        """Return `12|hall|red|open|blue=hall,green=attic`: item, room, carried key, state of the door, other keys."""
        if self._item < 0:
            raise EnvError("keydoor has no state yet: call reset first")
        keys = ",".join(f"{colour}={room}" for colour, room in sorted(self._keys.items()))
        door = self._ending or ("open" if self._open else "closed")
        return f"{self._item}|{self._room}|{self._carried or 'nothing'}|{door}|{keys}"

    def render(self) -> str:
        """Return an SVG of the two rooms, the doors, the keys and the player."""
        if self._item < 0:
            raise EnvError("keydoor has nothing to draw yet: call reset first")
        return "\n".join(self._draw())

    def _end(self, observation: str, *, success: bool) -> Step:
        self._playing, self._ending = False, "won" if success else "lost"
        return Step(observation, float(success), True, {"valid": True, "success": success})

    def _require_playing(self) -> None:
        if not self._playing:
            raise EnvError("keydoor needs a running episode: call reset first")

    def _keys_here(self) -> list[str]:
        return [colour for colour, _ in self._layout.keys if self._keys.get(colour) == self._room]

    def _next_room(self) -> str:
        return self._layout.side if self._room == HALL else HALL

    def _observation(self) -> str:
        keys = [f"a {colour} key" for colour in self._keys_here()] or ["nothing"]
        carried = f"the {self._carried} key" if self._carried else "nothing"
        door = f" The {self._layout.goal} door is open." if self._open else ""
        return (
            f"The treasure is behind the {self._layout.goal} door.{door} "
            f"You are in the {self._room} beside the {self._next_room()}. "
            f"You see {' and '.join(keys)}. You carry {carried}."
        )

    def _draw(self) -> Iterator[str]:
        status = {"won": "treasure taken", "lost": "trapped"}.get(self._ending, f"wanted: {self._layout.goal} door")
        yield '<svg xmlns="http://www.w3.org/2000/svg" width="440" height="260" viewBox="0 0 440 260" font-size="14">'
        yield f"<title>KeyDoor, item {self._item}</title>"
        yield '<rect width="440" height="260" fill="#f7f8fa"/>'
        yield f'<text x="20" y="30" font-weight="700" fill="#1f2933">KeyDoor, item {self._item}: {status}</text>'
        for left, room in ((20, HALL), (240, self._layout.side)):
            yield f'<rect x="{left}" y="90" width="180" height="150" fill="#fff" stroke="#334155" stroke-width="3"/>'
            yield f'<text x="{left + 10}" y="114" fill="#6b7785">{room}</text>'
            keys_in_room = [colour for colour, _ in self._layout.keys if self._keys.get(colour) == room]
            for place, colour in enumerate(keys_in_room):
                yield from _key(left + 40 + 50 * place, 145, colour)
            if room == self._room:
                yield f'<circle cx="{left + 90}" cy="205" r="16" fill="#2f6fb0"/>'
                if self._carried:
                    yield from _key(left + 125, 200, self._carried)
        yield '<rect x="198" y="150" width="44" height="36" fill="#fff"/>'  # the way between the rooms
        for place, (colour, _) in enumerate(self._layout.keys):
            fill = "none" if self._open and colour == self._layout.goal else _PAINT[colour]
            yield (
                f'<rect x="{35 + 55 * place}" y="58" width="40" height="32" fill="{fill}" '
                f'stroke="{_PAINT[colour]}" stroke-width="3"/>'
            )
        yield "</svg>"


_PAINT = {"red": "#c0392b", "green": "#2f9e56", "blue": "#2f6fb0", "yellow": "#d4a017"}


def _key(x: int, y: int, colour: str) -> Iterator[str]:
    paint = _PAINT[colour]
    yield f'<circle cx="{x}" cy="{y}" r="8" fill="none" stroke="{paint}" stroke-width="4"/>'
    yield f'<path d="M{x} {y + 8}v22m0 -6h8m-8 6h8" fill="none" stroke="{paint}" stroke-width="4"/>'


def _layout_of(item: int) -> Layout:
    if not 0 <= item < len(LAYOUTS):
        raise IndexError(f"keydoor has items 0 to {len(LAYOUTS) - 1}, got {item}")
    return LAYOUTS[item]
