"""Demonstrations in a program's own prompts: an oracle or random play answers the program's calls of the model.

A model that is made from scratch gets its words from them, so there is no tokenizer yet: conversations are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentgym_rl.agent.policy import Policy
from agentgym_rl.agent.proxy.chat import ChatReply, ChatRequest, digest, is_observation, session_ended
from agentgym_rl.agent.segments import Call
from agentgym_rl.errors import ProgramError
from agentgym_rl.types import Limits, Message


@dataclass(slots=True)
class DemonstratedConversation:
    """A conversation of the program with the model."""

    messages: list[Message]
    trained: list[bool]
    """One per message: True on replies that the program acted on."""
    tools: list[dict[str, Any]]
    """JSON schemas of the tools that the program offered."""


class DemonstratedModel:
    """A model for one episode. Its replies are the next actions of a demonstrator, an oracle or random play."""

    def __init__(self, demonstrator: Policy, limits: Limits) -> None:
        self._demonstrator, self._limits = demonstrator, limits
        self._lock = asyncio.Lock()
        self._closed = False
        self.conversations: list[DemonstratedConversation] = []
        self._last: DemonstratedConversation | None = None
        """Conversation of the last call, until the program acts."""
        self.calls: list[Call] = []
        """Always empty: nothing is sampled."""
        self.overflowed = False
        self.failure: Exception | None = None

    async def complete(self, request: ChatRequest) -> ChatReply:
        """Reply with the demonstrator's next action."""
        async with self._lock:
            if self._closed:
                raise session_ended()
            try:
                message = await self._next_action(request)
            except Exception as error:
                self.failure = error
                raise
            self._last = self._conversation(request)
            self._last.messages.append(message)
            self._last.trained.append(False)
            return ChatReply(message, "tool_calls" if message.tool_calls else "stop", 0, 0)

    def mark_action(self) -> None:
        """Imitate the last reply: the program has acted after it."""
        if self._last is not None:
            self._last.trained[-1] = True
        self._last = None

    async def close(self) -> None:
        self._closed = True
        await self._demonstrator.close()

    async def _next_action(self, request: ChatRequest) -> Message:
        reply = await self._demonstrator.reply(request.messages, "", self._limits)
        assert reply.action is not None
        offered = [tool["function"]["name"] for tool in request.tools]
        for call in reply.action.tool_calls or ():
            if call.name not in offered:
                raise ProgramError(
                    f"warm_start.through_program: the demonstrator calls the environment's tool {call.name!r}, but "
                    f"the program offers {', '.join(offered) or 'no tools'}: offer episode.tools, or set agent.style"
                )
        return reply.action

    def _conversation(self, request: ChatRequest) -> DemonstratedConversation:
        """Return the conversation that a request continues, with the request's messages, or a new one."""
        messages, tools = list(request.messages), list(request.tools)
        for conversation in self.conversations:
            known = len(conversation.messages)
            new = messages[known:]
            if is_observation(new) and _same(conversation, messages[:known], tools):
                conversation.messages += new
                conversation.trained += [False] * len(new)
                return conversation
        self.conversations.append(DemonstratedConversation(messages, [False] * len(messages), tools))
        return self.conversations[-1]


def _same(conversation: DemonstratedConversation, messages: Sequence[Message], tools: list[dict[str, Any]]) -> bool:
    return digest(conversation.messages, conversation.tools) == digest(messages, tools)
