"""What the viewer is handed to play with: environments and policies. It imports neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from agentgym_rl.types import EnvSession, Limits, Message


class PolicyReply(Protocol):
    """What a policy answers: the messages the observation became, and its action (None: no room was left)."""

    observation: list[Message]
    action: Message | None


class Policy(Protocol):
    """Plays one episode."""

    async def reply(self, messages: list[Message], observation: str, limits: Limits) -> Any:
        """A PolicyReply."""
        ...

    async def close(self) -> None: ...


PolicyFactory = Callable[[EnvSession, int], Policy]
"""(the episode's session, a seed) -> a policy for that episode."""


class Worlds(Protocol):
    """Where environments and policies come from. Failures are ConfigErrors and EnvErrors."""

    @property
    def policies(self) -> Mapping[str, PolicyFactory]:
        """By name; `oracle` and `random` at least."""
        ...

    @property
    def limits(self) -> Limits:
        """What a policy is asked to keep to."""
        ...

    def describe(self) -> list[dict[str, Any]]:
        """One row per environment: name, summary, installed, missing (why not), ranges, subsets. Slow at first."""
        ...

    def action_in(self, policy: str, reply: str) -> str:
        """The action in what a policy said: a policy that thinks aloud says more than that."""
        ...

    def subsets_of(self, env: str, item: int) -> tuple[str, ...]:
        """Subsets an item belongs to; none when the environment is unknown or not installed."""
        ...

    async def open(self, env: str, style: str = "act", turns_per_attempt: int | None = None) -> EnvSession:
        """A session of `env`, played in a style."""
        ...

    async def items(self, env: str, split: str, subset: str | None = None) -> list[int]: ...

    async def close(self) -> None: ...
