"""AgentGym's own servers, both dialects, as small servers: fields, paths, errors in 200 answers, missing /close.
No session is lost, and none is shared by two episodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from servers_for_tests import server_in_thread, wait_until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route

from agentgym_rl.agent.collect import Collector
from agentgym_rl.agent.policy import OraclePolicy, ScriptedPolicy
from agentgym_rl.commands.train import train
from agentgym_rl.config import AgentConfig, Config, EnvironmentConfig
from agentgym_rl.environment import catalog
from agentgym_rl.environment.agentgym import INSTRUCTION, AgentGymClient, Server, read_items
from agentgym_rl.environment.pool import RemotePool
from agentgym_rl.environment.server import bind
from agentgym_rl.environment.wire import NotSupported
from agentgym_rl.errors import ConfigError, EnvError, EnvTimeout, EnvUnavailable
from agentgym_rl.run.environments_pool import EnvironmentsPool
from agentgym_rl.types import Limits, StopReason, Task


@dataclass
class Game:
    """The player names the colour of the item. The first reply ends the game."""

    item: int = -1
    done: bool = True

    @property
    def colour(self) -> str:
        return ("red", "green", "blue")[self.item % 3]

    def look(self) -> str:
        return f"The lamp is {self.colour}. Say its colour."


@dataclass
class AgentGymServer:
    """Base of both dialects: numbered games that live until they are closed, and a record of the requests."""

    closes: bool = True
    lists_actions: bool = False
    reset_keys: frozenset[str] = frozenset()
    """Fields that /reset requires, like a pydantic model."""
    reset_reward: float = 0
    games: dict[int, Game] = field(default_factory=dict)
    created: int = 0
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    hang: threading.Event = field(default_factory=threading.Event)

    def routes(self) -> list[Route]:
        paths = [("/create", self.create), ("/reset", self.reset), ("/step", self.step)]
        routes = [Route(path, handler, methods=["POST"]) for path, handler in paths]
        if self.closes:
            routes.append(Route("/close", self.close, methods=["POST"]))
        if self.lists_actions:
            routes.append(Route("/available_actions", self.available_actions))
        return routes

    async def body(self, request: Request) -> dict[str, Any]:
        raw = await request.body()
        body = json.loads(raw) if raw else {}
        self.requests.append((request.url.path, body))
        return body

    def new(self) -> int:
        number = self.created
        self.created += 1
        self.games[number] = Game()
        return number

    def play(self, number: int, action: str) -> tuple[str, float, bool]:
        game = self.games[number]
        if game.done:
            raise ValueError(f"The task with environment {number} has finished.")
        if action == "raise":
            raise ValueError("the game broke")
        game.done = True
        return f"It was {game.colour}.", float(action == game.colour), True

    async def available_actions(self, request: Request) -> Response:
        return JSONResponse(["red", "green", "blue"])

    async def create(self, request: Request) -> Response:
        raise NotImplementedError

    reset = step = close = create


class IdServer(AgentGymServer):
    """Uses `id` and `data_idx`, and reports every error as a 200."""

    async def create(self, request: Request) -> Response:
        await self.body(request)
        return JSONResponse({"id": self.new()})

    async def reset(self, request: Request) -> Response:
        body = await self.body(request)
        try:
            missing = self.reset_keys - set(body)
            if missing:
                return JSONResponse({"detail": f"missing {missing}"}, 422)
            game = self.games[body["id"]]
            game.item, game.done = body["data_idx"], False
            if game.item > 100:
                raise IndexError("list index out of range")
        except Exception as error:
            return JSONResponse({"error": str(error)})
        return JSONResponse({"id": body["id"], "observation": game.look(), "reward": self.reset_reward, "done": False})

    async def step(self, request: Request) -> Response:
        body = await self.body(request)
        if body["action"] == "hang":
            await asyncio.to_thread(self.hang.wait, 20)
        if body["action"] == "html":
            return PlainTextResponse("<html>502</html>")
        try:
            observation, reward, done = self.play(body["id"], body["action"])
        except Exception as error:
            return JSONResponse({"error": str(error)})
        return JSONResponse({"observation": observation, "reward": reward, "score": reward, "done": done})

    async def close(self, request: Request) -> Response:
        body = await self.body(request)
        if body["id"] not in self.games:
            return JSONResponse({"error": f"The id {body['id']} is not valid."})
        del self.games[body["id"]]
        return JSONResponse(True)


@dataclass
class EnvIdxServer(AgentGymServer):
    """Uses `env_idx`. The fields set the names of the item, the answers and the endings of one server."""

    item_key: str = "id"
    create_answer: str = "number"
    reset_answer: str = "string"
    observation_key: str = "observation"
    done_key: str = "done"
    needs_item_on_create: bool = False

    async def create(self, request: Request) -> Response:
        body = await self.body(request)
        if self.needs_item_on_create and "id" not in body:
            return JSONResponse({"detail": "id: field required"}, 422)
        number = self.new()
        return JSONResponse(number if self.create_answer == "number" else {"env_idx": number})

    async def reset(self, request: Request) -> Response:
        body = await self.body(request)
        if self.item_key not in body or self.reset_keys - set(body):
            return JSONResponse({"detail": [{"loc": ["body", self.item_key], "msg": "Field required"}]}, 422)
        game = self.games[body["env_idx"]]
        game.item, game.done = body[self.item_key], False
        forms = {"string": game.look(), "pair": [game.look(), None], "object": {"observation": game.look()}}
        return JSONResponse(forms[self.reset_answer])

    async def step(self, request: Request) -> Response:
        body = await self.body(request)
        observation, reward, done = self.play(body["env_idx"], body["action"])  # an exception is a 500 here
        answer = {self.observation_key: observation, "reward": reward, self.done_key: done, "info": None}
        return JSONResponse(answer | ({"truncated": False} if self.done_key == "terminated" else {}))

    async def close(self, request: Request) -> Response:
        body = await self.body(request)
        del self.games[body["env_idx"]]
        return PlainTextResponse("closed")  # not JSON, like the answer of one such server


WEBSHOP = {"item_key": "session_id", "reset_answer": "pair", "observation_key": "state"}
SQLGYM = {"item_key": "item_id", "reset_answer": "pair", "observation_key": "state", "closes": False}
WEATHER = {"item_key": "id", "closes": False, "needs_item_on_create": True}
WEBARENA = {
    "item_key": "idx",
    "reset_keys": frozenset({"seed"}),
    "create_answer": "object",
    "reset_answer": "object",
    "done_key": "terminated",
}


@contextlib.contextmanager
def running(server: AgentGymServer, prefix: str = "") -> Iterator[str]:
    """Run the server under `prefix` on a free loopback port; yield host and port."""
    routes: list[Any] = [Mount(prefix, routes=server.routes())] if prefix else [*server.routes()]
    listener = bind("127.0.0.1", 0)
    web = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off"))
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: web.started)
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.hang.set()
        web.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


@contextlib.asynccontextmanager
async def pool_of(name: str, url: str, **options: Any):
    pool = RemotePool({name: url}, timeout_s=options.pop("timeout_s", 10.0), **options)
    try:
        yield pool
    finally:
        await pool.close()
        assert pool.num_open == 0


async def play_one(pool: RemotePool, name: str, item: int, colour: str):
    session = await pool.open(name)
    try:
        first = await session.reset(item)
        return first, await session.step(colour)
    finally:
        await session.close()


DIALECTS = [
    ("textcraft", IdServer(), "", {"id": 0, "data_idx": 4}),
    ("textcraft", IdServer(), "/textcraft", {"id": 0, "data_idx": 4}),
    ("wordle", IdServer(reset_keys=frozenset({"seed"}), closes=False), "/wordle", {"id": 0, "data_idx": 4, "seed": 4}),
    ("maze", IdServer(reset_keys=frozenset({"game"}), closes=False), "/maze", {"id": 0, "data_idx": 4, "game": 4}),
    (
        "alfworld",
        IdServer(reset_keys=frozenset({"game", "world_type"}), closes=False),
        "",
        {"id": 0, "data_idx": 4, "game": 4, "world_type": "Text"},
    ),
    ("webshop", EnvIdxServer(**WEBSHOP), "", {"env_idx": 0, "session_id": 4}),
    ("sqlgym", EnvIdxServer(**SQLGYM), "", {"env_idx": 0, "item_id": 4}),
    ("weather", EnvIdxServer(**WEATHER), "", {"env_idx": 0, "id": 4}),
    ("searchqa", EnvIdxServer(), "", {"env_idx": 0, "id": 4}),
    ("webarena", EnvIdxServer(**WEBARENA), "", {"env_idx": 0, "seed": 0, "idx": 4}),
]


@pytest.mark.parametrize(("name", "server", "prefix", "reset"), DIALECTS, ids=[f"{d[0]}{d[2]}" for d in DIALECTS])
async def test_each_known_server_gets_the_fields_that_it_expects(name, server, prefix, reset):
    with running(server, prefix) as host:
        async with pool_of(name, f"agentgym+http://{host}/{name}") as pool:
            first, last = await play_one(pool, name, 4, "green")
            again, lost = await play_one(pool, name, 5, "green")
    assert first.observation == "The lamp is green. Say its colour."
    assert (first.reward, first.done) == (0.0, False)
    assert (last.observation, last.reward, last.done) == ("It was green.", 1.0, True)
    assert last.info == {"success": True}
    assert again.observation == "The lamp is blue. Say its colour."
    assert (lost.reward, lost.done, lost.info) == (0.0, True, {"success": False})
    bodies = [body for path, body in server.requests if path.endswith("/reset")]
    assert bodies[0] == reset
    assert all(path.startswith(prefix) for path, _ in server.requests)
    # Without /close the session is reused, so that not every episode leaves one behind.
    assert (len(server.games), server.created) == ((0, 2) if server.closes else (1, 1))


async def test_an_unknown_name_uses_the_dialect_of_the_create_answer():
    for server in (IdServer(), EnvIdxServer(), EnvIdxServer(create_answer="object", reset_answer="pair")):
        with running(server) as host:
            async with pool_of("lamps", f"agentgym+http://{host}") as pool:
                first, last = await play_one(pool, "lamps", 3, "red")
        assert first.observation.startswith("The lamp is red")
        assert last.info["success"] is True
        assert server.games == {}


async def test_the_address_overrides_the_dialect_of_a_name():
    server = EnvIdxServer(item_key="task")
    with running(server) as host:
        url = f"agentgym+http://{host}/textcraft?reset_key=task&dialect=env_idx&success_at=0"
        async with pool_of("textcraft", url) as pool:
            _, last = await play_one(pool, "textcraft", 3, "blue")
    assert (last.reward, last.info["success"]) == (0.0, True)


async def test_the_wrong_dialect_is_a_clear_error_and_leaks_no_session():
    server = EnvIdxServer()
    with running(server) as host:
        async with pool_of("textcraft", f"agentgym+http://{host}/textcraft") as pool:
            with pytest.raises(EnvError, match=r"number under id, got 0: .* add \?dialect=id or \?dialect=env_idx"):
                await pool.open("textcraft")
            assert pool.num_open == 0


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("agentgym+http://h/webshop?dialect=klingon", "dialect=klingon is not understood"),
        ("agentgym+http://h/webshop?reset_key=", "reset_key= is not understood"),
        ("agentgym+http://h/webshop?success_at=high", "success_at=high is not understood"),
        ("agentgym+http://h/webshop?colour=red", "colour=red is not understood"),
        ("agentgym+ftp://h/webshop", "an environment's address looks like"),
        ("agentgym+http:///webshop", "an environment's address looks like"),
    ],
)
def test_an_invalid_address_is_refused_at_once(url, text):
    with pytest.raises(ConfigError, match=text):
        RemotePool({"webshop": url})


async def test_an_address_where_no_server_answers_is_a_config_error():
    with running(IdServer(), "/elsewhere") as host:
        async with pool_of("textcraft", f"agentgym+http://{host}/textcraft") as pool:
            with pytest.raises(ConfigError, match=r"/textcraft/create or http://[\d.:]+/create: check the address"):
                await pool.open("textcraft")


async def test_errors_in_200_answers_end_the_episode_and_not_the_run():
    server = IdServer()
    with running(server) as host:
        async with pool_of("textcraft", f"agentgym+http://{host}/textcraft") as pool:
            session = await pool.open("textcraft")
            with pytest.raises(EnvError, match="list index out of range"):
                await session.reset(101)
            await session.reset(3)
            with pytest.raises(EnvError, match="the game broke"):
                await session.step("raise")
            await session.step("red")
            with pytest.raises(EnvError, match="has finished"):
                await session.step("red")
            await session.reset(3)
            with pytest.raises(EnvError, match="must answer with JSON"):
                await session.step("html")
            await session.close()
    assert server.games == {}


async def test_a_500_is_an_environment_error_and_its_session_is_closed():
    """After an exception uvicorn closes the connection unannounced: the next request on it would be lost."""
    server = EnvIdxServer()
    with running(server) as host:
        async with pool_of("searchqa", f"agentgym+http://{host}/searchqa") as pool:
            for _ in range(20):
                session = await pool.open("searchqa")
                await session.reset(0)
                with pytest.raises(EnvError, match="answered 500"):
                    await session.step("raise")
                await session.close()
    assert server.created == 20
    assert server.games == {}


async def test_a_failed_session_is_not_reused_on_a_server_without_close():
    server = IdServer(closes=False)
    with running(server) as host:
        async with pool_of("textcraft", f"agentgym+http://{host}/textcraft") as pool:
            session = await pool.open("textcraft")
            await session.reset(0)
            with pytest.raises(EnvError):
                await session.step("raise")
            await session.close()
            await play_one(pool, "textcraft", 0, "red")
            await play_one(pool, "textcraft", 1, "red")
    assert [body["id"] for path, body in server.requests if path == "/step"] == [0, 1, 1]


async def test_without_close_the_number_of_sessions_is_bounded_by_the_concurrency():
    server = IdServer(closes=False)
    with running(server) as host:
        async with pool_of("textcraft", f"agentgym+http://{host}/textcraft", max_sessions=8) as pool:
            played = await asyncio.gather(*(play_one(pool, "textcraft", item % 90, "red") for item in range(60)))
    assert sum(last.reward for _, last in played) == 20
    assert server.created <= 8


async def test_a_session_id_returned_twice_is_refused():
    class Twice(IdServer):
        def new(self) -> int:
            self.games[7] = Game()
            return 7

    with running(Twice()) as host:
        async with pool_of("textcraft", f"agentgym+http://{host}/textcraft") as pool:
            await pool.open("textcraft")
            with pytest.raises(EnvError, match="session 7 twice"):
                await pool.open("textcraft")


async def test_deadlines_hold_and_a_step_is_sent_once():
    server = IdServer()
    with running(server) as host:
        async with pool_of("textcraft", f"agentgym+http://{host}/textcraft", timeout_s=2.0) as pool:
            session = await pool.open("textcraft")
            await session.reset(0)
            with pytest.raises(EnvTimeout, match=r"deadline of 2 s"):
                await session.step("hang")
            await session.close()
    assert [path for path, _ in server.requests].count("/step") == 1


async def test_a_missing_server_is_unavailable():
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.close()
    async with pool_of("textcraft", f"agentgym+http://127.0.0.1:{port}/textcraft") as pool:
        with pytest.raises(EnvUnavailable, match="is the server running"):
            await pool.open("textcraft")


async def test_what_agentgym_servers_lack_is_a_clear_error():
    with running(IdServer()) as host:
        async with pool_of("textcraft", f"agentgym+http://{host}/textcraft") as pool:
            session = await pool.open("textcraft")
            assert session.instruction == INSTRUCTION
            await session.reset(0)
            for question in (session.oracle, session.render, session.actions):
                with pytest.raises(NotSupported):
                    await question()
            with pytest.raises(ConfigError, match=r'items = \{ test = "0-373" \}'):
                await pool.items("textcraft", "test")


@pytest.mark.parametrize(
    "server", [IdServer(lists_actions=True), EnvIdxServer(lists_actions=True)], ids=["id", "env_idx"]
)
async def test_actions_are_listed_if_the_server_lists_them(server):
    with running(server) as host:
        async with pool_of("lamps", f"agentgym+http://{host}") as pool:
            session = await pool.open("lamps")
            await session.reset(0)
            assert await session.actions() == ["red", "green", "blue"]


@pytest.mark.parametrize(
    ("name", "reset_reward", "answers", "success"),
    [
        ("sciworld", 0, [(40, False), (60, True)], True),
        ("sciworld", 0, [(40, False), (0, True)], False),
        ("sciworld", 8, [(40, False), (52, True)], True),
        ("babyai", 0, [(0, False), (0.73, True)], True),
        ("webshop", 0, [(0.9, True)], False),
        ("textcraft", 0, [(0.07, False)] * 13 + [(0.09 - 1e-9, True)], True),
    ],
)
async def test_success_depends_on_the_reward_scale_of_the_server(name, reset_reward, answers, success):
    """ScienceWorld gives up to 100, some of it at reset; BabyAI less than 1; WebShop partial credit."""
    server = IdServer(reset_reward=reset_reward)
    script = iter(answers)

    def play(number: int, action: str) -> tuple[str, float, bool]:
        reward, done = next(script)
        return "So it is.", reward, done

    server.play = play  # type: ignore[method-assign]
    with running(server) as host:
        async with pool_of(name, f"agentgym+http://{host}/{name}?dialect=id") as pool:
            session = await pool.open(name)
            await session.reset(0)
            steps = [await session.step("red") for _ in answers]
    assert [step.reward for step in steps] == [answers[0][0] + reset_reward, *(reward for reward, _ in answers[1:])]
    assert steps[-1].info["success"] is success


async def test_a_separate_task_description_is_put_before_the_first_observation():
    class WithTask(IdServer):
        async def reset(self, request: Request) -> Response:
            answer = await super().reset(request)
            return JSONResponse(json.loads(bytes(answer.body)) | {"task_description": "Find the red lamp."})

    with running(WithTask()) as host:
        async with pool_of("sciworld", f"agentgym+http://{host}/sciworld") as pool:
            first, _ = await play_one(pool, "sciworld", 0, "red")
    assert first.observation == "Find the red lamp.\nThe lamp is red. Say its colour."


async def test_our_own_servers_work_with_the_agentgym_client_too():
    textcraft = catalog.load("textcraft")
    with server_in_thread({"textcraft": textcraft}) as ours:
        for url in (ours.url, f"{ours.url}/textcraft"):
            async with AgentGymClient(Server(f"agentgym+{url}", "textcraft")) as client:
                number = await client.create()
                first = await client.reset(number, 3)
                assert first.observation.startswith("Crafting commands")
                assert await client.actions(number)
                step = await client.step(number, "inventory")
                assert step.info["valid"] is True
                await client.close(number)
        assert ours.sessions.num_open == 0


# --- collecting, configuring, training ------------------------------------------------------------------------------


async def test_failed_episodes_are_recorded_and_retried_and_nothing_leaks():
    server = IdServer()
    with running(server) as host:
        async with pool_of("textcraft", f"agentgym+http://{host}/textcraft") as pool:
            seeds: list[int] = []

            def policy(session, seed):
                seeds.append(seed)
                return ScriptedPolicy(["raise" if len(seeds) % 2 else "red"], session.instruction)

            collect = Collector(pool, policy, group_size=1, concurrency=1, retries=1)
            (group,) = await collect([Task("textcraft", 0)], Limits(3, 8, 64), 0)
    failed, won = group.trajectories
    assert (failed.stop, won.stop) == (StopReason.ERROR, StopReason.DONE)
    assert "the game broke" in (failed.error or "")
    assert won.success
    assert won.messages[0].content == INSTRUCTION
    assert server.games == {}


async def test_an_oracle_demonstration_against_such_a_server_fails_in_one_line():
    with running(IdServer()) as host:
        async with pool_of("textcraft", f"agentgym+http://{host}/textcraft") as pool:
            collect = Collector(pool, lambda session, seed: OraclePolicy(session), 1, 1, retries=0)
            (group,) = await collect([Task("textcraft", 0)], Limits(3, 8, 64), 0)
    assert "AgentGym servers have no oracle" in (group.trajectories[0].error or "")


def test_items_from_the_config(tmp_path: Path):
    assert read_items("0-3") == [0, 1, 2, 3]
    assert read_items(" 5, 0 - 2 ,9") == [5, 0, 1, 2, 9]
    assert read_items("3,3,1-3") == [3, 1, 2]
    tasks = tmp_path / "tasks.json"
    tasks.write_text('[{"item_id": "textcraft_12", "conversations": []}, {"item_id": "textcraft_3"}]')
    assert read_items(str(tasks)) == [12, 3]
    tasks.write_text('[4, "7", "search_qa_8"]')
    assert read_items(str(tasks)) == [4, 7, 8]
    for content in ("{}", "[]", "[true]", '["none"]', '[{"id": 3}]', "[1.5]", "not json"):
        tasks.write_text(content)
        with pytest.raises(ConfigError, match=r"tasks\.json"):
            read_items(str(tasks))
    for text in ("5-3", "0-3,9-5", "-1", "1-2-3", "", "no/such/file.json"):
        with pytest.raises(ConfigError, match="items"):
            read_items(text)


async def test_the_config_names_items_by_split():
    agent = AgentConfig()
    url = "agentgym+http://127.0.0.1:9/textcraft"

    def pool(**settings: Any) -> EnvironmentsPool:
        return EnvironmentsPool((EnvironmentConfig(name="textcraft", **settings),), agent)

    remote = pool(url=url, items={"train": "0-4", "test": "5,7"})
    assert await remote.items("textcraft", "train") == [0, 1, 2, 3, 4]
    assert await remote.items("textcraft", "test") == [5, 7]
    with pytest.raises(ConfigError, match="no split 'dev', it has train, test"):
        await remote.items("textcraft", "dev")
    assert await pool(items={"train": "7-8"}).items("textcraft", "train") == [7, 8]  # also if it lists its items
    with pytest.raises(ConfigError, match="does not list its items"):
        await pool(url=url).items("textcraft", "train")
    with pytest.raises(ConfigError, match="item 3 is in both train and test"):
        pool(url=url, items={"train": "0-4", "test": "3-9"})
    with pytest.raises(ValueError, match="items or subsets, not both"):
        EnvironmentConfig(name="textcraft", items={"train": "0"}, subsets=("depth1",))


@pytest.mark.parametrize("server", [IdServer(lists_actions=True), EnvIdxServer(lists_actions=True, closes=False)])
async def test_a_small_model_trains_and_is_evaluated_against_such_a_server(server, tmp_path: Path):
    """The run has two steps of GRPO after a warm start of random play over the server's list of actions."""
    with running(server) as host:
        config = Config.model_validate(
            {
                "name": "lamps",
                "model": {"scratch": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2}},
                "environments": [
                    {
                        "name": "lamps",
                        "url": f"agentgym+http://{host}",
                        "items": {"train": "0-29", "test": "30-41"},
                    }
                ],
                "agent": {"instruction": "", "max_new_tokens": 4, "max_context": 64, "concurrency": 16},
                "warm_start": {"policy": "random", "episodes": 24, "max_turns": 1, "sft": {"optimizer": {"lr": 3e-3}}},
                "horizon": {"turns": [1]},
                "rl": {"steps": 2, "groups_per_step": 4, "group_size": 4, "kl_coef": 0.0, "optimizer": {"lr": 1e-3}},
                "eval": {"episodes": 12, "max_turns": 1},
            }
        )
        summary = await train(config, tmp_path / "run")
    assert summary["steps"] == 2
    assert summary["before"]["episodes"] == summary["after"]["episodes"] == 12
    items = [body.get("data_idx", body.get("id")) for path, body in server.requests if path == "/reset"]
    assert len(items) == 24 + 2 * 16 + 2 * 12
    assert set(items[-12:]) == set(range(30, 42))
    assert max(items[:24]) < 30
    assert (len(server.games) == 0) if server.closes else (server.created <= 16 + 4)  # agent.open_ahead
