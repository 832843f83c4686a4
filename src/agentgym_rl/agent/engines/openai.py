"""A client for OpenAI-compatible chat APIs, with bounded retries, rate limits, and usage and price counts."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

import httpx

from agentgym_rl.common.chat_messages import from_openai, to_openai
from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.types import Message, Sampling, ToolCall

_TRANSIENT = {408, 409, 425, 429}
"""Statuses that are retried, besides every 5xx."""
_QUOTA_EXHAUSTED = ("insufficient_quota", "billing_hard_limit_reached")
"""Codes of a 429 that a retry does not fix."""
_TOO_LONG = re.compile(
    r"context[_ ](length|size|window)|maximum (context|model|prompt|input|sequence)|max_(model_len|total_tokens)"
    r"|maximum number of (input )?tokens|(prompt|inputs?|messages?|conversation)\b.{0,40} too long"
    r"|`inputs` (tokens|must have)|too many (input |prompt )?tokens",
    re.IGNORECASE | re.DOTALL,
)
"""Servers' messages for a conversation longer than the model's context. There is no common error code."""
MAX_INITIAL_REFUSALS = 3
"""Give up after this many refusals if no request was answered. A single one may be due to its text."""
CONNECT_TIMEOUT_S = 15.0
FIRST_CONNECT_RETRIES = 2
"""Maximum retries before a server first answered, so that a wrong address fails soon."""


class ContextOverflow(EngineError):
    """The conversation is longer than the model's context."""


class Refused(EngineError):
    """The same request would be refused again."""


class _Transient(EngineError):
    """An error worth a retry, after `wait_s` seconds if the server said so. `pause_all`: all requests must wait."""

    def __init__(self, text: str, wait_s: float | None = None, *, pause_all: bool = False) -> None:
        super().__init__(text)
        self.wait_s = wait_s
        self.pause_all = pause_all


class Unreadable(_Transient):
    """The answer is not what the path answers with."""


class _NoConnection(_Transient):
    """The server did not accept a connection."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The server's token counts of one answer."""

    prompt: int = 0
    completion: int = 0
    """Includes hidden reasoning if the server counts it."""
    cached: int = 0
    """Prompt tokens read from the server's cache."""
    reported: bool = False
    """False if the server sent no counts; the numbers are then 0."""


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars per million tokens."""

    prompt: float = 0.0
    completion: float = 0.0
    cached: float | None = None
    """Price of cached prompt tokens; None for the full price."""

    def cost(self, tokens: Tokens) -> float:
        cached = self.prompt if self.cached is None else self.cached
        dollars = (tokens.prompt - tokens.cached) * self.prompt + tokens.cached * cached
        return (dollars + tokens.completion * self.completion) / 1e6


@dataclass(slots=True)
class Usage:
    """Requests and tokens so far."""

    requests: int = 0
    """HTTP requests sent, failed ones included."""
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    unreported: int = 0
    """Answers without readable token counts, which the sums do not include."""

    def add(self, tokens: Tokens) -> None:
        self.prompt_tokens += tokens.prompt
        self.completion_tokens += tokens.completion
        self.cached_tokens += tokens.cached
        self.unreported += not tokens.reported


@dataclass(frozen=True, slots=True)
class Answer:
    content: str
    cut: bool
    """True if the reply reached max_new_tokens."""
    tokens: Tokens
    calls: list[ToolCall] = field(default_factory=list)
    """Tool calls in order."""

    @property
    def context_tokens(self) -> int:
        """Prompt and reply tokens by the server's count; 0 if it sent none."""
        return self.tokens.prompt + self.tokens.completion


class Chat(Protocol):
    """The interface of a chat policy: a client, or one episode's view of it."""

    async def complete(
        self, messages: list[Message], sampling: Sampling, tools: Sequence[dict[str, Any]] = ()
    ) -> Answer: ...


class ChatClient:
    """One client per model, shared by all episodes. `usage` is their sum.

    `api_key_variable` names the environment variable with the key; None sends none. A request is tried `retries` + 1
    times, and fails at once if the server asks for a longer pause than `max_wait_s`. When one request is told to slow
    down, all wait; `requests_per_minute` spaces them out beforehand. `fatal_error` is the reason for a permanent
    failure, or an empty string. `setting` is the name of the setting or option with the address, for error messages.
    """

    path = "/chat/completions"
    """Path of the requests, after the base address."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_variable: str | None = "OPENAI_API_KEY",
        timeout_s: float = 120.0,
        retries: int = 5,
        max_wait_s: float = 60.0,
        max_tokens_field: str = "max_tokens",
        requests_per_minute: float | None = None,
        setting: str = "--base-url",
    ) -> None:
        require_address(base_url, setting)
        self._setting = setting
        self.model = model
        self.usage = Usage()
        self.fatal_error = ""
        self._key_variable = api_key_variable
        self._was_reached = False
        self._refusals = 0
        self.answers = self.failures = 0
        """Requests that were answered, and those that failed after all retries."""
        self.last_error = ""
        self._url = f"{base_url.rstrip('/')}{self.path}"
        self._timeout_s = timeout_s
        self._retries = retries
        self._max_wait_s = max_wait_s
        self._max_tokens_field = max_tokens_field
        self._limiter = _RateLimiter(60.0 / requests_per_minute if requests_per_minute else 0.0)
        # The number of concurrent episodes bounds the connections.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))
        try:
            self._http = httpx.AsyncClient(headers=key_headers(api_key_variable), timeout=timeout, limits=limits)
        except (ValueError, ImportError, httpx.InvalidURL) as error:  # bad values of HTTPS_PROXY and the like
            raise ConfigError(f"cannot set up an HTTP client ({error}): check the proxy variables") from error

    async def complete(
        self,
        messages: list[Message],
        sampling: Sampling,
        tools: Sequence[dict[str, Any]] = (),
        on_request: Callable[[], None] | None = None,
    ) -> Answer:
        """Return the model's next message. `tools` are JSON schemas of the functions it may call. `on_request` is
        called before every request that is sent, the retries included; an error that it raises ends the attempts."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [to_openai(m) for m in messages],
            "temperature": sampling.temperature,
            self._max_tokens_field: sampling.max_new_tokens,
        }
        if sampling.top_p != 1.0:  # Some models refuse the field itself.
            body["top_p"] = sampling.top_p
        if tools:
            body["tools"] = list(tools)
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        try:
            answer: Answer = await self._with_retries(body, on_request)
        except ContextOverflow:
            raise  # the episode's own trouble
        except EngineError as error:
            self.failures += 1
            self.last_error = str(error)
            self._refusals += isinstance(error, Refused)
            if not self.answers and self._refusals >= MAX_INITIAL_REFUSALS:
                self.fatal_error = str(error)
            raise
        self.answers += 1
        return answer

    async def _with_retries(self, body: dict[str, Any], on_request: Callable[[], None] | None = None) -> Any:
        """Send a request until it is answered, with retries."""
        attempt = 0
        while True:
            await self._limiter.wait()
            if on_request is not None:
                on_request()
            try:
                return await self._once(body)
            except _Transient as error:
                backoff_s = min(random.uniform(0.5, 1.0) * 2.0 ** min(attempt, 32), self._max_wait_s)
                wait_s = error.wait_s
                # A server that asks for no wait gets one retry at once. A date by a late clock says no wait, too.
                if wait_s is None or (attempt and wait_s < backoff_s):
                    wait_s = backoff_s
                never_reached = isinstance(error, _NoConnection) and not self._was_reached
                if never_reached and attempt >= min(self._retries, FIRST_CONNECT_RETRIES):
                    raise Refused(
                        f"{self._url} cannot be reached ({error}): check the address ({self._setting}) and that "
                        "the server runs"
                    ) from error
                if attempt >= self._retries or wait_s > self._max_wait_s:
                    pause = f", which asks to wait {wait_s:.0f} s," if wait_s > self._max_wait_s else ""
                    times = f"{attempt + 1} time{'s' if attempt else ''}"
                    raise EngineError(f"{self._url}{pause} failed {times}, the last: {error}") from error
                if error.pause_all:
                    self._limiter.pause(wait_s)
            attempt += 1
            self.usage.retries += 1
            await asyncio.sleep(wait_s)

    async def close(self) -> None:
        await self._http.aclose()

    async def _once(self, body: dict[str, Any]) -> Any:
        self.usage.requests += 1
        try:
            # httpx bounds each read. This bounds the whole request, even if the server sends byte by byte.
            async with asyncio.timeout(self._timeout_s):
                response = await self._http.post(self._url, json=body)
        except httpx.ConnectTimeout:
            raise _NoConnection(f"no connection within {min(self._timeout_s, CONNECT_TIMEOUT_S):g} s") from None
        except httpx.ConnectError as error:
            raise _NoConnection(f"{type(error).__name__}: {error}") from error
        except (TimeoutError, httpx.TimeoutException):
            raise _Transient(f"no answer within {self._timeout_s:g} s") from None
        except httpx.RequestError as error:  # a broken connection, or a body that cannot be unpacked
            raise _Transient(f"{type(error).__name__}: {error}") from error
        self._was_reached = True
        status, text = response.status_code, response.text
        exhausted = status == 429 and any(reason in text for reason in _QUOTA_EXHAUSTED)
        if (status in _TRANSIENT or status >= 500) and not exhausted:
            wait_s = _retry_after_s(response)
            raise _Transient(_explain(response), wait_s, pause_all=status == 429 or wait_s is not None)
        if status != 200:
            if status == 413 or (status in (400, 422) and _TOO_LONG.search(text)):
                raise ContextOverflow(f"{self._url} refused: {_explain(response)}")
            raise Refused(f"{self._url} refused: {_explain(response)}{self._advice(status, exhausted=exhausted)}")
        return self._answer(response)

    def _advice(self, status: int, *, exhausted: bool) -> str:
        """Return what to do about a refusal, or an empty string if unknown."""
        if status in (401, 403):
            if self._key_variable:
                return f": check the key in ${self._key_variable}"
            section = self._setting.rpartition(".")[0]
            option = f"{section}.api_key_variable" if section else "--key-variable"
            return f": check {option}, no key was sent"
        if status == 402 or exhausted:
            return ": the account has no credit left"
        if status in (404, 405) or 300 <= status < 400:
            return f": check the address ({self._setting}, it often ends in /v1) and the model's name, {self.model!r}"
        return ""

    def _answer(self, response: httpx.Response) -> Any:
        """Return what an answer says. Raise a transient error if it cannot be read."""
        try:
            row = response.json()
            choice = row["choices"][0]
            answered = choice["message"]
            # Servers leave out the content of a reply that is only calls, or that was cut in its hidden thought.
            text = answered.get("content") if "role" in answered else answered["content"]
            message = from_openai({"content": text, "tool_calls": answered.get("tool_calls"), "role": "assistant"})
            # A lone surrogate is legal in JSON and cannot be written to a file.
            content = message.content.encode("utf-8", "replace").decode()
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise Unreadable(f"not a chat completion ({type(error).__name__}): {response.text[:200]!r}") from error
        tokens = _tokens(row.get("usage"))
        self.usage.add(tokens)
        return Answer(content, choice.get("finish_reason") == "length", tokens, message.tool_calls or [])


@dataclass(slots=True)
class Meter:
    """One episode's view of a client, with the tokens of each answer."""

    client: ChatClient
    answers: list[Tokens] = field(default_factory=list)

    async def complete(
        self, messages: list[Message], sampling: Sampling, tools: Sequence[dict[str, Any]] = ()
    ) -> Answer:
        answer = await self.client.complete(messages, sampling, tools)
        self.answers.append(answer.tokens)
        return answer


class _RateLimiter:
    """Lets requests pass one interval apart, and none during a pause."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._turn = asyncio.Lock()
        self._next = 0.0
        self._paused_until = 0.0

    async def wait(self) -> None:
        async with self._turn:  # in the order of the calls, so that those that waited for a pause are spaced as well
            # A pause may begin or grow while this request waits.
            while (wait_s := max(self._next, self._paused_until) - time.monotonic()) > 0:  # noqa: ASYNC110 - the end is known
                await asyncio.sleep(wait_s)
            self._next = time.monotonic() + self._interval_s

    def pause(self, wait_s: float) -> None:
        self._paused_until = max(self._paused_until, time.monotonic() + wait_s)


def require_address(base_url: str, setting: str) -> None:
    """Raise ConfigError if the address that a setting names is none."""
    try:
        url = httpx.URL(base_url)
        # A name, an IPv4 address, or an IPv6 address, which httpx gives without brackets.
        host = re.fullmatch(r"[\w.-]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]+", url.host)
        is_valid = url.scheme in ("http", "https") and host is not None and 0 < (url.port or 80) < 65536
    except httpx.InvalidURL:
        is_valid = False
    if not is_valid:
        raise ConfigError(f"{setting} must look like https://api.openai.com/v1, got {base_url!r}")


def key_headers(api_key_variable: str | None) -> dict[str, str]:
    """Return the header with the key in an environment variable. Raise ConfigError if it holds none."""
    if api_key_variable is None:
        return {}
    key = os.environ.get(api_key_variable, "").strip()
    if not key:
        raise ConfigError(f"an API key is needed in ${api_key_variable}, which is not set: export it")
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise ConfigError(f"the API key in ${api_key_variable} must be one line of printable ASCII: export it again")
    return {"Authorization": f"Bearer {key}"}


def _tokens(usage: Any) -> Tokens:
    """Return the server's counts, or none if they are unreadable: a paid answer is not dropped for that."""
    if not isinstance(usage, dict):
        return Tokens()
    prompt, completion = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    if prompt is None or completion is None:
        return Tokens()
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    return Tokens(prompt, completion, min(cached or 0, prompt), reported=True)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def _explain(response: httpx.Response) -> str:
    return f"HTTP {response.status_code} {response.text[:300]!r}"


def _retry_after_s(response: httpx.Response) -> float | None:
    """Return the seconds to wait by Retry-After-Ms, or Retry-After as seconds or a date; None without them."""
    if (wait_s := _number(response.headers.get("retry-after-ms"))) is not None:
        return wait_s / 1000
    value = response.headers.get("retry-after")
    if value is None:
        return None
    if (wait_s := _number(value)) is not None:
        return wait_s
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return None if math.isnan(value) else max(0.0, value)
