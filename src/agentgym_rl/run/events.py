"""Events of a run's workers, recorded while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

POLL_INTERVAL_S = 5.0
"""Seconds between polls. A step may take half an hour."""
LAST_POLL_TIMEOUT_S = 30.0
"""Seconds allowed to the last poll, when a run ends."""


class EventPoller:
    """Polls `events` while it is open and once more when it closes, and hands each event to `record`."""

    def __init__(self, events: Callable[[], Awaitable[list[dict[str, Any]]]], record: Callable[..., None]) -> None:
        self._events, self._record = events, record
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def now(self) -> None:
        """Poll and record. If the caller is cancelled, events that were fetched are recorded all the same."""
        await asyncio.shield(asyncio.ensure_future(self._poll()))

    async def __aenter__(self) -> EventPoller:
        self._task = asyncio.create_task(self._poll_forever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        (failure,) = await asyncio.gather(self._task, return_exceptions=True)
        try:
            await asyncio.wait_for(self.now(), LAST_POLL_TIMEOUT_S)
        except Exception as last:
            failure = last
        # The error that ended the run says more than a failed poll.
        if error is None and isinstance(failure, Exception):
            raise failure

    async def _poll(self) -> None:
        async with self._lock:
            for event in await self._events():
                self._record(**event)

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self.now()
