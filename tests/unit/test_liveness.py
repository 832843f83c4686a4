"""Sessions of a client that is gone are closed; those of a client whose connection only broke are not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from envs_for_tests import Counting, SlowCounting
from servers_for_tests import RunningServer, server_in_thread, wait_until

from agentgym_rl.environment.liveness import Hold
from agentgym_rl.environment.pool import RemotePool
from agentgym_rl.environment.server_sessions import Sessions

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
    monkeypatch.setattr("agentgym_rl.environment.server_sessions.HOLD_GRACE_S", GRACE_S)
    monkeypatch.setattr("agentgym_rl.environment.liveness.RETRY_DELAY_S", GRACE_S / 8)
    with server_in_thread({"counting": Counting}) as running:
        yield running


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_sessions_of_a_killed_process_are_closed_and_no_others(server: RunningServer, loop: str) -> None:
    httpx.post(f"{server.url}/create")
    httpx.post(f"{server.url}/create", json={"owner": "an owner without a hold"})
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
    assert list(server.sessions._owner.values()) == ["an owner without a hold"]
    assert not server.sessions._holds


async def test_a_lost_hold_is_opened_again(server: RunningServer) -> None:
    pool = RemotePool({"counting": server.url})
    session = await pool.open("counting")
    await session.reset(3)
    hold = pool._holds["counting"]
    assert hold.is_held
    for _ in range(2):
        assert hold._connection is not None
        assert hold._connection.transport is not None
        hold._connection.transport.abort()
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


async def test_a_pool_reconnects_to_a_restarted_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgym_rl.environment.liveness.RETRY_DELAY_S", 0.05)
    with server_in_thread({"counting": Counting}) as first:
        port = int(first.url.rpartition(":")[2])
        pool = RemotePool({"counting": first.url})
        await pool.open("counting")
        started = time.monotonic()
    assert time.monotonic() - started < 3, "a hold must not delay the shutdown of a server"
    hold = pool._holds["counting"]
    await asyncio.sleep(0.2)
    assert not hold.is_held
    with server_in_thread({"counting": Counting}, port=port) as restarted:
        for _ in range(100):
            await asyncio.sleep(0.02)
            if hold.is_held:
                break
        assert hold.is_held
        await pool.open("counting")
        assert list(restarted.sessions._owner.values()) == [hold.owner]
        await pool.close()


def test_a_hold_needs_an_owner_and_the_token() -> None:
    with server_in_thread({"counting": Counting, "slow": SlowCounting}, token="secret") as server:
        assert httpx.post(f"{server.url}/hold", json={"owner": "x"}).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert httpx.post(f"{server.url}/hold", json={"owner": 3}, headers=headers).status_code == 422
        assert httpx.post(f"{server.url}/hold", json={"owner": ""}, headers=headers).status_code == 422
        assert httpx.post(f"{server.url}/other/hold", json={"owner": "x"}, headers=headers).status_code == 404
        assert not server.sessions._holds


async def test_a_pool_works_without_a_hold_if_the_server_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with server_in_thread({"counting": Counting, "slow": SlowCounting}, token="secret") as server:
        monkeypatch.setattr(server.app.dispatcher, "_hold_paths", set())
        pool = RemotePool({"counting": f"{server.url}/counting"}, token="secret")
        session = await pool.open("counting")
        assert not pool._holds["counting"].is_held
        assert (await session.reset(0)).observation
        await pool.close()
        assert server.sessions.num_open == 0


async def test_each_hold_starts_a_new_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgym_rl.environment.server_sessions.HOLD_GRACE_S", 1.0)
    sessions = Sessions({"counting": Counting}, 8, 600, 60)
    with sessions.held("x"):
        await sessions.create("counting", "x")
    await asyncio.sleep(0.6)
    with sessions.held("x"):
        pass
    await asyncio.sleep(0.7)
    assert sessions.num_open == 1, "closed by the grace period of the previous hold"
    await asyncio.sleep(0.6)
    assert sessions.num_open == 0
    assert not sessions._holds
    assert not sessions._grace_timers


async def test_a_hold_covers_sessions_created_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted server may create sessions before the client has opened its hold again."""
    monkeypatch.setattr("agentgym_rl.environment.server_sessions.HOLD_GRACE_S", 0.05)
    sessions = Sessions({"counting": Counting}, 8, 600, 60)
    await sessions.create("counting", "x")
    await sessions.create("counting")
    with sessions.held("x"):
        await asyncio.sleep(0.1)
        assert sessions.num_open == 2
    await asyncio.sleep(0.2)
    assert sessions.num_open == 1


class Listener:
    """Answers a hold with `answer` and sends nothing after it."""

    def __init__(self, answer: bytes) -> None:
        self.url = ""
        self.num_open = self.num_seen = 0
        self._answer = answer

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open, self.num_seen = self.num_open + 1, self.num_seen + 1
        with contextlib.suppress(OSError):
            await reader.readuntil(b"}")
            writer.write(self._answer)
            await reader.read()
        writer.close()
        self.num_open -= 1

    async def wait_for(self, num_open: int, num_seen: int) -> None:
        for _ in range(1000):
            if (self.num_open, self.num_seen) == (num_open, num_seen):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{self.num_open} of {self.num_seen} connections are open, not {num_open} of {num_seen}")


@contextlib.asynccontextmanager
async def listening(answer: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> AsyncIterator[Listener]:
    listener = Listener(answer)
    async with await asyncio.start_server(listener.accept, "127.0.0.1", 0) as server:
        listener.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield listener


async def test_concurrent_starts_open_one_connection() -> None:
    async with listening() as server:
        hold = Hold(server.url, None)
        await asyncio.gather(hold.start(), hold.start())
        assert hold.is_held
        await server.wait_for(1, 1)
        hold.close()
        await server.wait_for(0, 1)


async def test_a_cancelled_start_leaves_no_connection() -> None:
    async with listening(answer=b"") as server:
        hold = Hold(server.url, None)
        starting = asyncio.create_task(hold.start())
        await server.wait_for(1, 1)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await server.wait_for(0, 1)
        hold.close()


async def test_a_hold_closed_during_its_start_is_not_held() -> None:
    async with listening() as server:
        hold = Hold(server.url, None)
        starting = asyncio.create_task(hold.start())
        await asyncio.sleep(0)
        hold.close()
        await starting
        assert not hold.is_held
        await asyncio.sleep(0.1)
        assert server.num_open == 0


async def test_a_silent_server_gets_a_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgym_rl.environment.liveness.POLL_INTERVAL_S", 0.02)
    monkeypatch.setattr("agentgym_rl.environment.liveness.RETRY_DELAY_S", 0.02)
    async with listening() as server:
        hold = Hold(server.url, None)
        await hold.start()
        await server.wait_for(1, 2)
        hold.close()


async def test_a_server_that_sends_heartbeats_keeps_its_connection(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentgym_rl.environment.server.HEARTBEAT_S", 0.02)
    monkeypatch.setattr("agentgym_rl.environment.liveness.POLL_INTERVAL_S", 0.2)
    hold = Hold(server.url, None)
    await hold.start()
    connection = hold._connection
    await asyncio.sleep(1.2)
    time.sleep(1)  # noqa: ASYNC251, a blocked loop receives nothing, which must not count as silence
    await asyncio.sleep(0.1)
    assert hold._connection is connection
    assert hold.is_held
    hold.close()


async def test_a_cancelled_pool_close_ends_its_holds(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RemotePool({"counting": server.url})
    session = await pool.open("counting")
    monkeypatch.setattr(session._inner, "close", lambda: asyncio.sleep(60))  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pool.close(), 0.1)
    await asyncio.to_thread(wait_until, lambda: server.sessions.num_open == 0, 10)
    assert server.sessions.counts["left_closed"] == 1


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_hold_can_be_closed_after_its_loop_has_ended(server: RunningServer) -> None:
    hold = Hold(server.url, None)
    asyncio.run(hold.start())
    assert list(server.sessions._holds) == [hold.owner]
    hold.close()
    gc.collect()
    wait_until(lambda: not server.sessions._holds, 5)
