"""What an environment is: text in, text out, deterministic given the item."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol, runtime_checkable

from agentgym_rl.types import Step


class TextEnv(Protocol):
    """A small, single-use game. One instance plays one item at a time; `reset` starts another.

    An action that is malformed or impossible is answered in the game's own words with `info["valid"] = False`;
    raising is for a broken environment and ends the episode as an error.
    """

    name: ClassVar[str]
    instruction: ClassVar[str]
    """Rules and action format, told to the agent once as the system message. Lives here, not in clients."""
    splits: ClassVar[Mapping[str, range]]
    """Disjoint ranges of items, at least `train` and `test`."""
    subsets: ClassVar[tuple[str, ...]]
    """Names of the subsets items may belong to."""
    cheap: ClassVar[bool]
    """True when a step takes under a few milliseconds and never blocks: it then runs without a thread hop."""

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        """Subsets that `item` belongs to."""
        ...

    def reset(self, item: int) -> str:
        """Start `item` and return the first observation. Items outside every split raise IndexError."""
        ...

    def step(self, text: str) -> Step: ...

    def close(self) -> None: ...


@runtime_checkable
class HasActions(Protocol):
    def actions(self) -> list[str]:
        """Actions that make sense now, in the form step() takes."""
        ...


@runtime_checkable
class HasOracle(Protocol):
    def oracle(self) -> str:
        """The next action of a solution from the present state.

        A class whose oracle knows one way only, and fails once it was left, says `oracle_recovers = False`: then it is
        never asked for demonstrations with mistakes.
        """
        ...


@runtime_checkable
class HasThought(Protocol):
    def thought(self) -> str:
        """What leads to the action that oracle() gives now, from what the player has seen."""
        ...


@runtime_checkable
class HasStateKey(Protocol):
    def state_key(self) -> str:
        """Equal keys mean the same state (of the same item)."""
        ...


@runtime_checkable
class HasAgentGymNumbers(Protocol):
    """An environment whose items AgentGym plays, too, under numbers of its own."""

    @classmethod
    def agentgym_item(cls, number: int) -> int:
        """Return the item that AgentGym's server of this environment, set up like this one, calls `number`."""
        ...

    @classmethod
    def published_item(cls, number: int) -> int:
        """Return the item that AgentGym's published lists call `number`; ConfigError if there is none here."""
        ...


@runtime_checkable
class HasRender(Protocol):
    def render(self) -> str | bytes:
        """A picture for people: an SVG or HTML string, or PNG bytes."""
        ...
