"""Where sessions come from: environments in this process, or on servers. Both look the same to the agent.

Failures are EnvErrors, which end an episode; a name, a token or an address that is wrong is a ConfigError, which ends
the run, because the next episode would fail in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from agentgym_rl.environment import agentgym, catalog
from agentgym_rl.environment.base import TextEnv
from agentgym_rl.environment.client import EnvClient
from agentgym_rl.environment.formats import ActionFormat, action_format
from agentgym_rl.environment.liveness import Hold
from agentgym_rl.environment.open_files import allow_open_files
from agentgym_rl.environment.session import LocalSession
from agentgym_rl.errors import ConfigError, EnvError, EnvUnavailable
from agentgym_rl.types import EnvSession, Step

CLOSE_TIMEOUT_S = 5.0
"""Nobody waits longer than this for a server to close a session: its idle time-out does it in the end."""


class _Places:
    """A bounded number of places; whoever comes when all are taken waits, first come first served."""

    def __init__(self, max_sessions: int, wait_timeout_s: float) -> None:
        if max_sessions < 1:
            raise ConfigError(f"a pool needs room for at least 1 session, got max_sessions={max_sessions}")
        self.num_taken = 0
        self._max_sessions = max_sessions
        self._wait_timeout_s = wait_timeout_s
        self._free = asyncio.Semaphore(max_sessions)

    async def take(self) -> None:
        try:
            async with asyncio.timeout(self._wait_timeout_s):
                await self._free.acquire()
        except TimeoutError:
            raise EnvUnavailable(
                f"none of the pool's {self._max_sessions} sessions became free within {self._wait_timeout_s:g} s: "
                "raise max_sessions, or close sessions"
            ) from None
        self.num_taken += 1

    def give_back(self) -> None:
        self.num_taken -= 1
        self._free.release()


class _PooledSession:
    """A session of a pool: reads the action format, and gives its place back on close."""

    def __init__(self, inner: EnvSession, style: ActionFormat, on_close: Callable[[_PooledSession], None]) -> None:
        self.name = inner.name
        self.instruction = f"{inner.instruction}\n\n{style.explain}" if style.explain else inner.instruction
        self._inner = inner
        self._style = style
        self._on_close = on_close
        self._closed = False

    async def reset(self, item: int) -> Step:
        return await self._open_inner().reset(item)

    async def step(self, text: str) -> Step:
        return await self._open_inner().step(self._style.parse(text))

    async def actions(self) -> list[str]:
        return await self._open_inner().actions()

    async def oracle(self) -> str:
        return await self._open_inner().oracle()

    async def advice(self) -> tuple[str, str]:
        return await self._open_inner().advice()

    async def render(self) -> str | bytes:
        return await self._open_inner().render()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            with contextlib.suppress(EnvError):  # the episode is over: what it gave is already recorded
                await self._inner.close()
        finally:
            self._on_close(self)

    def _open_inner(self) -> EnvSession:
        if self._closed:
            raise EnvError(f"this {self.name} session is closed: open another")
        return self._inner


class _Pool(ABC):
    """What both pools share: places, the open sessions, closing."""

    def __init__(self, names: Iterable[str], max_sessions: int, wait_timeout_s: float, style: str) -> None:
        self._names = tuple(names)
        self._places = _Places(max_sessions, wait_timeout_s)
        self._style = action_format(style)
        self._sessions: set[_PooledSession] = set()
        self._closed = False

    @property
    def num_open(self) -> int:
        """Places taken: sessions that are open or being opened."""
        return self._places.num_taken

    async def open(self, env: str) -> EnvSession:
        self._check_name(env)
        await self._places.take()
        try:
            if self._closed:
                raise EnvUnavailable("the pool is closed")
            session = _PooledSession(await self._open(env), self._style, self._forget)
        except BaseException:
            self._places.give_back()
            raise
        self._sessions.add(session)
        return session

    async def close(self) -> None:
        """Close every session; the pool gives out no more."""
        self._closed = True
        await asyncio.gather(*(session.close() for session in list(self._sessions)))

    def _forget(self, session: _PooledSession) -> None:
        self._sessions.discard(session)
        self._places.give_back()

    @abstractmethod
    async def _open(self, env: str) -> EnvSession: ...

    def _check_name(self, env: str) -> None:
        if env not in self._names:
            raise ConfigError(f"this pool has no environment {env!r}: it has {', '.join(self._names) or 'none'}")


class LocalPool(_Pool):
    """Environments in this process. `timeout_s` bounds each call of one that is not cheap."""

    def __init__(
        self,
        environments: Mapping[str, Callable[[], TextEnv]],
        max_sessions: int = 256,
        timeout_s: float = 60.0,
        *,
        wait_timeout_s: float = 600.0,
        action_format: str = "plain",
    ) -> None:
        super().__init__(environments, max_sessions, wait_timeout_s, action_format)
        self._environments = dict(environments)
        self._timeout_s = timeout_s

    async def _open(self, env: str) -> EnvSession:
        return await LocalSession.open(env, self._environments[env], self._timeout_s)

    async def items(self, env: str, split: str, subset: str | None = None) -> list[int]:
        self._check_name(env)
        return list(catalog.items(catalog.class_of(self._environments[env]), split, subset))


class RemoteSession:
    """One session on a server."""

    def __init__(
        self,
        name: str,
        instruction: str,
        client: EnvClient,
        session_id: int,
        give_back: Callable[[EnvClient], None],
    ) -> None:
        self.name = name
        self.instruction = instruction
        self.id = session_id
        self._client = client
        self._give_back = give_back

    async def reset(self, item: int) -> Step:
        return await self._client.reset(self.id, item)

    async def step(self, text: str) -> Step:
        return await self._client.step(self.id, text)

    async def actions(self) -> list[str]:
        return await self._client.actions(self.id)

    async def oracle(self) -> str:
        return await self._client.oracle(self.id)

    async def advice(self) -> tuple[str, str]:
        return await self._client.advice(self.id)

    async def render(self) -> str | bytes:
        return await self._client.render(self.id)

    async def close(self) -> None:
        try:
            await self._client.close(self.id, min(CLOSE_TIMEOUT_S, self._client.timeout_s))
        finally:
            self._give_back(self._client)


class RemotePool(_Pool):
    """Environments on servers: `urls` maps a name to an address such as http://127.0.0.1:36001/textcraft.

    An address agentgym+http://... speaks to one of AgentGym's own servers, which do not list their items.
    `timeout_s` bounds each call; opening also waits up to `wait_timeout_s` for a place here and for room there.
    """

    def __init__(
        self,
        urls: Mapping[str, str],
        token: str | None = None,
        max_sessions: int = 256,
        timeout_s: float = 60.0,
        *,
        wait_timeout_s: float = 600.0,
        action_format: str = "plain",
    ) -> None:
        super().__init__(urls, max_sessions, wait_timeout_s, action_format)
        allow_open_files(max_sessions)
        self._wait_timeout_s = wait_timeout_s
        self._new_client = {name: _client_maker(name, url, token, timeout_s) for name, url in urls.items()}
        self._new_hold = {name: partial(Hold, url, token) for name, url in urls.items()}
        self._holds: dict[str, Hold] = {}
        self._idle_clients = {name: [new()] for name, new in self._new_client.items()}
        """Clients whose connection the next session takes over."""
        self._instructions: dict[str, str] = {}
        self._asking = asyncio.Lock()

    async def _open(self, env: str) -> EnvSession:
        client = self._take_client(env)
        give_back = self._idle_clients[env].append
        try:
            async with self._asking:  # one question is enough when many sessions open at once
                if env not in self._instructions:
                    info = await client.info()
                    if info.get("holds"):
                        if env not in self._holds:
                            self._holds[env] = self._new_hold[env]()
                        await self._holds[env].start()
                    self._instructions[env] = info["instruction"]
            owner = self._holds[env].owner if env in self._holds else ""
            session_id = await client.create(self._wait_timeout_s, owner)
        except BaseException:
            give_back(client)
            raise
        return RemoteSession(env, self._instructions[env], client, session_id, give_back)

    def _take_client(self, env: str) -> EnvClient:
        idle = self._idle_clients[env]
        return idle.pop() if idle else self._new_client[env]()

    async def items(self, env: str, split: str, subset: str | None = None) -> list[int]:
        self._check_name(env)
        client = self._take_client(env)
        try:
            return await client.items(split, subset)
        finally:
            self._idle_clients[env].append(client)

    async def info(self, env: str) -> dict[str, Any]:
        """Return what the server says of an environment."""
        self._check_name(env)
        client = self._take_client(env)
        try:
            return await client.info()
        finally:
            self._idle_clients[env].append(client)

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            for hold in self._holds.values():
                hold.close()
            for idle in self._idle_clients.values():
                for client in idle:
                    client.drop()


def _client_maker(name: str, url: str, token: str | None, timeout_s: float) -> Callable[[], EnvClient]:
    if agentgym.is_agentgym(url):
        return partial(agentgym.AgentGymClient, agentgym.Server(url, name), token, timeout_s)
    return partial(EnvClient, url, token, timeout_s)
