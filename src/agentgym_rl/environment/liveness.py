"""A connection that says no more than: I am still here. When it ends, the server closes the sessions of its owner.

Somebody who is killed cannot close what he opened; the system ends his connections all the same.
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

ANSWER_S = 10.0
"""Granted to the server to take a hold up."""
AGAIN_S = 1.0
"""After a hold broke off, until the next try; the server waits longer (server_sessions.GRACE_S)."""
MOST_AGAIN_S = 60.0
"""Twice as long each time, up to this, while the server does not take it up."""
LOOK_S = 15.0
"""Between looks at whether the server has sent anything, which it does as often (server.HEARTBEAT_S)."""
MOST_SILENT = 4
"""Looks in a row that find nothing. Looks are counted, not seconds: a loop that stood still looks once."""


class Hold:
    """Of all sessions that are created in the name of `owner`, from `start` to `close`. One that breaks off is taken up
    again."""

    def __init__(self, url: str, token: str | None) -> None:
        self.owner = secrets.token_hex(16)
        self._server = Connection(url, token)
        self._starting = asyncio.Lock()
        self._wire: _Wire | None = None
        self._next: asyncio.TimerHandle | None = None
        """A look at a hold, or another try where there is none."""
        self._trying: asyncio.Task[None] | None = None
        self._closed = False
        self._failures = 0

    @property
    def is_held(self) -> bool:
        return self._wire is not None and self._wire.status == 200

    async def start(self) -> None:
        """Returns when the server has answered, or has not in time: sessions can be had without a hold, too."""
        async with self._starting:
            if self._closed or self.is_held:
                return
            body = orjson.dumps({"owner": self.owner})
            wire = self._wire = _Wire(self._server.head("POST", "/hold", len(body)) + body, self._lost)
            try:
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(ANSWER_S):
                        await self._server.open_with(lambda: wire)
                        await wire.answered.wait()
            finally:
                if self.is_held and not self._closed:
                    self._failures = 0
                    self._then(LOOK_S, self._look)
                else:
                    wire.drop()
                    self._lost(wire)

    def close(self) -> None:
        self._closed = True
        if self._next is not None:
            self._next.cancel()
        if self._trying is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended
                self._trying.cancel()
        if self._wire is not None:
            self._wire.drop()
            self._wire = None

    def _lost(self, wire: _Wire) -> None:
        if wire is self._wire:
            self._wire = None
            self._then(min(AGAIN_S * 2**self._failures, MOST_AGAIN_S), self._try_again)
            self._failures = min(self._failures + 1, 10)

    def _then(self, delay_s: float, what: Callable[[], None]) -> None:
        if self._next is not None:
            self._next.cancel()
        if not self._closed:
            self._next = asyncio.get_running_loop().call_later(delay_s, what)

    def _try_again(self) -> None:
        self._trying = asyncio.get_running_loop().create_task(self.start())

    def _look(self) -> None:
        """A server whose machine went away ends no connection."""
        if self._wire is not None:
            self._wire.silent_looks += 1
            if self._wire.silent_looks >= MOST_SILENT:
                self._wire.drop()
            else:
                self._then(LOOK_S, self._look)


class _Wire(asyncio.Protocol):
    """Sends one request and listens for as long as there is somebody to listen to."""

    def __init__(self, request: bytes, lost: Callable[[_Wire], None]) -> None:
        self.transport: asyncio.Transport | None = None
        self.answered = asyncio.Event()
        self.status = 0
        self.silent_looks = 0
        self._request, self._tell = request, lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """The head comes in one piece with the first byte; what follows only shows that the server is there."""
        self.silent_looks = 0
        if not self.answered.is_set():
            found = re.match(rb"HTTP/1\.[01] (\d{3})", data)
            self.status = int(found[1]) if found else 0
            self.answered.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.status = 0
        self.answered.set()
        self._tell(self)

    def drop(self) -> None:
        transport, self.transport = self.transport, None
        if transport is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended: it goes with the garbage
                transport.abort()
