"""Pools of sessions, in this process or on servers. Both have the same interface.

Failures are EnvErrors, which end an episode. A wrong name, token or address is a ConfigError, which ends the run,
because the next episode would fail in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from agentgym_rl.common.thoughts import without_thought
from agentgym_rl.environment import agentgym, catalog
from agentgym_rl.environment.base import TextEnv
from agentgym_rl.environment.client import EnvClient
from agentgym_rl.environment.formats import ActionFormat, action_format
from agentgym_rl.environment.liveness import Hold
from agentgym_rl.environment.open_files import allow_open_files
from agentgym_rl.environment.session import LocalSession
from agentgym_rl.environment.tools import ACT, Tool, call_of, play_calls
from agentgym_rl.errors import ConfigError, EnvError, EnvUnavailable
from agentgym_rl.types import EnvSession, Step, ToolCall

CLOSE_TIMEOUT_S = 5.0
"""Seconds to wait for a server to close a session. The server's idle timeout closes it later anyway."""


class _Slots:
    """A bounded number of session slots. If all are taken, callers wait in order."""

    def __init__(self, max_sessions: int, wait_timeout_s: float) -> None:
        if max_sessions < 1:
            raise ConfigError(f"a pool needs at least 1 session, got max_sessions={max_sessions}: raise it")
        self.num_taken = 0
        self._max_sessions = max_sessions
        self._wait_timeout_s = wait_timeout_s
        self._free = asyncio.Semaphore(max_sessions)

    async def acquire(self) -> None:
        try:
            async with asyncio.timeout(self._wait_timeout_s):
                await self._free.acquire()
        except TimeoutError:
            raise EnvUnavailable(
                f"none of the pool's {self._max_sessions} sessions became free within {self._wait_timeout_s:g} s: "
                "raise max_sessions, or close sessions"
            ) from None
        self.num_taken += 1

    def release(self) -> None:
        self.num_taken -= 1
        self._free.release()


class _PooledSession:
    """A session of a pool. It parses the action format, plays tool calls and releases its slot on close."""

    def __init__(
        self,
        inner: LocalSession | RemoteSession,
        syntax: ActionFormat,
        on_close: Callable[[_PooledSession], None],
    ) -> None:
        self.name = inner.name
        self.tools = [tool.schema() for tool in inner.toolset] if syntax.tools else []
        self.instruction = f"{inner.instruction}\n\n{syntax.explain}" if syntax.explain else inner.instruction
        if syntax.tools and inner.tool_instruction:
            self.instruction = inner.tool_instruction
        self.roles = {
            role: f"{text}\n\n{syntax.explain}" if syntax.explain else text for role, text in inner.roles.items()
        }
        """Instruction of each role; empty for a single agent."""
        self._toolset = inner.toolset
        """Tools of the present state."""
        self._inner = inner
        self._syntax = syntax
        self._on_close = on_close
        self._closed = False
        self._state: dict[str, Any] = {}
        """The key of the present state, as a step's info has it."""

    async def reset(self, item: int) -> Step:
        return self._keep_state(await self._require_open().reset(item))

    async def step(self, text: str) -> Step:
        return await self._act(self._syntax.parse(without_thought(text)))

    async def call(self, calls: list[ToolCall], message: str = "") -> Step:
        if not calls and self._require_open().takes_messages:
            return await self._act(without_thought(message))
        return await play_calls(self._toolset, calls, self._act, self._state)

    def call_of(self, action: str) -> ToolCall | None:
        return call_of(self._toolset, action, self.name, self._inner.takes_messages)

    async def _act(self, action: str) -> Step:
        return self._keep_state(await self._require_open().step(action))

    def _keep_state(self, step: Step) -> Step:
        self._state = {key: step.info[key] for key in ("state_key",) if key in step.info}
        if (names := step.info.get("tools")) is not None:
            self._toolset = [tool for tool in self._inner.toolset if tool.name in names]
            if self._syntax.tools:
                self.tools[:] = [tool.schema() for tool in self._toolset]
        return step

    async def actions(self) -> list[str]:
        return await self._require_open().actions()

    async def oracle(self) -> str:
        return await self._require_open().oracle()

    async def advice(self) -> tuple[str, str]:
        return await self._require_open().advice()

    async def render(self) -> str | bytes:
        return await self._require_open().render()

    async def fork(self) -> object | None:
        inner = self._require_open()
        copy = await inner.fork() if isinstance(inner, LocalSession) else None
        return None if copy is None else (copy, self._state, self._toolset)

    async def resume(self, copy: object) -> None:
        inner = self._require_open()
        assert isinstance(inner, LocalSession)
        assert isinstance(copy, tuple)
        episode, self._state, self._toolset = copy
        if self._syntax.tools:
            self.tools[:] = [tool.schema() for tool in self._toolset]
        await inner.resume(episode)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            with contextlib.suppress(EnvError):  # the episode is over and already recorded
                await self._inner.close()
        finally:
            self._on_close(self)

    def _require_open(self) -> LocalSession | RemoteSession:
        if self._closed:
            raise EnvError(f"this {self.name} session is closed: open another")
        return self._inner


class _Pool(ABC):
    """Common base of the pools: slots, open sessions, closing."""

    def __init__(self, names: Iterable[str], max_sessions: int, wait_timeout_s: float, format_name: str) -> None:
        self._names = tuple(names)
        self._slots = _Slots(max_sessions, wait_timeout_s)
        self._syntax = action_format(format_name)
        self._sessions: set[_PooledSession] = set()
        self._closed = False

    @property
    def num_open(self) -> int:
        """Number of sessions that are open or being opened."""
        return self._slots.num_taken

    async def open(self, env: str) -> EnvSession:
        self._check_name(env)
        await self._slots.acquire()
        try:
            if self._closed:
                raise EnvUnavailable("the pool is closed")
            session = _PooledSession(await self._open(env), self._syntax, self._release)
        except BaseException:
            self._slots.release()
            raise
        self._sessions.add(session)
        return session

    async def close(self) -> None:
        """Close every session. The pool opens no more."""
        self._closed = True
        await asyncio.gather(*(session.close() for session in list(self._sessions)))

    def _release(self, session: _PooledSession) -> None:
        self._sessions.discard(session)
        self._slots.release()

    @abstractmethod
    async def _open(self, env: str) -> LocalSession | RemoteSession: ...

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

    async def _open(self, env: str) -> LocalSession:
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
        on_close: Callable[[EnvClient], None],
        toolset: Sequence[Tool],
        tool_instruction: str,
        takes_messages: bool,
        roles: Mapping[str, str],
    ) -> None:
        self.name = name
        self.instruction = instruction
        self.toolset = toolset
        self.tool_instruction = tool_instruction
        self.takes_messages = takes_messages
        self.roles = roles
        self.id = session_id
        self._client = client
        self._on_close = on_close

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
            self._on_close(self._client)


class RemotePool(_Pool):
    """Environments on servers: `urls` maps a name to an address such as http://127.0.0.1:36001/textcraft.

    An address agentgym+http://... is one of AgentGym's own servers, which do not list their items. `timeout_s` bounds
    each call. Opening also waits up to `wait_timeout_s` for a slot of the pool, and again for one of the server.
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
        self._client_factories = {name: _client_factory(name, url, token, timeout_s) for name, url in urls.items()}
        self._hold_factories = {name: partial(Hold, url, token) for name, url in urls.items()}
        self._holds: dict[str, Hold] = {}
        self._idle_clients = {name: [factory()] for name, factory in self._client_factories.items()}
        """Clients without a session. The next session reuses their connection."""
        self._instructions: dict[str, str] = {}
        self._toolsets: dict[str, tuple[Sequence[Tool], str, bool, Mapping[str, str]]] = {}
        """By environment: tools, instruction for an agent that calls them, whether it takes messages, and roles."""
        self._info_lock = asyncio.Lock()

    async def _open(self, env: str) -> RemoteSession:
        client = self._take_client(env)
        release_client = self._idle_clients[env].append
        try:
            async with self._info_lock:  # sessions that open concurrently share one /info request
                if env not in self._instructions:
                    info = await client.info()
                    if info.get("holds"):
                        if env not in self._holds:
                            self._holds[env] = self._hold_factories[env]()
                        await self._holds[env].start()
                    takes_messages = "messages" in (info.get("capabilities") or ())
                    explained = str(info.get("tool_instruction") or "")
                    roles = {str(role): str(text) for role, text in (info.get("roles") or {}).items()}
                    self._toolsets[env] = _toolset(info, client.url), explained, takes_messages, roles
                    self._instructions[env] = info["instruction"]
            owner = self._holds[env].owner if env in self._holds else ""
            session_id = await client.create(self._wait_timeout_s, owner)
        except BaseException:
            release_client(client)
            raise
        return RemoteSession(env, self._instructions[env], client, session_id, release_client, *self._toolsets[env])

    def _take_client(self, env: str) -> EnvClient:
        idle = self._idle_clients[env]
        return idle.pop() if idle else self._client_factories[env]()

    async def items(self, env: str, split: str, subset: str | None = None) -> list[int]:
        self._check_name(env)
        client = self._take_client(env)
        try:
            return await client.items(split, subset)
        finally:
            self._idle_clients[env].append(client)

    async def info(self, env: str) -> dict[str, Any]:
        """Return the server's /info of an environment."""
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


def _toolset(info: dict[str, Any], url: str) -> Sequence[Tool]:
    """Return the tools in a server's /info. An older server lists none."""
    return [Tool.from_wire(row, f"{url}/info") for row in info.get("tools") or ()] or (ACT,)


def _client_factory(name: str, url: str, token: str | None, timeout_s: float) -> Callable[[], EnvClient]:
    if agentgym.is_agentgym(url):
        return partial(agentgym.AgentGymClient, agentgym.Server(url, name), token, timeout_s)
    return partial(EnvClient, url, token, timeout_s)
