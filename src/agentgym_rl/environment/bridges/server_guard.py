"""The outermost layer of the bridges' servers: checks Host, Origin and token, and holds the sessions."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Callable, Mapping
from types import SimpleNamespace
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from agentgym_rl.common.http_guard import refusal
from agentgym_rl.environment import wire
from agentgym_rl.environment.base import TextEnv
from agentgym_rl.environment.server import MAX_SESSIONS, send_answer
from agentgym_rl.environment.server_sessions import Sessions
from agentgym_rl.errors import ConfigError


def make_sessions(
    environments: Mapping[str, Callable[[], TextEnv]],
    max_sessions: int = MAX_SESSIONS,
    idle_timeout_s: float = 1800.0,
    step_timeout_s: float = 60.0,
) -> Sessions:
    if not environments:
        raise ConfigError("a server needs at least one environment: name one")
    return Sessions(environments, max_sessions, idle_timeout_s, step_timeout_s)


@contextlib.asynccontextmanager
async def reaping(sessions: Sessions) -> AsyncIterator[None]:
    """Close idle sessions inside the block, and all of them after it."""
    reaper = asyncio.create_task(sessions.reap())
    try:
        yield
    finally:
        reaper.cancel()
        await sessions.close_all()


class Guard:
    """ASGI layer that refuses requests of other sites and, if there is a token, those without it."""

    def __init__(
        self, app: ASGIApp, sessions: Sessions, token: str | None, uvicorn_options: Mapping[str, Any] | None = None
    ) -> None:
        self._app = app
        self._authorization = f"Bearer {token}".encode() if token else None
        self.state = SimpleNamespace(sessions=sessions)
        self.uvicorn_options = dict(uvicorn_options or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        host, origin, site = (headers.get(name) for name in (b"host", b"origin", b"sec-fetch-site"))
        status, reason = refusal(
            scope.get("method", "POST"),  # a WebSocket of another site's page acts like a POST
            (host or b"").decode("latin-1"),
            None if origin is None else origin.decode("latin-1"),
            None if site is None else site.decode("latin-1"),
            self._authorization is None,
        )
        given = headers.get(b"authorization", b"")
        if not status and self._authorization and not hmac.compare_digest(given, self._authorization):
            status, reason = 401, "a valid bearer token is needed: send Authorization: Bearer TOKEN"
        if not status:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": reason[:100]})
        else:
            await send_answer(send, status, wire.error_body(ConfigError(reason)))
