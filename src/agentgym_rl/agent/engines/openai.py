"""A client for OpenAI-compatible chat APIs: plain HTTP, retries that end, rate limits kept, usage counted, priced."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import time
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

import httpx

from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.types import Message, Sampling

_TRANSIENT = {408, 409, 425, 429}
"""Beside every 5xx."""
_USED_UP = ("insufficient_quota", "billing_hard_limit_reached")
"""A 429 that says one of these will say it tomorrow too."""
_TOO_LONG = re.compile(
    r"context[_ ](length|size|window)|maximum (context|model|prompt|input|sequence)|max_(model_len|total_tokens)"
    r"|maximum number of (input )?tokens|(prompt|inputs?|messages?|conversation)\b.{0,40} too long"
    r"|`inputs` (tokens|must have)|too many (input |prompt )?tokens",
    re.IGNORECASE | re.DOTALL,
)
"""How servers say that a conversation is longer than their model can read: there is no code they share."""
REFUSALS_FOR_GOOD = 3
"""So many requests refused from the first one on, none answered: all will be. One alone may be its text's fault."""
CONNECT_TIMEOUT_S = 15.0
FIRST_CONNECT_RETRIES = 2
"""At most, while no server ever answered: a wrong address shall not be tried for a minute."""


class ContextOverflow(EngineError):
    """The conversation is longer than the model can read."""


class Refused(EngineError):
    """The same request would be refused again."""


class _Transient(EngineError):
    """Worth another try, after `wait_s` seconds if the server said how long; `everyone` should wait so long."""

    def __init__(self, text: str, wait_s: float | None = None, *, everyone: bool = False) -> None:
        super().__init__(text)
        self.wait_s = wait_s
        self.everyone = everyone


class _NoConnection(_Transient):
    """Nobody is there."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the server says one answer took."""

    prompt: int = 0
    completion: int = 0
    """Hidden reasoning included, where the server counts it."""
    cached: int = 0
    """Part of the prompt that was read from the server's cache."""
    reported: bool = False
    """False when the server did not say; the numbers are then 0 and mean nothing."""


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars per million tokens."""

    prompt: float = 0.0
    completion: float = 0.0
    cached: float | None = None
    """Of cached prompt tokens; None for the full price."""

    def cost(self, tokens: Tokens) -> float:
        cached = self.prompt if self.cached is None else self.cached
        dollars = (tokens.prompt - tokens.cached) * self.prompt + tokens.cached * cached
        return (dollars + tokens.completion * self.completion) / 1e6


@dataclass(slots=True)
class Usage:
    """What was asked of the API so far."""

    requests: int = 0
    """HTTP requests sent, failed ones included."""
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    unreported: int = 0
    """Answers without a readable count of their tokens: the sums are then too small."""

    def add(self, tokens: Tokens) -> None:
        self.prompt_tokens += tokens.prompt
        self.completion_tokens += tokens.completion
        self.cached_tokens += tokens.cached
        self.unreported += not tokens.reported


@dataclass(frozen=True, slots=True)
class Answer:
    content: str
    cut: bool
    """True when the reply hit max_new_tokens."""
    tokens: Tokens

    @property
    def context_tokens(self) -> int:
        """Prompt and reply together, by the server's count; 0 where it does not say."""
        return self.tokens.prompt + self.tokens.completion


class Chat(Protocol):
    """What a chat policy needs: a client, or one episode's view of it."""

    async def complete(self, messages: list[Message], sampling: Sampling) -> Answer: ...


class ChatClient:
    """One per model, shared by all episodes; `usage` adds up over all of them.

    `api_key_variable` names the environment variable that holds the key; None sends none. A request is tried
    `retries` + 1 times; a server that asks for a longer pause than `max_wait_s` is given up on. When one request is
    told to slow down, all wait; `requests_per_minute` spaces them out beforehand. `hopeless` says why no request will
    ever be answered, once that is clear.
    """

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
    ) -> None:
        _require_address(base_url)
        self.model = model
        self.usage = Usage()
        self.fatal_error = ""
        self._key_variable = api_key_variable
        self._heard_of = self._answered = False
        self._refusals = 0
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._timeout_s = timeout_s
        self._retries = retries
        self._max_wait_s = max_wait_s
        self._max_tokens_field = max_tokens_field
        self._gate = _Gate(60.0 / requests_per_minute if requests_per_minute else 0.0)
        # Connections are bounded by how many episodes are played at once, not here.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))
        try:
            self._http = httpx.AsyncClient(headers=_headers(api_key_variable), timeout=timeout, limits=limits)
        except (ValueError, ImportError, httpx.InvalidURL) as error:  # of HTTPS_PROXY and its like
            raise ConfigError(f"no HTTP client can be set up ({error}): look at the proxy variables") from error

    async def complete(self, messages: list[Message], sampling: Sampling) -> Answer:
        """The model's next message."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            "temperature": sampling.temperature,
            self._max_tokens_field: sampling.max_new_tokens,
        }
        if sampling.top_p != 1.0:  # Some models refuse the field itself.
            body["top_p"] = sampling.top_p
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        try:
            answer = await self._tried(body)
        except Refused as error:
            self._refusals += 1
            if not self._answered and self._refusals >= REFUSALS_FOR_GOOD:
                self.fatal_error = str(error)
            raise
        self._answered = True
        return answer

    async def _tried(self, body: dict[str, Any]) -> Answer:
        """The first good answer of several tries."""
        attempt = 0
        while True:
            await self._gate.turn()
            try:
                return await self._once(body)
            except _Transient as error:
                wait_s = error.wait_s
                if wait_s is None:
                    wait_s = min(random.uniform(0.5, 1.0) * 2.0 ** min(attempt, 32), self._max_wait_s)
                nobody = isinstance(error, _NoConnection) and not self._heard_of
                if nobody and attempt >= min(self._retries, FIRST_CONNECT_RETRIES):
                    raise Refused(
                        f"{self._url} cannot be reached ({error}): check the address (--base-url) and that the "
                        "server runs"
                    ) from error
                if attempt >= self._retries or wait_s > self._max_wait_s:
                    pause = f", which asks to wait {wait_s:.0f} s," if wait_s > self._max_wait_s else ""
                    times = f"{attempt + 1} time{'s' if attempt else ''}"
                    raise EngineError(f"{self._url}{pause} failed {times}, the last: {error}") from error
                if error.everyone:
                    self._gate.hold(wait_s)
            attempt += 1
            self.usage.retries += 1
            await asyncio.sleep(wait_s)

    async def close(self) -> None:
        await self._http.aclose()

    async def _once(self, body: dict[str, Any]) -> Answer:
        self.usage.requests += 1
        try:
            # httpx bounds each read; this bounds the whole request, also against a server that drips bytes.
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
        self._heard_of = True
        status, text = response.status_code, response.text
        used_up = status == 429 and any(reason in text for reason in _USED_UP)
        if (status in _TRANSIENT or status >= 500) and not used_up:
            wait_s = _retry_after_s(response)
            raise _Transient(_explain(response), wait_s, everyone=status == 429 or wait_s is not None)
        if status != 200:
            if status == 413 or (status in (400, 422) and _TOO_LONG.search(text)):
                raise ContextOverflow(f"{self._url} refused: {_explain(response)}")
            raise Refused(f"{self._url} refused: {_explain(response)}{self._advice(status, used_up=used_up)}")
        return self._answer(response)

    def _advice(self, status: int, *, used_up: bool) -> str:
        """What to do about a refusal, where that can be told."""
        if status in (401, 403):
            key = f"the key in ${self._key_variable}" if self._key_variable else "--key-variable, no key was sent"
            return f": check {key}"
        if status == 402 or used_up:
            return ": the account has nothing left to spend"
        if status in (404, 405) or 300 <= status < 400:
            return f": check the address (--base-url, it often ends in /v1) and the model's name, {self.model!r}"
        return ""

    def _answer(self, response: httpx.Response) -> Answer:
        try:
            row = response.json()
            choice = row["choices"][0]
            content = choice["message"]["content"] or ""
            if isinstance(content, list):  # in parts; pictures and the like are no words
                content = "".join(part["text"] for part in content if part.get("type", "text") == "text")
            # A lone surrogate is legal in JSON and cannot be written to a file.
            content = content.encode("utf-8", "replace").decode()
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise _Transient(f"not a chat completion ({type(error).__name__}): {response.text[:200]!r}") from error
        tokens = _tokens(row.get("usage"))
        self.usage.add(tokens)
        return Answer(content, choice.get("finish_reason") == "length", tokens)


@dataclass(slots=True)
class Meter:
    """One episode's view of a client: what it spent, answer by answer."""

    client: ChatClient
    answers: list[Tokens] = field(default_factory=list)

    async def complete(self, messages: list[Message], sampling: Sampling) -> Answer:
        answer = await self.client.complete(messages, sampling)
        self.answers.append(answer.tokens)
        return answer


class _Gate:
    """Lets requests through one interval apart, and none before a pause is over."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next = 0.0
        self._paused_until = 0.0

    async def turn(self) -> None:
        mine = max(self._next, time.monotonic())
        self._next = mine + self._interval_s
        # A pause may begin, or grow, while this request waits for its turn.
        while (wait_s := max(mine, self._paused_until) - time.monotonic()) > 0:  # noqa: ASYNC110 - it knows until when
            await asyncio.sleep(wait_s)

    def hold(self, wait_s: float) -> None:
        self._paused_until = max(self._paused_until, time.monotonic() + wait_s)


def _require_address(base_url: str) -> None:
    try:
        url = httpx.URL(base_url)
        # A name or an IPv4 address, or an IPv6 one, which httpx gives without its brackets.
        host = re.fullmatch(r"[\w.-]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]+", url.host)
        good = url.scheme in ("http", "https") and host is not None and 0 < (url.port or 80) < 65536
    except httpx.InvalidURL:
        good = False
    if not good:
        raise ConfigError(f"a chat API's address looks like https://api.openai.com/v1, got {base_url!r}")


def _headers(api_key_variable: str | None) -> dict[str, str]:
    if api_key_variable is None:
        return {}
    key = os.environ.get(api_key_variable, "").strip()
    if not key:
        raise ConfigError(f"an API key is needed in ${api_key_variable}, which is not set: export it")
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise ConfigError(f"the API key in ${api_key_variable} must be one line of plain letters: export it anew")
    return {"Authorization": f"Bearer {key}"}


def _tokens(usage: Any) -> Tokens:
    """The server's count, or none: a paid answer is not thrown away because its bill cannot be read."""
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
    """How long to wait: Retry-After-Ms, or Retry-After as seconds or a date; None when it does not say."""
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
