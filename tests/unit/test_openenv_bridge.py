"""OpenEnv's servers as environments, and our environments played by OpenEnv's own client."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("websockets")

import httpx
from runs_for_tests import train_two_steps
from servers_for_tests import (
    Clock,
    RunningServer,
    asgi_in_thread,
    free_port,
    listens,
    problems_over_http,
    server_in_thread,
    wait_until,
)
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect

from agentgym_rl.common import http_guard
from agentgym_rl.environment import catalog
from agentgym_rl.environment.bridges.openenv import describe_any, openenv_class
from agentgym_rl.environment.bridges.openenv_server import openenv_app
from agentgym_rl.environment.conformance import check
from agentgym_rl.environment.envs.keydoor import KeyDoor
from agentgym_rl.environment.envs.maze import Maze
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.errors import ConfigError, EnvUnavailable
from agentgym_rl.types import ToolCall

EXAMPLE = Path(__file__).parents[2] / "examples" / "openenv_maze.toml"


@pytest.fixture(scope="module")
def ours() -> Iterator[RunningServer]:
    """Serve the maze over OpenEnv's protocol."""
    with server_in_thread({"maze": Maze}, create=openenv_app) as server:
        yield server
        wait_until(lambda: server.sessions.num_open == 0)


async def test_our_server_and_our_bridge_pass_the_conformance_suite(ours: RunningServer) -> None:
    name, kwargs = f"openenv:{ours.url}", {"num_train": 5, "num_test": 2}
    findings = await check(name, kwargs)
    assert {finding.check for finding in findings} >= {"random play", "determinism", "hostile actions", "concurrency"}
    assert [finding for finding in findings if finding.level == "error"] == []
    assert await problems_over_http("maze", catalog.load(name, kwargs)) == []


def test_text_actions_are_played_as_text(ours: RunningServer) -> None:
    env_class = catalog.load(f"openenv:{ours.url}/maze", {"reset": {"split": "test"}})
    assert env_class.name == "maze"
    assert "You are in a maze" in env_class.instruction
    assert not hasattr(env_class, "tools")
    env, maze = env_class(), Maze()
    assert env.reset(3) == maze.reset(3)
    while True:
        action = maze.oracle()
        step, expected = env.step(action), maze.step(action)
        assert (step.observation, step.reward, step.done) == (expected.observation, expected.reward, expected.done)
        if step.done:
            break
    assert step.info["success"] is True
    assert env.reset(3) == maze.reset(3)
    env.close()
    with pytest.raises(IndexError, match="11000"):
        env.reset(11_000)


def test_messages_that_do_not_fit_are_answered_with_a_code(ours: RunningServer) -> None:
    with connect(ours.url.replace("http", "ws") + "/ws") as socket:

        def code(message: str) -> str:
            socket.send(message)
            answer = json.loads(socket.recv(timeout=30))
            return str(answer["data"].get("code", answer["type"]))

        assert code("{") == "INVALID_JSON"
        assert code("[" * 100_000) == "INVALID_JSON"
        assert code("[]") == "UNKNOWN_TYPE"
        assert code('{"type": "reset", "data": [1]}') == "VALIDATION_ERROR"
        assert code('{"type": "reset", "data": {"split": ["train"]}}') == "VALIDATION_ERROR"
        assert code('{"type": "dance"}') == "UNKNOWN_TYPE"
        assert code('{"type": "step", "data": {"action": "move up"}}') == "EXECUTION_ERROR"  # not reset
        assert code('{"type": "reset", "data": {"split": "dev"}}') == "VALIDATION_ERROR"
        assert code('{"type": "reset", "data": {"seed": "one"}}') == "VALIDATION_ERROR"
        assert code('{"type": "reset", "data": {"item": -1}}') == "VALIDATION_ERROR"
        assert code('{"type": "reset", "data": {"item": 3}}') == "observation"
        assert code('{"type": "step", "data": {"action": 7}}') == "VALIDATION_ERROR"
        assert code('{"type": "step", "data": {"action": "\\ud800"}}') == "observation"
        assert code('{"type": "state"}') == "state"


def test_other_sites_and_clients_without_a_token_are_refused(
    ours: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = ours.url.replace("http", "ws") + "/ws"
    with pytest.raises(InvalidStatus):
        connect(address, origin="http://evil.example")  # type: ignore[arg-type]
    assert httpx.get(ours.url + "/schema", headers={"host": "evil.example"}).status_code == 421
    with server_in_thread({"maze": Maze}, create=openenv_app, token="secret") as server:
        assert httpx.get(server.url + "/schema").status_code == 401
        with pytest.raises(InvalidStatus):
            connect(server.url.replace("http", "ws") + "/ws")
        with pytest.raises(ConfigError, match="401"):
            openenv_class(server.url)
        monkeypatch.setenv("AGENTGYM_TOKEN", "secret")
        env = openenv_class(server.url, token_variable="AGENTGYM_TOKEN")()
        assert "The goal is at" in env.reset(0)
        env.close()


def test_a_full_or_absent_server_is_named() -> None:
    with server_in_thread({"maze": Maze, "keydoor": KeyDoor}, create=openenv_app, max_sessions=1) as server:
        with pytest.raises(ConfigError, match="an OpenEnv server should answer"):
            openenv_class(server.url)  # two environments: each has its own address
        env_class = openenv_class(f"{server.url}/keydoor")
        first, second = env_class(), env_class()
        first.reset(0)
        with pytest.raises(EnvUnavailable, match="full"):
            second.reset(0)
        first.close()
        second.close()
    with pytest.raises(EnvUnavailable, match="no OpenEnv server answers"):
        env_class().reset(0)


def test_an_openenv_server_keeps_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    limits = {"idle_timeout_s": 0.1, "max_request_bytes": 2000}
    with (
        server_in_thread({"maze": Maze}, create=openenv_app, **limits) as server,
        connect(server.url.replace("http", "ws") + "/ws") as socket,
    ):
        reset = '{"type": "reset", "data": {"item": 3}}'
        socket.send(reset)
        assert json.loads(socket.recv(timeout=30))["type"] == "observation"
        clock.now += 100.0
        wait_until(lambda: server.sessions.counts["idle_closed"] == 1)
        socket.send(reset)
        refused = json.loads(socket.recv(timeout=30))["data"]
        assert refused["code"] == "EXECUTION_ERROR"
        assert "idle too long" in refused["message"]
        socket.send(json.dumps({"type": "step", "data": {"action": "x" * 2000}}))
        with pytest.raises(ConnectionClosedError, match="1009"):
            socket.recv(timeout=30)


def test_a_websocket_outlives_the_deadline_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_guard, "REQUEST_TIMEOUT_S", 0.2)
    monkeypatch.setattr(http_guard, "LATE_READ_S", 0.1)
    with (
        server_in_thread({"maze": Maze}, create=openenv_app) as server,
        connect(server.url.replace("http", "ws") + "/ws") as socket,
    ):
        time.sleep(1)
        socket.send('{"type": "reset", "data": {"item": 3}}')
        assert json.loads(socket.recv(timeout=30))["type"] == "observation"


def test_observations_are_described_in_words() -> None:
    assert describe_any({"text": "Hello.", "metadata": {"a": 1}}) == "Hello."
    assert describe_any({"x": 1, "legal": [1, 2], "empty": [], "message": "Go."}) == "x: 1\nlegal: [1, 2]\nmessage: Go."
    assert describe_any({"metadata": {"status": "ready"}}) == "ready"
    assert describe_any({}) == "(nothing)"
    assert describe_any({"tool_name": "add", "result": {"content": [{"type": "text", "text": "3"}]}}) == "3"
    assert describe_any({"tool_name": "add", "result": None, "error": {"message": "no such tool"}}) == "no such tool"


async def test_the_example_recipe_trains_on_our_openenv_server(
    ours: RunningServer, tiny_qwen: Path, tmp_path: Path
) -> None:
    await train_two_steps(EXAMPLE, tiny_qwen, tmp_path / "run", f"environments.0.name=openenv:{ours.url}")
    assert "You are in a maze" in (tmp_path / "run" / "trajectories" / "step_000002.jsonl").read_text()
    wait_until(lambda: ours.sessions.num_open == 0)


# --- with OpenEnv itself ---------------------------------------------------------------------------------------------


def test_the_client_of_openenv_plays_our_server(ours: RunningServer) -> None:
    client_module = pytest.importorskip("openenv.core.generic_client")
    maze = Maze()
    with client_module.GenericEnvClient(base_url=ours.url) as client:
        result = client.reset(item=3)
        assert result.observation["text"] == maze.reset(3)
        assert not result.done
        while not result.done:
            action = maze.oracle()
            result = client.step({"action": action})
            assert result.observation["text"] == maze.step(action).observation
        assert result.reward == 1.0
        state = client.state()
        assert (state["item"], state["score"]) == (3, 1.0)
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            client.reset(item=-1)


@pytest.fixture
def template(tmp_path: Path) -> Iterator[str]:
    """The environment that `openenv init` writes, unchanged, served by OpenEnv."""
    pytest.importorskip("openenv.core.env_server")
    init = [sys.executable, "-m", "openenv.cli", "init", "my_env", "--output-dir", str(tmp_path)]
    subprocess.run(init, capture_output=True, timeout=120, check=True)
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "server.app:app", "--port", str(port), "--log-level", "warning"]
    child = subprocess.Popen(command, cwd=tmp_path / "my_env")
    try:
        wait_until(lambda: listens(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        child.terminate()
        child.wait(30)


def test_the_environment_of_openenv_init_is_played_as_text(template: str) -> None:
    env = openenv_class(template)()
    assert "ready" in env.reset(0)
    step = env.step("hello \ud83e\udd16")
    assert step.info == {"valid": False}  # half of a pair cannot be sent
    step = env.step("hello")
    assert "echoed_message: hello" in step.observation
    assert "message_length: 5" in step.observation
    assert step.reward > 0
    env.close()


@pytest.mark.long
async def test_the_example_recipe_trains_on_the_environment_of_openenv_init(
    template: str, tiny_qwen: Path, tmp_path: Path
) -> None:
    changes = [f"environments.0.name=openenv:{template}", "agent.concurrency=1"]  # the template has one session
    rows = await train_two_steps(EXAMPLE, tiny_qwen, tmp_path / "run", *changes)
    assert all(row["reward/mean"] > 0 for row in rows), "it rewards every message by its length"


@pytest.fixture
def toolbox() -> Iterator[str]:
    """An environment with tools, on the base class of OpenEnv."""
    module = pytest.importorskip("openenv.core.env_server.mcp_environment")
    from fastmcp import FastMCP
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
    from openenv.core.env_server.types import Observation, State

    class Task(Observation):
        task: str

    class Toolbox(module.MCPEnvironment):  # type: ignore[misc, name-defined]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            tools = FastMCP("toolbox")

            @tools.tool
            def add(a: int, b: int) -> int:
                """Add two numbers."""
                return a + b

            super().__init__(tools)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
            return Task(task=f"Add {seed} and 1.")

        def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
            raise ValueError("only tools")

        @property
        def state(self) -> Any:
            return State()

    app = create_app(Toolbox, CallToolAction, CallToolObservation, env_name="toolbox", max_concurrent_envs=16)
    with asgi_in_thread(app) as url:
        yield url


async def test_the_tools_of_an_openenv_server_are_called(toolbox: str) -> None:
    env: Any = openenv_class(toolbox)()
    assert [tool.name for tool in env.tools()] == ["add"]
    assert env.reset(4) == "Add 4 and 1."
    assert env.step('{"name": "add", "arguments": {"a": 4, "b": 1}}').observation == "5"
    for action in ("4 + 1", '{"name": "sub"}', '{"name": "add", "arguments": {"a": "x"}}'):
        step = env.step(action)
        assert step.info["valid"] is False, action
        assert not step.done
    env.close()
    findings = await check(f"openenv:{toolbox}", {})
    assert [finding for finding in findings if finding.level == "error"] == []


async def test_structured_calls_reach_an_openenv_server(toolbox: str) -> None:
    pool = LocalPool({"toolbox": openenv_class(toolbox)}, action_format="tool")
    session = await pool.open("toolbox")
    assert [tool["function"]["name"] for tool in session.tools] == ["add"]
    assert '"parameters"' not in session.instruction, "the chat template shows the tools"
    await session.reset(4)
    step = await session.call([ToolCall("add", {"a": 4, "b": 1}), ToolCall("add", {"a": "4", "b": 2})])
    assert step.results == ["5", "6"]
    wrong = await session.call([ToolCall("add", {"a": "x", "b": 1}), ToolCall("sub")])
    assert wrong.results == [
        "Invalid call: add needs an integer as a, got '\"x\"'.",
        "Invalid call: there is no tool 'sub', only add.",
    ]
    assert wrong.info["valid"] is False
    await pool.close()
