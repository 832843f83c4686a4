"""Policies that answer observations: an engine's model, an oracle, random play, a script, a person, or a chat API.

A policy object plays one episode. It gets the conversation so far and the new observation, and returns the messages to
append. `EnginePolicy` and proxy/external.py attach token ids and log-probabilities; no other replies can be trained on.
"""

from __future__ import annotations

import math
import random
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from agentgym_rl.agent.context_management import ASK, FULL, SUMMARY, Context, summary_request, view
from agentgym_rl.agent.engines.base import Engine
from agentgym_rl.agent.engines.openai import Chat, ContextOverflow
from agentgym_rl.agent.renderer import Renderer, Tools
from agentgym_rl.agent.segments import assign_segment, segment_tokens
from agentgym_rl.agent.tool_parsers import numbered
from agentgym_rl.common.seeds import stable_seed
from agentgym_rl.common.thoughts import CLOSE, OPEN, split_thought
from agentgym_rl.errors import EngineError, EnvError
from agentgym_rl.types import Completion, EnvSession, Limits, Message, Observation, Role, Sampling

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

    async def reply(self, messages: list[Message], observation: Observation, limits: Limits) -> Reply: ...

    def unanswered(self, messages: list[Message], observation: Observation, limits: Limits) -> list[Message]:
        """Return the messages of an observation that the horizon leaves unanswered, with ids if replies have them, so
        that a critic can value the state."""

    async def close(self) -> None: ...


PolicyFactory = Callable[[EnvSession, int], Policy]
"""(the episode's session, the episode's seed) -> a policy for that episode."""


def observation_message(observation: str, max_chars: int = MAX_OBSERVATION_CHARS, role: Role = "user") -> Message:
    """Return the observation as a message, cut to `max_chars` with a last line that says so."""
    cut_chars = len(observation) - max_chars
    if cut_chars <= 0:
        return Message(role, observation)
    return Message(role, f"{observation[:max_chars]}\n[{cut_chars} characters cut]", cut_chars=cut_chars)


def observation_messages(
    messages: list[Message], instruction: str, observation: Observation, max_chars: int = MAX_OBSERVATION_CHARS
) -> list[Message]:
    """Return the messages of an observation: one text, or the results of the last reply's calls.

    The instruction precedes the first one.
    """
    if isinstance(observation, list):
        share = max(1, max_chars // len(observation))
        results = [observation_message(result, share, "tool") for result in observation]
        for message, call in zip(results, messages[-1].tool_calls or (), strict=True):
            message.tool_call_id = call.id
        return results
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
        tools: Tools = (),
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
        self._messages: list[Message] = []
        self._token_ids: list[int] = []
        """Ids of `_messages`, the conversation so far."""
        self._tools = tools
        if tools:
            renderer.require_tools()

    async def reply(self, messages: list[Message], observation: Observation, limits: Limits) -> Reply:
        if not messages:
            self._tools = list(self._tools)  # those that the prompt shows; an observation announces later ones
        new_messages = self._cut_observation(messages, observation, limits)
        tokenized = self._tokenized(messages, new_messages)
        prompt_ids = self._prompt(messages, tokenized)
        summary: list[Message] = []
        if self._is_full(messages, prompt_ids, limits):
            if self._context.kind == "summary":
                summary = await self._summarise(messages, limits)
            tokenized, prompt_ids = self._shortened([*messages, *summary], new_messages, limits)
        free_tokens = limits.max_context - len(prompt_ids)
        if free_tokens < 1:
            # The model never sees this observation, so it gets no ids: a segment has at most max_context tokens.
            return Reply([*summary, *new_messages], None, "max_context")
        max_new_tokens = min(limits.max_new_tokens, free_tokens)
        action, finish = await self._sample(prompt_ids, max_new_tokens, self._tools, len(messages))
        action.segment = tokenized[-1].segment
        if action.tool_calls is not None:
            action.tool_calls = numbered(action.tool_calls, messages)
        if finish == "length" and free_tokens < limits.max_new_tokens:
            finish = "max_context"
        return Reply([*summary, *tokenized], action, finish)

    def unanswered(self, messages: list[Message], observation: Observation, limits: Limits) -> list[Message]:
        new_messages = self._cut_observation(messages, observation, limits)
        tokenized = self._tokenized(messages, new_messages)
        return tokenized if len(self._prompt(messages, tokenized)) <= limits.max_context else new_messages

    def take_session(self, other: EnginePolicy) -> None:
        """Continue in the engine's session of an episode that has ended, whose cache may still hold a prefix."""
        self._session_id = other._session_id

    def show_tools(self, tools: Tools) -> None:
        """Show these tools in every prompt: an episode that is continued has shown them in its first."""
        self._tools = list(tools)

    async def close(self) -> None:
        await self._engine.release(self._session_id)

    async def _sample(
        self, prompt_ids: list[int], max_new_tokens: int, tools: Tools, *seed_parts: object
    ) -> tuple[Message, Literal["stop", "length", "max_context"]]:
        seed = self._sampling.seed
        sampling = replace(
            self._sampling,
            max_new_tokens=max_new_tokens,
            stop_token_ids=self._renderer.stop_token_ids,
            seed=None if seed is None else stable_seed(seed, *seed_parts),
        )
        completion = await self._engine.generate(prompt_ids, sampling, self._session_id)
        check_completion(completion, sampling)
        token_ids = list(completion.token_ids)
        content, calls = self._renderer.read_reply(token_ids, tools)
        versions = list(completion.versions)
        message = Message(
            "assistant", content, token_ids, list(completion.logprobs), completion.version, versions, tool_calls=calls
        )
        if not self._train_thoughts:
            message.untrained = self._renderer.thought_length(token_ids)
        return message, completion.finish

    def _is_full(self, messages: list[Message], prompt_ids: list[int], limits: Limits) -> bool:
        """Return whether the context must be cut: there is no space for a whole reply, and a summary after it."""
        if self._context.kind == "full":
            return False
        visible_turns = sum(m.is_reply for m in messages) - max((m.dropped_turns for m in messages), default=0)
        return visible_turns != 0 and len(prompt_ids) + self._reserved(limits) > limits.max_context

    def _reserved(self, limits: Limits) -> int:
        if self._context.kind != "summary":
            return limits.max_new_tokens
        return limits.max_new_tokens + len(self._renderer.follow_up(ASK)) + 1 + self._context.summary_tokens

    async def _summarise(self, messages: list[Message], limits: Limits) -> list[Message]:
        """Return the request for a summary and the summary, or nothing if they do not fit into the context.

        Without them turns are left out as by `window`.
        """
        request = self._tokenized(messages, summary_request(messages))
        prompt_ids = self._prompt(messages, request)
        max_new_tokens = min(self._context.summary_tokens, limits.max_context - len(prompt_ids))
        if max_new_tokens < 1:
            return []
        summary, _ = await self._sample(prompt_ids, max_new_tokens, (), len(messages), SUMMARY)
        return [*request, replace(summary, segment=request[-1].segment, purpose=SUMMARY)]

    def _shortened(
        self, messages: list[Message], new_messages: list[Message], limits: Limits
    ) -> tuple[list[Message], list[int]]:
        """Return the observation as the start of a shorter context, and the prompt: as many turns as fit are kept."""
        turns = sum(m.is_reply for m in messages)
        dropped = max(m.dropped_turns for m in messages)
        for kept in range(min(self._context.turns, turns - dropped - 1), -1, -1):
            cut = [*new_messages[:-1], replace(new_messages[-1], dropped_turns=turns - kept)]
            tokenized = self._tokenized(messages, cut)
            prompt_ids = self._prompt(messages, tokenized)
            if len(prompt_ids) + self._reserved(limits) <= limits.max_context:
                break
        return tokenized, prompt_ids

    def _prompt(self, messages: list[Message], tokenized: list[Message]) -> list[int]:
        if not self._is_linear:
            return segment_tokens([*messages, *tokenized], tokenized[-1].segment)
        prompt_ids = list(self._ids_of(messages))
        for message in tokenized:
            prompt_ids += message.token_ids
        return prompt_ids

    @property
    def _is_linear(self) -> bool:
        """Whether the conversation only grows, so that it is one segment."""
        return self._renderer.linear and self._context.kind == "full"

    def _cut_observation(self, messages: list[Message], observation: Observation, limits: Limits) -> list[Message]:
        """Return the observation's messages, cut to what fits if every token were the vocabulary's longest."""
        used = 0
        if self._is_linear:
            used = len(self._ids_of(messages))
        max_chars = min(MAX_OBSERVATION_CHARS, max(1, limits.max_context - used) * self._renderer.max_token_chars)
        return observation_messages(messages, self._instruction, observation, max_chars)

    def _ids_of(self, messages: list[Message]) -> list[int]:
        """Return the ids of the conversation, which grows from turn to turn: only new messages are read."""
        known = len(self._messages)
        if known > len(messages) or (known and messages[known - 1] is not self._messages[-1]):
            self._messages, self._token_ids, known = [], [], 0
        for message in messages[known:]:
            self._messages.append(message)
            self._token_ids += message.token_ids
        return self._token_ids

    def _tokenized(self, messages: list[Message], new_messages: list[Message]) -> list[Message]:
        """Return the new messages with the tokens they add to the last segment, or as the start of a new one."""
        if not messages:
            return self._renderer.opening(new_messages, self._tools)
        *others, last = new_messages
        segment = messages[-1].segment
        if not self._renderer.linear or last.dropped_turns:
            asked = [replace(message, purpose="") for message in new_messages]  # visible only while it is answered
            conversation = view([*messages, *asked])
            if self._renderer.linear:
                prompt_ids = self._renderer.linear_prompt(conversation, self._tools)
            else:
                prompt_ids = self._renderer.continuation(segment_tokens(messages, segment), conversation, self._tools)
            return [*others, assign_segment(messages, last, prompt_ids)]
        ids = self._renderer.observation_ids(new_messages)
        if messages[-1].token_ids[-1] not in self._renderer.stop_token_ids:
            # A stop string ended the reply, so its end-of-turn token was not sampled and belongs to the observation.
            ids = [self._renderer.end_of_turn, *ids]
        # The ids of several results cannot be separated: some templates write them as one turn.
        return [*others, replace(last, token_ids=ids, segment=segment)]


def check_completion(completion: Completion, sampling: Sampling) -> None:
    """Raise EngineError unless an engine kept to its protocol."""
    count = len(completion.token_ids)
    if not 1 <= count <= sampling.max_new_tokens:
        raise EngineError(f"the engine must sample 1 to {sampling.max_new_tokens} tokens, it returned {count}")
    if len(completion.logprobs) != count or not math.isfinite(sum(completion.logprobs)):
        raise EngineError(
            f"the engine must return one finite log-probability a token, for {count} tokens it returned "
            f"{completion.logprobs[:4]}... ({len(completion.logprobs)})"
        )


class TextPolicy(ABC):
    """Base of policies that reply with text: without ids and log-probabilities, they cannot be trained on."""

    instruction = ""

    @abstractmethod
    async def reply_text(self, observation: str) -> str:
        """Return the reply to `observation`."""

    async def reply(self, messages: list[Message], observation: Observation, limits: Limits) -> Reply:
        text = await self.reply_text(observation if isinstance(observation, str) else "\n".join(observation))
        new_messages = observation_messages(messages, self.instruction, observation)
        return Reply(new_messages, self._message(text, messages))

    def unanswered(self, messages: list[Message], observation: Observation, limits: Limits) -> list[Message]:
        return observation_messages(messages, self.instruction, observation)

    def _message(self, text: str, messages: list[Message]) -> Message:
        return Message("assistant", text)

    async def close(self) -> None:
        return None


class _ActionPolicy(TextPolicy):
    """Base of policies that choose a text action, which is a tool call or a message if the agent has tools."""

    def __init__(self, env: EnvSession) -> None:
        self._env = env
        self.instruction = env.instruction
        self._thought = ""
        """Reason for the chosen action, which a tool call cannot hold."""

    def _message(self, text: str, messages: list[Message]) -> Message:
        if not self._env.tools:
            return Message("assistant", text)
        thought, action = split_thought(text)
        content = f"{OPEN}{thought}{CLOSE}" if thought else self._thought
        call = self._env.call_of(action)
        if call is None:
            return Message("assistant", f"{content}\n{action}".strip(), tool_calls=[])
        return Message("assistant", content, tool_calls=numbered([call], messages))


class OraclePolicy(_ActionPolicy):
    """Plays the environment's own solution."""

    async def reply_text(self, observation: str) -> str:
        if not self._env.tools:
            return await self._env.oracle()
        self._thought, action = await self._env.advice()
        return action


class RandomPolicy(_ActionPolicy):
    """Plays uniformly random valid actions."""

    def __init__(self, env: EnvSession, seed: int) -> None:
        super().__init__(env)
        self._random = random.Random(seed)

    async def reply_text(self, observation: str) -> str:
        actions = await self._env.actions()
        if not actions:
            raise EnvError(f"random play needs at least one action, {self._env.name} offers none in this state")
        return self._random.choice(actions)


class ScriptedPolicy(TextPolicy):
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


class HumanPolicy(TextPolicy):
    """A person at a terminal: `ask(observation)` shows the observation and returns the typed reply."""

    def __init__(self, ask: Callable[[str], str], instruction: str = "") -> None:
        self._ask = ask
        self.instruction = instruction

    async def reply_text(self, observation: str) -> str:
        # Blocks the event loop on purpose: nothing else runs meanwhile, and Ctrl-C reaches input().
        return self._ask(observation)


class ChatPolicy:
    """A model behind an OpenAI-compatible chat API. Its tokens are unknown, so it can be evaluated but not trained."""

    def __init__(self, client: Chat, sampling: Sampling, *, instruction: str = "", tools: Tools = ()) -> None:
        self._client = client
        self._tools = tools
        self._sampling = sampling
        self._instruction = instruction
        self._context_tokens = 0

    async def reply(self, messages: list[Message], observation: Observation, limits: Limits) -> Reply:
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
            answer = await self._client.complete([*messages, *new_messages], sampling, self._tools)
        except ContextOverflow:
            return Reply(new_messages, None, "max_context")
        self._context_tokens = answer.context_tokens
        calls = numbered(answer.calls, messages) if self._tools else None
        action = Message("assistant", answer.content, tool_calls=calls)
        if answer.cut:
            return Reply(new_messages, action, "max_context" if free_tokens < limits.max_new_tokens else "length")
        return Reply(new_messages, action)

    def unanswered(self, messages: list[Message], observation: Observation, limits: Limits) -> list[Message]:
        return observation_messages(messages, self._instruction, observation)

    async def close(self) -> None:
        return None
