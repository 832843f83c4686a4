"""The viewer's HTTP server: the page, its files and its API. docs/guides/viewer.md describes it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from typing import Annotated, Any
from urllib.parse import quote

import uvicorn
from fastapi import APIRouter, Body, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError

from agentgym_rl.common.http_guard import HTTP_OPTIONS, is_loopback
from agentgym_rl.errors import AgentGymError, ConfigError, EnvError
from agentgym_rl.viewer.access_control import PICTURE_POLICY, Guard
from agentgym_rl.viewer.bundle import join_modules
from agentgym_rl.viewer.encode import to_json
from agentgym_rl.viewer.index import MAX_SAFE_INTEGER
from agentgym_rl.viewer.library import Library, NotFound
from agentgym_rl.viewer.playground import NoSuchGame, Playground
from agentgym_rl.viewer.queries import ORDERS, Filter
from agentgym_rl.viewer.replays import Frame, Replays

MAX_PAGE = 500
"""Most rows in one response."""
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_STATUS = {NotFound: 404, NoSuchGame: 404, ConfigError: 400, EnvError: 502}
Integer = Annotated[int, Query(ge=-MAX_SAFE_INTEGER, le=MAX_SAFE_INTEGER)]
Offset = Annotated[int, Query(ge=0, le=MAX_SAFE_INTEGER)]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
Text = Annotated[str, Query(max_length=1024)]
Field = Annotated[str, Body(max_length=1 << 18)]


def static_files() -> dict[str, bytes]:
    """Return the page's files by name. Requests are looked up in this table, never on the disk."""
    folder = files("agentgym_rl.viewer").joinpath("static")
    return {
        entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.name.partition(".")[2] in _MEDIA_TYPES
    }


def answer(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")


def frame_answer(frame: Frame) -> Response:
    if isinstance(frame, str):
        return Response(to_json({"detail": frame}), 404, media_type="application/json")
    return Response(frame.data, media_type=frame.media_type, headers={"content-security-policy": PICTURE_POLICY})


def episode_filter(
    kind: Text | None = None,
    step: Integer | None = None,
    env: Text | None = None,
    subset: Text | None = None,
    stop: Text | None = None,
    success: bool | None = None,
    horizon: Integer | None = None,
    item: Integer | None = None,
) -> Filter:
    return Filter(kind, step, env, subset, stop, None if success is None else int(success), horizon, item)


Filters = Annotated[Filter, Depends(episode_filter)]


def reading_routes(library: Library) -> APIRouter:
    """Return the routes that read files and store preferences. They are plain functions and run in threads."""
    router = APIRouter(prefix="/api")

    @router.get("/overview")
    def overview() -> Response:
        return answer(library.overview())

    @router.get("/changes")
    def changes() -> Response:
        return answer(library.changes())

    @router.get("/run")
    def run_details(run: Text) -> Response:
        return answer(library.details(run))

    @router.get("/metrics")
    def metrics(run: Text) -> Response:
        return answer(library.runs.metrics(library.run_folder(run)))

    @router.get("/eval")
    def evaluation(run: Text) -> Response:
        return answer(library.runs.evaluation(library.run_folder(run)))

    @router.get("/episodes")
    def episodes(run: Text, filters: Filters, order: Text = "step", offset: Offset = 0, limit: Limit = 100) -> Response:
        if order not in ORDERS:
            raise ConfigError(f"unknown order {order!r}: known are {', '.join(ORDERS)}")
        return answer(library.episodes(run, filters, order, offset, limit))

    @router.get("/groups")
    def groups(run: Text, filters: Filters, mixed: bool = False, offset: Offset = 0, limit: Limit = 100) -> Response:
        return answer(library.groups(run, filters, mixed, offset, limit))

    @router.get("/facets")
    def facets(run: Text, filters: Filters) -> Response:
        return answer(library.facets(run, filters))

    @router.get("/episode")
    def episode(run: Text, key: Text) -> Response:
        return answer(library.episode(run, key))

    @router.get("/same_task")
    def same_task(env: Text, item: Integer) -> Response:
        return answer(library.same_task(env, item))

    @router.get("/preferences")
    def preferences(left_run: Text, left_key: Text, right_run: Text, right_key: Text) -> Response:
        return answer(library.preferences((left_run, left_key), (right_run, right_key)))

    @router.post("/prefer")
    def record_preference(
        left_run: Field, left_key: Field, right_run: Field, right_key: Field, better: Field, by: Field
    ) -> Response:
        return answer(library.record_preference((left_run, left_key), (right_run, right_key), better, by))

    @router.get("/shared_tasks")
    def shared_tasks(left: Text, right: Text) -> Response:
        return answer(library.shared_tasks(left, right))

    return router


def playing_routes(library: Library, replays: Replays, playground: Playground) -> APIRouter:
    """Return the routes that play or replay episodes."""
    router = APIRouter(prefix="/api")
    descriptions: dict[str, Any] = {}

    @router.get("/frame")
    async def frame(run: Text, key: Text, turn: Offset) -> Response:
        episode = await asyncio.to_thread(library.raw_episode, run, key)
        folder = library.run_folder(run)
        style = await asyncio.to_thread(library.runs.style_of, folder, str(episode["env"]))
        return frame_answer(await replays.frame(episode, style, turn, folder.path))

    @router.get("/environments")
    async def environments() -> Response:
        if not descriptions:
            descriptions["rows"] = await asyncio.to_thread(library.environments.describe)
        return answer({"environments": descriptions["rows"], "policies": list(library.environments.policies)})

    @router.get("/items")
    async def items(env: Text, split: Text, subset: Text | None = None) -> Response:
        numbers = await library.environments.items(env, split, subset or None)
        return answer({"total": len(numbers), "items": numbers[:MAX_PAGE]})

    @router.post("/play/open")
    async def play_open(env: Field, item: Annotated[int, Body()]) -> Response:
        return answer(await playground.open(env, item))

    @router.post("/play/act")
    async def play_act(session: Field, action: Field) -> Response:
        return answer(await playground.act(session, action))

    @router.post("/play/policy")
    async def play_policy(session: Field, policy: Field) -> Response:
        return answer(await playground.play_turn(session, policy))

    @router.post("/play/close")
    async def play_close(session: Annotated[str, Body(embed=True)]) -> Response:
        await playground.close(session)
        return answer(True)

    @router.get("/play/frame")
    async def play_frame(session: Text) -> Response:
        return frame_answer(await playground.picture(session))

    return router


def page_routes() -> APIRouter:
    router = APIRouter()
    contents = static_files()
    # One script instead of twenty, because a browser requests modules layer by layer, which is slow.
    modules = {name: text.decode() for name, text in contents.items() if name.endswith(".js")}
    contents["page.js"] = join_modules(modules, "app.js").encode()

    def file_answer(name: str) -> Response:
        if name not in contents:
            return Response(to_json({"detail": f"no file {name[:80]!r}"}), 404)
        media_type = _MEDIA_TYPES[name.rpartition(".")[2]]
        return Response(contents[name], media_type=media_type, headers={"cache-control": "no-cache"})

    @router.get("/")
    async def index() -> Response:
        return file_answer("index.html")

    @router.get("/static/{name}")
    async def static(name: str) -> Response:
        return file_answer(name)

    return router


def create_app(library: Library, *, token: str | None = None, loopback: bool = True) -> Guard:
    """Create the viewer as an ASGI app."""
    replays, playground = Replays(library.environments), Playground(library.environments)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        library.indexer.start()
        try:
            yield
        finally:
            await asyncio.to_thread(library.indexer.stop)
            await replays.close()
            await playground.close_all()
            await library.environments.close()

    app = FastAPI(title="AgentGym-RL viewer", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(page_routes())
    app.include_router(reading_routes(library))
    app.include_router(playing_routes(library, replays, playground))

    async def handle_error(_: Request, error: Exception) -> Response:
        status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
        return Response(to_json({"detail": str(error)}), status, media_type="application/json")

    async def handle_invalid_query(_: Request, error: Exception) -> Response:
        problems = error.errors() if isinstance(error, RequestValidationError) else []
        detail = "; ".join(f"{problem['loc'][-1]}: {problem['msg']}" for problem in problems)
        return Response(to_json({"detail": detail}), 422, media_type="application/json")

    app.add_exception_handler(AgentGymError, handle_error)
    app.add_exception_handler(RequestValidationError, handle_invalid_query)
    return Guard(app, token, loopback)


def link_to(host: str, port: int, token: str | None) -> str:
    link = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
    return f"{link}?token={quote(token, safe='')}" if token else link


def uvicorn_config(app: Guard) -> uvicorn.Config:
    return uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, **HTTP_OPTIONS)


def serve(library: Library, host: str, port: int, token: str | None, announce: Callable[[str], None]) -> None:
    """Serve until interrupted. Call `announce` with the link to open."""
    loopback = is_loopback(host)
    if not loopback and not token:
        token = secrets.token_urlsafe(24)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)  # before the link is shown, so that an early client waits instead of being rejected
    except (OSError, socket.gaierror) as error:
        listener.close()
        advice = ": choose another --port" if getattr(error, "errno", 0) == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}{advice}") from error
    config = uvicorn_config(create_app(library, token=token, loopback=loopback))
    config.load()  # import everything before the link is shown
    announce(link_to(host, listener.getsockname()[1], token))
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        library.close()
        listener.close()
