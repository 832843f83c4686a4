"""Stages of an episode, each with its own bound: opening the environment, playing, closing.

Only playing needs the engine. Environments are opened and reset ahead of it, so that the engine does not wait for a
slow reset, and closed after it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager

from agentgym_rl.errors import ConfigError

STARTS_PER_ITERATION = 16
"""Episodes that start in one iteration of the event loop, so that an engine plays the first while others are reset."""


class EpisodeSlots:
    """Slots for `total` concurrent episodes.

    If several environments wait, the next slot goes to the one with the fewest relative to its weight. An environment
    that plays alone may use all. `weights` default to 1.
    """

    def __init__(self, total: int, weights: Mapping[str, float] | None = None) -> None:
        if total < 1:
            raise ConfigError(f"concurrency must be 1 or more, got {total}")
        self._free = total
        self._weights = weights or {}
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = defaultdict(deque)
        self._scheduled_in: asyncio.AbstractEventLoop | None = None
        """Event loop in which slots will be handed out."""

    @asynccontextmanager
    async def taken(self, env: str) -> AsyncIterator[None]:
        """Hold a slot while the body runs."""
        await self.acquire(env)
        try:
            yield
        finally:
            self.release(env)

    def take_free(self, env: str) -> bool:
        """Take a slot if one is free and none waits for it. Return whether it was."""
        if not self._free or any(self._waiting.values()):
            return False
        self._take(env)
        return True

    async def acquire(self, env: str) -> None:
        """Wait for a slot."""
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[None] = loop.create_future()
        self._waiting[env].append(granted)
        # Later, so that environments that start together are all waiting by then.
        self._schedule(loop)
        try:
            await granted
        except BaseException:
            if granted.done() and not granted.cancelled():
                self.release(env)
            raise

    def release(self, env: str) -> None:
        """Give a slot back."""
        self._free += 1
        self._taken[env] -= 1
        self._schedule(asyncio.get_running_loop())

    def _take(self, env: str) -> None:
        self._free -= 1
        self._taken[env] += 1

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand out slots in the next iteration, once."""
        if self._scheduled_in is not loop:
            self._scheduled_in = loop
            loop.call_soon(self._hand_out)

    def _hand_out(self) -> None:
        self._scheduled_in = None
        for _ in range(STARTS_PER_ITERATION):
            envs = [env for env, queue in self._waiting.items() if queue]
            if not self._free or not envs:
                return
            env = min(envs, key=lambda env: self._taken[env] / self._weights.get(env, 1.0))
            granted = self._waiting[env].popleft()
            if not granted.cancelled():
                self._take(env)
                granted.set_result(None)
        self._schedule(asyncio.get_running_loop())


class Stages:
    """Bounds of the stages of episodes, shared by several collectors.

    At most `playing` episodes are played at once, and at most `playing` + `ahead` environments are open. `opening`
    bounds, by environment, those that are being opened and reset; without an entry there is no such bound. Slots are
    shared by environments according to `weights`.
    """

    def __init__(
        self,
        playing: int,
        ahead: int = 0,
        opening: Mapping[str, int] | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        if ahead < 0:
            raise ConfigError(f"open_ahead must be 0 or more, got {ahead}")
        self.sessions = EpisodeSlots(playing + ahead, weights)
        self.playing = EpisodeSlots(playing, weights) if ahead else None  # else a session's slot is enough
        self.opening = {env: EpisodeSlots(limit) for env, limit in (opening or {}).items()}

    def episode(self, env: str) -> EpisodeStage:
        """Return a context that waits until an environment may be opened, and at its end frees what it holds."""
        return EpisodeStage(self, env)


class EpisodeStage:
    """The stage of one episode. It holds a slot of at most one stage, besides that of its session."""

    def __init__(self, stages: Stages, env: str) -> None:
        self._stages, self._env = stages, env
        self._slots: EpisodeSlots | None = None

    async def __aenter__(self) -> EpisodeStage:
        await self._stages.sessions.acquire(self._env)
        try:
            opening = self._stages.opening.get(self._env)
            if opening is not None and (waiting := self._enter(opening)) is not None:
                await waiting
        except BaseException:
            self._stages.sessions.release(self._env)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()
        self._stages.sessions.release(self._env)

    def play(self) -> Awaitable[None] | None:
        """End the opening and start to play: at once, or when the returned awaitable ends."""
        self.leave()
        return None if self._stages.playing is None else self._enter(self._stages.playing)

    def leave(self) -> None:
        """End the present stage. The environment may stay open."""
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.release(self._env)

    def _enter(self, slots: EpisodeSlots) -> Awaitable[None] | None:
        # At once if possible: the slots of sessions are handed out in portions already.
        if slots.take_free(self._env):
            self._slots = slots
            return None
        return self._wait(slots)

    async def _wait(self, slots: EpisodeSlots) -> None:
        await slots.acquire(self._env)
        self._slots = slots
