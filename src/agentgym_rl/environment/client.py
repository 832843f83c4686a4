"""The asynchronous client of one environment server.

Every call has a deadline over all it does. It is tried again only where that is safe: when no connection could be made,
so nothing was sent, and when the server says it is full. A step that was sent and not answered is never sent twice.

`EnvClient` is the seam for other dialects: a class with the same methods (create, reset, step, close, info, ...) that
writes and reads other fields can stand in its place; the pool knows nothing of the wire.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from functools import cache
from types import TracebackType
from typing import Any

import httpx
import orjson

from agentgym_rl.environment import wire
from agentgym_rl.errors import ConfigError, EnvError, EnvTimeout, EnvUnavailable
from agentgym_rl.types import Step

KEEPALIVE_S = 4.0
"""Idle connections are dropped before the server drops them (uvicorn's default is 5 s): a request that races with the
server's close fails, and could not be sent again safely."""
CONNECT_ATTEMPTS = 4
FIRST_DELAY_S = 0.05
MAX_DELAY_S = 2.0


@cache
def tls() -> ssl.SSLContext:
    """Made once: reading the certificates takes longer than an episode of a cheap game."""
    return ssl.create_default_context()


class EnvClient:
    """Speaks to one environment: `http://host:port/textcraft`, or `http://host:port` of a server that has just one.

    Give every session a client of its own with one connection: httpx looks through all connections of a transport for
    each request, and 64 sessions sharing one are five times slower than 64 with one each. Below `httpx.AsyncClient`,
    because redirects, cookies and proxies have no place here and cost a third of a call.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 60.0, max_connections: int = 1) -> None:
        try:
            parts = httpx.URL(url)
        except httpx.InvalidURL:
            parts = httpx.URL("")
        if parts.scheme not in ("http", "https") or not parts.host:
            raise ConfigError(f"an environment's address looks like http://127.0.0.1:36001/textcraft, got {url!r}")
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        limits = httpx.Limits(
            max_connections=max_connections,
            max_keepalive_connections=max_connections,
            keepalive_expiry=KEEPALIVE_S,
        )
        self._transport = httpx.AsyncHTTPTransport(verify=tls(), limits=limits, trust_env=False)
        self._headers = {"content-type": "application/json"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"

    async def __aenter__(self) -> EnvClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def create(self, wait_timeout_s: float | None = None) -> int:
        """Id of a new session; asks again for up to `wait_timeout_s` while the server is full."""
        give_up_at = time.monotonic() + (self.timeout_s if wait_timeout_s is None else wait_timeout_s)
        delay_s = FIRST_DELAY_S
        while True:
            try:
                answer = await self._json("POST", "/create", {})
                break
            except wire.Full:
                # Jitter, so that many who wait for room do not all come back at once.
                pause_s = delay_s * random.uniform(0.5, 1.5)
                if time.monotonic() + pause_s > give_up_at:
                    raise
                await asyncio.sleep(pause_s)
                delay_s = min(2 * delay_s, MAX_DELAY_S)
        if not isinstance(answer, dict) or type(answer.get("id")) is not int:
            raise EnvError(f"{self.url}/create must answer with an integer id, got {answer!r:.80}")
        return int(answer["id"])

    async def reset(self, session_id: int, item: int) -> Step:
        answer = await self._json("POST", "/reset", {"id": session_id, "data_idx": item})
        return wire.read_step(answer, f"{self.url}/reset")

    async def step(self, session_id: int, action: str) -> Step:
        answer = await self._json("POST", "/step", {"id": session_id, "action": action})
        return wire.read_step(answer, f"{self.url}/step")

    async def close(self, session_id: int, timeout_s: float | None = None) -> None:
        await self._json("POST", "/close", {"id": session_id}, timeout_s)

    async def observation(self, session_id: int) -> str:
        return str(await self._json("GET", f"/observation?id={session_id}"))

    async def actions(self, session_id: int) -> list[str]:
        answer = await self._json("GET", f"/available_actions?id={session_id}")
        if not isinstance(answer, list) or not all(isinstance(action, str) for action in answer):
            raise EnvError(f"{self.url}/available_actions must answer with a list of strings, got {answer!r:.80}")
        return answer

    async def oracle(self, session_id: int) -> str:
        return str(await self._json("GET", f"/oracle?id={session_id}"))

    async def state_key(self, session_id: int) -> str:
        return str(await self._json("GET", f"/state_key?id={session_id}"))

    async def render(self, session_id: int) -> str | bytes:
        response = await self._request("GET", f"/render?id={session_id}")
        return response.content if response.headers.get("content-type") == "image/png" else response.text

    async def info(self) -> dict[str, Any]:
        answer = await self._json("GET", "/info")
        if not isinstance(answer, dict) or not isinstance(answer.get("instruction"), str):
            raise EnvError(f"{self.url}/info must answer with an instruction, got {answer!r:.80}")
        return answer

    async def items(self, split: str, subset: str | None = None) -> list[int]:
        items: list[int] = []
        while True:
            query = httpx.QueryParams(split=split, offset=len(items))
            if subset is not None:
                query = query.set("subset", subset)
            try:
                answer = await self._json("GET", f"/items?{query}")
            except wire.BadRequest as error:  # no such split or subset: a mistake of the user, as in process
                raise ConfigError(str(error)) from error
            if not isinstance(answer, dict) or not isinstance(answer.get("items"), list):
                raise EnvError(f"{self.url}/items must answer with items and total, got {answer!r:.80}")
            items += answer["items"]
            if not answer["items"] or len(items) >= answer.get("total", 0):
                return items

    async def health(self) -> dict[str, Any]:
        answer = await self._json("GET", "/health")
        return answer if isinstance(answer, dict) else {}

    async def _json(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        response = await self._request(method, path, body, timeout_s)
        return wire.read_answer(response.content, self.url + path)

    async def _request(
        self, method: str, path: str, body: Any = None, timeout_s: float | None = None
    ) -> httpx.Response:
        """The answer, if it is 200; anything else is an exception."""
        where = self.url + path
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            content = None if body is None else orjson.dumps(body)
        except TypeError as error:
            raise EnvError(f"{where} cannot be asked what JSON cannot carry: {error}") from None
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._send(method, where, content)
        except TimeoutError:
            raise EnvTimeout(f"{where} did not answer within its deadline of {timeout_s:g} s") from None
        if response.status_code != 200:
            raise wire.error_from(response.status_code, response.content, where)
        return response

    async def _send(self, method: str, where: str, content: bytes | None) -> httpx.Response:
        request = httpx.Request(method, where, content=content, headers=self._headers)
        attempt = 0
        while True:
            try:
                response = await self._transport.handle_async_request(request)
                await response.aread()
                return response
            except httpx.ConnectError as error:
                attempt += 1
                if attempt == CONNECT_ATTEMPTS:
                    raise EnvUnavailable(f"{where} cannot be reached ({error}): is the server running?") from error
            except httpx.HTTPError as error:
                text = str(error) or type(error).__name__
                raise EnvUnavailable(f"{where} broke off before it answered: {text}") from error
            await asyncio.sleep(FIRST_DELAY_S * 2**attempt * random.uniform(0.5, 1.5))
