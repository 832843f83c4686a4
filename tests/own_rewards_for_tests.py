"""Reward functions of a user, named by import path in tests."""

from __future__ import annotations

from agentgym_rl.types import Group


def count_word(group: Group, word: str = "down") -> list[float]:
    """Return the share of an episode's replies that are `word`."""
    replies = [[m.content for m in t.messages if m.role == "assistant"] for t in group.trajectories]
    return [texts.count(word) / len(texts) for texts in replies]


async def per_turn(group: Group) -> list[list[float] | None]:
    """Return one score per turn, and none for the first episode."""
    return [None, *([float(k) for k in range(t.num_turns)] for t in group.trajectories[1:])]


def too_few(group: Group) -> list[float]:
    return [1.0]


def raising(group: Group) -> list[float]:
    raise RuntimeError("no connection")


def not_a_number(group: Group) -> list[float]:
    return [float("nan")] * len(group.trajectories)


A_NUMBER = 3
