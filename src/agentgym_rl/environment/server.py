"""The HTTP server: many sessions of environments in one process. docs/reference/protocol.md has the protocol.

`Dispatcher`, the outermost layer, answers the four hot paths (create, reset, step, close) directly from bytes to bytes:
FastAPI's routing and validation cost more than a step of a cheap environment. All other paths are FastAPI routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import re
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
from agentgym_rl.environment.base import HasActions, HasOracle, HasRender, HasStateKey, HasThought, HasTools, TextEnv
from agentgym_rl.environment.open_files import allow_open_files
from agentgym_rl.environment.own_class import is_import_path
from agentgym_rl.environment.server_sessions import MAX_SESSIONS, Sessions
from agentgym_rl.environment.session import LocalSession
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.types import Step

logger = logging.getLogger(__name__)

Handler = Callable[[bytes], Awaitable[bytes]]
"""Body in, body out."""
DISCONNECT_CHECK_ITERATIONS = 5
"""Event-loop iterations before checking whether the client disconnected."""

CAPABILITIES = {
    "actions": HasActions,
    "oracle": HasOracle,
    "thought": HasThought,
    "state_key": HasStateKey,
    "render": HasRender,
    "tools": HasTools,
}
MAX_ITEMS_PER_ANSWER = 100_000
RESERVED_HOLDS = 1024
"""Open files reserved for the holds of clients, besides those of all sessions."""
HEARTBEAT_S = 15.0
"""Seconds between heartbeats on a hold, so that no proxy closes it as idle."""
BODY_TIMEOUT_S = 30.0
"""Seconds to wait for the body of a request."""


def capabilities(env_class: type[TextEnv]) -> list[str]:
    """Return the names of what an environment offers beyond TextEnv."""
    names = [name for name, protocol in CAPABILITIES.items() if issubclass(env_class, protocol)]
    return [*names, "messages"] if getattr(env_class, "takes_messages", False) else names


def hot_handlers(sessions: Sessions, env: str, env_class: type[TextEnv]) -> dict[str, Handler]:
    """Return the handlers of the paths that a rollout calls most."""
    dialect = dialects.dialect_of(env_class)

    async def create(raw: bytes) -> bytes:
        # AgentGym's TextCraft client reads an observation here, before it has chosen an item.
        placeholder = Step("Reset this session with an item to begin.")
        answer = wire.step_answer(placeholder, 0.0, await sessions.create(env, wire.owner(raw)))
        return wire.dump(dialect.after_create(raw, answer))

    async def reset(raw: bytes) -> bytes:
        body = wire.read_body(raw)
        session_id = dialects.session_id(body)
        item, uses_agentgym_fields = dialect.read_item(body, env_class)
        session = sessions.get(env, session_id)
        with sessions.calling(session_id):
            step = await session.reset(item)
            session.uses_agentgym_fields = uses_agentgym_fields
        answer = wire.step_answer(step, session.score, session_id)
        return wire.dump(dialect.after_reset(answer, session.environment) if uses_agentgym_fields else answer)

    async def step(raw: bytes) -> bytes:
        body = wire.read_body(raw)
        session_id, action = dialects.session_id(body), wire.text(body, "action")
        session = sessions.get(env, session_id)
        with sessions.calling(session_id):
            step = await session.step(dialect.read_action(action) if session.uses_agentgym_fields else action)
        answer = wire.step_answer(step, session.score)
        return wire.dump(dialect.after_step(answer, session.environment) if session.uses_agentgym_fields else answer)

    async def close(raw: bytes) -> bytes:
        await sessions.close(env, dialects.session_id(wire.read_body(raw)))
        return b"true"

    return {"/create": create, "/reset": reset, "/step": step, "/close": close}


def undo_handlers(sessions: Sessions, env: str) -> dict[str, Handler]:
    """Return the handlers that undo a request whose client left before the answer. No other client knows the id."""

    async def create(answer: bytes) -> bytes:
        await sessions.close(env, dialects.created_session_id(answer))
        return b""

    return {"/create": create}


async def hold(sessions: Sessions, raw: bytes, receive: Receive, send: Send) -> None:
    """Send heartbeats until the client disconnects or the server shuts down."""
    owner = wire.text(wire.read_body(raw), "owner")
    if not owner:
        raise wire.BadRequest("owner must not be empty: an empty owner marks sessions without one")
    with sessions.held(owner):
        headers = [(b"content-type", b"text/plain"), (b"x-accel-buffering", b"no")]  # nginx would buffer the first byte
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
        shutdown = asyncio.ensure_future(sessions.shutting_down.wait())
        try:
            while not (disconnected.done() or shutdown.done()):
                await send({"type": "http.response.body", "body": b"\n", "more_body": True})
                await asyncio.wait((disconnected, shutdown), timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
            await send({"type": "http.response.body", "body": b""})
        finally:
            disconnected.cancel()
            shutdown.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Dispatcher:
    """The outermost ASGI layer: checks Host, Origin, token and size, and answers the hot paths and holds.

    Without a token the server listens on loopback, where any web page can reach it through the user's browser.
    """

    def __init__(
        self,
        app: ASGIApp,
        sessions: Sessions,
        handlers: Mapping[str, Handler],
        undo_handlers: Mapping[str, Handler],
        token: str | None,
        max_request_bytes: int,
    ) -> None:
        self._app, self._sessions = app, sessions
        self._hold_paths = {"/hold", *(f"/{env}/hold" for env in sessions.environments)}
        self._handlers, self._undo_handlers = handlers, undo_handlers
        self._authorization = f"Bearer {token}".encode() if token else None
        self._max_request_bytes = max_request_bytes
        self._accepted_host: str | None = None
        """Host header of the last accepted request. Most requests repeat it, and it is not checked again."""

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
                await send_answer(send, status, wire.error_body(ConfigError(reason)))
                return
            self._accepted_host = host
        if self._authorization and not hmac.compare_digest(authorization, self._authorization):
            detail = wire.error_body(ConfigError("a valid bearer token is needed: send Authorization: Bearer TOKEN"))
            await send_answer(send, 401, detail, (b"www-authenticate", b"Bearer"))
            return
        if content_length > self._max_request_bytes:
            await send_answer(send, 413, wire.error_body(self._too_large(str(content_length))))
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
            if (undo := self._undo_handlers.get(scope["path"])) is not None and await client_disconnected(receive):
                await undo(body)
        except (EnvError, ConfigError) as error:
            await send_answer(send, wire.STATUS.get(type(error), 500), wire.error_body(error))
        except TimeoutError:
            late = TimeoutError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s")
            await send_answer(send, 408, wire.error_body(late))
        except Exception as error:
            logger.exception("%s failed", scope["path"])
            await send_answer(send, 500, wire.error_body(RuntimeError(f"{type(error).__name__}: {error}")))
        else:
            await send_answer(send, 200, body)

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
    """FastAPI behind a dispatcher. FastAPI's own middleware would cost as much as a step of a cheap environment."""

    dispatcher: Dispatcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.dispatcher(scope, receive, send)

    async def call_fastapi(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)


async def client_disconnected(receive: Receive) -> bool:
    """Return whether the client has closed its connection. Call this after the request body was read."""
    next_message = asyncio.ensure_future(receive())
    for _ in range(DISCONNECT_CHECK_ITERATIONS):
        await asyncio.sleep(0)
    if not next_message.done():
        next_message.cancel()
        return False
    return (await next_message)["type"] == "http.disconnect"


async def send_answer(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    lines = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
    if status == 429:
        lines.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


def json_response(value: Any) -> Response:
    return Response(wire.dump(value), media_type="application/json")


def _session_id(id: int | None = None, env_idx: int | None = None) -> int:  # noqa: A002, the protocol's names
    session_id = env_idx if id is None else id
    if session_id is None:
        raise wire.BadRequest("the query must name a session: id=NUMBER")
    return session_id


SessionId = Annotated[int, Depends(_session_id)]


def env_routes(sessions: Sessions, env: str, env_class: type[TextEnv]) -> APIRouter:
    """Return the routes of one environment, except for the hot paths."""
    router, roles = APIRouter(), dict(getattr(env_class, "roles", {}))

    @router.get("/info")
    async def info() -> Response:
        return json_response(
            {
                "name": env,
                "instruction": env_class.instruction,
                **{"tool_instruction": getattr(env_class, "tool_instruction", ""), "roles": roles},
                "splits": {name: [split.start, split.stop] for name, split in env_class.splits.items()},
                "subsets": list(env_class.subsets),
                "capabilities": capabilities(env_class),
                "tools": [tool.to_wire() for tool in env_class.tools()] if issubclass(env_class, HasTools) else [],
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
        # In a thread: listing a subset checks every item of the split once.
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
        reasoning, action = await ask(id, LocalSession.advice)
        return json_response({"thought": reasoning, "action": action})

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
        # A picture may contain text of a model: it must not run anything in the browser.
        policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff"}
        return Response(picture, media_type=media_type, headers=headers)

    def add_query(path: str, query: Callable[[TextEnv], Any]) -> None:
        @router.get(path)
        async def answer_query(id: SessionId) -> Response:  # noqa: A002
            return json_response(dialects.run_query(query, sessions.get(env, id).environment))

    for path, query in dialects.dialect_of(env_class).queries.items():
        add_query(path, query)

    async def ask(session_id: int, method: Callable[[LocalSession], Awaitable[Any]]) -> Any:
        with sessions.calling(session_id):
            return await method(sessions.get(env, session_id))

    return router


def server_routes(sessions: Sessions) -> APIRouter:
    """Return the routes of the whole server."""
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
    max_request_bytes: int = 1 << 20,
    **limits: Any,
) -> FastAPI:
    """Return the server as an ASGI app. Each environment is under its name; a single one is at the root too.

    `limits` are those of Sessions.
    """
    if max_request_bytes < 1:
        raise ConfigError(f"max_request_bytes must be positive, got {max_request_bytes}")
    sessions = Sessions(environments, **limits)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with sessions.served():
            yield

    app = EnvironmentApp(
        title="AgentGym-RL environments", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    handlers: dict[str, Handler] = {}
    undo: dict[str, Handler] = {}
    for env, factory in environments.items():
        env_class = catalog.class_of(factory)
        for prefix in (f"/{env}", "") if len(environments) == 1 else (f"/{env}",):
            app.include_router(env_routes(sessions, env, env_class), prefix=prefix)
            handlers |= {prefix + path: handler for path, handler in hot_handlers(sessions, env, env_class).items()}
            undo |= {prefix + path: handler for path, handler in undo_handlers(sessions, env).items()}
    app.include_router(server_routes(sessions))
    for env in environments:
        app.include_router(server_routes(sessions), prefix=f"/{env}")

    async def refuse(_: Request, error: Exception) -> Response:
        status = wire.STATUS.get(type(error), 500)
        return Response(wire.error_body(error), status, media_type="application/json")

    for kind in (EnvError, ConfigError, Exception):
        app.add_exception_handler(kind, refuse)
    app.dispatcher = Dispatcher(app.call_fastapi, sessions, handlers, undo, token, max_request_bytes)
    app.state.sessions = sessions
    return app


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket. Raise ConfigError if the address is not available."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use: choose another port or stop its process") from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    except OverflowError:
        raise ConfigError(f"a port is a number from 0 to 65535, got {port}") from None


def serve(
    names: list[str],
    host: str = "127.0.0.1",
    port: int = 36001,
    *,
    token: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    announce: Callable[[str], None] = lambda line: None,
    create: Callable[..., ASGIApp] | None = None,
    path: str = "/{name}",
    **options: Any,
) -> None:
    """Serve environments by name or import path until interrupted. `options` are those of create_app.

    `kwargs` are arguments of the only environment. A class named by its import path is served under its own name.

    When the server is ready, `announce` gets one line per environment with its address, then `ready`. `create` makes
    the app of another protocol than this module's, with the addresses `path`.
    """
    if not token and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines, so a token is needed: give one, or use 127.0.0.1"
        )
    environments = load_served(names, kwargs)
    listener = bind(host, port)
    base = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    lines = [f"{name:{max(map(len, environments))}}  {base}{path.format(name=name)}" for name in environments]
    ready = "\n".join([*lines, "ready"])
    run(environments, listener, token=token, on_ready=lambda: announce(ready), create=create, **options)


def load_served(names: list[str], kwargs: Mapping[str, Any] | None) -> dict[str, type[TextEnv]]:
    """Return the classes by the word of their address."""
    if kwargs and len(names) > 1:
        raise ConfigError(f"--kwarg is for one environment, got {', '.join(names)}: start a server for each")
    environments: dict[str, type[TextEnv]] = {}
    for name in dict.fromkeys(names):
        env_class = catalog.load(name, kwargs)
        catalog.find(name).check()
        word = env_class.name if is_import_path(name) else name
        if word in environments or not re.fullmatch(r"[\w.~-]+", word):
            problem = "two environments have it" if word in environments else "it does not fit into an address"
            raise ConfigError(f"environment {name} is served under its name {word!r}: {problem}, choose another")
        environments[word] = env_class
    return environments


def run(
    environments: Mapping[str, Callable[[], TextEnv]],
    listener: socket.socket,
    *,
    on_ready: Callable[[], None] = lambda: None,
    create: Callable[..., ASGIApp] | None = None,
    **options: Any,
) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM, then close every environment."""
    allow_open_files(options.get("max_sessions", MAX_SESSIONS), RESERVED_HOLDS)
    server = uvicorn_server((create or create_app)(environments, **options))
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
        self.config.app.state.sessions.shutting_down.set()  # type: ignore[union-attr]
        await super().shutdown(sockets)


def uvicorn_server(app: ASGIApp) -> Server:
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
        **{**HTTP_OPTIONS, **getattr(app, "uvicorn_options", {})},
    )
    return Server(config)
