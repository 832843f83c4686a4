"""Decides which environment host plays a group, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentgym_rl.errors import WorkerLost


class HostScheduler:
    """Assigns groups to hosts, each with at most `max_episodes` at once. A larger group gets an idle host. Together
    they play no more than hosts times `max_episodes` at once, or one group."""

    def __init__(self, hosts: int, max_episodes: int, timeout_s: float) -> None:
        self._max_episodes, self._timeout_s = max_episodes, timeout_s
        self._playing = [0] * hosts
        self._down: set[int] = set()
        self._changed = asyncio.Condition()
        self._queue = asyncio.Lock()

    @asynccontextmanager
    async def host(self, episodes: int) -> AsyncIterator[int]:
        """Wait for capacity and yield the host with the fewest episodes."""
        index = await self._acquire(episodes)
        try:
            yield index
        finally:
            async with self._changed:
                self._playing[index] -= episodes
                self._changed.notify_all()

    def mark_lost(self, index: int) -> bool:
        """Mark a host as down. Return False if it already was."""
        is_new = index not in self._down
        self._down.add(index)
        return is_new

    async def mark_back(self, index: int) -> None:
        async with self._changed:
            self._down.discard(index)
            self._changed.notify_all()

    def _has_capacity(self, index: int, episodes: int) -> bool:
        total, limit = sum(self._playing), self._max_episodes * len(self._playing)
        if episodes > self._max_episodes:
            return not self._playing[index] and (not total or total + episodes <= limit)
        return self._playing[index] + episodes <= self._max_episodes and total + episodes <= limit

    async def _acquire(self, episodes: int) -> int:
        # First come, first served: otherwise small groups would overtake a large one forever.
        async with self._queue, self._changed:
            while True:
                up = [i for i in range(len(self._playing)) if i not in self._down]
                index = min(up, key=lambda i: (self._playing[i], i), default=-1)
                if index >= 0 and self._has_capacity(index, episodes):
                    self._playing[index] += episodes
                    return index
                try:
                    # A busy host may take as long as its episodes do; a restarting one may not.
                    await asyncio.wait_for(self._changed.wait(), None if up else self._timeout_s)
                except TimeoutError:
                    raise WorkerLost(f"all {len(self._playing)} environment hosts died and none came back") from None
