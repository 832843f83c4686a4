"""What is kept in memory of an episode, and how it would have gone under a shorter horizon.

No agent is told the horizon, so an episode of 32 turns is, turn by turn, what it would have been with 8 allowed. All
horizons of an evaluation are read off the episodes of the longest.
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
    """An episode that was played to an end which counts."""

    success: bool
    reward: float
    turns: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class Record:
    """One attempt at an episode."""

    env: str
    item: int
    sample: int
    attempt: int
    stop: StopReason
    success: bool
    rewards: tuple[float, ...]
    """One a turn."""
    answered: int
    """Turns that the environment answered: all, or all but the last where that is what failed."""
    tokens: tuple[Tokens, ...] | None
    """One a reply; None where nothing is sampled (oracle, random play)."""
    error: str
    seconds: float
    columns: tuple[str, ...]

    @property
    def key(self) -> tuple[str, int, int]:
        return self.env, self.item, self.sample

    @property
    def failed(self) -> bool:
        return self.stop is StopReason.ERROR

    def under(self, max_turns: int) -> Outcome | None:
        """How it ended with `max_turns` allowed; None when that cannot be told, because it failed before."""
        if self.answered > max_turns or (self.failed and self.answered == max_turns):
            return Outcome(False, math.fsum(self.rewards[:max_turns]), max_turns, True)
        if self.failed:
            return None
        return Outcome(self.success, math.fsum(self.rewards), len(self.rewards), self.stop.truncated)

    def tokens_under(self, max_turns: int) -> tuple[Tokens, ...]:
        return (self.tokens or ())[:max_turns]


def record_of(
    trajectory: Trajectory,
    sample: int,
    attempt: int,
    columns: Sequence[str],
    usage: Sequence[Tokens] | None,
) -> Record:
    """`usage` is what an API said it took; a local model's tokens are counted here, the same way."""
    stop = trajectory.stop or StopReason.ERROR
    # An observation is recorded even if nobody answers it, so a reply at the end is one that got none.
    unanswered = stop is StopReason.ERROR and trajectory.messages and trajectory.messages[-1].role == "assistant"
    return Record(
        trajectory.task.env,
        trajectory.task.item,
        sample,
        attempt,
        stop,
        trajectory.success,
        tuple(trajectory.rewards),
        trajectory.num_turns - bool(unanswered),
        tuple(usage) if usage is not None else _counted(trajectory),
        trajectory.error or "",
        trajectory.seconds,
        tuple(columns),
    )


def _counted(trajectory: Trajectory) -> tuple[Tokens, ...] | None:
    """What each reply read and sampled: the prompt is all that came before, as an API would bill it."""
    before, counted = 0, []
    for message in trajectory.messages:
        if message.logprobs is not None:
            counted.append(Tokens(before, len(message.token_ids), reported=True))
        before += len(message.token_ids)
    return tuple(counted) if before else None


def usage_to_json(usage: Sequence[Tokens] | None) -> list[list[int] | None] | None:
    if usage is None:
        return None
    return [[t.prompt, t.completion, t.cached] if t.reported else None for t in usage]


def usage_from_json(rows: Any) -> list[Tokens] | None:
    if rows is None:
        return None
    return [Tokens() if row is None else Tokens(row[0], row[1], row[2], reported=True) for row in rows]


def record_from_row(row: Mapping[str, Any], trajectory: Trajectory) -> Record:
    """From a line of a trajectory file: what `folder.Folder.write` put beside the episode."""
    return record_of(trajectory, row["sample"], row["attempt"], row["columns"], usage_from_json(row["usage"]))
