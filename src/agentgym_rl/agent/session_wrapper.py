"""A session around another session."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from agentgym_rl.types import EnvSession, Step, ToolCall


@runtime_checkable
class ForkableSession(Protocol):
    """A session whose running episode can be copied."""

    async def fork(self) -> object | None:
        """Return a copy of the episode's present state for `resume`, or None if it cannot be copied."""

    async def resume(self, copy: object) -> None:
        """Continue an episode from a copy that `fork` of another session of the same environment returned."""


class SessionWrapper:
    """Passes every call on to the session `env`. Subclasses replace what they change.

    It has no `fork`: a subclass that can be copied says so itself.
    """

    def __init__(self, env: EnvSession) -> None:
        self.name, self.instruction, self.tools = env.name, env.instruction, env.tools
        self._env = env

    async def reset(self, item: int) -> Step:
        return await self._env.reset(item)

    async def step(self, text: str) -> Step:
        return await self._env.step(text)

    async def call(self, calls: list[ToolCall], message: str = "") -> Step:
        return await self._env.call(calls, message)

    def call_of(self, action: str) -> ToolCall | None:
        return self._env.call_of(action)

    async def actions(self) -> list[str]:
        return await self._env.actions()

    async def oracle(self) -> str:
        return await self._env.oracle()

    async def advice(self) -> tuple[str, str]:
        return await self._env.advice()

    async def render(self) -> str | bytes:
        return await self._env.render()

    async def close(self) -> None:
        await self._env.close()
