"""Who answers an observation: an engine's model, an oracle, chance, a script, a person, or a chat API.

A policy object plays one episode. It is given the conversation so far and the new observation, and returns the messages
to append; only `EnginePolicy` attaches token ids and log-probabilities, so only its replies can be trained on.
"""

from __future__ import annotations

import math
import random
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from agentgym_rl.agent.engines.base import Engine
from agentgym_rl.agent.engines.openai import Chat, ContextOverflow
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.common.seeds import stable_seed
from agentgym_rl.errors import EngineError, EnvError
from agentgym_rl.types import Completion, EnvSession, Limits, Message, Sampling

MAX_OBSERVATION_CHARS = 1 << 22
"""Longer observations are cut before anything is done with them."""


@dataclass(slots=True)
class Reply:
    """What a policy returns for one observation."""

    observation: list[Message]
    """The messages the observation became: the system message too on the first turn."""
    action: Message | None
    """None only when there was no room to reply."""
    finish: Literal["stop", "length", "max_context"] = "stop"
    """`stop`: a whole reply. `length`: cut at max_new_tokens. `max_context`: cut by, or not begun for, want of room."""


class Policy(Protocol):
    """Plays one episode."""

    async def reply(self, messages: list[Message], observation: str, limits: Limits) -> Reply: ...

    def unanswered(self, messages: list[Message], observation: str, limits: Limits) -> list[Message]:
        """The messages of an observation that the horizon leaves unanswered; with ids if replies have them, so that a
        critic can say what the state was worth."""
        ...

    async def close(self) -> None: ...


PolicyFactory = Callable[[EnvSession, int], Policy]
"""(the episode's session, the episode's seed) -> a policy for that episode."""


def observed(observation: str, max_chars: int = MAX_OBSERVATION_CHARS) -> Message:
    """Return the observation as a message, cut to `max_chars` with a last line that says so."""
    cut_chars = len(observation) - max_chars
    if cut_chars <= 0:
        return Message("user", observation)
    return Message("user", f"{observation[:max_chars]}\n[{cut_chars} characters cut]", cut_chars=cut_chars)


def heard(
    messages: list[Message], instruction: str, observation: str, max_chars: int = MAX_OBSERVATION_CHARS
) -> list[Message]:
    """The messages an observation becomes: the instruction goes before the first one."""
    news = observed(observation, max_chars)
    return [Message("system", instruction), news] if instruction and not messages else [news]


class EnginePolicy:
    """A model behind an engine. What it sampled is kept as ids and never decoded and encoded again.

    `sampling.seed` is the episode's seed (each turn derives its own); `sampling.max_new_tokens` gives way to the
    episode's limits, `sampling.stop_token_ids` to the renderer's.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        sampling: Sampling,
        session_id: str | None = None,
        *,
        instruction: str = "",
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._sampling = sampling
        self._session_id = session_id or uuid.uuid4().hex
        self._instruction = instruction

    async def reply(self, messages: list[Message], observation: str, limits: Limits) -> Reply:
        news = self._news(messages, observation, limits)
        read = self._tokenized(messages, news)
        prompt_ids = [token for message in [*messages, *read] for token in message.token_ids]
        room = limits.max_context - len(prompt_ids)
        if room < 1:
            # Nobody read this observation, so it keeps no ids: an episode never holds more than max_context.
            return Reply(news, None, "max_context")
        seed = self._sampling.seed
        sampling = replace(
            self._sampling,
            max_new_tokens=min(limits.max_new_tokens, room),
            stop_token_ids=self._renderer.stop_token_ids,
            seed=None if seed is None else stable_seed(seed, len(messages)),
        )
        completion = await self._engine.generate(prompt_ids, sampling, self._session_id)
        _check(completion, sampling)
        action = Message(
            "assistant",
            self._renderer.decode(completion.token_ids),
            list(completion.token_ids),
            list(completion.logprobs),
            completion.version,
        )
        if completion.finish == "length" and room < limits.max_new_tokens:
            return Reply(read, action, "max_context")
        return Reply(read, action, completion.finish)

    def unanswered(self, messages: list[Message], observation: str, limits: Limits) -> list[Message]:
        news = self._news(messages, observation, limits)
        read = self._tokenized(messages, news)
        return read if sum(len(m.token_ids) for m in [*messages, *read]) <= limits.max_context else news

    async def close(self) -> None:
        await self._engine.release(self._session_id)

    def _news(self, messages: list[Message], observation: str, limits: Limits) -> list[Message]:
        """The observation's messages, cut to what could fit if every token of it were the vocabulary's longest."""
        room = max(1, limits.max_context - sum(len(message.token_ids) for message in messages))
        max_chars = min(MAX_OBSERVATION_CHARS, room * self._renderer.max_token_chars)
        return heard(messages, self._instruction, observation, max_chars)

    def _tokenized(self, messages: list[Message], news: list[Message]) -> list[Message]:
        if not messages:
            return self._renderer.opening(news)
        ids = self._renderer.follow_up(news[0].content)
        if messages[-1].token_ids[-1] not in self._renderer.stop_token_ids:
            # A stop string ended the reply: its end of turn was not sampled, so it belongs to the observation.
            ids = [self._renderer.end_of_turn, *ids]
        return [replace(news[0], token_ids=ids)]


def _check(completion: Completion, sampling: Sampling) -> None:
    count = len(completion.token_ids)
    if not 1 <= count <= sampling.max_new_tokens:
        raise EngineError(f"the engine must sample 1 to {sampling.max_new_tokens} tokens, it returned {count}")
    if len(completion.logprobs) != count or not all(math.isfinite(p) for p in completion.logprobs):
        raise EngineError(
            f"the engine must return one finite log-probability a token, for {count} tokens it returned "
            f"{completion.logprobs[:4]}... ({len(completion.logprobs)})"
        )


class _WordsPolicy(ABC):
    """Base of the policies that answer in words: no ids, no log-probabilities, nothing to train on."""

    instruction = ""

    @abstractmethod
    async def words(self, observation: str) -> str:
        """The reply to `observation`."""

    async def reply(self, messages: list[Message], observation: str, limits: Limits) -> Reply:
        words = await self.words(observation)
        return Reply(heard(messages, self.instruction, observation), Message("assistant", words))

    def unanswered(self, messages: list[Message], observation: str, limits: Limits) -> list[Message]:
        return heard(messages, self.instruction, observation)

    async def close(self) -> None:
        return None


class OraclePolicy(_WordsPolicy):
    """Plays the environment's own solution."""

    def __init__(self, env: EnvSession) -> None:
        self._env = env
        self.instruction = env.instruction

    async def words(self, observation: str) -> str:
        return await self._env.oracle()


class RandomPolicy(_WordsPolicy):
    """Plays uniformly among the actions that make sense."""

    def __init__(self, env: EnvSession, seed: int) -> None:
        self._env = env
        self._random = random.Random(seed)
        self.instruction = env.instruction

    async def words(self, observation: str) -> str:
        actions = await self._env.actions()
        if not actions:
            raise EnvError(f"random play needs at least one action, {self._env.name} offers none in this state")
        return self._random.choice(actions)


class ScriptedPolicy(_WordsPolicy):
    """Says the given replies one after the other."""

    def __init__(self, replies: Iterable[str], instruction: str = "") -> None:
        self._replies = list(replies)
        self._said = 0
        self.instruction = instruction

    async def words(self, observation: str) -> str:
        if self._said == len(self._replies):
            raise EngineError(f"the script has {self._said} replies and the episode asks for one more")
        self._said += 1
        return self._replies[self._said - 1]


class HumanPolicy(_WordsPolicy):
    """A person at a terminal: `ask(observation)` shows it and returns what was typed."""

    def __init__(self, ask: Callable[[str], str], instruction: str = "") -> None:
        self._ask = ask
        self.instruction = instruction

    async def words(self, observation: str) -> str:
        # Blocks the event loop on purpose: nothing else is played meanwhile, and Ctrl-C reaches a waiting input().
        return self._ask(observation)


class ChatPolicy:
    """A model behind an OpenAI-compatible chat API. Its tokens are not known, so it can be evaluated, not trained."""

    def __init__(self, client: Chat, sampling: Sampling, *, instruction: str = "") -> None:
        self._client = client
        self._sampling = sampling
        self._instruction = instruction
        self._context_tokens = 0

    async def reply(self, messages: list[Message], observation: str, limits: Limits) -> Reply:
        news = heard(messages, self._instruction, observation)
        room = limits.max_context - self._context_tokens
        if room < 1:
            return Reply(news, None, "max_context")
        seed = self._sampling.seed
        sampling = replace(
            self._sampling,
            max_new_tokens=min(limits.max_new_tokens, room),
            seed=None if seed is None else stable_seed(seed, len(messages)),
        )
        try:
            answer = await self._client.complete([*messages, *news], sampling)
        except ContextOverflow:
            return Reply(news, None, "max_context")
        self._context_tokens = answer.context_tokens
        action = Message("assistant", answer.content)
        if answer.cut:
            return Reply(news, action, "max_context" if room < limits.max_new_tokens else "length")
        return Reply(news, action)

    def unanswered(self, messages: list[Message], observation: str, limits: Limits) -> list[Message]:
        return heard(messages, self._instruction, observation)

    async def close(self) -> None:
        return None
