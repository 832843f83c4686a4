"""Protocols of the environments and policies that the viewer uses. The viewer imports neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from agentgym_rl.types import EnvSession, Limits, Message, Observation


class PolicyReply(Protocol):
    """A policy's reply: the messages of the observation, and the action. None means that the context is full."""

    observation: list[Message]
    action: Message | None


class Policy(Protocol):
    """A policy that plays one episode."""

    async def reply(self, messages: list[Message], observation: Observation, limits: Limits) -> PolicyReply: ...

    async def close(self) -> None: ...


PolicyFactory = Callable[[EnvSession, int], Policy]
"""Function from an episode's session and a seed to a policy for that episode."""


class Environments(Protocol):
    """The environments and policies of the viewer. Methods raise ConfigError or EnvError."""

    @property
    def policies(self) -> Mapping[str, PolicyFactory]:
        """Policies by name, at least `oracle` and `random`."""

    @property
    def limits(self) -> Limits:
        """Limits that a policy must respect."""

    def describe(self) -> list[dict[str, Any]]:
        """Return one row per environment: name, summary, installed, missing (reason), ranges, subsets. Slow."""

    def action_in(self, policy: str, reply: str) -> str:
        """Return the action in a policy's reply, which may also contain its thoughts."""

    def subsets_of(self, env: str, item: int) -> tuple[str, ...]:
        """Return the subsets of an item. Empty if the environment is unknown or not installed."""

    async def open(
        self,
        env: str,
        style: str | None = None,
        turns_per_attempt: int | None = None,
        attempts: int | None = None,
        retry: str = "failure",
        folder: Path | None = None,
    ) -> EnvSession:
        """Open a session of `env` in a style, by default that of the policies.

        `folder` is the run or evaluation whose episode is replayed; its environment may have arguments of its own.
        """

    async def items(self, env: str, split: str, subset: str | None = None) -> list[int]: ...

    async def close(self) -> None: ...
