"""The tools of an MCP server as an environment (`mcp:NAME`), with a list of tasks and a function that rewards.

Each episode gets a connection of its own: a new process of a stdio server, a new session of an HTTP server. With a tool
that resets the server, connections are kept for later episodes. All clients share one thread with an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar

import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.types import INVALID_PARAMS

from agentgym_rl.environment.base import TextEnv
from agentgym_rl.environment.bridges.bridge_settings import Tasks, import_value, load_tasks, read_headers
from agentgym_rl.environment.bridges.calls import BadCall, explain_tools, read_call, shorten
from agentgym_rl.environment.tools import Tool
from agentgym_rl.errors import ConfigError, EnvError, EnvUnavailable, describe_error
from agentgym_rl.types import Step

FINISH = "finish"
"""Name of the tool that ends an episode."""
FINISH_TOOL = Tool(
    FINISH,
    "End the task. Call it once, when the task is done.",
    parameters={"answer": {"type": "string", "description": "The answer, if the task asks for one.", "default": ""}},
)
_Job = tuple[Callable[[Client], Awaitable[Any]], "Future[Any]"]
"""A request, and where its answer goes."""


@dataclass(slots=True)
class Call:
    """One call that the agent made."""

    name: str
    arguments: dict[str, Any]
    result: str
    is_error: bool
    """Whether the server answered with an error."""


@dataclass(slots=True)
class Episode:
    """A finished episode, as the reward function gets it."""

    task: dict[str, Any]
    answer: str
    """The answer given to `finish`; may be empty."""
    call: Callable[[str, dict[str, Any]], str]
    """Calls a tool of the server and returns its result, to look at the state that the agent left."""
    calls: list[Call] = field(default_factory=list)


Reward = Callable[[Episode], float]


@lru_cache(maxsize=1)
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all clients. Its thread is a daemon: a forgotten session ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp-clients", daemon=True).start()
    return loop


class Connection:
    """A client of one MCP server, usable from any thread. One task opens it, runs its calls and closes it."""

    def __init__(self, server: StdioServerParameters | str, headers: Mapping[str, str], timeout_s: float) -> None:
        self._jobs: asyncio.Queue[_Job | None] = asyncio.Queue()
        self._failed = False
        opened: Future[None] = Future()
        work = self._run(server, headers, timeout_s, opened)
        self._task = asyncio.run_coroutine_threadsafe(work, _event_loop())
        opened.result()

    async def _run(
        self,
        server: StdioServerParameters | str,
        headers: Mapping[str, str],
        timeout_s: float,
        opened: Future[None],
    ) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                target: Any = server
                if isinstance(server, str) and headers:
                    http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=timeout_s))
                    target = streamable_http_client(server, http_client=http)
                client = await stack.enter_async_context(Client(target, read_timeout_seconds=timeout_s))
                opened.set_result(None)
                while (job := await self._jobs.get()) is not None:
                    request, answer = job
                    try:
                        answer.set_result(await request(client))
                    except Exception as error:
                        answer.set_exception(error)
        except Exception as error:
            if not opened.done():
                opened.set_exception(error)
        finally:
            while not self._jobs.empty():
                if (job := self._jobs.get_nowait()) is not None:
                    job[1].set_exception(EnvError("the connection to the MCP server is closed"))

    def _ask(self, request: Callable[[Client], Awaitable[Any]]) -> Any:
        if self._task.done():
            raise EnvError("the connection to the MCP server is closed")
        answer: Future[Any] = Future()
        _event_loop().call_soon_threadsafe(self._jobs.put_nowait, (request, answer))
        return answer.result()

    def tools(self) -> list[Tool]:
        """Return the server's tools."""
        tools: list[Tool] = []
        cursor = None
        while True:
            page = self._ask(partial(_list_tools, cursor=cursor))
            tools += [Tool.from_schema(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                return tools

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Return the text of a tool's answer and whether it is an error of the call. Other failures raise EnvError."""
        try:
            result = self._ask(lambda client: client.call_tool(name, arguments))
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                return shorten(str(error)), True
            self._failed = True
            raise EnvError(f"the MCP server failed to answer a call of {name}: {error}") from error
        return shorten(_content_text(result)), bool(result.is_error)

    @property
    def usable(self) -> bool:
        """Whether the connection is open and no call has failed."""
        return not (self._failed or self._task.done())

    def close(self) -> None:
        """Close the connection in the background: a stdio server has seconds to end."""
        _event_loop().call_soon_threadsafe(self._jobs.put_nowait, None)


async def _list_tools(client: Client, cursor: str | None) -> Any:
    return await client.list_tools(cursor=cursor)


def _content_text(result: Any) -> str:
    parts = [getattr(block, "text", None) or f"[{block.type}]" for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return "\n".join(parts) or "(no output)"


class McpEnv:
    """Tasks to do with the tools of an MCP server. Subclasses set everything. Implements TextEnv."""

    name: ClassVar[str]
    instruction: ClassVar[str]
    splits: ClassVar[Mapping[str, range]]
    subsets: ClassVar[tuple[str, ...]] = ()
    cheap: ClassVar[bool] = False

    tasks: ClassVar[list[dict[str, Any]]]
    tool_instruction: ClassVar[str]
    toolset: ClassVar[list[Tool]]
    connect: ClassVar[Callable[[], Connection]]
    reward: ClassVar[Reward]
    reset_tool: ClassVar[str | None]
    idle: ClassVar[list[Connection]]
    """Connections for later episodes. Empty without a reset tool."""

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._task: dict[str, Any] = {}
        self._calls: list[Call] = []

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return ()

    @classmethod
    def tools(cls) -> Sequence[Tool]:
        """Return the tools of the server, and `finish`."""
        return cls.toolset

    def reset(self, item: int) -> str:
        if not 0 <= item < len(self.tasks):
            raise IndexError(f"{self.name} has items 0 to {len(self.tasks) - 1}, got {item}")
        self.close()
        try:
            self._connection = self.idle.pop() if self.idle else type(self).connect()
        except Exception as error:
            raise EnvUnavailable(f"the MCP server of {self.name} cannot be reached: {_reason(error)}") from error
        self._task, self._calls = self.tasks[item], []
        first = [{"name": self.reset_tool}] if self.reset_tool is not None else []
        for call in [*first, *self._task.get("setup", [])]:
            result, is_error = self._connection.call(call["name"], call.get("arguments", {}))
            if is_error:
                raise EnvError(f"the setup of item {item} of {self.name} failed: {call} returned {result}")
        return str(self._task["prompt"])

    def step(self, text: str) -> Step:
        connection = self._connection
        if connection is None:
            raise EnvError(f"{self.name} needs a running episode: call reset first")
        try:
            name, arguments = read_call(text, [tool.name for tool in self.toolset])
        except BadCall as error:
            return Step(str(error), info={"valid": False})
        if name == FINISH:
            return self._finish(connection, str(arguments.get("answer", "")))
        result, is_error = connection.call(name, arguments)
        self._calls.append(Call(name, arguments, result, is_error))
        return Step(result, info={"valid": not is_error})

    def _finish(self, connection: Connection, answer: str) -> Step:
        def call(name: str, arguments: dict[str, Any]) -> str:
            return connection.call(name, arguments)[0]

        reward = float(type(self).reward(Episode(self._task, answer, call, self._calls)))
        self.close()
        return Step("The task is over.", reward, True, {"valid": True, "success": reward >= 1.0})

    def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            if self.reset_tool is not None and connection.usable:
                self.idle.append(connection)
            else:
                connection.close()


class SolvedMcpEnv(McpEnv):
    """Tasks that come with a `solution`, the calls that solve them."""

    oracle_recovers: ClassVar[bool] = False

    def oracle(self) -> str:
        """Return the next call of the solution, then `finish` with the task's answer."""
        if self._connection is None:
            raise EnvError(f"{self.name} needs a running episode: call reset first")
        solution = self._task["solution"]
        answer = self._task.get("answer")
        finish = {"name": FINISH, "arguments": {} if answer is None else {"answer": answer}}
        call = solution[len(self._calls)] if len(self._calls) < len(solution) else finish
        return json.dumps({"name": call["name"], "arguments": call.get("arguments", {})})


def mcp_class(
    name: str,
    *,
    tasks: str | Tasks,
    reward: str | Reward,
    command: Sequence[str] | None = None,
    url: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    token_variable: str | None = None,
    instruction: str = "Do the task with the tools that you have, then call finish.",
    reset_tool: str | None = None,
    call_timeout_s: float = 30.0,
) -> type[TextEnv]:
    """Return an environment whose tools are those of an MCP server.

    The server is a `command` that is started for each episode (with the variables `env` in the folder `cwd`), or the
    `url` of a streamable HTTP endpoint, with the token in the environment variable `token_variable`. `tasks` are dicts
    with a `prompt` and anything that `reward` needs, a .jsonl file or an import path. `setup` of a task lists calls
    that are made before it starts. `reward(episode)` returns the reward of a finished episode; 1 and above is a
    success. In a recipe it is an import path. `reset_tool` names a tool without arguments that restores the server's
    first state. The agent does not see it. If every task has a `solution`, a list of calls, the environment has an
    oracle.
    """
    where = f"environment mcp:{name}"
    if (command is None) == (url is None):
        raise ConfigError(f"{where} needs the command of a stdio server or the url of an HTTP server: set one of them")
    server: StdioServerParameters | str
    if command:
        server = StdioServerParameters(command=command[0], args=list(command[1:]), env=dict(env or {}), cwd=cwd)
    else:
        server = str(url)
    headers = read_headers(token_variable, where)
    rows, splits = load_tasks(tasks, where)
    score = import_value(reward, where, "reward") if isinstance(reward, str) else reward

    def connect() -> Connection:
        return Connection(server, headers, call_timeout_s)

    try:
        connection = connect()
        try:
            toolset = connection.tools()
        finally:
            connection.close()
    except Exception as error:
        address = " ".join(command) if command else url
        raise ConfigError(f"{where}: the MCP server {address} did not list its tools: {_reason(error)}") from error
    taken = [tool.name for tool in toolset]
    if FINISH in taken:
        raise ConfigError(f"{where}: the server has a tool {FINISH!r}, which is the name of the tool that ends a task")
    if reset_tool is not None and reset_tool not in taken:
        raise ConfigError(f"{where}: reset_tool is {reset_tool!r}, the tools of the server are {', '.join(taken)}")
    toolset = [tool for tool in toolset if tool.name != reset_tool] + [FINISH_TOOL]
    members = {
        "name": name,
        "instruction": f"{instruction}\n\n{explain_tools(toolset)}",
        "tool_instruction": instruction,
        "splits": splits,
        "tasks": rows,
        "toolset": toolset,
        "connect": staticmethod(connect),
        "reward": staticmethod(score),
        "reset_tool": reset_tool,
        "idle": [],
    }
    base = SolvedMcpEnv if all("solution" in row for row in rows) else McpEnv
    return type("McpEnv", (base,), members)


def _reason(error: BaseException) -> str:
    """Return the first cause of a failure in one line. Task groups wrap theirs."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return describe_error(error)
