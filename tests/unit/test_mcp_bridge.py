"""Tools of a real MCP server as an environment, and our environments played by the real MCP client."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("mcp")

import httpx
from envs_for_tests import Counting, Raising, SlowCounting
from mcp import Client, StdioServerParameters
from runs_for_tests import train_two_steps
from servers_for_tests import Clock, asgi_in_thread, problems_over_http, server_in_thread, wait_until

from agentgym_rl.agent.policy import OraclePolicy
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.agent.styles import STYLES
from agentgym_rl.environment import catalog
from agentgym_rl.environment.bridges.mcp import Episode, mcp_class
from agentgym_rl.environment.bridges.mcp_server import MCP_PATH, mcp_app
from agentgym_rl.environment.conformance import check
from agentgym_rl.environment.envs.maze import Maze
from agentgym_rl.environment.pool import LocalPool, RemotePool
from agentgym_rl.errors import ConfigError, EnvUnavailable
from agentgym_rl.types import Limits, Task, ToolCall

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "mcp_notes.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mcp_notes", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["mcp_notes"] = module  # a recipe names its tasks and its reward by import path
    return module


@pytest.fixture(scope="module")
def notes_url(example: ModuleType) -> Iterator[str]:
    """The notes server over HTTP, in a thread. Its notes are shared by all connections."""
    with asgi_in_thread(example.server.streamable_http_app()) as base:
        yield f"{base}/mcp"


def settings(url: str) -> dict[str, Any]:
    return {"url": url, "tasks": "mcp_notes:TASKS", "reward": "mcp_notes:reward", "reset_tool": "clear_notes"}


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def test_the_example_plays_its_server_over_stdio() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.count("reward 1") == 3
    assert "read_note  Go to Paris." in done.stdout


async def test_an_mcp_environment_passes_the_conformance_suite(
    notes_url: str, example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLE.parent)  # another process of the suite imports the tasks from there
    findings = await check("mcp:notes", settings(notes_url))
    assert {finding.check for finding in findings} >= {"random play", "determinism", "hostile actions", "oracle"}
    assert [finding for finding in findings if finding.level == "error"] == []
    assert await problems_over_http("notes", catalog.load("mcp:notes", settings(notes_url))) == []


async def test_the_example_recipe_trains_on_the_tools_of_its_server(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLE.parent)
    program = f'environments.0.kwargs.command=["{sys.executable}", "mcp_notes.py", "serve"]'
    few = ["warm_start.episodes=4", "warm_start.sft.epochs=1", "agent.concurrency=2"]
    await train_two_steps(EXAMPLE.with_suffix(".toml"), tiny_qwen, tmp_path / "run", program, *few)
    assert "Copy the note" in (tmp_path / "run" / "trajectories" / "step_000002.jsonl").read_text()


def test_calls_are_played_and_the_end_is_rewarded(notes_url: str, example: ModuleType) -> None:
    env: Any = catalog.load("mcp:notes", settings(notes_url))()
    assert env.splits == {"train": range(15), "test": range(15, 20)}
    assert [tool.name for tool in env.tools()] == ["write_note", "read_note", "finish"]
    assert '"required": ["title", "text"]' in env.instruction
    assert "trip 1" in env.reset(0)
    step = env.step(call("read_note", title="trip 1"))
    assert (step.observation, step.info) == ("Go to Quito.", {"valid": True})
    env.step(f"<tool_call>{call('write_note', title='plan', text='Go to Rome.')}</tool_call>")
    step = env.step(call("finish"))
    assert (step.reward, step.done, step.info["success"]) == (0.0, True, False)
    env.reset(0)
    assert "there is no note 'plan'" in env.step(call("read_note", title="plan")).observation
    env.step(call("write_note", title="plan", text="Go to Quito."))
    step = env.step(call("finish", answer="done"))
    assert (step.reward, step.done, step.info["success"]) == (1.0, True, True)
    with pytest.raises(IndexError, match="20"):
        env.reset(20)
    env.close()


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        ("read the note", "The action is not JSON"),
        ("[1]", "no object"),
        ('{"name": "reed_note"}', "did you mean 'read_note'"),
        ('{"arguments": {}}', "no name of a tool"),
        ('{"name": "clear_notes"}', "the tools are write_note, read_note, finish"),
        ('{"name": "read_note", "arguments": []}', "must be a JSON object, got list"),
        ('{"name": "read_note", "arguments": {"titel": 1}}', "Field required"),
        ('{"name": "read_note", "arguments": {"title": NaN}}', "NaN is no JSON number"),
        ('{"name": "read_note", "arguments": {"title": "\\ud800"}}', "not valid Unicode"),
        ("{" + '"a":{' * 100_000, "characters"),
        ("[" * 50_000, "nested too deeply"),
    ],
)
def test_a_malformed_call_is_answered_with_its_reason(
    notes_url: str, example: ModuleType, action: str, answer: str
) -> None:
    env: Any = catalog.load("mcp:notes", settings(notes_url))()
    env.reset(0)
    step = env.step(action)
    env.close()
    assert answer in step.observation
    assert step.info == {"valid": False}
    assert not step.done


def test_the_reward_function_sees_task_calls_and_answer(notes_url: str) -> None:
    seen: list[Episode] = []

    def reward(episode: Episode) -> float:
        seen.append(episode)
        return 0.25

    tasks = [{"prompt": "Write.", "split": split, "number": 7} for split in ("train", "test")]
    env = mcp_class("seen", url=notes_url, tasks=tasks, reward=reward)()
    assert not hasattr(env, "oracle")
    env.reset(1)
    env.step(call("write_note", title="a", text="b"))
    assert env.step(call("finish", answer="42")).reward == 0.25
    (episode,) = seen
    assert (episode.task["number"], episode.answer) == (7, "42")
    assert [(made.name, made.result, made.is_error) for made in episode.calls] == [("write_note", "Wrote a.", False)]


TASKS = [{"prompt": "Write.", "split": split} for split in ("train", "test")]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"url": None}, "needs the command of a stdio server or the url"),
        ({"url": "http://127.0.0.1:9/mcp"}, "did not list its tools: ConnectError"),
        ({"url": None, "command": ["no-such-server"]}, "did not list its tools: FileNotFoundError"),
        ({"tasks": TASKS[:1]}, "none of the split 'test'"),
        ({"tasks": [{"question": "?"}]}, "a task is an object with a prompt"),
        ({"tasks": "no_such_file.jsonl"}, "tasks must be a .jsonl file"),
        ({"reward": "nowhere:reward"}, "reward must be an import path"),
        ({"reset_tool": "reset"}, "the tools of the server are write_note"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(notes_url: str, changed: dict[str, Any], message: str) -> None:
    given = {"url": notes_url, "tasks": TASKS, "reward": len, **changed}
    with pytest.raises(ConfigError, match=message) as caught:
        mcp_class("notes", **given)
    assert "\n" not in str(caught.value)


def test_a_missing_or_unknown_setting_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="missing a required argument: 'tasks'; it takes tasks, reward, command"):
        catalog.load("mcp:notes", {"reward": "a:b"})
    with pytest.raises(ConfigError, match="unexpected keyword argument 'task'"):
        catalog.load("mcp:notes", {"tasks": "a:b", "reward": "a:b", "task": 1})


def test_tasks_are_read_from_a_file(notes_url: str, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(task) for task in [*TASKS, *TASKS]))
    assert mcp_class("notes", url=notes_url, tasks=str(path), reward=len).splits["test"] == range(2, 4)


def test_a_server_that_is_gone_is_an_error_of_the_episode(example: ModuleType) -> None:
    with asgi_in_thread(example.server.streamable_http_app()) as base:
        env = mcp_class("notes", url=f"{base}/mcp", tasks=TASKS, reward=len, call_timeout_s=5)()
    with pytest.raises(EnvUnavailable, match="cannot be reached"):
        env.reset(0)


async def play(server: Any) -> None:
    async with Client(server) as client:
        environments = (await client.call_tool("list_environments")).structured_content
        assert environments["maze"]["splits"]["test"] == [0, 1000]
        started = (await client.call_tool("start", {"environment": "maze", "item": 3})).structured_content
        env = Maze()
        assert started["observation"] == env.reset(3)
        assert started["instruction"] == env.instruction
        done = False
        while not done:
            answer = await client.call_tool("act", {"episode": started["episode"], "action": env.oracle()})
            step = env.step(env.oracle())
            done = answer.structured_content["done"]
            assert answer.structured_content["observation"] == step.observation
        assert answer.structured_content["score"] == 1.0
        over = await client.call_tool("act", {"episode": started["episode"], "action": "move up"})
        assert over.is_error
        assert "has ended its episode" in over.content[0].text
        await client.call_tool("stop", {"episode": started["episode"]})
        for wrong in ({"environment": "chess", "item": 0}, {"environment": "maze", "item": -1}):
            assert (await client.call_tool("start", wrong)).is_error


async def test_an_mcp_client_plays_our_environments_over_http() -> None:
    with server_in_thread({"maze": Maze}, create=mcp_app) as server:
        await play(server.url + MCP_PATH)
        assert server.sessions.num_open == 0


async def test_episodes_of_an_mcp_server_are_limited_and_closed_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class SlowReset(SlowCounting):
        def reset(self, item: int) -> str:
            clock.now += 100.0
            time.sleep(0.2)  # the reaper looks several times
            return super().reset(item)

    with server_in_thread({"counting": SlowReset}, create=mcp_app, max_sessions=1, idle_timeout_s=0.1) as server:
        async with Client(server.url + MCP_PATH) as client:
            first = {"environment": "counting", "item": 0}
            episode = (await client.call_tool("start", first)).structured_content["episode"]
            await asyncio.sleep(0.2)
            act = {"episode": episode, "action": "up"}
            assert not (await client.call_tool("act", act)).is_error
            assert "all 1 sessions are in use" in (await client.call_tool("start", first)).content[0].text
            clock.now += 100.0
            await asyncio.to_thread(wait_until, lambda: server.sessions.counts["idle_closed"] == 1)
            assert "idle too long" in (await client.call_tool("act", act)).content[0].text


def test_a_request_to_an_mcp_server_over_the_size_limit_is_refused() -> None:
    headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    with server_in_thread({"maze": Maze}, create=mcp_app, max_request_bytes=2000) as server:
        for body in (b"x" * 2500, (b"x" * 500 for _ in range(5))):  # the second does not tell its size
            assert httpx.post(server.url + MCP_PATH, content=body, headers=headers).status_code == 413


async def test_an_mcp_episode_that_cannot_start_is_closed_and_counted() -> None:
    class Unset(Counting):
        def reset(self, item: int) -> str:
            raise ConfigError("set the key of the game")

    class SlowReset(SlowCounting):
        def reset(self, item: int) -> str:
            time.sleep(2)
            return super().reset(item)

    environments = {"raising": Raising, "unset": Unset, "slow": SlowReset}
    with server_in_thread(environments, create=mcp_app, step_timeout_s=0.5) as server:
        async with Client(server.url + MCP_PATH) as client:
            for name, reason in (("raising", "ValueError"), ("unset", "the key of the game"), ("slow", "deadline")):
                answer = await client.call_tool("start", {"environment": name, "item": 13})
                assert answer.is_error
                assert reason in answer.content[0].text
        counts = server.sessions.counts
        assert (counts["failed"], counts["timed_out"], server.sessions.num_open) == (1, 1, 0)


def test_a_token_is_sent_and_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    with server_in_thread({"maze": Maze}, create=mcp_app, token="secret") as server:
        given = {"url": server.url + MCP_PATH, "tasks": TASKS, "reward": len}
        with pytest.raises(ConfigError, match="did not list its tools"):
            mcp_class("maze", **given)
        with pytest.raises(ConfigError, match="AGENTGYM_MCP_TOKEN, which should hold a token"):
            mcp_class("maze", **given, token_variable="AGENTGYM_MCP_TOKEN")
        monkeypatch.setenv("AGENTGYM_MCP_TOKEN", "secret")
        env = mcp_class("maze", **given, token_variable="AGENTGYM_MCP_TOKEN")()
        env.reset(0)
        assert "The goal is at" in env.step(call("start", environment="maze", item=3)).observation
        env.close()


async def test_an_mcp_client_plays_the_command_over_stdio() -> None:
    command = ["-m", "agentgym_rl", "serve", "maze", "--mcp", "--stdio"]
    variables = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    await play(StdioServerParameters(command=sys.executable, args=command, env=variables))


async def test_structured_calls_are_played_in_process_and_over_http(notes_url: str, example: ModuleType) -> None:
    env_class = catalog.load("mcp:notes", settings(notes_url))
    with server_in_thread({"notes": env_class}) as server:
        pools = (
            LocalPool({"notes": env_class}, action_format="tool"),
            RemotePool({"notes": f"{server.url}/notes"}, action_format="tool"),
        )
        for pool in pools:
            session = STYLES["tool"].wrap(await pool.open("notes"))
            assert [tool["function"]["name"] for tool in session.tools] == ["write_note", "read_note", "finish"]
            assert session.tools[0]["function"]["parameters"]["required"] == ["title", "text"]
            assert session.instruction == "Do the task with the tools that you have, then call finish."
            await session.reset(0)
            copied = {"title": "plan", "text": "Go to Quito."}
            step = await session.call([ToolCall("read_note", {"title": "trip 1"}), ToolCall("write_note", copied)])
            assert step.results == ["Go to Quito.", "Wrote plan."]
            assert step.info["valid"] is True
            step = await session.call([ToolCall("read_note", {"titel": "x"}), ToolCall("read", error="not valid JSON")])
            assert step.results == [
                "Invalid call: read_note has no argument 'titel': it takes title.",
                "Invalid call: not valid JSON.",
            ]
            assert step.info["valid"] is False
            step = await session.call([ToolCall("finish")])
            assert (step.reward, step.done, step.info["success"]) == (1.0, True, True)
            limits = Limits(max_turns=5, max_new_tokens=100, max_context=2000)
            played = await rollout(Task("notes", 3), session, OraclePolicy(session), limits, id="t")
            assert played.success
            assert [call.name for m in played.messages for call in m.tool_calls or ()] == [
                *("read_note", "write_note", "finish"),
            ]
            await pool.close()
