"""Which engine a trajectory's turns go to, the one that holds its keys and values; and which host plays a group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from agentgym_rl.errors import WorkerLost


class Homes:
    """Every session stays where it came to: with the engine that then had fewest of this host's."""

    def __init__(self, engines: int, first: int = 0) -> None:
        """`first`: where this host begins among equally busy ones; if all began with the same, that had most."""
        self._engines, self._first = engines, first
        self._home: dict[str, int] = {}

    def of(self, session: str, down: Collection[int]) -> int:
        """Its engine; a new session's is none of those that are `down`, unless all are."""
        if session not in self._home:
            counts = [0] * self._engines
            for index in self._home.values():
                counts[index] += 1
            up = [i for i in range(self._engines) if i not in down] or list(range(self._engines))
            self._home[session] = min(up, key=lambda i: (counts[i], (i - self._first) % self._engines))
        return self._home[session]

    def leave(self, session: str) -> int | None:
        """The engine it had."""
        return self._home.pop(session, None)

    def clear(self) -> None:
        self._home.clear()


class Turns:
    """Hosts that play groups, `most` at once each."""

    def __init__(self, hosts: int, most: int, timeout_s: float) -> None:
        self._most, self._timeout_s = most, timeout_s
        self._busy = [0] * hosts
        self._down: set[int] = set()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def host(self) -> AsyncIterator[int]:
        """The host with fewest, when it has room."""
        index = await self._take()
        try:
            yield index
        finally:
            async with self._changed:
                self._busy[index] -= 1
                self._changed.notify_all()

    def lost(self, index: int) -> bool:
        """Whether that is news."""
        news = index not in self._down
        self._down.add(index)
        return news

    async def back(self, index: int) -> None:
        async with self._changed:
            self._down.discard(index)
            self._changed.notify_all()

    async def _take(self) -> int:
        async with self._changed:
            while True:
                up = [i for i in range(len(self._busy)) if i not in self._down]
                index = min(up, key=lambda i: (self._busy[i], i), default=-1)
                if index >= 0 and self._busy[index] < self._most:
                    self._busy[index] += 1
                    return index
                try:
                    # A host at work may take as long as its episodes do; one that is to come back may not.
                    await asyncio.wait_for(self._changed.wait(), None if up else self._timeout_s)
                except TimeoutError:
                    raise WorkerLost(f"all {len(self._busy)} environment hosts died and none came back") from None
