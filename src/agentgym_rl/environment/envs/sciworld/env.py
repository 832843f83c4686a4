"""SciWorld as a text game."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from agentgym_rl.environment.envs.sciworld import tasks
from agentgym_rl.environment.envs.sciworld.gold import gold_path
from agentgym_rl.environment.envs.sciworld.picture import Scene, draw
from agentgym_rl.environment.envs.sciworld.world import World
from agentgym_rl.environment.tools import ACT, Tool
from agentgym_rl.errors import EnvError
from agentgym_rl.types import Step

INSTRUCTION = """\
You carry out science experiments in a simulated house with a kitchen, a workshop, a greenhouse and more. The first \
message gives your task and what you see around you.

Give exactly one action a turn, naming things as they are described to you. OBJ stands for a thing:
- look around; look at OBJ; look in OBJ; read OBJ
- inventory: what you carry; task: the task again
- open OBJ; close OBJ; go PLACE (the door must be open)
- pick up OBJ; put down OBJ; move OBJ to OBJ; pour OBJ into OBJ; dunk OBJ into OBJ; mix OBJ (what is in a container)
- activate OBJ; deactivate OBJ; use OBJ; use OBJ on OBJ; connect OBJ to OBJ; disconnect OBJ
- eat OBJ; flush OBJ
- wait: let ten moments pass; wait1: let one pass
- focus on OBJ: say that this is the thing the task asks about. Focus only on what the task tells you to: focusing on \
something else can end the game as failed.

If an action could mean several things you are shown a numbered list: answer with the number alone."""

_OBJECT = {"type": "string", "description": "A thing as it is described to you, such as the cup."}


def _verb(name: str, description: str, action: str) -> Tool:
    """Return a tool whose parameters are the placeholders of its action, all of them things."""
    return Tool(name, description, action, dict.fromkeys(re.findall(r"{(\w+)}", action), _OBJECT))


TOOLS = (
    _verb("look_around", "See the room you are in.", "look around"),
    _verb("look_at", "Look at a thing.", "look at {thing}"),
    _verb("examine", "Look closely at a thing.", "examine {thing}"),
    _verb("look_in", "Look into a thing.", "look in {thing}"),
    _verb("read", "Read a text.", "read {thing}"),
    _verb("inventory", "See what you carry.", "inventory"),
    _verb("task", "Read the task again.", "task"),
    _verb("open", "Open a door or a container.", "open {thing}"),
    _verb("close", "Close a door or a container.", "close {thing}"),
    _verb("go", "Go to a place through an open door.", "go {place}"),
    _verb("pick_up", "Take a thing.", "pick up {thing}"),
    _verb("move", "Move a thing to another one or into it.", "move {thing} to {target}"),
    _verb("pour", "Pour a liquid into a container.", "pour {thing} into {target}"),
    _verb("dunk", "Dunk a thing into a liquid.", "dunk {thing} into {target}"),
    _verb("mix", "Mix what is in a container.", "mix {thing}"),
    _verb("activate", "Switch a thing on.", "activate {thing}"),
    _verb("deactivate", "Switch a thing off.", "deactivate {thing}"),
    _verb("use_on", "Use a thing on another one, such as a thermometer on water.", "use {thing} on {target}"),
    _verb("use", "Use a thing.", "use {thing}"),
    _verb("disconnect", "Disconnect an electrical part.", "disconnect {thing}"),
    _verb("connect", "Connect two electrical parts.", "connect {thing} to {target}"),
    _verb("eat", "Eat a thing.", "eat {thing}"),
    _verb("flush", "Flush a thing.", "flush {thing}"),
    _verb("wait", "Let ten moments pass.", "wait"),
    _verb("wait_one_moment", "Let one moment pass.", "wait1"),
    _verb("focus_on", "Say that this is the thing the task asks about.", "focus on {thing}"),
    _verb("drop", "Put down a thing you carry.", "drop {thing}"),
    Tool("choose", "Answer a numbered list.", "{number}", {"number": {"type": "integer"}}),
    ACT,
)

NO_MATCH = "No known action matches that input."
"""The simulator's answer to an unknown action."""
_MAX_CHARS = 300
"""Longest action. Useful ones have at most about 150 characters."""
_AMBIGUOUS = "Ambiguous request:"
_DECLINED = re.compile(
    r"(No known action|Unknown action|<?ERROR|I'm not sure |It'?s not clear how |Something can't be |That can't be "
    r"|That object (already|does not) |The door doesn't appear |You can't |You must disconnect |Connections must )"
    r"|[^\n]* (aren't able to move|appears broken, and can't [^\n]*|can't be poured out[^\n]*"
    r"|is already connected, [^\n]*|does not contain any liquids [^\n]*|is empty, so there's nothing to pour"
    r"|is not something that can be activated|isn't open|isn't open, so you can't see inside"
    r"|is not (a container|closeable|currently passable|edible|movable|moveable|open|openable))\.$"
)
"""Answers that decline an action. Opening an open door is not declined, because the door is as requested."""


class SciWorld:
    """30 kinds of experiments in 7,207 variations. Implements TextEnv."""

    name: ClassVar[str] = "sciworld"
    instruction: ClassVar[str] = INSTRUCTION
    splits: ClassVar[Mapping[str, range]] = tasks.SPLITS
    subsets: ClassVar[tuple[str, ...]] = tasks.SUBSETS
    cheap: ClassVar[bool] = False
    oracle_recovers: ClassVar[bool] = False

    def __init__(self) -> None:
        self._world: World | None = None
        """Created by the first reset, so that no Java process starts for a session that is never played."""
        self._item = -1
        self._playing = False
        self._scene: Scene
        self._first_look = ""
        self._ambiguous = False
        self._history: list[tuple[str, bool]] = []
        """Each action, and whether it left the game unchanged."""

    @classmethod
    def tools(cls) -> Sequence[Tool]:
        return TOOLS

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return tasks.subsets_of(item)

    @classmethod
    def published_item(cls, number: int) -> int:
        return tasks.published_item(number)

    agentgym_item = published_item

    @property
    def task_description(self) -> str:
        return self._scene.description

    @property
    def first_look(self) -> str:
        """The first observation without the task."""
        return self._first_look

    def reset(self, item: int) -> str:
        task, variation = tasks.locate(item)
        self._playing = False
        if self._world is None or not self._world.jvm.usable:
            self._drop()
            self._world = World()
        try:
            description, look, inventory = self._world.load(task.name, variation)
        except EnvError:
            self._drop()
            raise
        self._item = item
        self._scene = Scene(task.name, variation, description, look, inventory)
        self._first_look = look.strip()
        self._ambiguous = False
        self._history = []
        self._playing = True
        return f"{description}\n\n{self._first_look}"

    def step(self, text: str) -> Step:
        world = self._running()
        action = text.strip()
        problem = _problem(action)
        if problem:
            return Step(f"{NO_MATCH} {problem}", info={"valid": False, "score": self._scene.score})
        try:
            answer = world.step(action)
        except EnvError:
            self._drop()
            raise
        scene = self._scene
        reward = (answer.score - scene.score) / 100
        done = answer.completed or answer.score < 0
        observation = answer.text.strip()
        self._playing = not done
        self._ambiguous = observation.startswith(_AMBIGUOUS)
        self._history.append((action, answer.moves == scene.moves and not self._ambiguous))
        scene.turn += 1
        scene.last_action, scene.last_answer = action, observation
        scene.score, scene.moves = answer.score, answer.moves
        scene.look, scene.inventory = answer.look, answer.inventory
        info: dict[str, bool | int] = {"valid": not _DECLINED.match(observation), "score": answer.score}
        if done:
            info["success"] = answer.score == 100
        return Step(observation, reward, done, info)

    def close(self) -> None:
        self._drop()

    def actions(self) -> list[str]:
        """Return every possible action, sorted; none when the episode is over."""
        return sorted(set(self._running().possible_actions())) if self._playing else []

    def oracle(self) -> str:
        """Return the next action of the gold path. EnvError after any other action that took time in the game."""
        self._running()
        task, variation = tasks.locate(self._item)
        path = gold_path(task.name, variation)
        place = 0
        for action, free in self._history:
            if place < len(path) and action == path[place]:
                place += 1
            elif not free:
                raise EnvError(f"sciworld's oracle knows only the gold path, and {action!r} left it: reset")
        if place == len(path):
            raise EnvError(f"sciworld's gold path of {task.name}/{variation} ended at a score of {self._scene.score}")
        return path[place]

    def state_key(self) -> str:
        """Return the item and a digest of room, inventory, score and any open question of the simulator."""
        scene = self._scene
        seen = "\x1f".join((scene.look, scene.inventory, str(scene.score), scene.last_answer * self._ambiguous))
        return f"{self._item}|{hashlib.sha256(seen.encode()).hexdigest()[:24]}"

    def render(self) -> str:
        """Return an SVG of the task, the score, the room, the inventory and the last action with its answer."""
        if self._item < 0:
            raise EnvError("sciworld has nothing to draw yet: call reset first")
        return draw(self._scene)

    def _running(self) -> World:
        if not self._playing or self._world is None:
            raise EnvError("sciworld needs a running episode: call reset first")
        return self._world

    def _drop(self) -> None:
        self._playing = False
        if self._world is not None:
            self._world.close()
            self._world = None


def _problem(action: str) -> str:
    """Return why an action cannot be sent to the simulator, or an empty string."""
    if len(action) > _MAX_CHARS:
        return f"An action of {len(action)} characters is too long."
    if len(action.splitlines()) > 1:
        return "Give one action a turn, on one line."
    if not all(" " <= letter <= "~" for letter in action):
        return "Use plain letters, digits and punctuation."
    return ""
