"""The HTTP server: many sessions of environments in one process. docs/reference/protocol.md has the protocol.

The four hot paths (create, reset, step, close) are answered by `Gate`, the outermost layer, straight from bytes to
bytes; everything else is an ordinary FastAPI route. Routing and validating them in FastAPI costs more than a step of
a cheap environment does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agentgym_rl import __version__
from agentgym_rl.common.http_guard import HTTP_OPTIONS, is_loopback, refusal
from agentgym_rl.environment import catalog, dialects, wire
from agentgym_rl.environment.base import HasActions, HasOracle, HasRender, HasStateKey, HasThought, TextEnv
from agentgym_rl.environment.open_files import allow_open_files
from agentgym_rl.environment.server_sessions import Sessions
from agentgym_rl.environment.session import LocalSession
from agentgym_rl.errors import ConfigError, EnvError
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
HEARTBEAT_S = 15.0
"""Between signs of life on a hold, so that no proxy takes it for dead."""
BODY_TIMEOUT_S = 30.0
"""A client that announces a body and does not send it is dropped after this long."""


def hot_handlers(sessions: Sessions, env: str, env_class: type[TextEnv]) -> dict[str, Handler]:
    """The paths a rollout spends its time in."""
    dialect = dialects.dialect_of(env_class)

    async def create(raw: bytes) -> bytes:
        # AgentGym's TextCraft client reads an observation here, before it has chosen an item.
        waiting = Step("Reset this session with an item to begin.")
        answer = wire.step_answer(waiting, 0.0, await sessions.create(env, wire.owner(raw)))
        return wire.dump(dialect.created(raw, answer))

    async def reset(raw: bytes) -> bytes:
        body = wire.read_body(raw)
        session_id = dialects.session_id(body)
        item, in_agentgym_words = dialect.read_item(body, env_class)
        session = sessions.get(env, session_id)
        try:
            step = await session.reset(item)
            session.in_agentgym_words = in_agentgym_words
        except EnvError as error:
            sessions.failed(session_id, error)
            raise
        finally:
            sessions.touch(session_id)
        answer = wire.step_answer(step, session.score, session_id)
        return wire.dump(dialect.after_reset(answer, session.environment) if in_agentgym_words else answer)

    async def step(raw: bytes) -> bytes:
        body = wire.read_body(raw)
        session_id, action = dialects.session_id(body), wire.text(body, "action")
        session = sessions.get(env, session_id)
        try:
            step = await session.step(dialect.action(action) if session.in_agentgym_words else action)
        except EnvError as error:
            sessions.failed(session_id, error)
            raise
        finally:
            sessions.touch(session_id)
        answer = wire.step_answer(step, session.score)
        return wire.dump(dialect.after_step(answer, session.environment) if session.in_agentgym_words else answer)

    async def close(raw: bytes) -> bytes:
        await sessions.close(env, dialects.session_id(wire.read_body(raw)))
        return b"true"

    return {"/create": create, "/reset": reset, "/step": step, "/close": close}


def undoing_handlers(sessions: Sessions, env: str) -> dict[str, Handler]:
    """What to do with an answer that nobody waits for any more: of a session only its opener knows the id."""

    async def create(answer: bytes) -> bytes:
        await sessions.close(env, dialects.created_session(answer))
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
    """The outermost layer: Host and Origin, token, size limit, hot paths, holds; the rest goes to the FastAPI app.

    Without a token the server is on loopback, where every page of the web can reach it through a browser.
    """

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
        self._accepted_host: str | None = None
        """Host header of the last request; most requests come from one kind of client and need no second look."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        authorization, host = b"", ""
        content_length = 0
        origin = fetch_site = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                authorization = value
            elif name == b"host":
                host = value.decode("latin-1")
            elif name == b"origin":
                origin = value.decode("latin-1")
            elif name == b"sec-fetch-site":
                fetch_site = value.decode("latin-1")
            elif name == b"content-length" and value.isdigit():
                content_length = int(value)
        if origin is not None or fetch_site is not None or host != self._accepted_host:
            status, reason = refusal(scope["method"], host, origin, fetch_site, self._authorization is None)
            if status:
                await answer(send, status, wire.error_body(ConfigError(reason)))
                return
            self._accepted_host = host
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


def _session_id(id: int | None = None, env_idx: int | None = None) -> int:  # noqa: A002, the protocol's names
    named = env_idx if id is None else id
    if named is None:
        raise wire.BadRequest("the query must name a session: id=NUMBER")
    return named


SessionId = Annotated[int, Depends(_session_id)]


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
    async def observation(id: SessionId) -> Response:  # noqa: A002, the protocol's name
        session = sessions.get(env, id)
        session.check_started()
        return json_response(session.observation)

    @router.get("/available_actions")
    async def available_actions(id: SessionId) -> Response:  # noqa: A002
        return json_response(await ask(id, LocalSession.actions))

    @router.get("/oracle")
    async def oracle(id: SessionId, thought: bool = False) -> Response:  # noqa: A002
        if not thought:
            return json_response(await ask(id, LocalSession.oracle))
        words, action = await ask(id, LocalSession.advice)
        return json_response({"thought": words, "action": action})

    @router.get("/state_key")
    async def state_key(id: SessionId) -> Response:  # noqa: A002
        return json_response(await ask(id, LocalSession.state_key))

    @router.get("/render")
    async def render(id: SessionId) -> Response:  # noqa: A002
        picture = await ask(id, LocalSession.render)
        if isinstance(picture, bytes):
            media_type = "image/png"
        else:
            media_type = "image/svg+xml" if picture.lstrip().startswith(("<svg", "<?xml")) else "text/html"
        # What an environment draws may hold text of a model: it must not run anything in the browser.
        policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff"}
        return Response(picture, media_type=media_type, headers=headers)

    def add_question(path: str, question: Callable[[TextEnv], Any]) -> None:
        @router.get(path)
        async def answer_question(id: SessionId) -> Response:  # noqa: A002
            return json_response(dialects.ask(question, sessions.get(env, id).environment))

    for path, question in dialects.dialect_of(env_class).questions.items():
        add_question(path, question)

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
            handlers |= {prefix + path: handler for path, handler in hot_handlers(sessions, env, env_class).items()}
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


def serve(
    names: list[str],
    host: str = "127.0.0.1",
    port: int = 36001,
    *,
    token: str | None = None,
    announce: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> None:
    """Serve environments of the catalog until interrupted; `options` are those of create_app.

    `announce` is called once requests are answered: with a line for each environment and its address, then `ready`.
    """
    if not token and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines, so a token is needed: give one, or use 127.0.0.1"
        )
    environments = {name: catalog.load(name) for name in names}
    listener = bind(host, port)
    base = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    lines = [f"{name:{max(map(len, names))}}  {base}/{name}" for name in environments]
    run(environments, listener, token=token, on_ready=lambda: announce("\n".join([*lines, "ready"])), **options)


def run(
    environments: Mapping[str, Callable[[], TextEnv]],
    listener: socket.socket,
    *,
    on_ready: Callable[[], None] = lambda: None,
    **options: Any,
) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM, then close every environment."""
    allow_open_files(options.get("max_sessions", MAX_SESSIONS), HOLDS)
    server = uvicorn_server(create_app(environments, **options))
    server.on_ready = on_ready
    with contextlib.suppress(KeyboardInterrupt), listener:
        server.run(sockets=[listener])


class Server(uvicorn.Server):
    on_ready: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.sessions.closing.set()  # type: ignore[union-attr]
        await super().shutdown(sockets)


def uvicorn_server(app: FastAPI) -> Server:
    config = uvicorn.Config(
        app,
        loop="uvloop",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        **HTTP_OPTIONS,
    )
    return Server(config)
