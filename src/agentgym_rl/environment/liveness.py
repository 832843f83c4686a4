"""The client's side of a hold: a connection that stays open for as long as the client lives.

When it ends, the server closes the owner's sessions. This covers a killed client: the system ends its connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Callable
from typing import cast

import orjson

from agentgym_rl.environment.connection import Connection

ACCEPT_TIMEOUT_S = 10.0
"""Seconds to wait for the server to accept a hold."""
RETRY_DELAY_S = 1.0
"""Seconds before the first retry of a lost hold; the server waits longer (server_sessions.HOLD_GRACE_S)."""
MAX_RETRY_DELAY_S = 60.0
"""Upper bound of the delay, which doubles with every failed retry."""
POLL_INTERVAL_S = 15.0
"""Seconds between checks for a heartbeat of the server, which sends them as often (server.HEARTBEAT_S)."""
MAX_SILENT_POLLS = 4
"""Polls in a row without a heartbeat. Polls are counted, not seconds, because a blocked event loop polls only once."""


class Hold:
    """Keeps the sessions of `owner` alive from `start` to `close`. A lost connection is opened again."""

    def __init__(self, url: str, token: str | None) -> None:
        self.owner = secrets.token_hex(16)
        self._server = Connection(url, token)
        self._starting = asyncio.Lock()
        self._connection: _HoldConnection | None = None
        self._timer: asyncio.TimerHandle | None = None
        """The next poll of the connection, or the next retry if there is no connection."""
        self._retry_task: asyncio.Task[None] | None = None
        self._closed = False
        self._failures = 0

    @property
    def is_held(self) -> bool:
        return self._connection is not None and self._connection.status == 200

    async def start(self) -> None:
        """Open the connection. Return without a hold if the server does not accept it before the deadline."""
        async with self._starting:
            if self._closed or self.is_held:
                return
            body = orjson.dumps({"owner": self.owner})
            request = self._server.request_head("POST", "/hold", len(body)) + body
            connection = self._connection = _HoldConnection(request, self._on_lost)
            try:
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(ACCEPT_TIMEOUT_S):
                        await self._server.open_protocol(lambda: connection)
                        await connection.answered.wait()
            finally:
                if self.is_held and not self._closed:
                    self._failures = 0
                    self._schedule(POLL_INTERVAL_S, self._poll)
                else:
                    connection.drop()
                    self._on_lost(connection)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._retry_task is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended
                self._retry_task.cancel()
        if self._connection is not None:
            self._connection.drop()
            self._connection = None

    def _on_lost(self, connection: _HoldConnection) -> None:
        if connection is self._connection:
            self._connection = None
            self._schedule(min(RETRY_DELAY_S * 2**self._failures, MAX_RETRY_DELAY_S), self._retry)
            self._failures = min(self._failures + 1, 10)

    def _schedule(self, delay_s: float, callback: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._closed:
            self._timer = asyncio.get_running_loop().call_later(delay_s, callback)

    def _retry(self) -> None:
        self._retry_task = asyncio.get_running_loop().create_task(self.start())

    def _poll(self) -> None:
        """Drop a silent connection: a server whose machine fails does not close it."""
        if self._connection is not None:
            self._connection.silent_polls += 1
            if self._connection.silent_polls >= MAX_SILENT_POLLS:
                self._connection.drop()
            else:
                self._schedule(POLL_INTERVAL_S, self._poll)


class _HoldConnection(asyncio.Protocol):
    """Sends one request, then receives heartbeats until the connection ends."""

    def __init__(self, request: bytes, on_lost: Callable[[_HoldConnection], None]) -> None:
        self.transport: asyncio.Transport | None = None
        self.answered = asyncio.Event()
        self.status = 0
        self.silent_polls = 0
        self._request, self._on_lost = request, on_lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from it
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Read the status from the first data, which holds the whole head. Later data are heartbeats."""
        self.silent_polls = 0
        if not self.answered.is_set():
            status_line = re.match(rb"HTTP/1\.[01] (\d{3})", data)
            self.status = int(status_line[1]) if status_line else 0
            self.answered.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.status = 0
        self.answered.set()
        self._on_lost(self)

    def drop(self) -> None:
        transport, self.transport = self.transport, None
        if transport is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended: the garbage collector closes it
                transport.abort()
