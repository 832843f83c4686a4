"""Agent styles: additions to the environment's instruction, and the format of actions.

A style is an instruction text, the name of an action format that the pool parses, and a wrapper around the session.
Only `rollout` alternates policy and environment; for it, `reflect` is an environment with several attempts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from agentgym_rl.agent.session_wrapper import ForkableSession, SessionWrapper
from agentgym_rl.common.thoughts import split_thought
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import EnvSession, Step, ToolCall


@dataclass(frozen=True, slots=True)
class Style:
    """Instruction text, action format and number of attempts."""

    suffix: str = ""
    """Added to the environment's instruction."""
    action_format: str = "plain"
    """Name of the pool's format that turns replies into actions."""
    written: str = "{action}"
    """Template of a reply in that format, for policies with an action and perhaps a thought (oracle, random play)."""
    encode: Callable[[str], str] = str
    """Function from an action to its text in that template."""
    attempts: int = 1
    """Attempts at an item. Each after the first starts with a written reflection."""

    def write(self, action: str, thought: str = "") -> str:
        return self.written.format(action=self.encode(action), thought=thought or _NO_THOUGHT)

    def wrap(
        self,
        env: EnvSession,
        turns_per_attempt: int | None = None,
        attempts: int | None = None,
        retry: Literal["failure", "always"] = "failure",
    ) -> EnvSession:
        """Return `env` wrapped for this style. `attempts` replaces the style's own number, `retry` says when."""
        styled = StyledSession(env, self)
        if self.attempts == 1:
            return styled
        if turns_per_attempt is None:
            raise ConfigError("a style with several attempts needs turns_per_attempt, got none: set it")
        return ReflectSession(styled, attempts or self.attempts, turns_per_attempt, retry)


_REACT = "Thought: {thought}\nAction: {action}"
_NO_THOUGHT = "This is the next step."


def _function_call(action: str) -> str:
    """Return an action as the format `function_call` reads it. Underscores of a name would become spaces."""
    name, _, rest = action.partition(" ")
    if "_" in name:
        name, rest = "", action
    return json.dumps({"name": name, "arguments": {"rest": rest} if rest else {}}, ensure_ascii=False)


STYLES: dict[str, Style] = {
    "act": Style(),
    "react": Style(action_format="react", written=_REACT),
    "tool": Style(action_format="tool"),
    "function_call": Style(
        action_format="function_call", written="<tool_call>{action}</tool_call>", encode=_function_call
    ),
    "code": Style(action_format="code", written="```\n{action}\n```"),
    "plan": Style(
        suffix=(
            "In your first reply, write a short numbered plan for the whole task in your thought, then the first "
            "action. In later replies, say which step of the plan you are at, and change the plan when what you see "
            "contradicts it."
        ),
        action_format="react",
        written=_REACT,
    ),
    "reflect": Style(
        suffix=(
            "You may have several attempts. When one fails you are asked for a reflection: reply with what went wrong "
            "and what to do differently, without an action. The task then starts again from the beginning."
        ),
        action_format="react",
        written=_REACT,
        attempts=3,
    ),
}


class StyledSession(SessionWrapper):
    """A session with the style's instruction text and action format."""

    def __init__(self, env: EnvSession, style: Style) -> None:
        super().__init__(env)
        self.instruction = "\n\n".join(text for text in (env.instruction, style.suffix) if text)
        self._style = style

    async def actions(self) -> list[str]:
        return [self._style.write(action) for action in await self._env.actions()]

    async def oracle(self) -> str:
        thought, action = await self._env.advice()
        if self._style.action_format not in ("plain", "tool"):  # other formats have a place of their own for it
            leading, action = split_thought(action)
            thought = thought or leading
        return self._style.write(action, thought)

    async def advice(self) -> tuple[str, str]:
        return await self._env.advice() if self.tools else ("", await self.oracle())

    async def fork(self) -> object | None:
        return await self._env.fork() if isinstance(self._env, ForkableSession) else None

    async def resume(self, copy: object) -> None:
        assert isinstance(self._env, ForkableSession)
        await self._env.resume(copy)


_ASK = (
    "Attempt {attempt} of {attempts} failed. Reply with a short reflection: what went wrong, and what will you do "
    "differently? Then the task starts again."
)
_ASK_AGAIN = (
    "Attempt {attempt} of {attempts} is over. Reply with a short reflection: was it right, and what will you do "
    "differently? Then the task starts again, and only the last attempt counts."
)
_PLAIN_REFLECTION = "I will start again and choose other actions."


class ReflectSession(SessionWrapper):
    """Several attempts at one item as one episode, with a written reflection between them.

    An attempt fails when the environment ends it without success or when its turns are used up. The next reply is then
    the reflection. It remains in the conversation, which the next attempt continues. With `retry` "always" every
    attempt but the last is followed by another, right or wrong, so that an agent can also spoil what was right.

    The episode is rewarded once, on its last turn, with the sum of the last attempt's rewards. Failed attempts earn
    nothing, else failing first would be worth more than succeeding at once. The environment's reward of each turn is in
    `info["env_reward"]`. `info["attempt"]` counts from 1, `info["reflection"]` marks reflections,
    and `info["attempt_success"]` is on the last turn of every attempt.
    """

    def __init__(
        self,
        env: EnvSession,
        attempts: int,
        turns_per_attempt: int,
        retry: Literal["failure", "always"] = "failure",
    ) -> None:
        if attempts < 1 or turns_per_attempt < 1:
            raise ConfigError(
                f"attempts and turns_per_attempt must be 1 or more, got {attempts} and {turns_per_attempt}"
            )
        super().__init__(env)
        self._attempts = attempts
        self._turns_per_attempt = turns_per_attempt
        self._retry = retry
        self._item = -1
        self._attempt = 1
        self._rewards: list[float] = []
        self._reflecting = False

    async def reset(self, item: int) -> Step:
        self._item = item
        self._attempt = 1
        return await self._start()

    async def step(self, text: str) -> Step:
        return await self._restart() if self._reflecting else self._played(await self._env.step(text))

    async def call(self, calls: list[ToolCall], message: str = "") -> Step:
        return await self._restart() if self._reflecting else self._played(await self._env.call(calls, message))

    def _played(self, step: Step) -> Step:
        self._rewards.append(step.reward)
        info = {**step.info, "attempt": self._attempt, "env_reward": step.reward}
        over = step.done or len(self._rewards) == self._turns_per_attempt
        if not over:
            return replace(step, reward=0.0, info=info)
        total = math.fsum(self._rewards)
        succeeded = step.done and bool(step.info.get("success", total >= 1.0))
        info["attempt_success"] = succeeded
        if (succeeded and self._retry == "failure") or self._attempt == self._attempts:
            return replace(step, reward=total, done=True, info={**info, "success": succeeded})
        self._reflecting = True
        if "state_key" in info:
            info["state_key"] = f"reflection {self._attempt}: {info['state_key']}"
        info.pop("success", None)
        ask = (_ASK if self._retry == "failure" else _ASK_AGAIN).format(attempt=self._attempt, attempts=self._attempts)
        return Step(f"{step.observation}\n\n{ask}", reward=0.0, done=False, info=info)

    async def actions(self) -> list[str]:
        return [_PLAIN_REFLECTION] if self._reflecting else await self._env.actions()

    async def oracle(self) -> str:
        return _PLAIN_REFLECTION if self._reflecting else await self._env.oracle()

    async def advice(self) -> tuple[str, str]:
        return "", await self.oracle()

    async def _start(self) -> Step:
        self._rewards = []
        self._reflecting = False
        return await self._env.reset(self._item)

    async def _restart(self) -> Step:
        info = {"attempt": self._attempt, "reflection": True, "valid": True}
        self._attempt += 1
        first = await self._start()
        return replace(first, reward=0.0, info={**first.info, **info})
