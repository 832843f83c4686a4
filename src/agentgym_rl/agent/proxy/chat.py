"""Model calls of one episode: OpenAI's messages in, a reply out, exact tokens recorded.

A call whose messages repeat an earlier call and its reply continues that call's tokens, so sampled ids are never
encoded again. Any other call is rendered whole. `stitch` turns the recorded calls into segments.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2.exceptions import TemplateError

from agentgym_rl.agent.engines.base import Engine
from agentgym_rl.agent.policy import check_completion
from agentgym_rl.agent.renderer import Renderer, Tools
from agentgym_rl.agent.segments import Call
from agentgym_rl.agent.tool_parsers import numbered
from agentgym_rl.common.chat_messages import TEXT_PARTS, from_openai, to_openai
from agentgym_rl.common.seeds import stable_seed
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Completion, Limits, Message, Sampling


class RequestError(Exception):
    """A request that is answered with an HTTP status and OpenAI's error object."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def bad_request(message: str, code: str = "invalid_request") -> RequestError:
    return RequestError(400, message, code)


def session_ended() -> RequestError:
    return RequestError(410, "this episode has ended: make no further calls", "session_ended")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request for one reply."""

    messages: list[Message]
    tools: Tools = ()
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatReply:
    """A reply as the API returns it."""

    message: Message
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    prompt_tokens: int
    completion_tokens: int


class RecordedModel:
    """A model for one episode. It keeps the ids and log-probabilities of every call.

    The run decides temperature and top-p, because the learner computes its probabilities with them. Calls are served
    one at a time.
    """

    def __init__(self, engine: Engine, renderer: Renderer, sampling: Sampling, limits: Limits, session: str) -> None:
        self._engine, self._renderer = engine, renderer
        self._sampling, self._limits = sampling, limits
        self._session = session
        self._lock = asyncio.Lock()
        self._paths: dict[bytes, list[int]] = {}
        """Prompt and reply of each call, by the digest of the conversation that ends with the reply."""
        self.calls: list[Call] = []
        self.overflowed = False
        """Whether the last call did not fit into the context."""
        self.failure: Exception | None = None
        """Failure of the engine in the last call, or None."""
        self._closed = False
        self._generating: asyncio.Task[Completion] | None = None

    async def complete(self, request: ChatRequest) -> ChatReply:
        """Sample a reply and record it."""
        async with self._lock:
            if self._closed:
                raise session_ended()
            prompt_ids = self._prompt(request)
            free_tokens = self._limits.max_context - len(prompt_ids)
            self.overflowed = free_tokens < 1
            if self.overflowed:
                raise bad_request(
                    f"the context has {self._limits.max_context} tokens (agent.max_context), the messages take "
                    f"{len(prompt_ids)}: send fewer",
                    "context_length_exceeded",
                )
            seed = self._sampling.seed
            sampling = replace(
                self._sampling,
                max_new_tokens=min(free_tokens, request.max_new_tokens or free_tokens, self._limits.max_new_tokens),
                stop_token_ids=self._renderer.stop_token_ids,
                stop=request.stop,
                seed=None if seed is None else stable_seed(seed, len(self.calls)),
            )
            completion = await self._generate(prompt_ids, sampling)
            self.failure = None
            message = self._read(request, completion.token_ids)
            new_text = "\n".join(m.text for m in _after_last_reply(request.messages))
            self.calls.append(
                Call(
                    prompt_ids,
                    list(completion.token_ids),
                    list(completion.logprobs),
                    completion.version,
                    new_text,
                    message.text,
                    list(completion.versions),
                )
            )
            self._paths[digest([*request.messages, message], request.tools)] = [*prompt_ids, *completion.token_ids]
            called = any(not call.error for call in message.tool_calls or ())
            finish = "tool_calls" if called else completion.finish
            return ChatReply(message, finish, len(prompt_ids), len(completion.token_ids))

    async def close(self) -> None:
        """Cancel the running call, refuse further ones and free the engine's cache."""
        self._closed = True
        if self._generating is not None:
            self._generating.cancel()
            await asyncio.wait([self._generating])
        await self._engine.release(self._session)

    async def _generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        self._generating = asyncio.ensure_future(self._engine.generate(prompt_ids, sampling, self._session))
        try:
            completion = await self._generating
            check_completion(completion, sampling)
            return completion
        except asyncio.CancelledError:
            if self._closed:
                raise session_ended() from None
            raise
        except Exception as error:
            self.failure = error
            raise
        finally:
            self._generating = None

    def _prompt(self, request: ChatRequest) -> list[int]:
        messages, tools, renderer = request.messages, request.tools, self._renderer
        path: list[int] = []
        new = messages
        for end in range(len(messages), 0, -1):
            known = self._paths.get(digest(messages[:end], tools)) if messages[end - 1].role == "assistant" else None
            if known is not None:
                path, new = known, messages[end:]
                break
        try:
            if tools:
                renderer.require_tools()
            if path and renderer.linear and is_observation(new):
                ended = path[-1] in renderer.stop_token_ids
                return [*path, *([] if ended else [renderer.end_of_turn]), *renderer.observation_ids(new)]
            return renderer.continuation(path, messages, tools)
        except (TemplateError, ConfigError) as error:
            raise bad_request(f"the model's chat template cannot write these messages: {error}") from error

    def _read(self, request: ChatRequest, token_ids: list[int]) -> Message:
        """Return the reply as the client will repeat it."""
        content, calls = self._renderer.read_reply(list(token_ids), request.tools)
        for stop in request.stop:
            content = content.partition(stop)[0]
        calls = numbered(calls, request.messages) if calls else None
        return from_openai(to_openai(Message("assistant", content, tool_calls=calls)))


def is_observation(messages: Sequence[Message]) -> bool:
    """Return whether messages can follow a reply: one text, or results of calls."""
    roles = [message.role for message in messages]
    return roles == ["user"] or (bool(roles) and set(roles) == {"tool"})


def _after_last_reply(messages: Sequence[Message]) -> Sequence[Message]:
    start = max((i + 1 for i, message in enumerate(messages) if message.role == "assistant"), default=0)
    return messages[start:]


def digest(messages: Sequence[Message], tools: Tools) -> bytes:
    """Return a digest of a conversation. Space around replies does not count: some SDKs strip it."""
    rows = [to_openai(replace(m, content=m.content.strip()) if m.role == "assistant" else m) for m in messages]
    return hashlib.blake2b(json.dumps([rows, list(tools)]).encode(), digest_size=16).digest()


_ACCEPTED = {
    "n": (None, 1),
    "response_format": (None, {"type": "text"}),
    "functions": (None,),
    "logprobs": (None, False),
}
"""Fields that change a reply in ways the engines cannot, with the values that are accepted."""


def read_chat_request(body: dict[str, Any]) -> ChatRequest:
    """Return the request of a body of `/chat/completions`. Raise RequestError if it is none or cannot be served."""
    for name, accepted in _ACCEPTED.items():
        if body.get(name) not in accepted:
            raise bad_request(f"{name} = {body[name]!r:.80} is not supported: leave it out")
    stop = body.get("stop") or ()
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
        raise bad_request(f"stop must be a text or a list of texts, got {body['stop']!r:.80}")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise bad_request(f"stream_options must be an object, got {body['stream_options']!r:.80}")
    tools = [] if body.get("tool_choice") == "none" else read_tools(body.get("tools"))
    limit = body.get("max_completion_tokens")
    limit = body.get("max_tokens") if limit is None else limit
    return ChatRequest(read_messages(body.get("messages")), tools, read_limit(limit), tuple(stop))


def read_limit(limit: Any) -> int | None:
    """Return the maximum number of sampled tokens that a request asks for."""
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise bad_request(f"the maximum number of tokens must be a positive integer, got {limit!r:.80}")
    return limit


def read_messages(rows: Any) -> list[Message]:
    """Return the messages of a request. The last one must not be the assistant's."""
    if not isinstance(rows, list) or not rows:
        raise bad_request(f"messages must be a list of at least one message, got {rows!r:.80}")
    for row in rows:
        require_text(row.get("content") if isinstance(row, dict) else None)
    try:
        messages = [from_openai({**row, "role": "system"} if row["role"] == "developer" else row) for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise bad_request(f"a message is not valid ({type(error).__name__}: {error})") from error
    if messages[-1].role == "assistant":
        raise bad_request("the last message must not be of role assistant: replies are sampled whole")
    return messages


def require_text(content: Any) -> None:
    """Raise RequestError for a content with a part that is no text, such as an image."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind not in TEXT_PARTS:
            raise bad_request(f"a content may have parts of type text, got {kind!r:.80}: the model reads only text")


def read_tools(rows: Any) -> list[dict[str, Any]]:
    """Return the function tools of a request, as chat templates take them."""
    if rows is not None and not isinstance(rows, list):
        raise bad_request(f"tools must be a list, got {rows!r:.80}")
    tools = []
    for row in rows or ():
        function = row.get("function") if isinstance(row, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f'a tool must be {{"type": "function", "function": {{"name": …}}}}, got {row!r:.80}')
        kept = {name: function[name] for name in ("name", "description", "parameters") if name in function}
        tools.append({"type": "function", "function": kept})
    return tools
