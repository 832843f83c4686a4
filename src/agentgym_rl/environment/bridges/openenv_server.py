"""Our environments behind OpenEnv's protocol, for OpenEnv's own clients: one session per WebSocket.

Each environment is at /NAME, a single one at the root too. An action is {"action": "move up"}, an observation
{"text": "...", "metadata": {...}}. `reset` takes the `item`, or a `seed` that chooses an item of `split`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket, WebSocketDisconnect

from agentgym_rl import __version__
from agentgym_rl.environment import catalog, wire
from agentgym_rl.environment.base import TextEnv
from agentgym_rl.environment.bridges.server_guard import Guard
from agentgym_rl.environment.server_sessions import Sessions
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.types import Step

METADATA = {"type": "object", "additionalProperties": True}
ACTION_SCHEMA = {
    "type": "object",
    "title": "TextAction",
    "properties": {"action": {"type": "string"}, "metadata": METADATA},
    "required": ["action"],
}
OBSERVATION_SCHEMA = {
    "type": "object",
    "title": "TextObservation",
    "properties": {
        "text": {"type": "string"},
        "reward": {"type": "number"},
        "done": {"type": "boolean"},
        "metadata": METADATA,
    },
}
STATE_SCHEMA = {
    "type": "object",
    "title": "State",
    "properties": {
        "episode_id": {"type": "string"},
        "step_count": {"type": "integer"},
        "item": {"type": "integer"},
        "score": {"type": "number"},
    },
}


class BadMessage(Exception):
    """A message that cannot be read."""


class Conversation:
    """The messages of one WebSocket: reset, step, state and close."""

    def __init__(self, sessions: Sessions, env: str, session_id: int) -> None:
        self._sessions, self._env, self._id = sessions, env, session_id
        self._splits = catalog.class_of(sessions.environments[env]).splits
        self._item: int | None = None
        self._episode_id = str(session_id)
        self._num_steps = 0

    async def answer(self, raw: str) -> dict[str, Any] | None:
        """Return the answer to a message, or None to close."""
        try:
            message = json.loads(raw)
        except (ValueError, RecursionError) as error:
            return _error("INVALID_JSON", f"Invalid JSON: {error}")
        kind = message.get("type") if isinstance(message, dict) else None
        data = message.get("data") if isinstance(message, dict) else None
        try:
            if kind == "close":
                return None
            if kind == "reset":
                return _observation(await self._reset(data or {}))
            if kind == "step":
                return _observation(await self._step(data))
            if kind == "state":
                return {"type": "state", "data": self._state()}
        except (BadMessage, wire.BadRequest) as error:
            return _error("VALIDATION_ERROR", str(error))
        except (EnvError, ConfigError) as error:
            return _error("EXECUTION_ERROR", str(error))
        return _error("UNKNOWN_TYPE", f"Unknown message type: {str(kind)[:80]}")

    async def _reset(self, data: Any) -> Step:
        if not isinstance(data, dict):
            raise BadMessage(f"the data of a reset must be an object, got {type(data).__name__}")
        item = _integer(data, "item")
        if item is None:
            split = data.get("split", "train")
            if not isinstance(split, str) or split not in self._splits:
                raise BadMessage(f"there is no split {split!r:.80}: there are {', '.join(self._splits)}")
            items = self._splits[split]
            item = items[(_integer(data, "seed") or 0) % len(items)]
        step = await self._played(self._sessions.get(self._env, self._id).reset(item))
        self._item, self._num_steps = item, 0
        self._episode_id = str(data.get("episode_id") or self._id)
        return step

    async def _step(self, data: Any) -> Step:
        action = data.get("action") if isinstance(data, dict) else None
        if not isinstance(action, str):
            raise BadMessage('an action is {"action": "some text"}')
        step = await self._played(self._sessions.get(self._env, self._id).step(action))
        self._num_steps += 1
        return step

    async def _played(self, call: Any) -> Step:
        with self._sessions.calling(self._id):
            return await call

    def _state(self) -> dict[str, Any]:
        score = self._sessions.get(self._env, self._id).score
        return {"episode_id": self._episode_id, "step_count": self._num_steps, "item": self._item, "score": score}


def _integer(data: Any, field: str) -> int | None:
    value = data.get(field) if isinstance(data, dict) else None
    if value is not None and type(value) is not int:
        raise BadMessage(f"{field!r} must be an integer, got {value!r:.80}")
    return value


def _observation(step: Step) -> dict[str, Any]:
    observation = {"text": step.observation, "metadata": step.info}
    data = {"observation": observation, "reward": step.reward, "done": step.done, "metadata": step.info}
    return {"type": "observation", "data": data}


def _error(code: str, text: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": text, "code": code}}


def _routes(sessions: Sessions, env: str, prefix: str) -> list[BaseRoute]:
    env_class = catalog.class_of(sessions.environments[env])
    schema = {"action": ACTION_SCHEMA, "observation": OBSERVATION_SCHEMA, "state": STATE_SCHEMA}
    about = {"name": env, "description": env_class.instruction, "version": __version__, "author": "agentgym-rl"}

    async def get_schema(_: Request) -> JSONResponse:
        return JSONResponse(schema)

    async def get_metadata(_: Request) -> JSONResponse:
        return JSONResponse(about)

    async def get_health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "healthy"})

    async def converse(socket: WebSocket) -> None:
        await socket.accept()
        try:
            session_id = await sessions.create(env)
        except (EnvError, ConfigError) as error:
            code = "CAPACITY_REACHED" if isinstance(error, wire.Full) else "FACTORY_ERROR"
            await socket.send_json(_error(code, str(error)))
            await socket.close()
            return
        conversation = Conversation(sessions, env, session_id)
        try:
            while (answer := await conversation.answer(await socket.receive_text())) is not None:
                await socket.send_text(json.dumps(answer))
            await socket.close()
        except WebSocketDisconnect:
            pass
        finally:
            with contextlib.suppress(wire.NoSuchSession):
                await sessions.close(env, session_id)

    return [
        Route(f"{prefix}/schema", get_schema),
        Route(f"{prefix}/metadata", get_metadata),
        Route(f"{prefix}/health", get_health),
        WebSocketRoute(f"{prefix}/ws", converse),
    ]


def openenv_app(
    environments: Mapping[str, Callable[[], TextEnv]],
    *,
    token: str | None = None,
    max_request_bytes: int = 1 << 20,
    **limits: Any,
) -> ASGIApp:
    """Return the server as an ASGI app. `limits` are those of Sessions."""
    sessions = Sessions(environments, **limits)
    prefixes = [(env, f"/{env}") for env in environments]
    if len(environments) == 1:
        prefixes.append((next(iter(environments)), ""))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with sessions.served():
            yield

    app = Starlette(
        routes=[route for env, prefix in prefixes for route in _routes(sessions, env, prefix)], lifespan=lifespan
    )
    return Guard(app, sessions, token, {"ws": "websockets-sansio", "ws_max_size": max_request_bytes})
