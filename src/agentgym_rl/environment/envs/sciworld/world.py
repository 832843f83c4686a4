"""One simulated house, in a Java process shared with others."""

from __future__ import annotations

import json
from dataclasses import dataclass

from agentgym_rl.environment.envs.sciworld.gateway import Reference, Value, call, create, release
from agentgym_rl.environment.envs.sciworld.jvm import POOL, Jvm, JvmPool
from agentgym_rl.environment.envs.sciworld.simulator import Globals, reference
from agentgym_rl.errors import EnvError

_SEPARATOR = "\x1f"
_GOLD_TIMEOUT_S = 600.0
"""Seconds to wait for a gold path. It is a whole episode in one answer: seconds, or minutes on a busy machine."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The simulator's answer to an action."""

    text: str
    score: int
    """0 to 100, or -100 after a fatal mistake."""
    completed: bool
    moves: int
    """Time passed in the game."""
    look: str
    """Text that `look around` would give now."""
    inventory: str


class World:
    """A simulated house. `load` starts a task, and can be called again. `close` frees its slot in the pool."""

    def __init__(self, pool: JvmPool = POOL) -> None:
        self._pool = pool
        self.jvm: Jvm = pool.acquire()
        self._globals = Globals()
        self._interface: Reference | None = None
        self._closed = False
        try:
            with self.jvm.lock:  # one table of tasks at a time, see _drop_tasks
                (interface,) = self._ask(create("scienceworld.runtime.pythonapi.PythonInterface"))
                self._interface = reference(interface)
                self._ask(self._drop_tasks())
        except BaseException:
            self.close()
            raise

    def load(self, task: str, variation: int) -> tuple[str, str, str]:
        """Start a task. Return its description, the first look around and the inventory."""
        with self.jvm.lock:  # one table of tasks at a time, see _drop_tasks
            self._load(task, variation, gold_path=False)
            description, *seen, _ = self._ask(self._call("getTaskDescription"), *self._look(), self._drop_tasks())
        look, inventory = map(str, seen)
        return str(description), look, inventory

    def gold_path(self, task: str, variation: int) -> tuple[str, ...]:
        """Return actions that solve a task, found by playing it. The task is then loaded again.

        The process is busy meanwhile: use one without other sessions.
        """
        self._load(task, variation, gold_path=True)
        (listed,) = self._ask(self._call("getGoldActionSequence"))
        actions = reference(listed)
        joined, _ = self._ask(call("java.lang.String", "join", _SEPARATOR, actions), release(actions))
        return tuple(str(joined).split(_SEPARATOR))

    def step(self, action: str) -> Answer:
        # Ask for look and inventory too: that is cheap, and a later request would wait in the queue again.
        text, score, completed, moves, *seen = self._ask(
            self._call("step", action),
            self._call("getScore"),
            self._call("getCompleted"),
            self._call("getNumMoves"),
            *self._look(),
        )
        assert isinstance(score, float)
        assert isinstance(moves, int)
        look, inventory = map(str, seen)
        return Answer(str(text), round(100 * score), completed is True, moves, look, inventory)

    def possible_actions(self) -> list[str]:
        """Return every possible action. This takes several times as long as a step."""
        (text,) = self._ask(self._call("getValidActionObjectCombinationsJSON"))
        return [entry["action"] for entry in json.loads(str(text))["validActions"]]

    def close(self) -> None:
        """Free the slot in the pool. Never raises, and may be called again."""
        if self._closed:
            return
        try:
            if self._interface is not None and self.jvm.usable:
                self._ask(release(self._interface))
        except EnvError:
            pass  # the process is gone, and the world with it
        finally:
            self._closed = True
            self._pool.release(self.jvm)

    def _load(self, task: str, variation: int, *, gold_path: bool) -> None:
        timeout_s = _GOLD_TIMEOUT_S if gold_path else None
        (error,) = self._ask(self._call("load", task, variation, "", gold_path), timeout_s=timeout_s)
        if error:
            raise EnvError(f"sciworld's simulator cannot load variation {variation} of {task}: {error}")

    def _drop_tasks(self) -> str:
        """Return the command that drops the table of all tasks, nine tenths of a world's memory.

        Only loading needs the table, and creates it again. Hold the process's lock from the table's creation to this
        command, because the heap has space for about 30 tables.
        """
        return self._call("taskMaker_$eq", None)

    def _look(self) -> tuple[str, str]:
        """Return the commands for look and inventory. Neither takes time in the game."""
        return self._call("freeActionLook"), self._call("freeActionInventory")

    def _call(self, method: str, *arguments: Value) -> str:
        return call(reference(self._interface), method, *arguments)

    def _ask(self, *commands: str, timeout_s: float | None = None) -> list[Value]:
        if self._closed:
            raise EnvError("this sciworld world is closed: create another")
        with self.jvm.simulator(timeout_s) as simulator:
            answers, self._globals = simulator.ask(self._globals, *commands)
        return answers
