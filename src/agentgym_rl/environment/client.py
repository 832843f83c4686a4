"""The asynchronous client of one environment server.

Every call has one deadline, retries included. A call is retried only if that is safe: if no connection was made and
nothing was sent, or if the server is full. A step that was sent and not answered is never sent twice.

Other protocols plug in here: a class with the methods of `EnvClient` (create, reset, step, close, info, ...) can
replace it, because the pool does not depend on the wire format. `agentgym.py` has such a class.
"""

from __future__ import annotations

import asyncio
import random
import time
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

import orjson

from agentgym_rl.environment import wire
from agentgym_rl.environment.connection import Answer, CannotConnect, Connection, ConnectionBroken
from agentgym_rl.errors import ConfigError, EnvError, EnvTimeout, EnvUnavailable
from agentgym_rl.types import Step

CONNECT_ATTEMPTS = 4
FIRST_DELAY_S = 0.05
MAX_DELAY_S = 2.0


class EnvClient:
    """Client of one environment: `http://host:port/textcraft`, or `http://host:port` if the server has only one.

    All calls share one connection, one at a time. Sessions that run concurrently need a client each.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._connection = Connection(self.url, token)

    async def __aenter__(self) -> EnvClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()

    def drop(self) -> None:
        """Close the connection. The next call opens a new one."""
        self._connection.drop()

    async def create(self, wait_timeout_s: float | None = None, owner: str = "") -> int:
        """Return the id of a new session. While the server is full, retry for up to `wait_timeout_s`.
        The session ends with the hold of its `owner`, if there is one."""
        give_up_at = time.monotonic() + (self.timeout_s if wait_timeout_s is None else wait_timeout_s)
        delay_s = FIRST_DELAY_S
        while True:
            try:
                return await self._create(owner)
            except wire.Full:
                # Jitter, so that waiting clients do not all retry at once.
                pause_s = delay_s * random.uniform(0.5, 1.5)
                if time.monotonic() + pause_s > give_up_at:
                    raise
                await asyncio.sleep(pause_s)
                delay_s = min(2 * delay_s, MAX_DELAY_S)

    async def _create(self, owner: str) -> int:
        answer = await self._json("POST", "/create", {"owner": owner} if owner else {})
        if not isinstance(answer, dict) or type(answer.get("id")) is not int:
            raise EnvError(f"{self.url}/create must answer with an integer id, got {answer!r:.80}")
        return int(answer["id"])

    async def reset(self, session_id: int, item: int) -> Step:
        # `data_idx` is for servers of earlier versions. Without `item` it would be AgentGym's number of the item.
        answer = await self._json("POST", "/reset", {"id": session_id, "item": item, "data_idx": item})
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

    async def advice(self, session_id: int) -> tuple[str, str]:
        """Return thought and action of the oracle. The thought is empty if the server has none."""
        path = f"/oracle?id={session_id}&thought=true"
        answer = await self._json("GET", path)
        if isinstance(answer, str):
            return "", answer
        match answer:
            case {"thought": str(thought), "action": str(action)}:
                return thought, action
        raise EnvError(f"{self.url}{path} must answer with a thought and an action, got {answer!r:.80}")

    async def state_key(self, session_id: int) -> str:
        return str(await self._json("GET", f"/state_key?id={session_id}"))

    async def render(self, session_id: int) -> str | bytes:
        answer = await self._request("GET", f"/render?id={session_id}")
        return answer.body if answer.content_type == "image/png" else answer.body.decode(errors="replace")

    async def info(self) -> dict[str, Any]:
        answer = await self._json("GET", "/info")
        if not isinstance(answer, dict) or not isinstance(answer.get("instruction"), str):
            raise EnvError(f"{self.url}/info must answer with an instruction, got {answer!r:.80}")
        return answer

    async def items(self, split: str, subset: str | None = None) -> list[int]:
        items: list[int] = []
        while True:
            query = urlencode({"split": split, "offset": len(items)} | ({"subset": subset} if subset else {}))
            try:
                answer = await self._json("GET", f"/items?{query}")
            except wire.BadRequest as error:  # no such split or subset: a ConfigError, as in a LocalPool
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
        return wire.read_answer((await self._request(method, path, body, timeout_s)).body, self.url + path)

    async def _request(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Answer:
        """Return the answer if its status is 200; raise otherwise."""
        answer = await self._exchange(method, path, body, timeout_s)
        if answer.status != 200:
            raise wire.error_from(answer.status, answer.body, self.url + path)
        return answer

    async def _exchange(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Answer:
        """Return the answer with any status."""
        where = self.url + path
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            content = b"" if body is None else orjson.dumps(body)
        except TypeError as error:
            raise EnvError(f"the request to {where} cannot be written as JSON: {error}") from None
        try:
            async with asyncio.timeout(timeout_s):
                return await self._send_with_retries(method, path, content)
        except TimeoutError:
            raise EnvTimeout(f"{where} did not answer within its deadline of {timeout_s:g} s") from None
        except ConnectionBroken as error:
            raise EnvUnavailable(f"{where} did not send a complete HTTP answer: {error}") from error
        except CannotConnect as error:
            raise EnvUnavailable(f"{where} cannot be reached ({error}): is the server running?") from error

    async def _send_with_retries(self, method: str, path: str, content: bytes) -> Answer:
        for attempt in range(1, CONNECT_ATTEMPTS):
            try:
                return await self._connection.request(method, path, content)
            except CannotConnect:
                await asyncio.sleep(FIRST_DELAY_S * 2**attempt * random.uniform(0.5, 1.5))
        return await self._connection.request(method, path, content)
