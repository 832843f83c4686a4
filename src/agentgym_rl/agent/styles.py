"""Ways of playing: what the agent is told on top of the environment's instruction, and how it writes its actions.

A style never alternates policy and environment (only `rollout` does). It is words, the name of an action format that
the pool parses, and a wrapper around the session; `reflect` is an environment of several attempts as far as the loop
can tell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from agentgym_rl.errors import ConfigError
from agentgym_rl.types import EnvSession, Step


@dataclass(frozen=True, slots=True)
class Style:
    suffix: str = ""
    """Added to the environment's instruction."""
    action_format: str = "plain"
    """How replies become actions: the name of a format that the pool is opened with."""
    written: str = "{action}"
    """How a policy that knows an action and perhaps a thought (oracle, random play) writes a reply in that format."""
    attempts: int = 1
    """Tries at an item; from the second on, a written reflection comes first."""

    def write(self, action: str, thought: str = "") -> str:
        return self.written.format(action=action, thought=thought or _NO_THOUGHT)

    def wrap(self, env: EnvSession, turns_per_attempt: int | None = None) -> EnvSession:
        """`env` as it is played in this style."""
        styled = StyledSession(env, self)
        if self.attempts == 1:
            return styled
        if turns_per_attempt is None:
            raise ConfigError("a style of several attempts needs turns_per_attempt, got none: set it")
        return ReflectSession(styled, self.attempts, turns_per_attempt)


_REACT = "Thought: {thought}\nAction: {action}"
_NO_THOUGHT = "This is the next step."

STYLES: dict[str, Style] = {
    "act": Style(),
    "react": Style(action_format="react", written=_REACT),
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


class StyledSession:
    """A session with the style's words in its instruction and its actions written in the style's format."""

    def __init__(self, env: EnvSession, style: Style) -> None:
        self.name = env.name
        self.instruction = "\n\n".join(text for text in (env.instruction, style.suffix) if text)
        self._env = env
        self._style = style

    async def reset(self, item: int) -> Step:
        return await self._env.reset(item)

    async def step(self, text: str) -> Step:
        return await self._env.step(text)

    async def actions(self) -> list[str]:
        return [self._style.write(action) for action in await self._env.actions()]

    async def oracle(self) -> str:
        thought, action = await self._env.advice()
        return self._style.write(action, thought)

    async def advice(self) -> tuple[str, str]:
        return "", await self.oracle()

    async def render(self) -> str | bytes:
        return await self._env.render()

    async def close(self) -> None:
        await self._env.close()


_ASK = (
    "Attempt {attempt} of {attempts} failed. Reply with a short reflection: what went wrong, and what will you do "
    "differently? Then the task starts again."
)
_PLAIN_REFLECTION = "I will start again and choose other actions."


class ReflectSession:
    """Several attempts at one item, with a reflection written between them, as one episode.

    An attempt fails when the environment ends it without success or when its turns are used up. Then the next reply
    is taken as the reflection; it stays in the conversation, which the next attempt continues.

    The episode is paid once, on its last turn: the sum of the last attempt's rewards. Rewards of failed attempts are
    not paid (they would make failing first worth more than succeeding at once); what the environment gave on each turn
    is in `info["env_reward"]`. `info["attempt"]` counts from 1, `info["reflection"]` marks reflections.
    """

    def __init__(self, env: EnvSession, attempts: int, turns_per_attempt: int) -> None:
        if attempts < 1 or turns_per_attempt < 1:
            raise ConfigError(
                f"attempts and turns_per_attempt must be 1 or more, got {attempts} and {turns_per_attempt}"
            )
        self.name = env.name
        self.instruction = env.instruction
        self._env = env
        self._attempts = attempts
        self._turns_per_attempt = turns_per_attempt
        self._item = -1
        self._attempt = 1
        self._rewards: list[float] = []
        self._reflecting = False

    async def reset(self, item: int) -> Step:
        self._item = item
        self._attempt = 1
        return await self._start()

    async def step(self, text: str) -> Step:
        if self._reflecting:
            return await self._restart()
        step = await self._env.step(text)
        self._rewards.append(step.reward)
        info = {**step.info, "attempt": self._attempt, "env_reward": step.reward}
        over = step.done or len(self._rewards) == self._turns_per_attempt
        if not over:
            return replace(step, reward=0.0, info=info)
        total = math.fsum(self._rewards)
        succeeded = step.done and bool(step.info.get("success", total >= 1.0))
        if succeeded or self._attempt == self._attempts:
            return replace(step, reward=total, done=True, info={**info, "success": succeeded})
        self._reflecting = True
        if "state_key" in info:
            info["state_key"] = f"reflection {self._attempt}: {info['state_key']}"
        info.pop("success", None)
        ask = _ASK.format(attempt=self._attempt, attempts=self._attempts)
        return Step(f"{step.observation}\n\n{ask}", reward=0.0, done=False, info=info)

    async def actions(self) -> list[str]:
        return [_PLAIN_REFLECTION] if self._reflecting else await self._env.actions()

    async def oracle(self) -> str:
        return _PLAIN_REFLECTION if self._reflecting else await self._env.oracle()

    async def advice(self) -> tuple[str, str]:
        return "", await self.oracle()

    async def render(self) -> str | bytes:
        return await self._env.render()

    async def close(self) -> None:
        await self._env.close()

    async def _start(self) -> Step:
        self._rewards = []
        self._reflecting = False
        return await self._env.reset(self._item)

    async def _restart(self) -> Step:
        info = {"attempt": self._attempt, "reflection": True, "valid": True}
        self._attempt += 1
        first = await self._start()
        return replace(first, reward=0.0, info={**first.info, **info})
