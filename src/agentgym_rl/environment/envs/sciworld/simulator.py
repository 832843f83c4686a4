"""The simulator of one Java process, shared by several worlds.

It has two global variables: the number of the last created object and the random generator. Loading a task resets both
for every world of the process. Another world would then reuse an object number and draw wrong random numbers. So each
world keeps its own pair, which is set before its commands and read after them. As a side effect a world depends only
on its task and actions.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentgym_rl.environment.envs.sciworld.gateway import Gateway, Long, Reference, Value, call

_SCRAMBLE = 0x5DEECE66D
"""java.util.Random.setSeed(s) sets the generator's state to s ^ this."""


@dataclass(frozen=True, slots=True)
class Globals:
    """Values of the simulator's global variables for one world."""

    last_object: int = 0
    random_state: int = _SCRAMBLE


class Simulator:
    """Not thread-safe: the Jvm yields it to one caller at a time."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._objects = self._module("util.UniqueIdentifier$")
        self._random = self._module("scala.util.Random$")
        self._generator = self._look_up(call(self._random, "self"))
        random_class = self._look_up(call("java.lang.Class", "forName", "java.util.Random"))
        self._state = self._look_up(call(random_class, "getDeclaredField", "seed"))
        gateway.ask(call(self._state, "setAccessible", True))

    def ask(self, before: Globals, *commands: str) -> tuple[list[Value], Globals]:
        """Run commands with the global variables of one world. Return the answers and the new variables."""
        _, _, *answers, last_object, random_state = self.gateway.ask(
            call(self._objects, "count_$eq", Long(before.last_object)),
            call(self._random, "setSeed", Long(before.random_state ^ _SCRAMBLE)),
            *commands,
            call(self._objects, "count"),
            call(self._state, "get", self._generator),
        )
        assert isinstance(last_object, int)
        assert isinstance(random_state, int)
        return answers, Globals(last_object, random_state)

    def _module(self, name: str) -> Reference:
        """Return the only instance of a Scala object."""
        holder = self._look_up(call("java.lang.Class", "forName", name))
        return self._look_up(call(self._look_up(call(holder, "getField", "MODULE$")), "get", None))

    def _look_up(self, command: str) -> Reference:
        (value,) = self.gateway.ask(command)
        return reference(value)


def reference(value: Value) -> Reference:
    assert isinstance(value, Reference), f"the simulator must return an object, got {value!r:.80}"
    return value
