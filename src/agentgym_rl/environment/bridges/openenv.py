"""Environments behind OpenEnv's servers (`openenv:http://127.0.0.1:8000`), played over their WebSocket.

The server's schema of actions decides how an action is written. If it has one field of text, the action is that text.
If the server offers tools, or actions with several fields, the action is a JSON call. An item is the seed of `reset`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, ClassVar

import httpx
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from agentgym_rl.environment.base import TextEnv, check_item
from agentgym_rl.environment.bridges.bridge_settings import import_value, read_headers
from agentgym_rl.environment.bridges.calls import (
    BadCall,
    explain_tools,
    read_call,
    shorten,
)
from agentgym_rl.environment.tools import Tool
from agentgym_rl.errors import ConfigError, EnvError, EnvTimeout, EnvUnavailable
from agentgym_rl.types import Step

MAX_MESSAGE_BYTES = 100 << 20
"""Largest message of a server, as in OpenEnv's own client."""
ACT = "act"
"""Name of the only tool of a server whose actions have several fields."""
TOOL_FIELDS = {"tool_name", "arguments"}
"""Fields of an action that calls one of the server's tools."""

Describe = Callable[[dict[str, Any]], str]


class ServerError(EnvError):
    """An answer of type `error`."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(f"the OpenEnv server answered with an error: {data.get('message')} ({data.get('code')})")
        self.code = data.get("code")
        self.detail = json.dumps(data.get("errors"), default=str) if data.get("errors") else str(data.get("message"))


class Connection:
    """One session of an OpenEnv server: a WebSocket."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        address = re.sub(r"^http", "ws", url) + "/ws"
        self._stack = ExitStack()
        try:
            opened = connect(address, additional_headers=headers, open_timeout=timeout_s, max_size=MAX_MESSAGE_BYTES)
            self._socket: ClientConnection = self._stack.enter_context(opened)
        except (OSError, WebSocketException) as error:
            raise EnvUnavailable(f"no OpenEnv server answers at {address}: {error}") from error

    def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of the answer."""
        try:
            with suppress(ConnectionClosed):  # a server that refuses a session says why, then closes
                self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self._socket.recv(timeout=self._timeout_s))
        except TimeoutError:
            raise EnvTimeout(f"the OpenEnv server did not answer a {kind} within {self._timeout_s:g} s") from None
        except (OSError, WebSocketException, ValueError) as error:
            raise EnvUnavailable(f"the connection to the OpenEnv server failed: {error}") from error
        if answer.get("type") == "error":
            data = answer.get("data") or {}
            if data.get("code") == "CAPACITY_REACHED":
                raise EnvUnavailable(f"the OpenEnv server is full: {data.get('message')}")
            raise ServerError(data)
        return answer.get("data") or {}

    def close(self) -> None:
        self._stack.close()


class OpenEnvEnv:
    """An environment of an OpenEnv server. Subclasses set everything. Implements TextEnv."""

    name: ClassVar[str]
    instruction: ClassVar[str]
    splits: ClassVar[Mapping[str, range]]
    subsets: ClassVar[tuple[str, ...]] = ()
    cheap: ClassVar[bool] = False

    connect: ClassVar[Callable[[], Connection]]
    describe: ClassVar[Describe]
    text_field: ClassVar[str | None]
    """The action's only field, if it is text. None if actions are calls."""
    tool_instruction: ClassVar[str]
    toolset: ClassVar[list[Tool]]
    """Tools; empty if actions are text."""
    calls_tools: ClassVar[bool]
    """Whether the tools are the server's own, which are called by name."""
    reset_options: ClassVar[Mapping[str, Any]]
    success_reward: ClassVar[float | None]

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._playing = False

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return ()

    def reset(self, item: int) -> str:
        check_item(self, item)
        if self._connection is None:
            self._connection = type(self).connect()
        answer = self._connection.ask("reset", {"seed": item, **self.reset_options})
        self._playing = not answer.get("done")
        return self._text(answer)

    def step(self, text: str) -> Step:
        if self._connection is None or not self._playing:
            raise EnvError(f"{self.name} needs a running episode: call reset first")
        try:
            action = self._read(text)
        except BadCall as error:
            return Step(str(error), info={"valid": False})
        try:
            answer = self._connection.ask("step", action)
        except ServerError as error:
            if error.code != "VALIDATION_ERROR":
                raise
            return Step(shorten(f"The action does not fit the schema: {error.detail}"), info={"valid": False})
        done, reward = bool(answer.get("done")), float(answer.get("reward") or 0.0)
        self._playing = not done
        info: dict[str, Any] = {"valid": (answer.get("observation") or {}).get("error") is None}
        if done:
            info["success"] = reward > 0 if self.success_reward is None else reward >= self.success_reward
        return Step(self._text(answer), reward, done, info)

    def close(self) -> None:
        self._playing = False
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()

    def _text(self, answer: Mapping[str, Any]) -> str:
        return shorten(type(self).describe(dict(answer.get("observation") or {})))

    def _read(self, text: str) -> dict[str, Any]:
        if self.text_field is not None:
            try:
                text.encode()
            except UnicodeError:
                raise BadCall("The action is not valid Unicode.") from None
            return {self.text_field: text}
        name, arguments = read_call(text, [tool.name for tool in self.toolset])
        return {"type": "call_tool", "tool_name": name, "arguments": arguments} if self.calls_tools else arguments


class OpenEnvTools(OpenEnvEnv):
    """An environment whose actions are calls."""

    @classmethod
    def tools(cls) -> Sequence[Tool]:
        """Return the tools of the server, or the one tool that its actions are."""
        return cls.toolset


def openenv_class(
    url: str,
    *,
    name: str | None = None,
    instruction: str | None = None,
    describe: str | Describe | None = None,
    reset: Mapping[str, Any] | None = None,
    num_train: int = 10_000,
    num_test: int = 1_000,
    success_reward: float | None = None,
    token_variable: str | None = None,
    timeout_s: float = 60.0,
) -> type[TextEnv]:
    """Return the environment of the OpenEnv server at `url`.

    `describe(observation)` returns an observation, a dict, in words; in a recipe it is an import path. `reset` holds
    further arguments of the server's reset. Items of `train` are the seeds from 0, those of `test` follow. A success
    is an episode whose last reward is at least `success_reward`, by default above 0. `token_variable` names the
    environment variable with the server's bearer token.
    """
    where, url = f"environment openenv:{url}", url.rstrip("/")
    if num_train < 1 or num_test < 1:
        raise ConfigError(f"{where}: num_train and num_test must be at least 1")
    view: Describe | None = import_value(describe, where, "describe") if isinstance(describe, str) else describe
    headers = read_headers(token_variable, where)
    schema, about = (_get(url + path, headers, where, timeout_s) for path in ("/schema", "/metadata"))

    def open_connection() -> Connection:
        return Connection(url, headers, timeout_s)

    text_field, toolset, calls_tools = _actions(schema.get("action") or {}, open_connection, where)
    rules = instruction or str(about.get("description") or f"You act in the environment {about.get('name') or url}.")
    replies = "Reply with your action." if text_field is not None else explain_tools(toolset)
    members = {
        "name": name or re.sub(r"[^\w.~-]+", "-", str(about.get("name") or url)),
        "instruction": f"{rules}\n\n{replies}",
        "splits": {"train": range(num_train), "test": range(num_train, num_train + num_test)},
        "connect": staticmethod(open_connection),
        "describe": staticmethod(view or describe_any),
        "text_field": text_field,
        "tool_instruction": rules if toolset else "",
        "toolset": toolset,
        "calls_tools": calls_tools,
        "reset_options": dict(reset or {}),
        "success_reward": success_reward,
    }
    return type("OpenEnvEnv", (OpenEnvTools if toolset else OpenEnvEnv,), members)


def _get(url: str, headers: Mapping[str, str], where: str, timeout_s: float) -> dict[str, Any]:
    try:
        answer = httpx.get(url, headers=headers, timeout=timeout_s, trust_env=False)
        body = answer.raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"{where}: an OpenEnv server should answer at {url}: {error}") from error
    return body if isinstance(body, dict) else {}


def _actions(
    schema: Mapping[str, Any], open_connection: Callable[[], Connection], where: str
) -> tuple[str | None, list[Tool], bool]:
    """Return the text field, or the tools and whether they are the server's own."""
    fields = {field: about for field, about in (schema.get("properties") or {}).items() if field != "metadata"}
    if fields.keys() >= TOOL_FIELDS or not fields:
        connection = open_connection()
        try:
            answer = connection.ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}})
        except EnvError as error:
            raise ConfigError(f"{where}: its actions are calls of tools, but it lists none: {error}") from error
        finally:
            connection.close()
        tools = (answer.get("result") or {}).get("tools") or []
        if not tools:
            raise ConfigError(f"{where}: its actions are calls of tools, but it lists none: {answer.get('error')}")
        return None, [_tool(tool) for tool in tools], True
    if len(fields) == 1:
        (field, about), *_ = fields.items()
        if about.get("type") == "string" and "enum" not in about:
            return field, [], False
    parameters = {**schema, "properties": fields}
    return None, [Tool.from_schema(ACT, str(schema.get("description") or "Act."), parameters)], False


def _tool(tool: Mapping[str, Any]) -> Tool:
    parameters = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "additionalProperties": True}
    return Tool.from_schema(str(tool["name"]), str(tool.get("description") or ""), parameters)


def describe_any(observation: dict[str, Any]) -> str:
    """Return an observation in words: a tool's result, its only text, or a line for each field that holds something.

    Metadata is left out, unless there is nothing else.
    """
    if "tool_name" in observation:
        return _describe_result(observation.get("error") or observation.get("result"))
    fields = {name: value for name, value in observation.items() if name != "metadata" and value not in (None, [], {})}
    fields = fields or dict(observation.get("metadata") or {})
    if len(fields) == 1 and isinstance(value := next(iter(fields.values())), str):
        return value or "(nothing)"
    return "\n".join(f"{name}: {_plain(value)}" for name, value in fields.items()) or "(nothing)"


def _describe_result(result: Any) -> str:
    if isinstance(result, dict):
        if isinstance(result.get("message"), str):
            return result["message"]
        parts = [part for part in result.get("content") or [] if isinstance(part, dict)]
        if parts and all(isinstance(part.get("text"), str) for part in parts):
            return "\n".join(part["text"] for part in parts) or "(nothing)"
    return _plain(result) or "(nothing)"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
