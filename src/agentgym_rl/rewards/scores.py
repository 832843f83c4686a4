"""Rewards that need no judge: shaping of format and length, and functions of the user's own.

A rewarder gets the episodes of one group, each with at least one turn, and returns one verdict for each.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from numbers import Real
from typing import Any

from agentgym_rl.common.import_paths import import_named
from agentgym_rl.errors import ConfigError
from agentgym_rl.training.reward_settings import RewardSettings
from agentgym_rl.types import MAX_REWARD, Group, Message, Trajectory, Verdict

Rewarder = Callable[[Group], Awaitable[list[Verdict]]]


def verdict(
    settings: RewardSettings, trajectory: Trajectory, score: Any, reason: str = "", cut_chars: int = 0
) -> Verdict:
    """Return a verdict. A number is paid on the last turn, a list one entry per turn; anything else is an error."""
    turns = trajectory.num_turns
    scores = list(score) if isinstance(score, list | tuple) else [0.0] * (turns - 1) + [score]
    problem = ""
    if score is None:
        problem = "no score was given"
    elif len(scores) != turns:
        problem = f"an episode of {turns} turns needs as many scores, got {len(scores)}"
    elif not all(isinstance(s, Real) and abs(float(s)) <= MAX_REWARD for s in scores):  # NaN compares false
        problem = f"a score must be a number of at most {MAX_REWARD:g}, got {score!r:.80}"
    if problem:
        return failure(settings, problem, reason)
    return Verdict(settings.source, settings.weight, [float(s) for s in scores], reason, cut_chars=cut_chars)


def failure(settings: RewardSettings, error: str, reason: str = "") -> Verdict:
    """Return the verdict of a source that could not score an episode."""
    return Verdict(settings.source, settings.weight, [], reason, " ".join(error.split()))


def replies(trajectory: Trajectory) -> list[Message]:
    """Return the replies of the turns, K."""
    return [m for m in trajectory.messages if m.is_reply][: trajectory.num_turns]


def format_reward(settings: RewardSettings) -> Rewarder:
    """Return a rewarder that pays 1 / K for each of K replies that matches the pattern."""
    pattern = re.compile(settings.pattern, re.DOTALL)

    def scores(trajectory: Trajectory) -> list[float]:
        texts = [reply.text.strip() for reply in replies(trajectory)]
        return [bool(pattern.fullmatch(text)) / len(texts) for text in texts]

    return _each(settings, scores)


def length_reward(settings: RewardSettings) -> Rewarder:
    """Return a rewarder that takes up to 1 / K off each of K replies: nothing up to `tokens`, all at twice as many."""
    free = settings.tokens

    def scores(trajectory: Trajectory) -> list[float]:
        lengths = [len(reply.token_ids) or len(reply.text.split()) for reply in replies(trajectory)]
        return [-min(1.0, max(0.0, (length - free) / free)) / len(lengths) for length in lengths]

    return _each(settings, scores)


def environment_reward(settings: RewardSettings) -> Rewarder:
    """Return a rewarder that repeats the environment's own rewards, which gives them a weight."""
    return _each(settings, lambda trajectory: list(trajectory.rewards))


def _each(settings: RewardSettings, scores: Callable[[Trajectory], list[float]]) -> Rewarder:
    async def reward(group: Group) -> list[Verdict]:
        return [verdict(settings, trajectory, scores(trajectory)) for trajectory in group.trajectories]

    return reward


def import_function(path: str) -> Callable[..., Any]:
    """Return the function of the user's own that `my_module:function` names."""
    where = f"reward {path!r}"
    function = import_named(path, where, "a function of your own", "my_module:my_reward", Callable)
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"{where}: it must name a function, got {type(function).__name__} {function!r:.60}")
    return function


def own_reward(settings: RewardSettings) -> Rewarder:
    """Return a rewarder that calls the user's function with the group and `kwargs`.

    The function returns one entry per episode: a number, a list with one number per turn, or None to leave the episode
    out.
    """
    function = import_function(settings.kind)
    definition = "def my_reward(group: Group) -> list[float | list[float] | None]"
    try:
        inspect.signature(function).bind(None, **settings.kwargs)
    except TypeError as error:
        raise ConfigError(
            f"reward {settings.kind!r}: it is called with a group and kwargs = {settings.kwargs}, which does not fit "
            f"({error}): write `{definition}`"
        ) from error
    return function_reward(settings, function)


def function_reward(settings: RewardSettings, function: Callable[..., Any]) -> Rewarder:
    """Return a rewarder that calls `function`. If it raises, no episode of the group is trained on."""
    one_at_a_time = asyncio.Lock()

    async def reward(group: Group) -> list[Verdict]:
        count = len(group.trajectories)
        try:
            if inspect.iscoroutinefunction(function):
                returned = await function(group, **settings.kwargs)
            else:  # in a thread, because it may wait for something
                async with one_at_a_time:
                    returned = await asyncio.to_thread(function, group, **settings.kwargs)
        except Exception as error:
            problem = f"{settings.kind} raised {type(error).__name__}: {error}"
            return [failure(settings, problem) for _ in range(count)]
        if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != count:
            shown = f"{len(returned)}" if isinstance(returned, Sequence) else f"{returned!r:.60}"
            problem = f"{settings.kind} must return a list with one score per episode, {count}, got {shown}"
            return [failure(settings, problem) for _ in range(count)]
        return [verdict(settings, t, score) for t, score in zip(group.trajectories, returned, strict=True)]

    return reward
