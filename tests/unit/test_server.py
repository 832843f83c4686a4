"""The server over real HTTP: every status code, locks, limits, timeouts, shutdown."""

import asyncio
import signal
import socket
import sys
import threading
import time
from dataclasses import replace

import httpx
import pytest
from envs_for_tests import Bare, Counting, Garbage, Hanging, Raising, RaisingInThread, SlowCounting
from servers_for_tests import Clock, server_in_thread, server_process, wait_until

from agentgym_rl.environment import catalog
from agentgym_rl.environment.server import create_app, serve
from agentgym_rl.environment.server_sessions import Sessions
from agentgym_rl.errors import ConfigError

ENVIRONMENTS = {env.name: env for env in (Counting, SlowCounting, Raising, RaisingInThread, Hanging, Garbage, Bare)}


@pytest.fixture(scope="module")
def server():
    with server_in_thread(ENVIRONMENTS, step_timeout_s=60.0, max_request_bytes=10_000) as running:
        yield running


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, trust_env=False, timeout=20) as client:
        yield client


def reset_session(http, env, item=0):
    """Create and reset a session; return its id."""
    session_id = http.post(f"/{env}/create").json()["id"]
    assert http.post(f"/{env}/reset", json={"id": session_id, "data_idx": item}).status_code == 200
    return session_id


def assert_refused(response, status, text):
    assert response.status_code == status, response.text
    assert text in str(response.json()["detail"])
    assert response.headers["content-type"] == "application/json"


def test_an_episode_and_its_score(http):
    session_id = http.post("/counting/create", json={}).json()["id"]
    answer = http.post("/counting/reset", json={"id": session_id, "data_idx": 2, "more": "is ignored"}).json()
    assert answer == {
        "id": session_id,
        "observation": "Goal: 4. You are at 0.",
        "reward": 0.0,
        "score": 0.0,
        "done": False,
        "info": {"state_key": "0"},
    }
    assert http.get("/counting/observation", params={"id": session_id}).json() == "Goal: 4. You are at 0."
    assert http.get("/counting/available_actions", params={"id": session_id}).json() == ["up", "down"]
    scores = []
    for count in range(1, 5):
        assert http.get("/counting/oracle", params={"id": session_id}).json() == "up"
        answer = http.post("/counting/step", json={"id": session_id, "action": "up"}).json()
        assert http.get("/counting/state_key", params={"id": session_id}).json() == str(count)
        scores.append(answer["score"])
        assert answer["reward"] == 0.25
    assert scores == [0.25, 0.5, 0.75, 1.0]
    assert answer["done"]
    assert answer["info"] == {"valid": True, "success": True, "state_key": "4"}
    assert_refused(http.post("/counting/step", json={"id": session_id, "action": "up"}), 409, "has ended its episode")
    assert_refused(http.get("/counting/oracle", params={"id": session_id}), 409, "has ended its episode")
    picture = http.get("/counting/render", params={"id": session_id})  # the last state can still be rendered
    assert picture.headers["content-type"].startswith("image/svg+xml")
    assert "default-src 'none'" in picture.headers["content-security-policy"]
    assert http.post("/counting/reset", json={"id": session_id, "data_idx": 3}).json()["score"] == 0.0
    assert http.post("/counting/close", json={"id": session_id}).json() is True
    assert_refused(http.post("/counting/close", json={"id": session_id}), 404, str(session_id))


def test_unknown_session_ids_are_404(http):
    for path in ("reset", "step", "close"):
        body = {"id": 12345, "data_idx": 0, "action": "up"}
        assert_refused(http.post(f"/counting/{path}", json=body), 404, "no counting session has the id 12345")
    for path in ("observation", "available_actions", "oracle", "state_key", "render"):
        assert_refused(http.get(f"/counting/{path}?id=12345"), 404, "12345")
    counting_id = reset_session(http, "counting")
    assert_refused(http.post("/bare/step", json={"id": counting_id, "action": "up"}), 404, "no bare session")
    assert http.post("/nowhere/create").status_code == 404


def test_a_session_without_reset_is_409(http):
    session_id = http.post("/counting/create").json()["id"]
    assert_refused(http.post("/counting/step", json={"id": session_id, "action": "up"}), 409, "was not reset")
    for path in ("observation", "available_actions", "oracle", "state_key", "render"):
        assert_refused(http.get(f"/counting/{path}?id={session_id}"), 409, "was not reset")


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("step", b"{", "must be JSON"),
        ("step", b"", "must be JSON"),
        ("step", b"[1]", "must be a JSON object, got list"),
        ("step", b'{"action": "up"}', "'id' must be an integer, got nothing"),
        ("step", b'{"id": true, "action": "up"}', "'id' must be an integer, got True"),
        ("step", b'{"id": "1", "action": "up"}', "'id' must be an integer, got '1'"),
        ("step", b'{"id": 1, "action": 3}', "'action' must be a string, got 3"),
        ("reset", b'{"id": 1}', "'data_idx' must be an integer, got nothing"),
        ("reset", b'{"id": 1, "data_idx": 1.5}', "'data_idx' must be an integer, got 1.5"),
        ("close", b"7", "must be a JSON object"),
    ],
)
def test_malformed_bodies_are_422(http, path, body, text):
    assert_refused(http.post(f"/counting/{path}", content=body), 422, text)


def test_unknown_items_and_bad_queries_are_422(http):
    session_id = reset_session(http, "counting")
    for item in (-1, 120, 10**30):
        response = http.post("/counting/reset", json={"id": session_id, "data_idx": item})
        assert_refused(response, 422, "must be an integer" if item > 2**63 else f"no item {item}: it has train 0..99")
    # The refused reset changed nothing.
    assert http.post("/counting/step", json={"id": session_id, "action": "up"}).status_code == 200
    assert http.get("/counting/observation?id=x").status_code == 422
    assert http.get("/counting/observation").status_code == 422
    assert_refused(http.get("/counting/items?split=dev"), 422, "no split 'dev': known are train, test")
    assert_refused(http.get("/counting/items?split=test&subset=prime"), 422, "no subset 'prime': known are even, odd")
    assert http.get("/counting/items?split=test&limit=0").status_code == 422


def test_items_of_a_split_and_a_subset_are_listed(http):
    assert http.get("/counting/items?split=test").json() == {"items": list(range(100, 120)), "total": 20}
    assert http.get("/counting/items?split=test&subset=odd&offset=2&limit=3").json() == {
        "items": [105, 107, 109],
        "total": 10,
    }


def test_an_environment_that_raises_is_500_and_can_be_reset(http):
    for env in ("raising", "raising_in_thread"):
        session_id = reset_session(http, env)
        response = http.post(f"/{env}/step", json={"id": session_id, "action": "raise"})
        assert_refused(response, 500, f"{env}.step raised ZeroDivisionError: the game broke")
        assert_refused(http.post(f"/{env}/step", json={"id": session_id, "action": "up"}), 409, "since it failed")
        assert_refused(http.post(f"/{env}/reset", json={"id": session_id, "data_idx": 13}), 500, "ValueError: unlucky")
        assert_refused(http.post(f"/{env}/reset", json={"id": session_id, "data_idx": 14}), 500, "IndexError: a bug")
        assert http.post(f"/{env}/reset", json={"id": session_id, "data_idx": 1}).status_code == 200
    session_id = reset_session(http, "raising_in_thread")
    body = {"id": session_id, "action": "exit"}
    assert_refused(http.post("/raising_in_thread/step", json=body), 500, "SystemExit: 3")


def test_invalid_answers_of_an_environment_are_500(http):
    session_id = reset_session(http, "garbage", 1)
    assert_refused(
        http.post("/garbage/step", json={"id": session_id, "action": "tuple"}), 500, "must return a Step, got tuple"
    )
    assert_refused(
        http.post("/garbage/reset", json={"id": session_id, "data_idx": 0}), 500, "must return a string as observation"
    )


def test_a_step_past_its_deadline_is_504_and_discards_the_session():
    Hanging.release.clear()
    with (
        server_in_thread({"hanging": Hanging, "counting": Counting}, step_timeout_s=2.0) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=20) as http,
    ):
        session_id = reset_session(http, "hanging")
        started_at = time.monotonic()
        assert_refused(http.post("/hanging/step", json={"id": session_id, "action": "hang"}), 504, "deadline of 2 s")
        assert time.monotonic() - started_at < 15
        assert_refused(http.post("/hanging/step", json={"id": session_id, "action": "up"}), 404, str(session_id))
        assert server.sessions.counts["timed_out"] == 1
        assert server.sessions.num_open == 0
    # The abandoned thread closes its environment once its call returns.
    alive = Hanging.num_alive
    Hanging.release.set()
    wait_until(lambda: Hanging.num_alive == alive - 1)


def test_a_missing_optional_method_is_501(http):
    session_id = reset_session(http, "bare")
    for path in ("available_actions", "oracle", "state_key", "render"):
        assert_refused(http.get(f"/bare/{path}?id={session_id}"), 501, "bare has no")
    assert http.get("/bare/info").json()["capabilities"] == []
    assert http.post("/bare/step", json={"id": session_id, "action": "hi"}).json()["info"] == {}


def test_a_request_over_the_size_limit_is_413(http):
    session_id = reset_session(http, "counting")
    body = {"id": session_id, "action": "x" * 20_000}
    assert_refused(http.post("/counting/step", json=body), 413, "may have 10000 bytes")

    def chunks():
        yield b'{"id": 1, "action": "'
        for _ in range(20):
            yield b"x" * 1000

    assert_refused(http.post("/counting/step", content=chunks()), 413, "may have 10000 bytes, this one has more")
    assert http.post("/counting/step", json={"id": session_id, "action": "up"}).status_code == 200


def test_a_body_that_never_arrives_is_408(server, monkeypatch):
    monkeypatch.setattr("agentgym_rl.environment.server.BODY_TIMEOUT_S", 0.2)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /counting/step HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_info_and_health(http, server):
    assert http.get("/").json() == "ok"
    info = http.get("/counting/info").json()
    assert info["name"] == "counting"
    assert info["instruction"] == Counting.instruction
    assert info["splits"] == {"train": [0, 100], "test": [100, 120]}
    assert info["subsets"] == ["even", "odd"]
    assert info["capabilities"] == ["actions", "oracle", "state_key", "render"]
    assert http.get("/info").status_code == 404  # with several environments, none is at the root
    before = http.get("/health").json()
    reset_session(http, "counting")
    after = http.get("/health").json()
    assert after["sessions"] == before["sessions"] + 1 == server.sessions.num_open
    assert after["environments"]["counting"] == before["environments"]["counting"] + 1
    assert after["created"] == before["created"] + 1
    assert 0 < before["uptime_s"] < after["uptime_s"]


def test_session_ids_are_never_reused(http):
    seen = set()
    for _ in range(20):
        session_id = http.post("/counting/create").json()["id"]
        assert session_id not in seen
        seen.add(session_id)
        http.post("/counting/close", json={"id": session_id})
    with server_in_thread({"counting": Counting}) as other:  # as after a restart
        assert httpx.post(f"{other.url}/create").json()["id"] not in seen


async def test_concurrent_requests_of_one_session_run_one_after_the_other(server):
    async with httpx.AsyncClient(base_url=f"{server.url}/slow_counting", trust_env=False) as http:
        session_id = (await http.post("/create")).json()["id"]
        await http.post("/reset", json={"id": session_id, "data_idx": 4})
        SlowCounting.most_inside = 0
        step = {"id": session_id, "action": "up"}
        answers = await asyncio.gather(*(http.post("/step", json=step) for _ in range(8)))
        # The goal is 6, so the episode is over for the last two requests.
        assert sorted(answer.status_code for answer in answers) == [200] * 6 + [409] * 2
        observations = sorted(a.json()["observation"] for a in answers if a.status_code == 200)
        assert observations == [f"You are at {count}." for count in range(1, 7)]
        assert SlowCounting.most_inside == 1
        assert (await http.get("/render", params={"id": session_id})).headers["content-type"] == "image/png"


async def test_64_sessions_at_once_do_not_block_each_other(server):
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=30) as http:

        async def play(env, item):
            session_id = (await http.post(f"/{env}/create")).json()["id"]
            answer = (await http.post(f"/{env}/reset", json={"id": session_id, "data_idx": item})).json()
            num_steps = 0
            while not answer["done"]:
                answer = (await http.post(f"/{env}/step", json={"id": session_id, "action": "up"})).json()
                num_steps += 1
            assert (await http.post(f"/{env}/close", json={"id": session_id})).json() is True
            return num_steps

        envs = ["counting", "slow_counting"] * 32
        step_counts = await asyncio.gather(*(play(env, item) for item, env in enumerate(envs)))
    assert step_counts == [item % 5 + 2 for item in range(64)]


def test_the_session_limit_holds_across_environments():
    with server_in_thread({"counting": Counting, "bare": Bare}, max_sessions=2) as server:
        first = httpx.post(f"{server.url}/counting/create").json()["id"]
        httpx.post(f"{server.url}/bare/create")
        response = httpx.post(f"{server.url}/counting/create")
        assert_refused(response, 429, "all 2 sessions are in use")
        assert response.headers["retry-after"] == "1"
        httpx.post(f"{server.url}/counting/close", json={"id": first})
        assert httpx.post(f"{server.url}/counting/create").status_code == 200


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_session_whose_client_disconnected_before_the_answer_is_closed(in_thread):
    """No other client knows the id of such a session."""
    may_open = threading.Event()

    class Slow(SlowCounting if in_thread else Counting):
        def __init__(self):
            may_open.wait(60)  # blocks the server's loop if it is not in a thread
            super().__init__()

    with server_in_thread({"slow": Slow}) as server:
        host, port = server.url.removeprefix("http://").split(":")
        for _ in range(10):
            with socket.create_connection((host, int(port))) as client:
                client.sendall(b"POST /create HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
        may_open.set()
        wait_until(lambda: server.sessions.counts["closed"] == 10)
        assert server.sessions.counts["created"] == 10
        assert server.sessions.num_open == 0
        assert httpx.post(f"{server.url}/create").status_code == 200
        assert server.sessions.num_open == 1


def test_idle_sessions_are_closed():
    alive = Counting.num_alive
    with server_in_thread({"counting": Counting}, idle_timeout_s=4.0) as server, httpx.Client() as http:
        idle = http.post(f"{server.url}/create").json()["id"]
        used = http.post(f"{server.url}/create").json()["id"]
        http.post(f"{server.url}/reset", json={"id": used, "data_idx": 0})
        give_up_at = time.monotonic() + 60
        while server.sessions.num_open == 2:
            assert time.monotonic() < give_up_at
            assert http.get(f"{server.url}/observation", params={"id": used}).status_code == 200
            time.sleep(0.05)
        assert_refused(http.post(f"{server.url}/close", json={"id": idle}), 404, "idle too long")
        assert http.get(f"{server.url}/health").json()["idle_closed"] == 1
        assert Counting.num_alive == alive + 1


def test_idle_time_begins_when_an_oracle_has_answered(monkeypatch):
    clock = Clock(monkeypatch)

    class Slow(SlowCounting):
        def oracle(self):
            clock.now += 100.0
            time.sleep(0.2)  # the reaper looks several times
            return super().oracle()

    with (
        server_in_thread({"slow": Slow}, idle_timeout_s=0.1) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=20) as http,
    ):
        session_id = reset_session(http, "slow")
        assert http.get("/oracle", params={"id": session_id}).json() == "up"
        time.sleep(0.2)
        assert http.get("/observation", params={"id": session_id}).status_code == 200
        clock.now += 100.0
        wait_until(lambda: server.sessions.counts["idle_closed"] == 1)
        assert_refused(http.get("/oracle", params={"id": session_id}), 404, "idle too long")


def test_every_path_needs_the_token():
    with server_in_thread({"counting": Counting}, token="secret") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            for method, path in (("POST", "/create"), ("GET", "/info"), ("GET", "/health"), ("GET", "/")):
                response = httpx.request(method, server.url + path, headers=headers)
                assert_refused(response, 401, "a valid bearer token is needed")
        authorized = {"Authorization": "Bearer secret"}
        assert httpx.post(f"{server.url}/create", headers=authorized).status_code == 200
        assert server.sessions.num_open == 1


def test_one_environment_answers_at_the_root_and_under_its_name():
    with server_in_thread({"counting": Counting}) as server:
        for base in (server.url, f"{server.url}/counting"):
            assert httpx.get(f"{base}/info").json()["name"] == "counting"
            assert httpx.get(f"{base}/").json() == "ok"
            assert httpx.get(f"{base}/health").json()["status"] == "ok"
            session_id = httpx.post(f"{base}/create").json()["id"]
            assert httpx.post(f"{server.url}/close", json={"id": session_id}).json() is True


def test_shutdown_closes_every_environment():
    alive = Counting.num_alive, SlowCounting.num_alive
    with server_in_thread({"counting": Counting, "slow_counting": SlowCounting}) as server:
        for _ in range(5):
            httpx.post(f"{server.url}/counting/create")
            httpx.post(f"{server.url}/slow_counting/create")
        assert (Counting.num_alive, SlowCounting.num_alive) == (alive[0] + 5, alive[1] + 5)
    assert (Counting.num_alive, SlowCounting.num_alive) == alive
    assert server.sessions.num_open == 0


@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM")
def test_sigterm_closes_environments_of_a_real_process():
    with server_process("ClosingAloud") as (url, process):
        httpx.post(f"{url}/create")
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[0] == "closed\n"


def test_serve_refuses_invalid_settings():
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 can be reached from other machines, so a token is needed"):
        serve(["textcraft"], host="0.0.0.0", port=0)
    with pytest.raises(ConfigError, match=r"unknown environment 'chess': known are agentdojo, .*textcraft"):
        serve(["chess"], port=0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            serve(["textcraft"], port=port)
    with pytest.raises(ConfigError, match="from 0 to 65535, got 70000"):
        serve(["textcraft"], port=70000)
    with pytest.raises(ConfigError, match="at least one environment"):
        create_app({})
    with pytest.raises(ConfigError, match="must be positive"):
        create_app({"counting": Counting}, max_sessions=0)


def test_a_missing_package_is_named_with_its_pip_extra(monkeypatch):
    entry = replace(catalog.CATALOG["babyai"], package="no_such_package")
    monkeypatch.setitem(catalog.CATALOG, "babyai", entry)
    with pytest.raises(ConfigError, match=r"needs the package 'no_such_package': pip install 'agentgym-rl\[babyai\]'"):
        catalog.load("babyai")


async def test_shutdown_waits_for_a_call_in_a_thread_and_closes_its_environment():
    closed = []

    class Slow(Counting):
        cheap = False

        def step(self, text):
            time.sleep(0.5)
            return super().step(text)

        def close(self):
            closed.append(self)

    sessions = Sessions({"slow": Slow}, max_sessions=4, idle_timeout_s=60.0, step_timeout_s=60.0)
    session = sessions.get("slow", await sessions.create("slow"))
    await session.reset(0)
    step = asyncio.create_task(session.step("up"))
    await asyncio.sleep(0.1)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    await sessions._close_all()
    assert len(closed) == 1
