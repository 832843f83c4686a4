"""The proxy's HTTP server: OpenAI's API for models, and a few paths for the episode itself.

GET /sessions/ID is the task, POST /sessions/ID/step an action, POST /sessions/ID/end a reward. Models are called at
/sessions/ID/v1, or at /v1 with the session's key alone. POST /sessions gives a waiting episode to a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentgym_rl.agent.proxy.chat import ChatReply, RequestError, bad_request, read_chat_request
from agentgym_rl.agent.proxy.responses import read_response_request, response_events, response_object
from agentgym_rl.agent.proxy.sessions import ProxySession, Sessions, Submission
from agentgym_rl.common.chat_messages import call_from_openai, clean_json, to_openai
from agentgym_rl.common.http_guard import HTTP_OPTIONS, is_loopback, refusal
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import MAX_REWARD, Step

logger = logging.getLogger(__name__)

MODEL_NAME = "policy"
"""Name of the only model. Other names are accepted, because programs often have theirs built in."""
MAX_BODY_BYTES = 1 << 24
CLAIM_TIMEOUT_S = 20.0
"""Seconds that a client waits for an episode before it has to ask again."""
BACKLOG = 2048
KEEP_ALIVE_S = 120
"""Seconds that an idle connection stays open. A client that reuses one while it is closed loses its request."""

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class Proxy:
    """The server and its sessions. It starts with the first session and shares the run's event loop."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        if not token and not is_loopback(host):
            raise ConfigError(
                f"{host} can be reached from other machines, so a token is needed: give one, or use 127.0.0.1"
            )
        self._host, self._port, self._token = host, port, token
        self.sessions = Sessions()
        self._starting = asyncio.Lock()
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}"

    async def start(self) -> None:
        """Listen, unless the proxy does already."""
        async with self._starting:
            if self._serving is not None:
                return
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            try:
                listener = socket.create_server((self._host, self._port), family=family, backlog=BACKLOG)
            except OSError as error:
                raise ConfigError(f"cannot listen on {self._host} port {self._port}: {error.strerror}") from None
            self._port = listener.getsockname()[1]
            options: dict[str, Any] = {"log_level": "warning", "access_log": False, "lifespan": "off", **HTTP_OPTIONS}
            options |= {"timeout_graceful_shutdown": 5, "timeout_keep_alive": KEEP_ALIVE_S}
            self._server = _Server(uvicorn.Config(self._app(), **options))
            self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
            await self._server.listening.wait()

    async def close(self) -> None:
        """Stop listening. Clients that wait for an episode get status 410."""
        self.sessions.close()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._server = self._serving = None

    def links(self, session: ProxySession) -> dict[str, str]:
        """Return the addresses and the key of a session."""
        url = f"{self.url}/sessions/{session.id}"
        return {"id": session.id, "url": url, "base_url": f"{url}/v1", "api_key": session.key, "model": MODEL_NAME}

    def _app(self) -> Starlette:
        session_routes: dict[str, tuple[str, Callable[[ProxySession, Request], Awaitable[Response]]]] = {
            "": ("GET", self._task),
            "/step": ("POST", self._step),
            "/end": ("POST", self._end),
        }
        model_routes: dict[str, tuple[str, Callable[[ProxySession, Request], Awaitable[Response]]]] = {
            "/v1/chat/completions": ("POST", _chat),
            "/v1/responses": ("POST", _response),
            "/v1/models": ("GET", _models),
        }
        routes = [
            Route(f"/sessions/{{id}}{path}", self._guarded(handler), methods=[method])
            for path, (method, handler) in (session_routes | model_routes).items()
        ]
        routes += [Route(path, self._guarded(handler), methods=[m]) for path, (m, handler) in model_routes.items()]
        routes.append(Route("/sessions", self._answered(self._claim), methods=["POST"]))
        return Starlette(routes=routes)

    def _guarded(self, handler: Callable[[ProxySession, Request], Awaitable[Response]]) -> Handler:
        """Return a handler that finds the session and checks its key first."""

        async def find_session(request: Request) -> Response:
            session = self.sessions.find(request.path_params.get("id"), _bearer(request))
            return await handler(session, request)

        return self._answered(find_session)

    def _answered(self, handler: Handler) -> Handler:
        """Return a handler that turns failures into OpenAI's error objects and refuses pages of other sites."""

        async def answer(request: Request) -> Response:
            headers = request.headers
            status, reason = refusal(
                request.method,
                headers.get("host", ""),
                headers.get("origin"),
                headers.get("sec-fetch-site"),
                is_loopback(self._host),
            )
            if status:
                return _error(status, reason, "refused")
            try:
                return await handler(request)
            except RequestError as error:
                return _error(error.status, str(error), error.code)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                logger.exception("%s failed", request.url.path)
                return _error(500, f"{type(error).__name__}: {error}", "engine_error")

        return answer

    async def _claim(self, request: Request) -> Response:
        if self._token and not hmac.compare_digest(_bearer(request).encode(), self._token.encode()):
            raise RequestError(401, "a valid bearer token is needed: send Authorization: Bearer TOKEN", "invalid_token")
        session = await _unless_disconnected(request, self.sessions.claim(CLAIM_TIMEOUT_S))
        if session is None:
            raise RequestError(404, "no episode waits for a client at the moment: ask again", "no_episode")
        return JSONResponse({**self.links(session), **session.task})

    async def _task(self, session: ProxySession, request: Request) -> Response:
        return JSONResponse({**self.links(session), **session.task})

    async def _step(self, session: ProxySession, request: Request) -> Response:
        body = await _body(request)
        rows, action = body.get("tool_calls"), body.get("action")
        if (rows is None) == (action is None):
            raise bad_request('a step needs {"action": TEXT} or {"tool_calls": [...]}, one of them')
        if rows is None:
            if not isinstance(action, str):
                raise bad_request(f"action must be a text, got {action!r:.80}")
            return JSONResponse(await session.submit(Submission(action)))
        if not session.task["tools"]:
            raise bad_request("this environment has no tools: send an action, or set agent.style = 'tool'")
        try:
            calls = [call_from_openai(row) for row in rows]
        except (KeyError, TypeError, AttributeError) as error:
            raise bad_request(f"tool_calls must have OpenAI's form ({type(error).__name__}: {error})") from error
        return JSONResponse(await session.submit(Submission(calls=calls)))

    async def _end(self, session: ProxySession, request: Request) -> Response:
        body = await _body(request)
        reward, success = body.get("reward"), body.get("success")
        if not isinstance(reward, int | float) or isinstance(reward, bool) or not abs(reward) <= MAX_REWARD:
            raise bad_request(f"reward must be a number of at most ±{MAX_REWARD:g}, got {reward!r:.80}")
        if success is not None and not isinstance(success, bool):
            raise bad_request(f"success must be true or false, got {success!r:.80}")
        info = {} if success is None else {"success": success}
        ending = Step("", float(reward), done=True, info=info)
        return JSONResponse(await session.submit(Submission(ending=ending)))


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the run."""
        yield


def _bearer(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


async def _body(request: Request) -> dict[str, Any]:
    raw = b""
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise RequestError(413, f"a request may have {MAX_BODY_BYTES} bytes, this one has more", "too_large")
    try:
        body = clean_json(json.loads(raw))
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    return body


def _error(status: int, message: str, code: str) -> Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    # OpenAI's SDK repeats failed requests unless the server says no. A repeated call would be sampled twice.
    return JSONResponse(body, status, {"x-should-retry": "false"})


async def _models(session: ProxySession, request: Request) -> Response:
    model = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "agentgym-rl"}
    return JSONResponse({"object": "list", "data": [model]})


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. It is cancelled if the client disconnects first. The body is discarded."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    result = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
        if result.done():
            return result.result()
        raise ClientDisconnect
    finally:
        result.cancel()
        gone.cancel()
        await asyncio.gather(result, gone, return_exceptions=True)


async def _chat(session: ProxySession, request: Request) -> Response:
    body = await _body(request)
    reply = await _unless_disconnected(request, session.model.complete(read_chat_request(body)))
    base = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": str(body.get("model", MODEL_NAME)),
    }
    if body.get("stream"):
        options = body.get("stream_options") or {}
        return _events(_chat_chunks(base, reply, with_usage=bool(options.get("include_usage"))))
    message = {**_message(reply), "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}
    return JSONResponse({**base, "object": "chat.completion", "choices": [choice], "usage": _usage(reply)})


def _message(reply: ChatReply) -> dict[str, Any]:
    row = to_openai(reply.message)
    return {**row, "content": None} if row.get("tool_calls") and not row["content"] else row


def _usage(reply: ChatReply) -> dict[str, int]:
    total = reply.prompt_tokens + reply.completion_tokens
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": total,
    }


def _chat_chunks(base: dict[str, Any], reply: ChatReply, *, with_usage: bool) -> Iterator[str]:
    """Yield the events of a streamed reply: role, text, each call, the end. The reply itself is complete by then."""
    row = _message(reply)
    deltas: list[tuple[dict[str, Any], str | None]] = [({"role": "assistant", "content": ""}, None)]
    if row["content"]:
        deltas.append(({"content": row["content"]}, None))
    deltas += [({"tool_calls": [{"index": i, **call}]}, None) for i, call in enumerate(row.get("tool_calls", ()))]
    deltas.append(({}, reply.finish_reason))
    for delta, finish in deltas:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        yield json.dumps({**base, "object": "chat.completion.chunk", "choices": [choice]})
    if with_usage:
        yield json.dumps({**base, "object": "chat.completion.chunk", "choices": [], "usage": _usage(reply)})
    yield "[DONE]"


async def _response(session: ProxySession, request: Request) -> Response:
    body = await _body(request)
    reply = await _unless_disconnected(request, session.model.complete(read_response_request(body)))
    response = response_object(reply, str(body.get("model", MODEL_NAME)))
    if body.get("stream"):
        return _events((json.dumps(event) for event in response_events(response)), named=True)
    return JSONResponse(response)


def _events(lines: Iterator[str], *, named: bool = False) -> Response:
    """Return server-sent events. Those of the Responses API have names."""

    async def stream() -> AsyncIterator[str]:
        for line in lines:
            name = f"event: {json.loads(line)['type']}\n" if named else ""
            yield f"{name}data: {line}\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")
