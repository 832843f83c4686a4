"""The sessions of a server: their ids, owners, holds and deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

from agentgym_rl.environment import wire
from agentgym_rl.environment.base import TextEnv
from agentgym_rl.environment.session import LocalSession
from agentgym_rl.errors import ConfigError, EnvError, EnvTimeout

MAX_SESSIONS = 4096
SHUTDOWN_GRACE_S = 10.0
"""Seconds a shutdown waits for calls in threads to return, so that their environments are closed too."""
HOLD_GRACE_S = 30.0
"""Seconds from the end of an owner's last hold until its sessions are closed. A client can reconnect meanwhile."""

LARGEST_ID = (1 << 53) - 1
"""Largest session id. Ids are random, so that no client can guess another's, and exact in every JSON reader."""


class Sessions:
    """Every open session of the server by id, and counts of how sessions ended."""

    def __init__(
        self,
        environments: Mapping[str, Callable[[], TextEnv]],
        max_sessions: int = MAX_SESSIONS,
        idle_timeout_s: float = 1800.0,
        step_timeout_s: float = 60.0,
    ) -> None:
        if not environments:
            raise ConfigError("a server needs at least one environment: name one")
        if max_sessions < 1 or min(idle_timeout_s, step_timeout_s) <= 0:
            raise ConfigError("max_sessions, idle_timeout_s and step_timeout_s must be positive")
        self.environments = dict(environments)
        self.max_sessions = max_sessions
        self.idle_timeout_s = idle_timeout_s
        self.step_timeout_s = step_timeout_s
        self.started_at = time.monotonic()
        self.counts = {"created": 0, "closed": 0, "idle_closed": 0, "left_closed": 0, "timed_out": 0, "failed": 0}
        self._open: dict[int, tuple[str, LocalSession]] = {}
        self._last_used: dict[int, float] = {}
        self._owner: dict[int, str] = {}
        """Owners by session id. A session may have none."""
        self._holds: Counter[str] = Counter()
        self._grace_timers: dict[str, asyncio.TimerHandle] = {}
        """Timers of owners whose last hold has ended and who may still reconnect."""
        self._close_tasks: set[asyncio.Task[None]] = set()
        self.shutting_down = asyncio.Event()
        """Set when the server shuts down. Holds end then."""
        self._num_opening = 0

    @property
    def num_open(self) -> int:
        return len(self._open) + self._num_opening

    def num_open_of(self, env: str) -> int:
        return sum(name == env for name, _ in self._open.values())

    async def create(self, env: str, owner: str = "") -> int:
        if self.num_open >= self.max_sessions:
            raise wire.Full(f"all {self.max_sessions} sessions are in use: close one, or try again later")
        self._num_opening += 1
        try:
            session = await LocalSession.open(env, self.environments[env], self.step_timeout_s)
        except EnvError as error:
            self._count(error)
            raise
        finally:
            self._num_opening -= 1
        session_id = secrets.randbelow(LARGEST_ID) + 1
        self._open[session_id] = (env, session)
        self._last_used[session_id] = time.monotonic()
        if owner:
            self._owner[session_id] = owner
        self.counts["created"] += 1
        return session_id

    @contextlib.contextmanager
    def held(self, owner: str) -> Iterator[None]:
        """Keep the sessions of `owner` open inside the block, and for HOLD_GRACE_S after it."""
        if (timer := self._grace_timers.pop(owner, None)) is not None:
            timer.cancel()
        self._holds[owner] += 1
        try:
            yield
        finally:
            self._holds[owner] -= 1
            if not self._holds[owner]:
                del self._holds[owner]
                if not self.shutting_down.is_set():
                    loop = asyncio.get_running_loop()
                    self._grace_timers[owner] = loop.call_later(HOLD_GRACE_S, self._end_grace, owner)

    def _end_grace(self, owner: str) -> None:
        del self._grace_timers[owner]
        task = asyncio.create_task(self._close_sessions_of(owner))
        self._close_tasks.add(task)
        task.add_done_callback(self._close_tasks.discard)

    async def _close_sessions_of(self, owner: str) -> None:
        for session_id in [session_id for session_id, name in self._owner.items() if name == owner]:
            if session_id in self._open:
                _, session = self._open[session_id]
                self._forget(session_id)
                self.counts["left_closed"] += 1
                await session.close()

    def get(self, env: str, session_id: int) -> LocalSession:
        name, session = self._open.get(session_id, ("", None))
        if session is None or name != env:
            raise wire.NoSuchSession(
                f"no {env} session has the id {session_id}: it was closed, was idle too long or never existed"
            )
        self._last_used[session_id] = time.monotonic()
        return session

    def env_of(self, session_id: int) -> str:
        """Return the environment of a session, or an empty string if there is no such session."""
        return self._open.get(session_id, ("", None))[0]

    async def close(self, env: str, session_id: int) -> None:
        session = self.get(env, session_id)
        self._forget(session_id)
        self.counts["closed"] += 1
        await session.close()

    @contextlib.contextmanager
    def calling(self, session_id: int) -> Iterator[None]:
        """Count a failure inside the block, and restart the idle time after it: long calls do not count as idle.

        Discard a session whose thread hangs; one that raised can be reset.
        """
        try:
            yield
        except EnvError as error:
            self._count(error)
            if isinstance(error, EnvTimeout):
                self._forget(session_id)
            raise
        finally:
            if session_id in self._open:
                self._last_used[session_id] = time.monotonic()

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[None]:
        """Close idle sessions inside the block, and all of them after it."""
        reaper = asyncio.create_task(self._reap())
        try:
            yield
        finally:
            reaper.cancel()
            await self._close_all()

    async def _reap(self) -> None:
        """Close idle sessions until cancelled."""
        while True:
            await asyncio.sleep(min(self.idle_timeout_s / 4, 15.0))
            oldest = time.monotonic() - self.idle_timeout_s
            for session_id, last_used in list(self._last_used.items()):
                if last_used < oldest and session_id in self._open and not self._open[session_id][1].busy:
                    _, session = self._open[session_id]
                    self._forget(session_id)
                    self.counts["idle_closed"] += 1
                    await session.close()

    async def _close_all(self) -> None:
        sessions = [session for _, session in self._open.values()]
        self._open.clear()
        self._last_used.clear()
        self._owner.clear()
        self.counts["closed"] += len(sessions)
        await asyncio.gather(*(session.close() for session in sessions))
        deadline = time.monotonic() + SHUTDOWN_GRACE_S
        while any(session.is_closing for session in sessions) and time.monotonic() < deadline:  # noqa: ASYNC110, threads do not set events of a loop that ends
            await asyncio.sleep(0.02)

    def _forget(self, session_id: int) -> None:
        self._open.pop(session_id, None)
        self._last_used.pop(session_id, None)
        self._owner.pop(session_id, None)

    def _count(self, error: EnvError) -> None:
        if isinstance(error, EnvTimeout):
            self.counts["timed_out"] += 1
        elif type(error) is EnvError:
            self.counts["failed"] += 1
