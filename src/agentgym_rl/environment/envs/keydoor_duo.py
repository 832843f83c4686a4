"""KeyDoor for two: the guide knows the right door and can only talk, the walker acts and does not know it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from agentgym_rl.environment.envs.keydoor import COLOURS, KeyDoor
from agentgym_rl.environment.tools import ACT, Tool
from agentgym_rl.types import Step

GUIDE, WALKER = ROLES = ("guide", "walker")
MAX_MESSAGE = 100
"""Characters of a message that the walker gets."""

GAME = """\
Two players share a world. A treasure is behind one of the doors of the hall. The hall has a door for each key, of the \
key's colour, and beside it there is one more room. Behind every other door there is a trap that ends the game. The \
guide knows the right door and can only talk. The walker fetches the key, opens the door and takes the treasure, and \
does not know which door is the right one. Before every move of the walker the guide may say something. Both win or \
lose together."""
ACTIONS = "Reply with exactly one action: take COLOUR key, open COLOUR door, go to ROOM, or take treasure."


class KeyDoorDuo(KeyDoor):
    """The 1,152 layouts of KeyDoor. Implements TextEnv with the roles `guide` and `walker`."""

    name: ClassVar[str] = "keydoor_duo"
    instruction: ClassVar[str] = f"{GAME}\n\nYou play both in turn. As the walker: {ACTIONS}"
    roles: ClassVar[Mapping[str, str]] = {
        GUIDE: f"{GAME}\n\nYou are the guide. Reply with a short message to the walker.",
        WALKER: f"{GAME}\n\nYou are the walker. {ACTIONS}",
    }

    def __init__(self) -> None:
        super().__init__()
        self._role = GUIDE
        self._message = ""
        """Last message of the guide; empty if it was silent."""
        self._named = ""
        """Colour that the guide named last."""
        self._refused = False

    @classmethod
    def tools(cls) -> Sequence[Tool]:
        return (ACT,)

    def reset(self, item: int) -> str:
        self._role, self._message, self._named, self._refused = GUIDE, "", "", False
        return super().reset(item)

    def role(self) -> str:
        """Return the role whose turn it is."""
        return self._role

    def step(self, text: str) -> Step:
        self._require_playing()
        if self._role == GUIDE:
            printable = "".join(c if c.isprintable() else " " for c in text[:MAX_MESSAGE])
            self._role, self._message = WALKER, " ".join(printable.split())
            self._named = [self._named, *(word for word in self._message.lower().split() if word in COLOURS)][-1]
            return Step(self._observation(), info={"valid": True})
        step = super().step(text)
        if step.done:
            step.info["rewards"] = dict.fromkeys(ROLES, step.reward)
            return step
        self._role, self._refused = GUIDE, not step.info["valid"]
        return Step(self._observation(), info=step.info)

    def actions(self) -> list[str]:
        """Return the colours that the guide may name, or the walker's possible actions."""
        if self._role == GUIDE:
            return list(COLOURS) if self._playing else []
        return super().actions()

    def oracle(self) -> str:
        """Return the right colour, or the walker's next action towards the colour that the guide named last.

        Without a colour the walker goes for the first key.
        """
        self._require_playing()
        if self._role == GUIDE:
            return self._layout.goal
        colours = [colour for colour, _ in self._layout.keys]
        return self._towards(self._named if self._named in colours else colours[0])

    def state_key(self) -> str:
        """Return KeyDoor's key with the role to act, a refusal of the walker's last move, the colour named last and the
        last message."""
        refused = "refused" if self._refused else ""
        return f"{super().state_key()}|{self._role}|{refused}|{self._named}|{self._message}"

    def _observation(self) -> str:
        keys = [f"a {colour} key" for colour in self._keys_here()] or ["nothing"]
        carried = f"the {self._carried} key" if self._carried else "nothing"
        door = f" The {self._layout.goal} door is open." if self._open else ""
        if self._role == GUIDE:
            return (
                f"The treasure is behind the {self._layout.goal} door.{door} The walker is in the {self._room} "
                f"and carries {carried}."
            )
        said = f"The guide says: {self._message}." if self._message else "The guide says nothing."
        refused = "That was not possible. " if self._refused else ""
        return (
            f"{refused}{said}{door} You are in the {self._room} beside the {self._next_room()}. "
            f"You see {' and '.join(keys)}. You carry {carried}."
        )
