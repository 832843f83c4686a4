"""The environment interface: text in, text out, deterministic given the item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable

from agentgym_rl.environment.tools import Tool
from agentgym_rl.types import Step


class TextEnv(Protocol):
    """A text game. One instance plays one item at a time; `reset` starts another.

    `step` answers a malformed or impossible action with an observation and `info["valid"] = False`.
    An exception means that the environment is broken, and ends the episode as an error.
    """

    name: ClassVar[str]
    instruction: ClassVar[str]
    """Rules and action format. The agent gets them once, as the system message."""
    splits: ClassVar[Mapping[str, range]]
    """Disjoint ranges of items, at least `train` and `test`."""
    subsets: ClassVar[tuple[str, ...]]
    """Names of the subsets items may belong to."""
    cheap: ClassVar[bool]
    """Whether a step takes at most a few milliseconds and never blocks. If so, it runs without a thread."""

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        """Return the subsets that `item` belongs to."""

    def reset(self, item: int) -> str:
        """Start `item` and return the first observation. Items outside every split raise IndexError."""

    def step(self, text: str) -> Step: ...

    def close(self) -> None: ...


def check_item(env: TextEnv | type[TextEnv], item: int) -> int:
    """Return `item`. Raise IndexError if it is in no split."""
    if not any(item in split for split in env.splits.values()):
        last = max(split.stop for split in env.splits.values()) - 1
        raise IndexError(f"{env.name} has items 0 to {last}, got {item}")
    return item


@runtime_checkable
class HasActions(Protocol):
    def actions(self) -> list[str]:
        """Return the actions that make sense now, in the form that step() takes."""


@runtime_checkable
class HasTools(Protocol):
    @classmethod
    def tools(cls) -> Sequence[Tool]:
        """Return the functions that an agent may call instead of writing actions, each with its text action.

        A class may have a `tool_instruction`, which replaces `instruction` for an agent that calls tools. A class with
        `takes_messages = True` also takes messages to a user: the text of a reply without a call, as step() gets it.
        """
        ...


@runtime_checkable
class HasItemTools(HasTools, Protocol):
    def item_tools(self) -> list[str]:
        """Return the names of the tools() that the agent may call now, if they depend on the item or the state."""
        ...


@runtime_checkable
class HasOracle(Protocol):
    def oracle(self) -> str:
        """Return the next action of a solution from the present state.

        A class whose oracle follows one fixed path and fails off that path sets `oracle_recovers = False`.
        Such an oracle is not used for demonstrations with injected mistakes.
        """


@runtime_checkable
class HasThought(Protocol):
    def thought(self) -> str:
        """Return the reasoning behind the current oracle() action, using only what the player has seen."""


@runtime_checkable
class HasStateKey(Protocol):
    def state_key(self) -> str:
        """Return a key of the state. Equal keys mean equal states of the same item."""


@runtime_checkable
class HasFork(Protocol):
    def fork(self) -> TextEnv:
        """Return an independent copy in the same state. A cheap environment without it is copied by `deepcopy`."""


@runtime_checkable
class HasRoles(Protocol):
    """A game of several roles. One of them is to act at any time, and step() plays its action.

    The observation is for the role that acts next, and the last one for all. `info["rewards"]` holds the rewards of the
    roles, {role: reward}; `reward` is that of the role that acted. An empty action is that of a role which is silent.
    """

    roles: ClassVar[Mapping[str, str]]
    """Instruction of each role, in the order of play."""

    def role(self) -> str:
        """Return the role whose turn it is."""


@runtime_checkable
class HasAgentGymNumbers(Protocol):
    """An environment whose items AgentGym has too, under other numbers."""

    @classmethod
    def agentgym_item(cls, number: int) -> int:
        """Return the item that AgentGym's server calls `number`, given the same settings of the environment."""

    @classmethod
    def published_item(cls, number: int) -> int:
        """Return the item that AgentGym's published lists call `number`; ConfigError if there is none here."""


@runtime_checkable
class HasRender(Protocol):
    def render(self) -> str | bytes:
        """Return a picture for people: an SVG or HTML string, or PNG bytes."""
