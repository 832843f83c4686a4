"""The household as a text game."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from agentgym_rl.environment.agentgym_tools import ALFWORLD as INSTRUCTION
from agentgym_rl.environment.base import check_item
from agentgym_rl.environment.envs.alfworld import commands, house, oracle
from agentgym_rl.environment.envs.text_svg import Panel, draw
from agentgym_rl.environment.tools import Tool
from agentgym_rl.errors import EnvError
from agentgym_rl.types import Step

_MAX_CHARS = 100
_PLACE = {"type": "string", "description": "Name of a place, such as shelf 2."}
_THING = {"type": "string", "description": "Name of a thing, such as mug 1."}
TOOLS = (
    Tool("go_to", "Walk to a place.", "go to {place}", {"place": _PLACE}),
    Tool("open", "Open the place you are at.", "open {place}", {"place": _PLACE}),
    Tool("close", "Close the place you are at.", "close {place}", {"place": _PLACE}),
    Tool("examine", "Look at the place you are at.", "examine {place}", {"place": _PLACE}),
    Tool("take", "Take a thing from a place.", "take {thing} from {place}", {"thing": _THING, "place": _PLACE}),
    Tool(
        "put", "Put what you carry in or on a place.", "put {thing} in/on {place}", {"thing": _THING, "place": _PLACE}
    ),
    Tool("clean", "Clean a thing at a sink.", "clean {thing} with {place}", {"thing": _THING, "place": _PLACE}),
    Tool("heat", "Heat a thing in a microwave.", "heat {thing} with {place}", {"thing": _THING, "place": _PLACE}),
    Tool("cool", "Cool a thing in a fridge.", "cool {thing} with {place}", {"thing": _THING, "place": _PLACE}),
    Tool("use", "Switch a thing on, such as a desk lamp.", "use {thing}", {"thing": _THING}),
    Tool("look", "Look around.", "look"),
    Tool("inventory", "See what you carry.", "inventory"),
)


class AlfWorld:
    """3,300 tasks in four kinds of rooms. Implements TextEnv."""

    name: ClassVar[str] = "alfworld"
    instruction: ClassVar[str] = INSTRUCTION
    splits: ClassVar[Mapping[str, range]] = house.SPLITS
    subsets: ClassVar[tuple[str, ...]] = house.TASKS
    cheap: ClassVar[bool] = True

    def __init__(self) -> None:
        self._house: house.House | None = None
        self._playing = False
        self._last = ("", "")
        """The last command and its answer."""

    @classmethod
    def tools(cls) -> Sequence[Tool]:
        return TOOLS

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return (house.task_of(check_item(cls, item)),)

    def reset(self, item: int) -> str:
        self._house = house.build(check_item(self, item))
        self._playing, self._last = True, ("", "")
        seen = commands.listed(list(self._house.places))
        text = f"You are in the middle of a room. Looking quickly around you, you see {seen}."
        return self._with_actions(f"{text}\nYour task is to: {self._house.goal}")

    def step(self, text: str) -> Step:
        state = self._require_playing()
        command = " ".join(text.split()).lower().strip("\"'`. ") if len(text) <= _MAX_CHARS else ""
        answer = commands.run(state, command)
        valid = answer != commands.NOTHING
        self._last = (command, answer) if valid else ("", answer)
        if valid and state.is_solved:
            self._playing = False
            return Step(f"{answer} The task is done.", 1.0, True, {"valid": True, "success": True})
        return Step(self._with_actions(answer), info={"valid": valid})

    def close(self) -> None:
        self._playing = False

    def actions(self) -> list[str]:
        """Return the commands that do something now; none when the episode is over."""
        return commands.possible(self._house) if self._house is not None and self._playing else []

    def oracle(self) -> str:
        """Return the next command of a solution, found with knowledge of where everything is."""
        return oracle.next_command(self._require_playing())

    def state_key(self) -> str:
        """Return the item, the player's place, what is where, what is open, treated and switched on."""
        state = self._known()
        where = ",".join(f"{thing}@{place}" for thing, place in sorted(state.location.items()))
        treated = ",".join(f"{thing}:{'+'.join(sorted(states))}" for thing, states in sorted(state.states.items()))
        return "|".join(
            [str(state.item), state.here, where, ",".join(sorted(state.open_places)), treated, str(state.lamp_on)]
        )

    def render(self) -> str:
        """Return an SVG of the task, the player's place and what is known to be where."""
        state = self._known()
        status = "done" if state.is_solved else "playing"
        places = [f"{place}: {self._contents(state, place)}" for place in state.places]
        panels = [Panel("Task", state.goal, colour="#eef4fb"), Panel("Places", "\n".join(places))]
        if self._last[1]:
            panels.append(Panel(f"> {self._last[0]}" if self._last[0] else "Last answer", self._last[1]))
        title = f"Household, item {state.item}: {state.task}"
        headline = f"at {state.here or 'the middle of the room'}, holding {state.held or 'nothing'}"
        return draw(title, headline, status, "solved" if state.is_solved else "playing", panels)

    def _contents(self, state: house.House, place: str) -> str:
        things = [*state.things_at(place), *([house.LAMP] if place == state.lamp_place else [])]
        lid = " (closed)" if not state.is_accessible(place) else ""
        return f"{', '.join(things) or 'nothing'}{lid}"

    def _with_actions(self, text: str) -> str:
        return f"{text}\nAVAILABLE ACTIONS: {', '.join(commands.possible(self._known()))}"

    def _known(self) -> house.House:
        if self._house is None:
            raise EnvError("alfworld has no state yet: call reset first")
        return self._house

    def _require_playing(self) -> house.House:
        if self._house is None or not self._playing:
            raise EnvError("alfworld needs a running episode: call reset first")
        return self._house
