"""The sessions of a server: who has which, and when they end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from agentgym_rl.environment import wire
from agentgym_rl.environment.base import TextEnv
from agentgym_rl.environment.session import LocalSession
from agentgym_rl.errors import EnvError, EnvTimeout

SHUTDOWN_GRACE_S = 10.0
"""How long a shutdown waits for calls in threads to come back, so that their environments are closed too."""
GRACE_S = 30.0
"""After somebody's hold has ended, until his sessions are closed: a connection that merely broke is back by then."""

LARGEST_ID = (1 << 53) - 1
"""Ids are random, so that nobody can guess another's, and integers that JSON readers of every language hold exactly."""


class Sessions:
    """Every session of the server by id, and what became of them."""

    def __init__(
        self,
        environments: Mapping[str, Callable[[], TextEnv]],
        max_sessions: int,
        idle_timeout_s: float,
        step_timeout_s: float,
    ) -> None:
        self.environments = dict(environments)
        self.max_sessions = max_sessions
        self.idle_timeout_s = idle_timeout_s
        self.step_timeout_s = step_timeout_s
        self.started_at = time.monotonic()
        self.counts = {"created": 0, "closed": 0, "idle_closed": 0, "left_closed": 0, "timed_out": 0, "failed": 0}
        self._open: dict[int, tuple[str, LocalSession]] = {}
        self._last_used: dict[int, float] = {}
        self._owner: dict[int, str] = {}
        """Of a session, where it has one."""
        self._holds: Counter[str] = Counter()
        self._leaving: dict[str, asyncio.TimerHandle] = {}
        """Owners whose last hold has ended, but not their time to come back."""
        self._closings: set[asyncio.Task[None]] = set()
        self.closing = asyncio.Event()
        """The server shuts down: whoever holds something is let go."""
        self._opening = 0

    @property
    def num_open(self) -> int:
        return len(self._open) + self._opening

    def num_open_of(self, env: str) -> int:
        return sum(name == env for name, _ in self._open.values())

    async def create(self, env: str, owner: str = "") -> int:
        if self.num_open >= self.max_sessions:
            raise wire.Full(f"all {self.max_sessions} sessions are in use: close one, or try again later")
        self._opening += 1
        try:
            session = await LocalSession.open(env, self.environments[env], self.step_timeout_s)
        except EnvError as error:
            self._count(error)
            raise
        finally:
            self._opening -= 1
        session_id = secrets.randbelow(LARGEST_ID) + 1
        self._open[session_id] = (env, session)
        self._last_used[session_id] = time.monotonic()
        if owner:
            self._owner[session_id] = owner
        self.counts["created"] += 1
        return session_id

    @contextlib.contextmanager
    def held(self, owner: str) -> Iterator[None]:
        """While somebody holds the sessions of an owner."""
        if (leaving := self._leaving.pop(owner, None)) is not None:
            leaving.cancel()
        self._holds[owner] += 1
        try:
            yield
        finally:
            self._holds[owner] -= 1
            if not self._holds[owner]:
                del self._holds[owner]
                if not self.closing.is_set():
                    self._leaving[owner] = asyncio.get_running_loop().call_later(GRACE_S, self._let_go, owner)

    def _let_go(self, owner: str) -> None:
        del self._leaving[owner]
        task = asyncio.create_task(self._close_those_of(owner))
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)

    async def _close_those_of(self, owner: str) -> None:
        for session_id in [session_id for session_id, of in self._owner.items() if of == owner]:
            if session_id in self._open:
                _, session = self._open[session_id]
                self._forget(session_id)
                self.counts["left_closed"] += 1
                await session.close()

    def touch(self, session_id: int) -> None:
        """A call has ended: a session is idle from then on, however long the call took."""
        if session_id in self._open:
            self._last_used[session_id] = time.monotonic()

    def get(self, env: str, session_id: int) -> LocalSession:
        name, session = self._open.get(session_id, ("", None))
        if session is None or name != env:
            raise wire.NoSuchSession(
                f"no {env} session has the id {session_id}: it was closed, idle too long or never was"
            )
        self._last_used[session_id] = time.monotonic()
        return session

    async def close(self, env: str, session_id: int) -> None:
        session = self.get(env, session_id)
        self._forget(session_id)
        self.counts["closed"] += 1
        await session.close()

    def failed(self, session_id: int, error: EnvError) -> None:
        """Count a failure; a session whose thread hangs is discarded, one that raised may be reset."""
        self._count(error)
        if isinstance(error, EnvTimeout):
            self._forget(session_id)

    async def reap(self) -> None:
        """Close idle sessions, for ever."""
        while True:
            await asyncio.sleep(min(self.idle_timeout_s / 4, 15.0))
            oldest = time.monotonic() - self.idle_timeout_s
            for session_id, last_used in list(self._last_used.items()):
                if last_used < oldest and session_id in self._open and not self._open[session_id][1].busy:
                    _, session = self._open[session_id]
                    self._forget(session_id)
                    self.counts["idle_closed"] += 1
                    await session.close()

    async def close_all(self) -> None:
        sessions = [session for _, session in self._open.values()]
        self._open.clear()
        self._last_used.clear()
        self._owner.clear()
        self.counts["closed"] += len(sessions)
        await asyncio.gather(*(session.close() for session in sessions))
        deadline = time.monotonic() + SHUTDOWN_GRACE_S
        while any(session.ending for session in sessions) and time.monotonic() < deadline:  # noqa: ASYNC110, threads do not set events of a loop that ends
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
