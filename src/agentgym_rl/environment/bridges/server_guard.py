"""The outermost layer of the bridges' servers: checks Host, Origin and token, and holds the sessions."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from agentgym_rl.common.http_guard import refusal
from agentgym_rl.environment import wire
from agentgym_rl.environment.server import send_answer
from agentgym_rl.environment.server_sessions import Sessions
from agentgym_rl.errors import ConfigError


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
