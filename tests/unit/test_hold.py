"""Sessions of somebody who is gone are closed; those of somebody whose connection merely broke are not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from envs_for_tests import Counting, SlowCounting
from servers_for_tests import RunningServer, server_in_thread, wait_until

from agentgym_rl.environment.pool import RemotePool

GRACE_S = 0.4
PROGRAM = """
import asyncio, sys
from agentgym_rl.environment.pool import RemotePool

async def main(url):
    pool = RemotePool({"counting": url})
    sessions = [await pool.open("counting") for _ in range(5)]
    await sessions[0].close()
    print("open", flush=True)
    await asyncio.sleep(600)

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    monkeypatch.setattr("agentgym_rl.environment.server.GRACE_S", GRACE_S)
    monkeypatch.setattr("agentgym_rl.environment.hold.AGAIN_S", GRACE_S / 8)
    with server_in_thread({"counting": Counting}) as running:
        yield running


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_sessions_of_a_killed_process_are_closed_and_no_others(server: RunningServer, loop: str) -> None:
    httpx.post(f"{server.url}/create")
    httpx.post(f"{server.url}/create", json={"owner": "somebody who holds nothing"})
    program = PROGRAM.replace("asyncio.run", f"{loop}.run").replace("import asyncio", f"import asyncio, {loop}")
    child = subprocess.Popen([sys.executable, "-c", program, server.url], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        time.sleep(2 * GRACE_S)
        assert server.sessions.num_open == 2 + 4
    finally:
        child.kill()
        child.wait()
    wait_until(lambda: server.sessions.num_open == 2)
    assert server.sessions.counts["left_closed"] == 4
    assert server.sessions._of_owner == {}
    assert not server.sessions._holds


async def test_a_hold_that_broke_off_is_taken_up_again(server: RunningServer) -> None:
    pool = RemotePool({"counting": server.url})
    session = await pool.open("counting")
    await session.reset(3)
    hold = pool._holds["counting"]
    assert hold.is_held
    for _ in range(2):
        assert hold._wire is not None
        assert hold._wire.transport is not None
        hold._wire.transport.abort()
        await asyncio.sleep(2 * GRACE_S)
        assert hold.is_held
        assert server.sessions.num_open == 1
    assert (await session.step(await session.oracle())).info["valid"]
    await pool.close()
    assert server.sessions.num_open == 0
    await asyncio.sleep(2 * GRACE_S)
    assert not hold.is_held
    assert server.sessions.counts["left_closed"] == 0
    assert not server.sessions._holds


async def test_a_pool_comes_back_to_a_server_that_was_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgym_rl.environment.hold.AGAIN_S", 0.05)
    with server_in_thread({"counting": Counting}) as first:
        port = int(first.url.rpartition(":")[2])
        pool = RemotePool({"counting": first.url})
        await pool.open("counting")
        started = time.monotonic()
    assert time.monotonic() - started < 3, "a hold must not keep a server from ending"
    hold = pool._holds["counting"]
    await asyncio.sleep(0.2)
    assert not hold.is_held
    with server_in_thread({"counting": Counting}, port=port) as again:
        for _ in range(100):
            await asyncio.sleep(0.02)
            if hold.is_held:
                break
        assert hold.is_held
        await pool.open("counting")
        assert list(again.sessions._of_owner) == [hold.owner]
        await pool.close()


def test_a_hold_needs_an_owner_and_the_token() -> None:
    with server_in_thread({"counting": Counting, "slow": SlowCounting}, token="secret") as server:
        assert httpx.post(f"{server.url}/hold", json={"owner": "x"}).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert httpx.post(f"{server.url}/hold", json={"owner": 3}, headers=headers).status_code == 422
        assert httpx.post(f"{server.url}/other/hold", json={"owner": "x"}, headers=headers).status_code == 404
        assert not server.sessions._holds


async def test_a_server_that_refuses_a_hold_is_played_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with server_in_thread({"counting": Counting, "slow": SlowCounting}, token="secret") as server:
        monkeypatch.setattr(server.app.gate, "_hold_paths", set())
        pool = RemotePool({"counting": f"{server.url}/counting"}, token="secret")
        session = await pool.open("counting")
        assert not pool._holds["counting"].is_held
        assert (await session.reset(0)).observation
        await pool.close()
        assert server.sessions.num_open == 0
