"""Which environment host plays a group, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentgym_rl.errors import WorkerLost


class Turns:
    """Hosts that play groups, of at most `most` episodes at once each. A larger group has a host to itself, and room
    that others leave: all together play no more than hosts times `most` at once, or one group."""

    def __init__(self, hosts: int, most: int, timeout_s: float) -> None:
        self._most, self._timeout_s = most, timeout_s
        self._busy = [0] * hosts
        self._down: set[int] = set()
        self._changed = asyncio.Condition()
        self._line = asyncio.Lock()

    @asynccontextmanager
    async def host(self, episodes: int) -> AsyncIterator[int]:
        """The host with fewest, when it has room for a group of so many."""
        index = await self._take(episodes)
        try:
            yield index
        finally:
            async with self._changed:
                self._busy[index] -= episodes
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

    def _has_room(self, index: int, episodes: int) -> bool:
        playing = sum(self._busy)
        if episodes > self._most:
            return not self._busy[index] and (not playing or playing + episodes <= self._most * len(self._busy))
        return self._busy[index] + episodes <= self._most and playing + episodes <= self._most * len(self._busy)

    async def _take(self, episodes: int) -> int:
        # In line: a large group that waits for room would else be passed by small ones for ever.
        async with self._line, self._changed:
            while True:
                up = [i for i in range(len(self._busy)) if i not in self._down]
                index = min(up, key=lambda i: (self._busy[i], i), default=-1)
                if index >= 0 and self._has_room(index, episodes):
                    self._busy[index] += episodes
                    return index
                try:
                    # A host at work may take as long as its episodes do; one that is to come back may not.
                    await asyncio.wait_for(self._changed.wait(), None if up else self._timeout_s)
                except TimeoutError:
                    raise WorkerLost(f"all {len(self._busy)} environment hosts died and none came back") from None
