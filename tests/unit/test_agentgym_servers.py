"""AgentGym's eight further environments, played on servers written here from the protocol of each.

AgentGym's own servers need data, accounts or keys. These have their requests, answers and rules of reward.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import itertools
import re
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from servers_for_tests import wait_until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentgym_rl.config import EnvironmentConfig, load_config
from agentgym_rl.environment.agentgym_servers import KNOWN_DIALECTS, SERVED, sql_of, tool_call_of
from agentgym_rl.environment.pool import RemotePool
from agentgym_rl.environment.server import bind
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.preflight import require_environments

ROOT = Path(__file__).parents[2]
TOOLS = ("weather", "movie", "academia", "sheet", "todo")


@dataclass
class ServerBase:
    """Routes and a record of the actions received."""

    actions: list[str] = field(default_factory=list)
    num_created: int = 0

    def routes(self) -> list[Route]:
        posts = [Route(f"/{name}", getattr(self, name), methods=["POST"]) for name in ("create", "reset", "step")]
        return [*posts, *(Route(f"/{n}", getattr(self, n)) for n in ("available_actions",) if hasattr(self, n))]


def require(body: dict[str, Any], **kinds: type) -> Response | None:
    """Return the 422 of a pydantic model if a field is missing or of another type."""
    wrong = [name for name, kind in kinds.items() if type(body.get(name)) is not kind]
    return (
        JSONResponse({"detail": [{"loc": ["body", name], "msg": "Field required"} for name in wrong]}, 422)
        if wrong
        else None
    )


@dataclass
class ToolServer(ServerBase):
    """Reads `Action: NAME with Action Input: {...}` in one line. The reward is that of the episode so far."""

    keeps_a_state: bool = False
    """Like Todo: the final reward needs the right answer and the right state."""
    episodes: dict[int, dict[str, Any]] = field(default_factory=dict)

    async def create(self, request: Request) -> Response:
        body = await request.json()
        if (refused := require(body, id=int)) is not None:
            return refused
        self.num_created += 1
        self.episodes[self.num_created - 1] = {}
        return JSONResponse(self.num_created - 1)

    async def reset(self, request: Request) -> Response:
        body = await request.json()
        if (refused := require(body, env_idx=int, id=int)) is not None:
            return refused
        self.episodes[body["env_idx"]] = {"item": body["id"], "reward": 0.0, "done": False, "changed": False}
        goal = f"Now new trial starts.\nYou should perform actions to accomplish the goal: find number {body['id']}"
        return JSONResponse(f"{goal}\nGive me one action.")

    async def step(self, request: Request) -> Response:
        body = await request.json()
        if (refused := require(body, env_idx=int, action=str)) is not None:
            return refused
        self.actions.append(body["action"])
        episode = self.episodes[body["env_idx"]]
        match = re.search(r"\s*(.*?)\s*with\s*Action Input:\s*(.*?)$", body["action"])
        if match is None:
            text = 'Format error, please response in the format of "Action: [your action] with Action Input: [...]'
        else:
            text = f"Observation: {self._call(episode, *match.groups())}\nGive me one action."
        return JSONResponse({"observation": text, "reward": float(episode["reward"]), "done": episode["done"]})

    def _call(self, episode: dict[str, Any], name: str, arguments: str) -> str:
        if not name.startswith("Action:"):
            return "ERROR | TypeError(cannot unpack non-iterable NoneType object)"
        name = name.removeprefix("Action:").strip()
        try:
            values = ast.literal_eval(arguments)
        except (SyntaxError, ValueError):
            return "ERROR | Exception(Parameters in action input are not valid, please change your action input.)"
        if name == "look":
            episode["reward"] = max(episode["reward"], 0.5)
            return str({"number": episode["item"]})
        if name == "change":
            episode["changed"] = True
            return "changed"
        if name == "finish":
            episode["done"] = True
            right = values.get("answer") == episode["item"]
            episode["reward"] = 1.0 if right else episode["reward"]
            if self.keeps_a_state:
                episode["reward"] = right and episode["changed"]
            return str(values.get("answer"))
        return f"ERROR | Invalid action: {name}."


@dataclass
class AlfWorldServer(ServerBase):
    """Reports errors as 200, lists the possible actions beside the observation, and has no /close."""

    games: dict[int, int] = field(default_factory=dict)

    async def create(self, request: Request) -> Response:
        self.num_created += 1
        return JSONResponse({"id": self.num_created - 1})

    async def reset(self, request: Request) -> Response:
        body = await request.json()
        if (refused := require(body, id=int, game=int, world_type=str)) is not None:
            return refused
        if body["world_type"] not in ("Text", "Embody", "Hybrid"):
            return JSONResponse({"error": 'world_type must be one of "Text", "Embody" and "Hybrid"'})
        self.games[body["id"]] = body["game"]
        text = "You are in the middle of a room. You see a shelf 1.\nYour task is to: go to the shelf."
        answer = {"id": body["id"], "observation": text, "available_actions": ["go to shelf 1", "look"]}
        return JSONResponse({**answer, "task_type": "pick_and_place_simple-Mug-None-Shelf-1/trial"})

    async def step(self, request: Request) -> Response:
        body = await request.json()
        if (refused := require(body, id=int, action=str)) is not None:
            return refused
        if body["id"] not in self.games:
            return JSONResponse({"error": f"The id {body['id']} is not valid."})
        self.actions.append(body["action"])
        won = body["action"] == "go to shelf 1"
        text = "On the shelf 1, you see nothing." if won else "Nothing happens."
        answer = {"observation": text, "reward": float(won), "available_actions": ["look"], "done": won}
        return JSONResponse(answer)

    async def available_actions(self, request: Request) -> Response:
        return JSONResponse(["go to shelf 1", "look"])


@dataclass
class SqlGymServer(ServerBase):
    """Has eight sessions. A further /create returns one of them. One statement ends the episode."""

    sessions: list[int] = field(default_factory=list)
    items: dict[int, int | None] = field(default_factory=dict)

    async def create(self, request: Request) -> Response:
        self.num_created += 1
        if len(self.sessions) == 8:
            return JSONResponse(self.sessions[(self.num_created - 1) % 8])
        self.sessions.append(1000 + 7 * self.num_created)
        self.items[self.sessions[-1]] = None
        return JSONResponse(self.sessions[-1])

    async def reset(self, request: Request) -> Response:
        body = await request.json()
        if (refused := require(body, env_idx=int, item_id=int)) is not None:
            return refused
        assert self.items[body["env_idx"]] is None, "two episodes play in one session"
        self.items[body["env_idx"]] = body["item_id"]
        return JSONResponse([f"numbers contains tables such as n. What is {body['item_id']} plus one?", None])

    async def step(self, request: Request) -> Response:
        body = await request.json()
        if (refused := require(body, env_idx=int, action=str)) is not None:
            return refused
        self.actions.append(body["action"])
        await asyncio.sleep(0.01)
        item = self.items[body["env_idx"]]
        assert item is not None
        self.items[body["env_idx"]] = None
        try:
            rows: Any = sqlite3.connect(":memory:").execute(body["action"]).fetchall()
        except sqlite3.Error as error:
            rows = error
        reward = 0.0 if isinstance(rows, Exception) else float(set(rows) == {(item + 1,)})
        return JSONResponse({"state": str(rows)[:100], "reward": reward, "done": True, "info": {"ground_truth": "..."}})


CLICKABLES = {"results": ["back to search", "b001"], "product": ["back to search", "< prev", "red", "buy now"]}


@dataclass
class WebShopServer(ServerBase):
    """Answers /reset with a pair, names the page `state`, and has no /close."""

    pages: dict[int, str] = field(default_factory=dict)

    async def create(self, request: Request) -> Response:
        self.num_created += 1
        return JSONResponse(48_000_000 + self.num_created)

    async def reset(self, request: Request) -> Response:
        body = await request.json()
        if (refused := require(body, env_idx=int, session_id=int)) is not None:
            return refused
        self.pages[body["env_idx"]] = "search"
        return JSONResponse(["WebShop [SEP] Instruction: [SEP] Find me a red mug [SEP] Search", None])

    async def step(self, request: Request) -> Response:
        body = await request.json()
        if (refused := require(body, env_idx=int, action=str)) is not None:
            return refused
        self.actions.append(body["action"])
        number, action = body["env_idx"], body["action"]
        before = self.pages[number]
        after = {("search", "search[red mug]"): "results", ("results", "click[b001]"): "product"}.get((before, action))
        bought = (before, action) == ("product", "click[buy now]")
        self.pages[number] = after or before
        state = "Thank you for shopping with us!" if bought else self.pages[number]
        return JSONResponse({"state": state, "reward": 0.75 if bought else 0.0, "done": bought, "info": None})

    async def available_actions(self, request: Request) -> Response:
        page = self.pages[int(request.query_params["env_idx"])]
        return JSONResponse({"has_search_bar": page == "search", "clickables": CLICKABLES.get(page, ["search"])})


@contextlib.contextmanager
def running(server: ServerBase) -> Iterator[str]:
    """Run the server on a free loopback port; yield its address."""
    listener = bind("127.0.0.1", 0)
    web = uvicorn.Server(uvicorn.Config(Starlette(routes=server.routes()), log_level="critical", lifespan="off"))
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: web.started)
        yield f"agentgym+http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        web.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


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
