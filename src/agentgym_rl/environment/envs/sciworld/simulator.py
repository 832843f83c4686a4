"""The simulator of one Java process, made fit for several worlds.

It keeps two things in global variables: the number of the last object made and the random generator. Loading a task
resets both for every world of the process, after which another world would give a new object the number of one it has,
and draw another's random numbers. So each world keeps its own pair, which is put in place around whatever is asked of
it. As a side effect a world depends on nothing but its task and the actions taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentgym_rl.environment.envs.sciworld.gateway import Gateway, Long, Reference, Value, call

_SCRAMBLE = 0x5DEECE66D
"""java.util.Random.setSeed(s) sets the generator's state to s ^ this."""


@dataclass(frozen=True, slots=True)
class Globals:
    """What a world needs in the simulator's global variables."""

    last_object: int = 0
    random_state: int = _SCRAMBLE


class Simulator:
    """Not thread-safe: the Jvm hands it out to one caller at a time."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._objects = self._module("util.UniqueIdentifier$")
        self._random = self._module("scala.util.Random$")
        self._generator = self._look_up(call(self._random, "self"))
        random_class = self._look_up(call("java.lang.Class", "forName", "java.util.Random"))
        self._state = self._look_up(call(random_class, "getDeclaredField", "seed"))
        gateway.ask(call(self._state, "setAccessible", True))

    def ask(self, before: Globals, *commands: str) -> tuple[list[Value], Globals]:
        """Answers to commands given with the global variables of one world, and what is in these afterwards."""
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
        """The only instance of a Scala object."""
        holder = self._look_up(call("java.lang.Class", "forName", name))
        return self._look_up(call(self._look_up(call(holder, "getField", "MODULE$")), "get", None))

    def _look_up(self, command: str) -> Reference:
        (found,) = self.gateway.ask(command)
        return reference(found)


def reference(value: Value) -> Reference:
    assert isinstance(value, Reference), f"the simulator should have given an object, got {value!r:.80}"
    return value
