"""Nim for two players: the player who takes the last stone wins."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping
from typing import ClassVar

from agentgym_rl.environment.envs.text_svg import Panel, draw
from agentgym_rl.errors import EnvError
from agentgym_rl.types import Step

RULES = """\
Nim is a game for two players who move in turn. There are up to three piles of stones. A move takes 1, 2 or 3 stones \
from one pile. Who takes the last stone of all wins. A reply that is not a possible move loses the game at once.

Reply with exactly one move: take NUMBER from COLOUR."""

FIRST, SECOND = ROLES = ("first", "second")
COLOURS = ("red", "green", "blue")
"""Names of the piles."""
SUBSETS = ("one", "two", "three")
"""Subsets by the number of piles."""
MAX_TAKE = 3
NUM_TEST = 50
_MOVE = re.compile(r"take (\d) from (\w+)")


def _all_starts() -> tuple[tuple[int, ...], ...]:
    """Return every start once, in a fixed random order."""
    starts: list[tuple[int, ...]] = [(size,) for size in range(4, 13)]
    starts += itertools.product(range(1, 7), repeat=2)
    starts += itertools.product(range(1, 6), repeat=3)
    random.Random("nim").shuffle(starts)
    return tuple(starts)


STARTS = _all_starts()


class Nim:
    """170 starts of one to three piles. Implements TextEnv with the roles `first` and `second`."""

    name: ClassVar[str] = "nim"
    instruction: ClassVar[str] = f"{RULES} You play both sides in turn."
    roles: ClassVar[Mapping[str, str]] = {
        FIRST: f"{RULES} You move first.",
        SECOND: f"{RULES} Your opponent moves first.",
    }
    splits: ClassVar[Mapping[str, range]] = {"train": range(NUM_TEST, len(STARTS)), "test": range(NUM_TEST)}
    subsets: ClassVar[tuple[str, ...]] = SUBSETS
    cheap: ClassVar[bool] = True

    def __init__(self) -> None:
        self._item = -1
        self._piles: list[int] = []
        self._role = FIRST
        self._last = ""
        """The last move."""
        self._winner = ""
        self._playing = False

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return (SUBSETS[len(_start_of(item)) - 1],)

    def reset(self, item: int) -> str:
        self._piles = list(_start_of(item))
        self._item, self._role, self._last, self._winner, self._playing = item, FIRST, "", "", True
        return self._observation()

    def role(self) -> str:
        """Return the role whose turn it is."""
        return self._role

    def step(self, text: str) -> Step:
        self._require_playing()
        action = " ".join(text[:100].strip(" \t\n\"'`.").lower().split())
        if action not in self.actions():
            return self._end(f"That is not a possible move: {self._role} loses.", self._other(), valid=False)
        move = _MOVE.fullmatch(action)
        assert move is not None
        self._piles[COLOURS.index(move[2])] -= int(move[1])
        self._last = action
        if not any(self._piles):
            return self._end(f"The last stone is taken: {self._role} wins.", self._role, valid=True)
        self._role = self._other()
        return Step(self._observation(), info={"valid": True})

    def close(self) -> None:
        self._playing = False

    def actions(self) -> list[str]:
        """Return every possible move; none when the game is over."""
        if not self._playing:
            return []
        return [
            f"take {count} from {colour}"
            for colour, size in zip(COLOURS, self._piles, strict=False)
            for count in range(1, min(MAX_TAKE, size) + 1)
        ]

    def oracle(self) -> str:
        """Return a winning move, or if there is none the first of the possible moves.

        A pile counts as its size modulo 4. The player to move loses if the exclusive or of all piles is 0.
        """
        self._require_playing()
        for action in self.actions():
            count, colour = action.split()[1::2]
            piles = list(self._piles)
            piles[COLOURS.index(colour)] -= int(count)
            if not _grundy(piles):
                return action
        return self.actions()[0]

    def state_key(self) -> str:
        """Return `12|first|3,5,2`: item, role to move, piles; with the winner instead of the role at the end."""
        if self._item < 0:
            raise EnvError("nim has no state yet: call reset first")
        state = f"won by {self._winner}" if self._winner else self._role
        return f"{self._item}|{state}|{','.join(map(str, self._piles))}"

    def render(self) -> str:
        """Return an SVG of the piles."""
        if self._item < 0:
            raise EnvError("nim has nothing to draw yet: call reset first")
        piles = "\n".join(f"{colour:6} {'● ' * size}" for colour, size in zip(COLOURS, self._piles, strict=False))
        status, state = (f"{self._winner} wins", "solved") if self._winner else (f"{self._role} to move", "playing")
        return draw(f"Nim, item {self._item}", self._last or "start", status, state, [Panel("piles", piles, mono=True)])

    def _other(self) -> str:
        return SECOND if self._role == FIRST else FIRST

    def _observation(self) -> str:
        piles = ", ".join(f"{colour} {size}" for colour, size in zip(COLOURS, self._piles, strict=False))
        return f"Your opponent: {self._last}. Piles: {piles}." if self._last else f"Piles: {piles}."

    def _end(self, observation: str, winner: str, *, valid: bool) -> Step:
        self._playing, self._winner = False, winner
        rewards = {role: 1.0 if role == winner else -1.0 for role in ROLES}
        info = {"valid": valid, "success": winner == self._role, "rewards": rewards}
        return Step(observation, rewards[self._role], True, info)

    def _require_playing(self) -> None:
        if not self._playing:
            raise EnvError("nim needs a running episode: call reset first")


def _grundy(piles: list[int]) -> int:
    value = 0
    for size in piles:
        value ^= size % (MAX_TAKE + 1)
    return value


def _start_of(item: int) -> tuple[int, ...]:
    if not 0 <= item < len(STARTS):
        raise IndexError(f"nim has items 0 to {len(STARTS) - 1}, got {item}")
    return STARTS[item]
