"""What befalls a run's workers, told while it happens and to the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

ASK_S = 5.0
"""Between questions: a step may take half an hour."""
LAST_S = 30.0
"""Granted to the last answer."""


class Telling:
    """Asks for `events` every so often as long as it is open, and once more when it closes, however a run ends."""

    def __init__(self, events: Callable[[], Awaitable[list[dict[str, Any]]]], tell: Callable[..., None]) -> None:
        self._events, self._tell = events, tell
        self._one_at_a_time = asyncio.Lock()
        self._asking: asyncio.Task[None] | None = None

    async def now(self) -> None:
        """Ask and tell. Whoever is cancelled meanwhile leaves the answer to be told all the same."""
        await asyncio.shield(asyncio.ensure_future(self._ask()))

    async def __aenter__(self) -> Telling:
        self._asking = asyncio.create_task(self._every_so_often())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._asking is not None
        self._asking.cancel()
        (failed,) = await asyncio.gather(self._asking, return_exceptions=True)
        try:
            await asyncio.wait_for(self.now(), LAST_S)
        except Exception as last:
            failed = last
        # What ended the run says more than that there is nobody left to ask.
        if error is None and isinstance(failed, Exception):
            raise failed

    async def _ask(self) -> None:
        async with self._one_at_a_time:
            for event in await self._events():
                self._tell(**event)

    async def _every_so_often(self) -> None:
        while True:
            await asyncio.sleep(ASK_S)
            await self.now()
