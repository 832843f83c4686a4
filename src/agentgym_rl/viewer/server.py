"""The viewer's HTTP server: the page, its files, and what the page asks for. docs/guides/viewer.md shows it."""

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
from agentgym_rl.viewer.bundle import join_modules
from agentgym_rl.viewer.encode import to_json
from agentgym_rl.viewer.guard import PICTURE_POLICY, Guard
from agentgym_rl.viewer.index import LARGEST
from agentgym_rl.viewer.library import Library, NotFound
from agentgym_rl.viewer.playground import NoSuchGame, Playground
from agentgym_rl.viewer.queries import ORDERS, Filter
from agentgym_rl.viewer.replays import Frame, Replays

MAX_PAGE = 500
"""Rows in one answer."""
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_STATUS = {NotFound: 404, NoSuchGame: 404, ConfigError: 400, EnvError: 502}
Whole = Annotated[int, Query(ge=-LARGEST, le=LARGEST)]
Offset = Annotated[int, Query(ge=0, le=LARGEST)]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
Text = Annotated[str, Query(max_length=1024)]
Field = Annotated[str, Body(max_length=1 << 18)]


def static_files() -> dict[str, bytes]:
    """The page's files by name: looked up here, never on the disk."""
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


def wanted_filter(
    kind: Text | None = None,
    step: Whole | None = None,
    env: Text | None = None,
    subset: Text | None = None,
    stop: Text | None = None,
    success: bool | None = None,
    horizon: Whole | None = None,
    item: Whole | None = None,
) -> Filter:
    return Filter(kind, step, env, subset, stop, None if success is None else int(success), horizon, item)


Wanted = Annotated[Filter, Depends(wanted_filter)]


def reading_routes(library: Library) -> APIRouter:
    """Everything that only reads files. Plain functions: they run in threads."""
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
        return answer(library.runs.metrics(library.place(run)))

    @router.get("/eval")
    def evaluation(run: Text) -> Response:
        return answer(library.runs.evaluation(library.place(run)))

    @router.get("/episodes")
    def episodes(run: Text, wanted: Wanted, order: Text = "step", offset: Offset = 0, limit: Limit = 100) -> Response:
        if order not in ORDERS:
            raise ConfigError(f"there is no order {order!r}: there are {', '.join(ORDERS)}")
        return answer(library.episodes(run, wanted, order, offset, limit))

    @router.get("/groups")
    def groups(run: Text, wanted: Wanted, mixed: bool = False, offset: Offset = 0, limit: Limit = 100) -> Response:
        return answer(library.groups(run, wanted, mixed, offset, limit))

    @router.get("/facets")
    def facets(run: Text, wanted: Wanted) -> Response:
        return answer(library.facets(run, wanted))

    @router.get("/episode")
    def episode(run: Text, key: Text) -> Response:
        return answer(library.episode(run, key))

    @router.get("/same_task")
    def same_task(env: Text, item: Whole) -> Response:
        return answer(library.same_task(env, item))

    @router.get("/shared_tasks")
    def shared_tasks(left: Text, right: Text) -> Response:
        return answer(library.shared_tasks(left, right))

    return router


def playing_routes(library: Library, replays: Replays, playground: Playground) -> APIRouter:
    """Everything that plays."""
    router = APIRouter(prefix="/api")
    described: dict[str, Any] = {}

    @router.get("/frame")
    async def frame(run: Text, key: Text, turn: Offset) -> Response:
        episode = await asyncio.to_thread(library.raw_episode, run, key)
        style = await asyncio.to_thread(library.runs.style_of, library.place(run), str(episode["env"]))
        return frame_answer(await replays.frame((run, key, str(episode.get("id"))), episode, style, turn))

    @router.get("/environments")
    async def environments() -> Response:
        if not described:
            described["rows"] = await asyncio.to_thread(library.worlds.describe)
        return answer({"environments": described["rows"], "policies": list(library.worlds.policies)})

    @router.get("/items")
    async def items(env: Text, split: Text, subset: Text | None = None) -> Response:
        found = await library.worlds.items(env, split, subset or None)
        return answer({"total": len(found), "items": found[:MAX_PAGE]})

    @router.post("/play/open")
    async def play_open(env: Field, item: Annotated[int, Body()]) -> Response:
        return answer(await playground.open(env, item))

    @router.post("/play/act")
    async def play_act(session: Field, action: Field) -> Response:
        return answer(await playground.act(session, action))

    @router.post("/play/policy")
    async def play_policy(session: Field, policy: Field) -> Response:
        return answer(await playground.let_play(session, policy))

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
    known = static_files()
    # One script instead of twenty: a browser asks for modules a layer at a time, which is slow on a busy machine.
    modules = {name: text.decode() for name, text in known.items() if name.endswith(".js")}
    known["page.js"] = join_modules(modules, "app.js").encode()

    def file_answer(name: str) -> Response:
        if name not in known:
            return Response(to_json({"detail": f"there is no file {name[:80]!r}"}), 404)
        media_type = _MEDIA_TYPES[name.rpartition(".")[2]]
        return Response(known[name], media_type=media_type, headers={"cache-control": "no-cache"})

    @router.get("/")
    async def index() -> Response:
        return file_answer("index.html")

    @router.get("/static/{name}")
    async def static(name: str) -> Response:
        return file_answer(name)

    return router


def create_app(library: Library, *, token: str | None = None, loopback: bool = True) -> Guard:
    """The viewer as an ASGI app."""
    replays, playground = Replays(library.worlds), Playground(library.worlds)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        library.indexer.start()
        try:
            yield
        finally:
            await asyncio.to_thread(library.indexer.stop)
            await replays.close()
            await playground.close_all()
            await library.worlds.close()

    app = FastAPI(title="AgentGym-RL viewer", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(page_routes())
    app.include_router(reading_routes(library))
    app.include_router(playing_routes(library, replays, playground))

    async def refuse(_: Request, error: Exception) -> Response:
        status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
        return Response(to_json({"detail": str(error)}), status, media_type="application/json")

    async def refuse_query(_: Request, error: Exception) -> Response:
        problems = error.errors() if isinstance(error, RequestValidationError) else []
        detail = "; ".join(f"{problem['loc'][-1]}: {problem['msg']}" for problem in problems)
        return Response(to_json({"detail": detail}), 422, media_type="application/json")

    app.add_exception_handler(AgentGymError, refuse)
    app.add_exception_handler(RequestValidationError, refuse_query)
    return Guard(app, token, loopback)


def link_to(host: str, port: int, token: str | None) -> str:
    link = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
    return f"{link}?token={quote(token, safe='')}" if token else link


def uvicorn_config(app: Guard) -> uvicorn.Config:
    return uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, **HTTP_OPTIONS)


def serve(library: Library, host: str, port: int, token: str | None, announce: Callable[[str], None]) -> None:
    """Serve until interrupted; `announce` gets the link to open."""
    loopback = is_loopback(host)
    if not loopback and not token:
        token = secrets.token_urlsafe(24)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(128)  # before the link is shown: whoever is quick waits instead of being refused
    except (OSError, socket.gaierror) as error:
        bound.close()
        advice = ": choose another --port" if getattr(error, "errno", 0) == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}{advice}") from error
    config = uvicorn_config(create_app(library, token=token, loopback=loopback))
    config.load()  # what the server needs is imported before the link is shown
    announce(link_to(host, bound.getsockname()[1], token))
    try:
        uvicorn.Server(config).run(sockets=[bound])
    finally:
        library.close()
        bound.close()
