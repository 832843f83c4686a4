"""Record of an episode in memory, and its outcome at a shorter horizon.

No agent knows the horizon. The first 8 turns of an episode with 32 allowed are therefore those of an episode with 8.
All horizons of an evaluation are computed from the episodes of the longest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentgym_rl.agent.engines.openai import Tokens
from agentgym_rl.types import StopReason, Trajectory


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an episode that ended without an error."""

    success: bool
    reward: float
    turns: int
    truncated: bool
    tries: tuple[bool, ...] = ()
    """Success of every attempt of style reflect that ended; empty in other styles."""


@dataclass(frozen=True, slots=True)
class Record:
    """One attempt at an episode."""

    env: str
    item: int
    sample: int
    stop: StopReason
    success: bool
    rewards: tuple[float, ...]
    """One reward per turn."""
    answered: int
    """Turns that the environment answered: all, or all but the last if that step failed."""
    tokens: tuple[Tokens, ...] | None
    """Token counts of each reply. None if nothing is sampled (oracle, random play)."""
    error: str
    seconds: float
    columns: tuple[str, ...]
    tries: tuple[tuple[int, bool], ...] = ()
    """Last turn, from 1, and success of every attempt of style reflect."""
    passive_reward: float = 0.0
    """Reward of a role that never replied."""

    @property
    def key(self) -> tuple[str, int, int]:
        return self.env, self.item, self.sample

    @property
    def failed(self) -> bool:
        return self.stop is StopReason.ERROR

    def at_horizon(self, max_turns: int) -> Outcome | None:
        """Return the outcome with `max_turns` allowed, or None if the episode failed before."""
        if self.answered > max_turns or (self.failed and self.answered == max_turns):
            tries = tuple(success for turn, success in self.tries if turn <= max_turns)
            return Outcome(False, math.fsum(self.rewards[:max_turns]), max_turns, True, tries)
        if self.failed:
            return None
        tries = tuple(success for _, success in self.tries)
        reward = math.fsum(self.rewards) + self.passive_reward
        return Outcome(self.success, reward, len(self.rewards), self.stop.truncated, tries)

    def tokens_at_horizon(self, max_turns: int) -> tuple[Tokens, ...]:
        return (self.tokens or ())[:max_turns]


def record_of(
    trajectory: Trajectory,
    sample: int,
    columns: Sequence[str],
    usage: Sequence[Tokens] | None,
) -> Record:
    """Make a record. `usage` is what an API reported; a local model's tokens are counted in the same way."""
    stop = trajectory.stop or StopReason.ERROR
    # Every observation is recorded. A reply at the end is therefore one without an observation.
    unanswered = stop is StopReason.ERROR and trajectory.messages and trajectory.messages[-1].role == "assistant"
    return Record(
        trajectory.task.env,
        trajectory.task.item,
        sample,
        stop,
        trajectory.success,
        tuple(trajectory.rewards),
        trajectory.num_turns - bool(unanswered),
        tuple(usage) if usage is not None else _count_tokens(trajectory),
        trajectory.error or "",
        trajectory.seconds,
        tuple(columns),
        tuple(
            (turn, bool(info["attempt_success"]))
            for turn, info in enumerate(trajectory.infos, start=1)
            if "attempt_success" in info
        ),
        trajectory.passive_reward,
    )


def _count_tokens(trajectory: Trajectory) -> tuple[Tokens, ...] | None:
    """Return prompt and sampled tokens of each turn. As an API bills it, the prompt is all text before a reply."""
    counted: list[Tokens] = []
    lengths: dict[int, int] = {}
    prompt = completion = 0
    for message in trajectory.messages:
        length = lengths.setdefault(message.segment, message.prefix[1] if message.prefix else 0)
        if message.logprobs is not None:
            prompt, completion = prompt + length, completion + len(message.token_ids)
        if message.logprobs is not None and message.is_reply:
            counted.append(Tokens(prompt, completion, reported=True))
            prompt = completion = 0
        lengths[message.segment] = length + len(message.token_ids)
    return tuple(counted) if any(lengths.values()) else None


def usage_to_json(usage: Sequence[Tokens] | None) -> list[list[int] | None] | None:
    if usage is None:
        return None
    return [[t.prompt, t.completion, t.cached] if t.reported else None for t in usage]


def usage_from_json(rows: Any) -> list[Tokens] | None:
    if rows is None:
        return None
    return [Tokens() if row is None else Tokens(row[0], row[1], row[2], reported=True) for row in rows]


def record_from_row(row: Mapping[str, Any], trajectory: Trajectory) -> Record:
    """Make a record from a line of a trajectory file, with the metadata that `folder.Folder.write` added."""
    return record_of(trajectory, row["sample"], row["columns"], usage_from_json(row["usage"]))
