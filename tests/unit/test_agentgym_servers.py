"""AgentGym's eight further environments, played on servers written from the protocol of each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from pathlib import Path

import pytest
from agentgym_servers_for_tests import AlfWorldServer, ServerBase, SqlGymServer, ToolServer, WebShopServer, running
from typer.testing import CliRunner

from agentgym_rl.cli import app
from agentgym_rl.config import EnvironmentConfig, load_config
from agentgym_rl.environment import catalog, conformance
from agentgym_rl.environment.agentgym_servers import KNOWN_DIALECTS, SERVED, sql_of, tool_call_of
from agentgym_rl.environment.pool import RemotePool
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.preflight import require_environments

ROOT = Path(__file__).parents[2]
TOOLS = ("weather", "movie", "academia", "sheet", "todo")


@contextlib.asynccontextmanager
async def session_of(name: str, server: ServerBase, item: int, action_format: str = "react"):
    """Open one session and reset it to `item`; yield it and the first step."""
    with running(server) as url:
        pool = RemotePool({name: f"{url}/{name}"}, timeout_s=20, action_format=action_format)
        try:
            session = await pool.open(name)
            yield session, await session.reset(item)
            await session.close()
        finally:
            await pool.close()


@pytest.mark.parametrize("name", TOOLS)
async def test_a_tool_server_gets_a_whole_call_and_pays_its_total_once(name: str) -> None:
    server = ToolServer()
    async with session_of(name, server, 7) as (session, first):
        assert first.observation.startswith("Now new trial starts.")
        assert session.instruction.startswith(SERVED[name].instruction)
        wrong = await session.step("Thought: I guess.\nAction: look around")
        steps = [await session.step("Action: look with Action Input: {}") for _ in range(2)]
        last = await session.step('Thought: done\nAction: finish with Action Input: {"answer":\n7}')
    assert server.actions[1:] == [
        *["Action: look with Action Input: {}"] * 2,
        'Action: finish with Action Input: {"answer": 7}',
    ]
    assert (wrong.reward, wrong.done, wrong.info) == (0.0, False, {"valid": False})
    assert [step.reward for step in (*steps, last)] == [0.5, 0.0, 0.5]
    assert (last.done, last.info) == (True, {"success": True})


async def test_progress_is_taken_back_if_a_todo_list_ends_in_the_wrong_state() -> None:
    async with session_of("todo", ToolServer(keeps_a_state=True), 7) as (session, _):
        look = await session.step("Action: look with Action Input: {}")
        last = await session.step('Action: finish with Action Input: {"answer": 7}')
    assert (look.reward, last.reward) == (0.5, -0.5)
    assert last.info == {"success": False}


async def test_a_failed_tool_call_is_an_invalid_action() -> None:
    async with session_of("movie", ToolServer(), 7) as (session, _):
        step = await session.step("Action: look with Action Input: {id: 3}")
    assert step.info == {"valid": False}


async def test_alfworld_shows_the_possible_actions_in_each_observation() -> None:
    server = AlfWorldServer()
    async with session_of("alfworld", server, 2420) as (session, first):
        assert await session.actions() == ["go to shelf 1", "look"]
        refused = await session.step("Action: fly")
        last = await session.step("Action: go to shelf 1")
    assert server.games == {0: 2420}
    assert first.observation.endswith("go to the shelf.\nAVAILABLE ACTIONS: go to shelf 1, look")
    assert refused.observation == "Nothing happens.\nAVAILABLE ACTIONS: look"
    assert refused.info == {"valid": False}
    assert (last.reward, last.done, last.info) == (1.0, True, {"success": True})
    assert last.observation == "On the shelf 1, you see nothing."


async def test_sqlgym_gets_the_statement_alone() -> None:
    server = SqlGymServer()
    async with session_of("sqlgym", server, 41) as (session, first):
        assert first.observation.endswith("What is 41 plus one?")
        last = await session.step("Thought: easy\nAction: ```sql\nSELECT 42;\n```")
    assert server.actions == ["SELECT 42;"]
    assert (last.observation, last.reward, last.done) == ("[(42,)]", 1.0, True)
    assert last.info == {"success": True}


async def test_many_episodes_wait_for_the_eight_sessions_of_sqlgym() -> None:
    server = SqlGymServer()

    async def play(pool: RemotePool, item: int) -> float:
        session = await pool.open("sqlgym")
        try:
            await session.reset(item)
            return (await session.step(f"SELECT {item + 1}")).reward
        finally:
            await session.close()

    with running(server) as url:
        pool = RemotePool({"sqlgym": f"{url}/sqlgym"}, timeout_s=20)
        try:
            rewards = await asyncio.gather(*(play(pool, item) for item in range(30)))
        finally:
            await pool.close()
    assert rewards == [1.0] * 30
    assert server.num_created == 8


async def test_webshop_lists_what_can_be_clicked_and_scores_part_of_a_purchase() -> None:
    server = WebShopServer()
    async with session_of("webshop", server, 12) as (session, first):
        assert first.observation == "WebShop [SEP] Instruction: [SEP] Find me a red mug [SEP] Search"
        assert await session.actions() == []
        await session.step("Action: search[red mug]")
        assert await session.actions() == ["click[back to search]", "click[b001]"]
        await session.step("Action: click[b001]")
        last = await session.step("Action: click[buy now]")
    assert (last.reward, last.done, last.info) == (0.75, True, {"success": False})


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("SELECT 1", "SELECT 1"),
        ("```sql\nSELECT 1\n```", "SELECT 1"),
        ("first ```SELECT 1``` then ```sql SELECT 2```", "SELECT 2"),
    ],
)
def test_the_statement_of_a_reply(text: str, sent: str) -> None:
    assert sql_of(text) == sent


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("finish with Action Input: {}", "Action: finish with Action Input: {}"),
        ("Thought: so\n\nAction: a with Action Input: {\n1}", "Action: a with Action Input: { 1}"),
        ("finish", "finish"),
    ],
)
def test_the_call_of_a_reply(text: str, sent: str) -> None:
    assert tool_call_of(text) == sent


@pytest.mark.parametrize("name", SERVED)
async def test_each_passes_the_conformance_suite(name: str) -> None:
    others = {"webshop": WebShopServer(), "alfworld": AlfWorldServer(), "sqlgym": SqlGymServer(may_abandon=True)}
    items = [SERVED[name].splits["test"][0], SERVED[name].splits["test"][-1]]
    # Texts that JSON can hold; long ones take the server's regular expression seconds.
    sent = {kind: text for kind, text in conformance.HOSTILE.items() if len(text) < 1000 and kind != "lone surrogates"}
    with running(others.get(name, ToolServer())) as url:
        pool = RemotePool({name: f"{url}/{name}"}, timeout_s=120)
        try:
            assert await conformance.determinism_problems(pool, name, items) == []
            assert await conformance.concurrency_problems(pool, name, items) == []
            assert (await conformance.hostile_problems(pool, name, items[0], sent))[0] == []
            assert (await conformance.random_problems(pool, name, items, turns=6))[0] == []
        finally:
            await pool.close()


@pytest.mark.parametrize("name", SERVED)
async def test_instruction_and_items_are_known_by_name(name: str) -> None:
    served = SERVED[name]
    pool = RemotePool({name: "agentgym+http://127.0.0.1:9"})
    try:
        for split, items in served.splits.items():
            assert await pool.items(name, split) == list(items)
        with pytest.raises(ConfigError, match="set items"):
            await pool.items(name, "no such split")
        with pytest.raises(ConfigError, match="set items"):
            await pool.items(name, "test", "a subset")
        assert (await pool.info(name))["instruction"] == served.instruction
    finally:
        await pool.close()
    ranges = sorted(served.splits.values(), key=lambda items: items.start)
    assert all(a.stop == b.start for a, b in itertools.pairwise(ranges)), "splits are disjoint"
    assert name in KNOWN_DIALECTS


@pytest.mark.parametrize("name", SERVED)
def test_each_has_a_recipe_against_its_server_and_a_docs_section(name: str) -> None:
    config = load_config(ROOT / "recipes" / "agentgym" / f"{name}.toml", [])
    (environment,) = config.environments
    assert isinstance(environment, EnvironmentConfig)
    assert environment.name == name
    assert environment.url == f"agentgym+http://127.0.0.1:36001/{name}"
    assert config.agent.style == "react"
    limit = KNOWN_DIALECTS[name].max_sessions
    assert limit is None or config.agent.concurrency <= limit
    assert {environment.split, environment.eval_split} <= {*environment.items, *SERVED[name].splits}
    require_environments(config.environments)
    assert f"`{name}`" in (ROOT / "docs" / "reference" / "environments" / "agentgym.md").read_text()


def test_an_environment_without_its_server_says_how_to_play_it() -> None:
    with pytest.raises(ConfigError, match=r"needs AgentGym's server \(weather --port 36001\): play it with url"):
        catalog.load("weather")


def test_envs_lists_the_environments_that_need_a_server() -> None:
    result = CliRunner().invoke(app, ["envs", "--json"])
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert set(SERVED) <= rows.keys()
    assert rows["weather"]["server"] == "weather --port 36001"
    assert rows["weather"]["ranges"] == {"train": [0, 323], "test": [323, 343]}
    assert rows["sqlgym"]["installed"] is True
    assert "†" in rows["sqlgym"]["summary"]
