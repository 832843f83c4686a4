"""The asynchronous client of one environment server.

Every call has a deadline over all it does. It is tried again only where that is safe: when no connection could be made,
so nothing was sent, and when the server says it is full. A step that was sent and not answered is never sent twice.

`EnvClient` is the seam for other dialects: a class with the same methods (create, reset, step, close, info, ...) that
writes and reads other fields can stand in its place; the pool knows nothing of the wire. `agentgym.py` has one.
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
from agentgym_rl.environment.connection import Answer, BrokeOff, CannotConnect, Connection
from agentgym_rl.errors import ConfigError, EnvError, EnvTimeout, EnvUnavailable
from agentgym_rl.types import Step

CONNECT_ATTEMPTS = 4
FIRST_DELAY_S = 0.05
MAX_DELAY_S = 2.0


class EnvClient:
    """Speaks to one environment: `http://host:port/textcraft`, or `http://host:port` of a server that has just one.

    It has one connection, and calls take turns: give every session that plays at the same time a client of its own.
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
        """Close the connection; another call opens another."""
        self._connection.drop()

    async def create(self, wait_timeout_s: float | None = None, owner: str = "") -> int:
        """Id of a new session; asks again for up to `wait_timeout_s` while the server is full. It ends with the hold of
        its `owner`, if there is one."""
        give_up_at = time.monotonic() + (self.timeout_s if wait_timeout_s is None else wait_timeout_s)
        delay_s = FIRST_DELAY_S
        while True:
            try:
                return await self._create(owner)
            except wire.Full:
                # Jitter, so that many who wait for room do not all come back at once.
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
        # `data_idx` is for servers of earlier versions; here it would be AgentGym's number of the item.
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
        """(thought, action) of the oracle; a server that knows no thoughts answers with the action alone."""
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
        return wire.read_answer((await self._request(method, path, body, timeout_s)).body, self.url + path)

    async def _request(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Answer:
        """The answer, if it is 200; anything else is an exception."""
        answer = await self._any_answer(method, path, body, timeout_s)
        if answer.status != 200:
            raise wire.error_from(answer.status, answer.body, self.url + path)
        return answer

    async def _any_answer(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Answer:
        """The answer, whatever its status."""
        where = self.url + path
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            content = b"" if body is None else orjson.dumps(body)
        except TypeError as error:
            raise EnvError(f"{where} cannot be asked what JSON cannot carry: {error}") from None
        try:
            async with asyncio.timeout(timeout_s):
                return await self._send(method, path, content)
        except TimeoutError:
            raise EnvTimeout(f"{where} did not answer within its deadline of {timeout_s:g} s") from None
        except BrokeOff as error:
            raise EnvUnavailable(f"{where} broke off before it answered: {error}") from error
        except CannotConnect as error:
            raise EnvUnavailable(f"{where} cannot be reached ({error}): is the server running?") from error

    async def _send(self, method: str, path: str, content: bytes) -> Answer:
        for attempt in range(1, CONNECT_ATTEMPTS):
            try:
                return await self._connection.request(method, path, content)
            except CannotConnect:
                await asyncio.sleep(FIRST_DELAY_S * 2**attempt * random.uniform(0.5, 1.5))
        return await self._connection.request(method, path, content)
