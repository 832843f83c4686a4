"""A lock whose code cannot be known in advance: the first guess is luck, but the sound of the lock betrays the code.

Two independent guesses open it in 5 of 9 games. An agent that learns what the sounds mean opens it at the second
attempt every time. `examples/lock.toml` trains that from scratch on a CPU:

    cd examples && agentgym-rl train lock.toml
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import ClassVar

from agentgym_rl.types import Step

SOUNDS = {"red": "hums", "green": "clicks", "blue": "rattles"}
"""Sound of a lock by its code. Every guess makes it, right or wrong."""
CODES = tuple(SOUNDS)


class Lock:
    """Say the code. One guess ends the game."""

    name: ClassVar[str] = "lock"
    instruction: ClassVar[str] = "Say the code of the lock: red, green or blue."
    splits: ClassVar[Mapping[str, range]] = {"train": range(300), "test": range(300, 360)}
    subsets: ClassVar[tuple[str, ...]] = ()
    cheap: ClassVar[bool] = True

    def __init__(self) -> None:
        self.item = -1
        self.code = ""
        self.guess = ""
        self.told = False
        """Whether this lock has made its sound, in this attempt or an earlier one."""

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return ()

    def reset(self, item: int) -> str:
        self.told = self.told and item == self.item
        self.item, self.code, self.guess = item, random.Random(f"lock {item}").choice(CODES), ""
        return "Guess ."

    def step(self, text: str) -> Step:
        self.guess, self.told = text.strip(), True
        success = self.guess == self.code
        return Step(
            f"The lock {SOUNDS[self.code]} .", float(success), True, {"valid": self.guess in CODES, "success": success}
        )

    def actions(self) -> list[str]:
        """Return the codes. The right one is listed twice after the sound, so random play listens now and then."""
        return [*CODES, self.code] if self.told else list(CODES)

    def state_key(self) -> str:
        return f"{self.item}|{self.guess}|{self.told}"

    def close(self) -> None: ...
