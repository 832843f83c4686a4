"""The HTTP server: many sessions of one or several environments in one process. docs/protocol.md says what travels.

The four hot paths (create, reset, step, close) are answered by `Gate`, the outermost layer, straight from bytes to
bytes; everything else is an ordinary FastAPI route. Routing and validating them in FastAPI costs more than a step of
a cheap environment does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import itertools
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, FastAPI, Query, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agentgym_rl import __version__
from agentgym_rl.environment import catalog, wire
from agentgym_rl.environment.base import HasActions, HasOracle, HasRender, HasStateKey, HasThought, TextEnv
from agentgym_rl.environment.open_files import allow_open_files
from agentgym_rl.environment.session import LocalSession
from agentgym_rl.errors import ConfigError, EnvError, EnvTimeout
from agentgym_rl.types import Step

logger = logging.getLogger(__name__)

Handler = Callable[[bytes], Awaitable[bytes]]
"""Body in, body out."""
TURNS_TO_HEAR = 5
"""Of the loop, until what a connection has is read, its end is known and whoever waits for that is woken."""

CAPABILITIES = {
    "actions": HasActions,
    "oracle": HasOracle,
    "thought": HasThought,
    "state_key": HasStateKey,
    "render": HasRender,
}
MAX_ITEMS_PER_ANSWER = 100_000
MAX_SESSIONS = 4096
HOLDS = 1024
"""Clients whose connections there is room for besides those of all sessions."""
SHUTDOWN_GRACE_S = 10.0
"""How long a shutdown waits for calls in threads to come back, so that their environments are closed too."""
GRACE_S = 30.0
"""After somebody's hold has ended, until his sessions are closed: a connection that merely broke is back by then."""
HEARTBEAT_S = 15.0
"""Between signs of life on a hold, so that no proxy takes it for dead."""
BODY_TIMEOUT_S = 30.0
"""A client that announces a body and does not send it is dropped after this long."""


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
        # Counted on from the time of the start: after a restart an old id is unknown rather than somebody else's.
        self._ids = itertools.count(int(time.time()) << 20)

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
        session_id = next(self._ids)
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


def hot_handlers(sessions: Sessions, env: str) -> dict[str, Handler]:
    """The paths a rollout spends its time in."""

    async def create(raw: bytes) -> bytes:
        # AgentGym's TextCraft client reads an observation here, before it has chosen an item.
        waiting = Step("Reset this session with an item to begin.")
        return wire.dump(wire.step_answer(waiting, 0.0, await sessions.create(env, wire.owner(raw))))

    async def reset(raw: bytes) -> bytes:
        body = wire.read_body(raw)
        session_id, item = wire.integer(body, "id"), wire.integer(body, "data_idx")
        session = sessions.get(env, session_id)
        try:
            step = await session.reset(item)
        except EnvError as error:
            sessions.failed(session_id, error)
            raise
        finally:
            sessions.touch(session_id)
        return wire.dump(wire.step_answer(step, session.score, session_id))

    async def step(raw: bytes) -> bytes:
        body = wire.read_body(raw)
        session_id, action = wire.integer(body, "id"), wire.text(body, "action")
        session = sessions.get(env, session_id)
        try:
            step = await session.step(action)
        except EnvError as error:
            sessions.failed(session_id, error)
            raise
        finally:
            sessions.touch(session_id)
        return wire.dump(wire.step_answer(step, session.score))

    async def close(raw: bytes) -> bytes:
        await sessions.close(env, wire.integer(wire.read_body(raw), "id"))
        return b"true"

    return {"/create": create, "/reset": reset, "/step": step, "/close": close}


def undoing_handlers(sessions: Sessions, env: str) -> dict[str, Handler]:
    """What to do with an answer that nobody waits for any more: of a session only its opener knows the id."""

    async def create(answer: bytes) -> bytes:
        await sessions.close(env, wire.integer(wire.read_body(answer), "id"))
        return b""

    return {"/create": create}


async def hold(sessions: Sessions, raw: bytes, receive: Receive, send: Send) -> None:
    """Answer, and go on answering until the client leaves or the server shuts down."""
    owner = wire.text(wire.read_body(raw), "owner")
    if not owner:
        raise wire.BadRequest("owner must not be empty: that is who sessions without one belong to")
    with sessions.held(owner):
        headers = [(b"content-type", b"text/plain"), (b"x-accel-buffering", b"no")]  # nginx would keep the first byte
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        left = asyncio.ensure_future(_disconnected(receive))
        closing = asyncio.ensure_future(sessions.closing.wait())
        try:
            while not (left.done() or closing.done()):
                await send({"type": "http.response.body", "body": b"\n", "more_body": True})
                await asyncio.wait((left, closing), timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
            await send({"type": "http.response.body", "body": b""})
        finally:
            left.cancel()
            closing.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Gate:
    """The outermost layer: token, size limit, hot paths, holds; the rest goes to the FastAPI app inside."""

    def __init__(
        self,
        app: ASGIApp,
        sessions: Sessions,
        handlers: Mapping[str, Handler],
        undoing: Mapping[str, Handler],
        token: str | None,
        max_request_bytes: int,
    ) -> None:
        self._app, self._sessions = app, sessions
        self._hold_paths = {"/hold", *(f"/{env}/hold" for env in sessions.environments)}
        self._handlers, self._undoing = handlers, undoing
        self._authorization = f"Bearer {token}".encode() if token else None
        self._max_request_bytes = max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        authorization = b""
        content_length = 0
        for name, value in scope["headers"]:
            if name == b"authorization":
                authorization = value
            elif name == b"content-length" and value.isdigit():
                content_length = int(value)
        if self._authorization and not hmac.compare_digest(authorization, self._authorization):
            detail = wire.error_body(ConfigError("a valid bearer token is needed: send Authorization: Bearer TOKEN"))
            await answer(send, 401, detail, (b"www-authenticate", b"Bearer"))
            return
        if content_length > self._max_request_bytes:
            await answer(send, 413, wire.error_body(self._too_large(str(content_length))))
            return
        handler = self._handlers.get(scope["path"]) if scope["method"] == "POST" else None
        is_hold = scope["method"] == "POST" and scope["path"] in self._hold_paths
        if handler is None and not is_hold:
            await self._app(scope, receive, send)
            return
        try:
            raw = await self._body(receive)
            if handler is None:
                await hold(self._sessions, raw, receive, send)
                return
            body = await handler(raw)
            if (undo := self._undoing.get(scope["path"])) is not None and await has_left(receive):
                await undo(body)
        except (EnvError, ConfigError) as error:
            await answer(send, wire.STATUS.get(type(error), 500), wire.error_body(error))
        except TimeoutError:
            await answer(send, 408, wire.error_body(TimeoutError(f"the body did not come within {BODY_TIMEOUT_S:g} s")))
        except Exception as error:
            logger.exception("%s failed", scope["path"])
            await answer(send, 500, wire.error_body(RuntimeError(f"{type(error).__name__}: {error}")))
        else:
            await answer(send, 200, body)

    async def _body(self, receive: Receive) -> bytes:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body, more = b"", True
            while more:
                message = await receive()
                body += message.get("body", b"")
                if len(body) > self._max_request_bytes:
                    raise self._too_large("more")
                more = message.get("more_body", False)
        return body

    def _too_large(self, size: str) -> wire.TooLarge:
        return wire.TooLarge(f"a request may have {self._max_request_bytes} bytes, this one has {size}")


class EnvironmentApp(FastAPI):
    """FastAPI behind a gate. Not a middleware of it: what FastAPI does around those costs as much as a step."""

    gate: Gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.gate(scope, receive, send)

    async def inner(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)


async def has_left(receive: Receive) -> bool:
    """Whether the client of a request that was read has closed its connection."""
    next_message = asyncio.ensure_future(receive())
    for _ in range(TURNS_TO_HEAR):
        await asyncio.sleep(0)
    if not next_message.done():
        next_message.cancel()
        return False
    return (await next_message)["type"] == "http.disconnect"


async def answer(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    lines = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
    if status == 429:
        lines.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


def json_response(value: Any) -> Response:
    return Response(wire.dump(value), media_type="application/json")


def env_routes(sessions: Sessions, env: str, env_class: type[TextEnv]) -> APIRouter:
    """Everything about one environment that is not hot."""
    router = APIRouter()

    @router.get("/info")
    async def info() -> Response:
        return json_response(
            {
                "name": env,
                "instruction": env_class.instruction,
                "splits": {name: [split.start, split.stop] for name, split in env_class.splits.items()},
                "subsets": list(env_class.subsets),
                "capabilities": [name for name, protocol in CAPABILITIES.items() if issubclass(env_class, protocol)],
                "holds": True,
                "version": __version__,
            }
        )

    @router.get("/items")
    async def items(
        split: str,
        subset: str | None = None,
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_ITEMS_PER_ANSWER)] = MAX_ITEMS_PER_ANSWER,
    ) -> Response:
        # In a thread: listing a subset looks at every item of the split once.
        selected = await asyncio.to_thread(catalog.items, env_class, split, subset)
        return json_response({"items": list(selected[offset : offset + limit]), "total": len(selected)})

    @router.get("/observation")
    async def observation(id: int) -> Response:  # noqa: A002, the protocol's name
        session = sessions.get(env, id)
        session.check_started()
        return json_response(session.observation)

    @router.get("/available_actions")
    async def available_actions(id: int) -> Response:  # noqa: A002
        return json_response(await ask(id, LocalSession.actions))

    @router.get("/oracle")
    async def oracle(id: int, thought: bool = False) -> Response:  # noqa: A002
        if not thought:
            return json_response(await ask(id, LocalSession.oracle))
        words, action = await ask(id, LocalSession.advice)
        return json_response({"thought": words, "action": action})

    @router.get("/state_key")
    async def state_key(id: int) -> Response:  # noqa: A002
        return json_response(await ask(id, LocalSession.state_key))

    @router.get("/render")
    async def render(id: int) -> Response:  # noqa: A002
        picture = await ask(id, LocalSession.render)
        if isinstance(picture, bytes):
            media_type = "image/png"
        else:
            media_type = "image/svg+xml" if picture.lstrip().startswith(("<svg", "<?xml")) else "text/html"
        # What an environment draws may hold text of a model: it must not run anything in the browser.
        policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff"}
        return Response(picture, media_type=media_type, headers=headers)

    async def ask(session_id: int, question: Callable[[LocalSession], Awaitable[Any]]) -> Any:
        try:
            return await question(sessions.get(env, session_id))
        except EnvError as error:
            sessions.failed(session_id, error)
            raise

    return router


def server_routes(sessions: Sessions) -> APIRouter:
    """What concerns the whole server."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        return json_response(
            {
                "status": "ok",
                "version": __version__,
                "uptime_s": round(time.monotonic() - sessions.started_at, 3),
                "sessions": sessions.num_open,
                "max_sessions": sessions.max_sessions,
                "step_timeout_s": sessions.step_timeout_s,
                "environments": {name: sessions.num_open_of(name) for name in sessions.environments},
                **sessions.counts,
            }
        )

    @router.get("/")
    async def root() -> Response:
        return json_response("ok")

    return router


def create_app(
    environments: Mapping[str, Callable[[], TextEnv]],
    *,
    token: str | None = None,
    max_sessions: int = MAX_SESSIONS,
    idle_timeout_s: float = 1800.0,
    step_timeout_s: float = 60.0,
    max_request_bytes: int = 1 << 20,
) -> FastAPI:
    """The server as an ASGI app: each environment under its name, and at the root too when there is just one."""
    if not environments:
        raise ConfigError("a server needs at least one environment: name one")
    if max_sessions < 1 or min(idle_timeout_s, step_timeout_s) <= 0 or max_request_bytes < 1:
        raise ConfigError("max_sessions, idle_timeout_s, step_timeout_s and max_request_bytes must be positive")
    sessions = Sessions(environments, max_sessions, idle_timeout_s, step_timeout_s)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reaper = asyncio.create_task(sessions.reap())
        try:
            yield
        finally:
            reaper.cancel()
            await sessions.close_all()

    app = EnvironmentApp(
        title="AgentGym-RL environments", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    handlers: dict[str, Handler] = {}
    undoing: dict[str, Handler] = {}
    for env, factory in environments.items():
        env_class = catalog.class_of(factory)
        for prefix in (f"/{env}", "") if len(environments) == 1 else (f"/{env}",):
            app.include_router(env_routes(sessions, env, env_class), prefix=prefix)
            handlers |= {prefix + path: handler for path, handler in hot_handlers(sessions, env).items()}
            undoing |= {prefix + path: handler for path, handler in undoing_handlers(sessions, env).items()}
    app.include_router(server_routes(sessions))
    for env in environments:
        app.include_router(server_routes(sessions), prefix=f"/{env}")

    async def refuse(_: Request, error: Exception) -> Response:
        status = wire.STATUS.get(type(error), 500)
        return Response(wire.error_body(error), status, media_type="application/json")

    for kind in (EnvError, ConfigError, Exception):
        app.add_exception_handler(kind, refuse)
    app.gate = Gate(app.inner, sessions, handlers, undoing, token, max_request_bytes)
    app.state.sessions = sessions
    return app


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; ConfigError when the address cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use: choose another port or end its user") from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    except OverflowError:
        raise ConfigError(f"a port is a number from 0 to 65535, got {port}") from None


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(
    names: list[str], host: str = "127.0.0.1", port: int = 36001, *, token: str | None = None, **options: Any
) -> None:
    """Serve environments of the catalog until interrupted; `options` are those of create_app."""
    if not token and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines, so a token is needed: give one, or use 127.0.0.1"
        )
    run({name: catalog.load(name) for name in names}, bind(host, port), token=token, **options)


def run(environments: Mapping[str, Callable[[], TextEnv]], listener: socket.socket, **options: Any) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM, then close every environment."""
    allow_open_files(options.get("max_sessions", MAX_SESSIONS), HOLDS)
    with contextlib.suppress(KeyboardInterrupt), listener:
        uvicorn_server(create_app(environments, **options)).run(sockets=[listener])


class Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.sessions.closing.set()  # type: ignore[union-attr]
        await super().shutdown(sockets)


def uvicorn_server(app: FastAPI) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )
    return Server(config)
