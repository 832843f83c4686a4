"""Toy environments: a counting game that works, and others that each fail in one way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from agentgym_rl.types import Step


class Counting:
    """The player says `up` until the target is reached. Each step up gives 1 / target."""

    name: ClassVar[str] = "counting"
    instruction: ClassVar[str] = "Count to the goal. Actions: up, down."
    splits: ClassVar[Mapping[str, range]] = {"train": range(0, 100), "test": range(100, 120)}
    subsets: ClassVar[tuple[str, ...]] = ("even", "odd")
    cheap: ClassVar[bool] = True
    num_alive: ClassVar[int] = 0
    """Number of open instances. Tests use it to detect leaks."""

    def __init__(self) -> None:
        self.count = 0
        self.target = 0
        self.threads: set[int] = set()
        type(self).num_alive += 1

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return ("odd",) if item % 2 else ("even",)

    def reset(self, item: int) -> str:
        self.count, self.target = 0, item % 5 + 2
        return f"Goal: {self.target}. You are at 0."

    def step(self, text: str) -> Step:
        self.threads.add(threading.get_ident())
        if text not in ("up", "down"):
            return Step(f"I do not know {text!r}.", info={"valid": False})
        self.count += 1 if text == "up" else -1
        done = self.count == self.target
        info: dict[str, Any] = {"valid": True} | ({"success": True} if done else {})
        return Step(f"You are at {self.count}.", (1 if text == "up" else -1) / self.target, done, info)

    def actions(self) -> list[str]:
        return ["up", "down"]

    def oracle(self) -> str:
        return "up" if self.count < self.target else "down"

    def state_key(self) -> str:
        return str(self.count)

    def render(self) -> str | bytes:
        return f"<svg xmlns='http://www.w3.org/2000/svg'><text>{self.count}</text></svg>"

    def close(self) -> None:
        type(self).num_alive -= 1


class Thinking(Counting):
    """Has thoughts for its oracle's actions, except for goal 3."""

    name: ClassVar[str] = "thinking"
    num_alive: ClassVar[int] = 0

    def thought(self) -> str:
        return f"{self.count} is less than {self.target}." if self.target != 3 else None  # type: ignore[return-value]


class SlowCounting(Counting):
    """Counting in a thread, slow enough for two requests to overlap."""

    name: ClassVar[str] = "slow_counting"
    cheap: ClassVar[bool] = False
    num_alive: ClassVar[int] = 0
    num_inside: ClassVar[int] = 0
    """Number of running calls of all instances. More than one of a single instance means a broken lock."""
    most_inside: ClassVar[int] = 0

    def step(self, text: str) -> Step:
        cls = type(self)
        cls.num_inside += 1
        cls.most_inside = max(cls.most_inside, cls.num_inside)
        time.sleep(0.02)
        cls.num_inside -= 1
        return super().step(text)

    def render(self) -> str | bytes:
        return b"\x89PNG\r\n\x1a\n not really"


class Raising(Counting):
    """Raises on `raise` and on the actions of UNUSUAL. Resetting item 13 raises ValueError, item 14 IndexError."""

    name: ClassVar[str] = "raising"
    num_alive: ClassVar[int] = 0

    def reset(self, item: int) -> str:
        if item == 13:
            raise ValueError("unlucky")
        if item == 14:
            raise IndexError("a bug, not an unknown item")
        return super().reset(item)

    def step(self, text: str) -> Step:
        if text == "raise":
            raise ZeroDivisionError("the game broke")
        if text in UNUSUAL:
            raise UNUSUAL[text](3)
        return super().step(text)


UNUSUAL: dict[str, type[BaseException]] = {
    "exit": SystemExit,
    "interrupt": KeyboardInterrupt,
    "cancel": asyncio.CancelledError,
    "stop iteration": StopIteration,
}


class RaisingInThread(Raising):
    name: ClassVar[str] = "raising_in_thread"
    cheap: ClassVar[bool] = False
    num_alive: ClassVar[int] = 0


class Hanging(Counting):
    """Hangs on `hang` until `release` is set."""

    name: ClassVar[str] = "hanging"
    cheap: ClassVar[bool] = False
    num_alive: ClassVar[int] = 0
    release: ClassVar[threading.Event] = threading.Event()

    def step(self, text: str) -> Step:
        if text == "hang":
            self.release.wait(30)
        return super().step(text)


class HangingOnClose(Counting):
    """Works, but its close() returns only when `release` is set."""

    name: ClassVar[str] = "hanging_on_close"
    cheap: ClassVar[bool] = False
    num_alive: ClassVar[int] = 0
    release: ClassVar[threading.Event] = threading.Event()

    def close(self) -> None:
        self.release.wait(60)
        super().close()


class Garbage(Counting):
    """Answers with the entry of GARBAGE that the action names."""

    name: ClassVar[str] = "garbage"
    num_alive: ClassVar[int] = 0

    def reset(self, item: int) -> str:
        return super().reset(item) if item else None  # type: ignore[return-value]

    def step(self, text: str) -> Step:
        return GARBAGE[text] if text in GARBAGE else super().step(text)

    def oracle(self) -> str:
        return None  # type: ignore[return-value]

    def actions(self) -> list[str]:
        return [1, 2]  # type: ignore[list-item]


GARBAGE: dict[str, Any] = {
    "nothing": None,
    "text": "You are at 1.",
    "tuple": ("You are at 1.", 0.0, False),
    "observation": Step(7),  # type: ignore[arg-type]
    "nan": Step("x", float("nan")),
    "infinite": Step("x", float("inf")),
    "reward beyond sums": Step("x", 1e308),
    "reward beyond floats": Step("x", -(10**400)),
    "reward text": Step("x", "1"),  # type: ignore[arg-type]
    "reward bool": Step("x", True),
    "done": Step("x", 0.0, 1),  # type: ignore[arg-type]
    "info": Step("x", 0.0, False, []),  # type: ignore[arg-type]
    "info set": Step("x", 0.0, False, {"set": {1}}),
}


class Bare:
    """Has only the required methods."""

    name: ClassVar[str] = "bare"
    instruction: ClassVar[str] = "Say anything."
    splits: ClassVar[Mapping[str, range]] = {"train": range(2), "test": range(2, 3)}
    subsets: ClassVar[tuple[str, ...]] = ()
    cheap: ClassVar[bool] = True

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return ()

    def reset(self, item: int) -> str:
        return "Hello."

    def step(self, text: str) -> Step:
        return Step(f"You said {text}")

    def close(self) -> None: ...


class ClosingAloud(Counting):
    """Prints when it is closed, for a test in another process."""

    name: ClassVar[str] = "closing_aloud"

    def close(self) -> None:
        print("closed", flush=True)


class Treacherous(Counting):
    """Fails in a different way for each of five kinds of items, see `kind_of`."""

    name: ClassVar[str] = "treacherous"
    cheap: ClassVar[bool] = False
    num_alive: ClassVar[int] = 0
    release: ClassVar[threading.Event] = threading.Event()
    """Ends every hanging call. Set it when the test is over."""
    failed_once: ClassVar[set[int]] = set()

    @staticmethod
    def kind_of(item: int) -> str:
        return ("raises", "hangs", "garbage", "fails once", "works")[item % 5]

    def reset(self, item: int) -> str:
        self.item, self.kind = item, self.kind_of(item)
        if self.kind == "fails once" and item not in self.failed_once:
            self.failed_once.add(item)
            raise ConnectionError("only the first time")
        return super().reset(item)

    def step(self, text: str) -> Step:
        if self.kind == "raises":
            raise ZeroDivisionError("the game broke")
        if self.kind == "hangs":
            self.release.wait(60)
        if self.kind == "garbage":
            return None  # type: ignore[return-value]
        return super().step(text)


class Fuse(Counting):
    """Works, and calls `blow` once after `steps_left` steps of all instances, to break something else."""

    name: ClassVar[str] = "fuse"
    num_alive: ClassVar[int] = 0
    steps_left: ClassVar[int] = 0
    blow: ClassVar[Any] = None

    def step(self, text: str) -> Step:
        cls = type(self)
        cls.steps_left -= 1
        if cls.steps_left == 0:
            cls.blow()
        return super().step(text)


def refuse(env: Any, action: str) -> str:
    """Play an invalid action: the state remains and the reward is 0. Return the answer."""
    before = env.state_key()
    step = env.step(action)
    assert step.info == {"valid": False}
    assert (step.reward, step.done) == (0.0, False)
    assert env.state_key() == before
    return str(step.observation)
