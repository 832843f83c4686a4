"""Policies that answer observations: an engine's model, an oracle, random play, a script, a person, or a chat API.

A policy object plays one episode. It gets the conversation so far and the new observation, and returns the messages to
append. Only `EnginePolicy` attaches token ids and log-probabilities, so only its replies can be trained on.
"""

from __future__ import annotations

import math
import random
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from agentgym_rl.agent.context import ASK, FULL, SUMMARY, Context, view
from agentgym_rl.agent.engines.base import Engine
from agentgym_rl.agent.engines.openai import Chat, ContextOverflow
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.segments import attach, path
from agentgym_rl.common.seeds import stable_seed
from agentgym_rl.errors import EngineError, EnvError
from agentgym_rl.types import Completion, EnvSession, Limits, Message, Sampling

MAX_OBSERVATION_CHARS = 1 << 22
"""Longer observations are cut first."""


@dataclass(slots=True)
class Reply:
    """A policy's answer to one observation."""

    observation: list[Message]
    """Messages of the observation, on the first turn with the system message."""
    action: Message | None
    """None only if the context has no tokens left for a reply."""
    finish: Literal["stop", "length", "max_context"] = "stop"
    """`stop`: a whole reply. `length`: cut at max_new_tokens. `max_context`: cut or not started by the context
    limit."""


class Policy(Protocol):
    """Plays one episode."""

    async def reply(self, messages: list[Message], observation: str, limits: Limits) -> Reply: ...

    def unanswered(self, messages: list[Message], observation: str, limits: Limits) -> list[Message]:
        """Return the messages of an observation that the horizon leaves unanswered, with ids if replies have them, so
        that a critic can value the state."""

    async def close(self) -> None: ...


PolicyFactory = Callable[[EnvSession, int], Policy]
"""(the episode's session, the episode's seed) -> a policy for that episode."""


def observation_message(observation: str, max_chars: int = MAX_OBSERVATION_CHARS) -> Message:
    """Return the observation as a message, cut to `max_chars` with a last line that says so."""
    cut_chars = len(observation) - max_chars
    if cut_chars <= 0:
        return Message("user", observation)
    return Message("user", f"{observation[:max_chars]}\n[{cut_chars} characters cut]", cut_chars=cut_chars)


def observation_messages(
    messages: list[Message], instruction: str, observation: str, max_chars: int = MAX_OBSERVATION_CHARS
) -> list[Message]:
    """Return the messages of an observation. The instruction precedes the first one."""
    message = observation_message(observation, max_chars)
    return [Message("system", instruction), message] if instruction and not messages else [message]


class EnginePolicy:
    """A model behind an engine. Sampled ids are kept as they are, never decoded and encoded again.

    `sampling.seed` is the episode's seed (each turn derives its own). The episode's limits replace
    `sampling.max_new_tokens`, and the renderer's stop tokens replace `sampling.stop_token_ids`. `context` says what
    happens when the context is full. Without `train_thoughts` the loss skips the thought of every reply.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        sampling: Sampling,
        session_id: str | None = None,
        *,
        instruction: str = "",
        context: Context = FULL,
        train_thoughts: bool = True,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._sampling = sampling
        self._session_id = session_id or uuid.uuid4().hex
        self._instruction = instruction
        self._context = context
        self._train_thoughts = train_thoughts

    async def reply(self, messages: list[Message], observation: str, limits: Limits) -> Reply:
        new_messages = self._cut_observation(messages, observation, limits)
        tokenized = self._tokenized(messages, new_messages)
        prompt_ids = self._prompt(messages, tokenized)
        summary: list[Message] = []
        if self._is_full(messages, prompt_ids, limits):
            if self._context.kind == "summary":
                summary = await self._summarise(messages, limits)
                if not summary:
                    return Reply(new_messages, None, "max_context")
            tokenized, prompt_ids = self._shortened([*messages, *summary], new_messages, limits)
        free_tokens = limits.max_context - len(prompt_ids)
        if free_tokens < 1:
            # The model never sees this observation, so it gets no ids: a segment has at most max_context tokens.
            return Reply([*summary, *new_messages], None, "max_context")
        action, finish = await self._sample(prompt_ids, min(limits.max_new_tokens, free_tokens), len(messages))
        action.segment = tokenized[-1].segment
        if finish == "length" and free_tokens < limits.max_new_tokens:
            finish = "max_context"
        return Reply([*summary, *tokenized], action, finish)

    def unanswered(self, messages: list[Message], observation: str, limits: Limits) -> list[Message]:
        new_messages = self._cut_observation(messages, observation, limits)
        tokenized = self._tokenized(messages, new_messages)
        return tokenized if len(self._prompt(messages, tokenized)) <= limits.max_context else new_messages

    async def close(self) -> None:
        await self._engine.release(self._session_id)

    async def _sample(
        self, prompt_ids: list[int], max_new_tokens: int, *seed_parts: object
    ) -> tuple[Message, Literal["stop", "length", "max_context"]]:
        seed = self._sampling.seed
        sampling = replace(
            self._sampling,
            max_new_tokens=max_new_tokens,
            stop_token_ids=self._renderer.stop_token_ids,
            seed=None if seed is None else stable_seed(seed, *seed_parts),
        )
        completion = await self._engine.generate(prompt_ids, sampling, self._session_id)
        _check(completion, sampling)
        token_ids = list(completion.token_ids)
        message = Message(
            "assistant", self._renderer.decode(token_ids), token_ids, list(completion.logprobs), completion.version
        )
        if not self._train_thoughts:
            message.untrained = self._renderer.thought_length(token_ids)
        return message, completion.finish

    def _is_full(self, messages: list[Message], prompt_ids: list[int], limits: Limits) -> bool:
        """Return whether the context must be cut: there is no space for a whole reply, and a summary after it."""
        visible_turns = sum(m.is_reply for m in messages) - max((m.dropped_turns for m in messages), default=0)
        if self._context.kind == "full" or not visible_turns:
            return False
        return len(prompt_ids) + self._reserved(limits) > limits.max_context

    def _reserved(self, limits: Limits) -> int:
        if self._context.kind != "summary":
            return limits.max_new_tokens
        return limits.max_new_tokens + len(self._renderer.follow_up(ASK)) + 1 + self._context.summary_tokens

    async def _summarise(self, messages: list[Message], limits: Limits) -> list[Message]:
        """Return the request for a summary and the summary, or nothing if they do not fit into the context."""
        [ask] = self._tokenized(messages, [Message("user", ASK, purpose=SUMMARY)])
        prompt_ids = self._prompt(messages, [ask])
        max_new_tokens = min(self._context.summary_tokens, limits.max_context - len(prompt_ids))
        if max_new_tokens < 1:
            return []
        summary, _ = await self._sample(prompt_ids, max_new_tokens, len(messages), SUMMARY)
        return [ask, replace(summary, segment=ask.segment, purpose=SUMMARY)]

    def _shortened(
        self, messages: list[Message], new_messages: list[Message], limits: Limits
    ) -> tuple[list[Message], list[int]]:
        """Return the observation as the start of a shorter context, and the prompt: as many turns as fit are kept."""
        turns = sum(m.is_reply for m in messages)
        dropped = max(m.dropped_turns for m in messages)
        for kept in range(min(self._context.turns, turns - dropped - 1), -1, -1):
            cut = [replace(message, dropped_turns=turns - kept) for message in new_messages]
            tokenized = self._tokenized(messages, cut)
            prompt_ids = self._prompt(messages, tokenized)
            if len(prompt_ids) + self._reserved(limits) <= limits.max_context:
                break
        return tokenized, prompt_ids

    def _prompt(self, messages: list[Message], tokenized: list[Message]) -> list[int]:
        return path([*messages, *tokenized], tokenized[-1].segment)

    def _cut_observation(self, messages: list[Message], observation: str, limits: Limits) -> list[Message]:
        """Return the observation's messages, cut to what fits if every token were the vocabulary's longest."""
        used = 0
        if messages and self._context.kind == "full" and self._renderer.linear:
            used = len(path(messages, messages[-1].segment))
        max_chars = min(MAX_OBSERVATION_CHARS, max(1, limits.max_context - used) * self._renderer.max_token_chars)
        return observation_messages(messages, self._instruction, observation, max_chars)

    def _tokenized(self, messages: list[Message], new_messages: list[Message]) -> list[Message]:
        """Return the new messages with the tokens they add to the last segment, or as the start of a new one."""
        if not messages:
            return self._renderer.opening(new_messages)
        [message] = new_messages
        segment = messages[-1].segment
        if not self._renderer.linear or message.dropped_turns:
            asked = replace(message, purpose="")  # a request is visible only while it is answered
            prompt_ids = self._renderer.continuation(path(messages, segment), view([*messages, asked]))
            return [attach(messages, message, prompt_ids)]
        ids = self._renderer.follow_up(message.content)
        if messages[-1].token_ids[-1] not in self._renderer.stop_token_ids:
            # A stop string ended the reply, so its end-of-turn token was not sampled and belongs to the observation.
            ids = [self._renderer.end_of_turn, *ids]
        return [replace(message, token_ids=ids, segment=segment)]


def _check(completion: Completion, sampling: Sampling) -> None:
    count = len(completion.token_ids)
    if not 1 <= count <= sampling.max_new_tokens:
        raise EngineError(f"the engine must sample 1 to {sampling.max_new_tokens} tokens, it returned {count}")
    if len(completion.logprobs) != count or not all(math.isfinite(p) for p in completion.logprobs):
        raise EngineError(
            f"the engine must return one finite log-probability a token, for {count} tokens it returned "
            f"{completion.logprobs[:4]}... ({len(completion.logprobs)})"
        )


class _TextPolicy(ABC):
    """Base of policies that reply with text: without ids and log-probabilities, they cannot be trained on."""

    instruction = ""

    @abstractmethod
    async def reply_text(self, observation: str) -> str:
        """Return the reply to `observation`."""

    async def reply(self, messages: list[Message], observation: str, limits: Limits) -> Reply:
        text = await self.reply_text(observation)
        return Reply(observation_messages(messages, self.instruction, observation), Message("assistant", text))

    def unanswered(self, messages: list[Message], observation: str, limits: Limits) -> list[Message]:
        return observation_messages(messages, self.instruction, observation)

    async def close(self) -> None:
        return None


class OraclePolicy(_TextPolicy):
    """Plays the environment's own solution."""

    def __init__(self, env: EnvSession) -> None:
        self._env = env
        self.instruction = env.instruction

    async def reply_text(self, observation: str) -> str:
        return await self._env.oracle()


class RandomPolicy(_TextPolicy):
    """Plays uniformly random valid actions."""

    def __init__(self, env: EnvSession, seed: int) -> None:
        self._env = env
        self._random = random.Random(seed)
        self.instruction = env.instruction

    async def reply_text(self, observation: str) -> str:
        actions = await self._env.actions()
        if not actions:
            raise EnvError(f"random play needs at least one action, {self._env.name} offers none in this state")
        return self._random.choice(actions)


class ScriptedPolicy(_TextPolicy):
    """Gives the replies of a script in order."""

    def __init__(self, replies: Iterable[str], instruction: str = "") -> None:
        self._replies = list(replies)
        self._num_replies = 0
        self.instruction = instruction

    async def reply_text(self, observation: str) -> str:
        if self._num_replies == len(self._replies):
            raise EngineError(f"the script has {self._num_replies} replies and the episode asks for one more")
        self._num_replies += 1
        return self._replies[self._num_replies - 1]


class HumanPolicy(_TextPolicy):
    """A person at a terminal: `ask(observation)` shows the observation and returns the typed reply."""

    def __init__(self, ask: Callable[[str], str], instruction: str = "") -> None:
        self._ask = ask
        self.instruction = instruction

    async def reply_text(self, observation: str) -> str:
        # Blocks the event loop on purpose: nothing else runs meanwhile, and Ctrl-C reaches input().
        return self._ask(observation)


class ChatPolicy:
    """A model behind an OpenAI-compatible chat API. Its tokens are unknown, so it can be evaluated but not trained."""

    def __init__(self, client: Chat, sampling: Sampling, *, instruction: str = "") -> None:
        self._client = client
        self._sampling = sampling
        self._instruction = instruction
        self._context_tokens = 0

    async def reply(self, messages: list[Message], observation: str, limits: Limits) -> Reply:
        new_messages = observation_messages(messages, self._instruction, observation)
        free_tokens = limits.max_context - self._context_tokens
        if free_tokens < 1:
            return Reply(new_messages, None, "max_context")
        seed = self._sampling.seed
        sampling = replace(
            self._sampling,
            max_new_tokens=min(limits.max_new_tokens, free_tokens),
            seed=None if seed is None else stable_seed(seed, len(messages)),
        )
        try:
            answer = await self._client.complete([*messages, *new_messages], sampling)
        except ContextOverflow:
            return Reply(new_messages, None, "max_context")
        self._context_tokens = answer.context_tokens
        action = Message("assistant", answer.content)
        if answer.cut:
            return Reply(new_messages, action, "max_context" if free_tokens < limits.max_new_tokens else "length")
        return Reply(new_messages, action)

    def unanswered(self, messages: list[Message], observation: str, limits: Limits) -> list[Message]:
        return observation_messages(messages, self._instruction, observation)

    async def close(self) -> None:
        return None
