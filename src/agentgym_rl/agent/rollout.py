"""The agent loop: the only function that alternates policy and environment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from numbers import Real
from typing import Any

from agentgym_rl.agent.policy import Policy, observation_messages
from agentgym_rl.errors import EnvError
from agentgym_rl.types import (
    EPISODE_TIMEOUT,
    MAX_REWARD,
    EnvSession,
    Limits,
    Observation,
    Step,
    StopReason,
    Task,
    Trajectory,
)

_ENDINGS = {"length": StopReason.LENGTH, "max_context": StopReason.MAX_CONTEXT}


async def rollout(
    task: Task,
    env: EnvSession,
    policy: Policy,
    limits: Limits,
    *,
    id: str,  # noqa: A002 - the name of the field it fills
    timeout_s: float | None = None,
    truncate: bool = False,
    before_play: Callable[[], Awaitable[None] | None] | None = None,
) -> Trajectory:
    """Play one episode to a named ending and close the policy. The caller closes `env`.

    A failure, or the deadline `timeout_s`, ends the episode as ERROR with the turns played so far. With `truncate` the
    deadline ends it as TIMEOUT, which may be trained on. Only a cancellation is raised. `before_play` is called
    between the reset and the first reply. If it returns an awaitable, the wait counts neither for the deadline nor for
    `seconds`.
    """
    trajectory = Trajectory(id=id, task=task, horizon=limits.max_turns, tools=env.tools)
    now = asyncio.get_running_loop().time
    started = now()
    try:
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                step = _checked(await env.reset(task.item), task)
                trajectory.tools = list(env.tools)  # they may depend on the item
                if before_play is not None and (waiting := before_play()) is not None:
                    started += await _wait(waiting, deadline)
                trajectory.stop = await _play(trajectory, step, env, policy, limits)
        finally:
            await policy.close()
    except Exception as error:
        trajectory.stop = StopReason.ERROR
        trajectory.error = f"{type(error).__name__}: {error}"
        if isinstance(error, TimeoutError) and deadline.expired():
            trajectory.error = f"{EPISODE_TIMEOUT}: the episode did not end within {timeout_s:g} s"
            if truncate:
                trajectory.stop, trajectory.error = StopReason.TIMEOUT, None
    trajectory.seconds = now() - started
    return trajectory


async def _wait(waiting: Awaitable[None], deadline: asyncio.Timeout) -> float:
    """Await `waiting` and move the deadline by the time it took, which is returned in seconds."""
    loop, end = asyncio.get_running_loop(), None if deadline.expired() else deadline.when()
    started = loop.time()
    if end is not None:
        deadline.reschedule(None)
    await waiting
    waited_s = loop.time() - started
    if end is not None:
        deadline.reschedule(end + waited_s)
    return waited_s


async def _play(trajectory: Trajectory, step: Step, env: EnvSession, policy: Policy, limits: Limits) -> StopReason:
    task, messages = trajectory.task, trajectory.messages
    # The observation without a reply so far. It is recorded even if no reply follows.
    pending: Observation | None = step.observation
    try:
        while not step.done:
            if trajectory.num_turns >= limits.max_turns:
                messages += policy.unanswered(messages, observed(step), limits)
                pending = None
                return StopReason.MAX_TURNS
            reply = await policy.reply(messages, observed(step), limits)
            messages += reply.observation
            pending = None
            if reply.action is None:
                return _ENDINGS[reply.finish]
            messages.append(reply.action)
            # Added before the step, so that every turn has a reward and an info even if the step fails.
            trajectory.rewards.append(0.0)
            trajectory.infos.append(_info({}, step.info))
            if reply.finish != "stop":
                return _ENDINGS[reply.finish]
            state = step.info
            calls = reply.action.tool_calls
            answer = env.step(reply.action.content) if calls is None else env.call(calls, reply.action.content)
            step = _checked(await answer, task)
            pending = observed(step)
            trajectory.rewards[-1] = float(step.reward)
            trajectory.infos[-1] = _info(step.info, state)
        return StopReason.DONE
    finally:
        if pending is not None:
            messages += observation_messages(messages, "", pending)


def observed(step: Step) -> Observation:
    """Return a step as a policy sees it: the results of its tool calls one by one, otherwise the text."""
    return step.results or step.observation


def _info(step_info: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Return the environment's info on a turn, with the key of the state in which the reply was given."""
    info = {key: value for key, value in step_info.items() if key != "state_key"}
    if "state_key" in state:
        info["state_key"] = state["state_key"]
    return info


def _is_plain(value: Any) -> bool:
    """Return whether JSON and UTF-8 can surely represent a value: most infos hold no others."""
    return type(value) is bool or (type(value) is str and value.isascii())


def _checked(step: Step, task: Task) -> Step:
    """Check a step here: a bad reward or an unprintable observation would fail far from its cause."""
    if not isinstance(step, Step):
        raise EnvError(f"{task.key} must return a Step, got {step!r:.200}")
    reward = step.reward
    if not isinstance(reward, Real) or not abs(reward) <= MAX_REWARD:  # catches NaN
        raise EnvError(f"{task.key} needs a finite reward of at most ±{MAX_REWARD:g}, got {reward!r:.200}")
    if not isinstance(step.observation, str):
        raise EnvError(f"{task.key} needs a text observation, got {step.observation!r:.200}")
    if not isinstance(step.done, bool) or not isinstance(step.info, dict):
        raise EnvError(f"{task.key} needs a bool for done and a dict for info, got {step!r:.200}")
    try:
        step.observation.encode()
        if not all(_is_plain(value) for item in step.info.items() for value in item):
            json.dumps(step.info, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise EnvError(f"{task.key} needs an observation and info that can be written as JSON: {error}") from error
    return step
