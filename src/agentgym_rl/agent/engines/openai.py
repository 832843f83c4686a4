"""A client for OpenAI-compatible chat APIs: plain HTTP, retries that end, usage counted."""

from __future__ import annotations

import asyncio
import os
import random
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.types import Message, Sampling

_TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504, 529}


class ContextOverflow(EngineError):
    """The conversation is longer than the model can read."""


class _Transient(EngineError):
    """Worth another try, after `wait_s` seconds if the server said how long."""

    def __init__(self, text: str, wait_s: float | None = None) -> None:
        super().__init__(text)
        self.wait_s = wait_s


@dataclass(slots=True)
class Usage:
    """What was asked of the API so far."""

    requests: int = 0
    """HTTP requests sent, failed ones included."""
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    content: str
    cut: bool
    """True when the reply hit max_new_tokens."""
    context_tokens: int
    """Prompt and reply together, by the server's count; 0 where it does not say."""


class ChatClient:
    """One per model, shared by all episodes; `usage` adds up over all of them.

    `api_key_variable` names the environment variable that holds the key; None sends none. A request is tried
    `retries` + 1 times; a server that asks for a longer pause than `max_wait_s` is given up on.
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
    ) -> None:
        headers = {}
        if api_key_variable is not None:
            key = os.environ.get(api_key_variable)
            if not key:
                raise ConfigError(f"an API key is needed in ${api_key_variable}, which is not set: export it")
            headers["Authorization"] = f"Bearer {key}"
        self.model = model
        self.usage = Usage()
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._timeout_s = timeout_s
        self._retries = retries
        self._max_wait_s = max_wait_s
        self._max_tokens_field = max_tokens_field
        # Connections are bounded by how many episodes are played at once, not here.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout_s, limits=limits)

    async def complete(self, messages: list[Message], sampling: Sampling) -> Answer:
        """The model's next message."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            self._max_tokens_field: sampling.max_new_tokens,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        attempt = 0
        while True:
            try:
                return await self._once(body)
            except _Transient as error:
                wait_s = error.wait_s if error.wait_s is not None else random.uniform(0.5, 1.0) * 2.0**attempt
                if attempt >= self._retries or wait_s > self._max_wait_s:
                    pause = f", which asks to wait {wait_s:.0f} s," if wait_s > self._max_wait_s else ""
                    raise EngineError(f"{self._url}{pause} failed {attempt + 1} times, the last: {error}") from error
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
        except (TimeoutError, httpx.TimeoutException):
            raise _Transient(f"no answer within {self._timeout_s:g} s") from None
        except httpx.TransportError as error:
            raise _Transient(f"{type(error).__name__}: {error}") from error
        if response.status_code in _TRANSIENT:
            raise _Transient(_explain(response), _retry_after_s(response))
        if response.status_code != 200:
            text = _explain(response)
            overflow = "context_length" in text or "maximum context" in text
            raise (ContextOverflow if overflow else EngineError)(f"{self._url} refused: {text}")
        return self._answer(response)

    def _answer(self, response: httpx.Response) -> Answer:
        try:
            row = response.json()
            choice = row["choices"][0]
            content = choice["message"]["content"] or ""
            usage = row.get("usage") or {}
            prompt, completion = int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0))
            # A lone surrogate is legal in JSON and cannot be written to a file.
            content = content.encode("utf-8", "replace").decode()
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise _Transient(f"not a chat completion ({type(error).__name__}): {response.text[:200]!r}") from error
        self.usage.prompt_tokens += prompt
        self.usage.completion_tokens += completion
        return Answer(content, choice.get("finish_reason") == "length", prompt + completion)


def _explain(response: httpx.Response) -> str:
    return f"HTTP {response.status_code} {response.text[:300]!r}"


def _retry_after_s(response: httpx.Response) -> float | None:
    """Retry-After in seconds; it comes as a number or as a date."""
    value = response.headers.get("retry-after")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
