"""A policy whose every state is also shown to the environment's oracle."""

from __future__ import annotations

import random

from agentgym_rl.agent.policy import EnginePolicy, Reply
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.segments import segment_tokens
from agentgym_rl.types import EnvSession, Limits, Message, Observation


class AdvisedPolicy:
    """A model with the oracle's reply beside each of its own. The oracle plays a share of the turns itself."""

    def __init__(
        self, policy: EnginePolicy, env: EnvSession, renderer: Renderer, oracle_share: float, seed: int
    ) -> None:
        self._policy, self._env, self._renderer = policy, env, renderer
        self._oracle_share, self._random = oracle_share, random.Random(seed)

    async def reply(self, messages: list[Message], observation: Observation, limits: Limits) -> Reply:
        advice = await self._env.oracle()
        if self._random.random() < self._oracle_share:
            return self._oracle_reply(messages, observation, limits, advice)
        reply = await self._policy.reply(messages, observation, limits)
        if reply.action is not None:
            reply.action.advice = advice
        return reply

    def _oracle_reply(self, messages: list[Message], observation: Observation, limits: Limits, advice: str) -> Reply:
        """Return the advice as a reply: with ids, because later turns follow it, and without log-probabilities."""
        observed = self._policy.unanswered(messages, observation, limits)
        segment = observed[-1].segment
        action = Message("assistant", advice, self._renderer.reply_ids(advice), advice=advice, segment=segment)
        num_tokens = len(segment_tokens([*messages, *observed, action], segment))
        if not observed[-1].token_ids or num_tokens > limits.max_context:
            return Reply(observed, None, "max_context")
        return Reply(observed, action)

    def unanswered(self, messages: list[Message], observation: Observation, limits: Limits) -> list[Message]:
        return self._policy.unanswered(messages, observation, limits)

    async def close(self) -> None:
        await self._policy.close()
