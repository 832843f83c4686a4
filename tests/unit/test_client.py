"""The client: deadlines, which calls are retried and which are not, and invalid answers of servers."""

import asyncio
import contextlib
import time

import pytest
from envs_for_tests import Counting
from servers_for_tests import server_in_thread

from agentgym_rl.environment.client import EnvClient
from agentgym_rl.environment.pool import RemotePool
from agentgym_rl.environment.wire import Full, NoSuchSession
from agentgym_rl.errors import ConfigError, EnvError, EnvTimeout, EnvUnavailable
from agentgym_rl.types import Step


class RawServer:
    """A server that answers every request with the same bytes, or not at all, and counts requests."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer = answer
        self.num_requests = 0
        self.num_connections = 0

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self.server.close()

    async def serve(self, reader, writer):
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        await reader.readexactly(int(line.split(b":")[1]))
                self.num_requests += 1
                if self.answer is None:
                    await asyncio.sleep(30)
                if self.answer == b"":
                    break
                writer.write(self.answer)
        writer.close()


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


async def test_a_server_without_thoughts_answers_with_the_action():
    async with RawServer(ok(b'"up"')) as server, EnvClient(server.url) as client:
        assert await client.advice(1) == ("", "up")
        assert server.num_requests == 1
        server.answer = ok(b'{"thought": null, "action": "up"}')
        with pytest.raises(EnvError, match="must answer with a thought and an action"):
            await client.advice(1)


async def test_every_call_to_a_server_that_never_answers_times_out():
    async with RawServer(None) as server, EnvClient(server.url, timeout_s=0.5) as client:
        started_at = time.monotonic()
        for call in (client.create(), client.step(1, "up"), client.info(), client.close(1)):
            with pytest.raises(EnvTimeout, match=r"deadline of 0\.5 s"):
                await call
        assert time.monotonic() - started_at < 30
        assert server.num_requests == 4


async def test_the_deadline_covers_an_answer_that_never_ends():
    """Every single read succeeds here, so only a deadline of the whole call can end it."""

    async def drip(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with EnvClient(url, timeout_s=0.3) as client:
        started_at = time.monotonic()
        with pytest.raises(EnvTimeout):
            await client.step(1, "up")
        assert time.monotonic() - started_at < 30
    server.close()


async def test_a_step_whose_connection_broke_is_not_sent_again():
    async with RawServer(b"") as server, EnvClient(server.url) as client:
        with pytest.raises(EnvUnavailable, match="did not send a complete HTTP answer"):
            await client.step(1, "up")
        assert server.num_requests == 1


async def test_a_refused_connection_is_retried_and_then_unavailable():
    async with RawServer(b"") as server:
        url = server.url
    async with EnvClient(url) as client:
        started_at = time.monotonic()
        with pytest.raises(EnvUnavailable, match=r"cannot be reached .*: is the server running"):
            await client.step(1, "up")
        assert 0.1 < time.monotonic() - started_at < 18  # it was retried, with pauses


async def test_a_server_that_starts_late_is_reached_by_a_retry():
    async with RawServer(ok(b'{"id": 3}')) as late:
        port = int(late.url.rsplit(":", 1)[1])
    async with EnvClient(late.url) as client:
        creating = asyncio.create_task(client.create())
        await asyncio.sleep(0.05)
        server = await asyncio.start_server(late.serve, "127.0.0.1", port)
        assert await creating == 3
        server.close()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (ok(b"hello"), "must answer with JSON"),
        (ok(b"[1]"), "must answer with an object, got list"),
        (ok(b'{"observation": "x", "reward": 1}'), "'done' is missing"),
        (ok(b'{"observation": 3, "reward": 1, "done": false}'), "must return a string as observation"),
        (ok(b'{"observation": "x", "reward": null, "done": false}'), "must return a float as reward, got NoneType"),
        (ok(b'{"observation": "x", "reward": 0, "done": "no"}'), "must return a bool as done"),
        (ok(b'{"error": "no such env"}'), "answered with an error: no such env"),
        (b"HTTP/1.1 418 Teapot\r\nContent-Length: 5\r\n\r\nshort", "answered 418: short"),
        (b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", "answered 302"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "did not send a complete HTTP answer"),
    ],
)
async def test_invalid_answers_are_errors_and_are_not_retried(answer, text):
    async with RawServer(answer) as server, EnvClient(server.url) as client:
        with pytest.raises(EnvError, match=text):
            await client.step(1, "up")
        assert server.num_requests == 1


async def test_a_step_without_an_info_field_is_accepted():
    body = b'{"observation": "x", "reward": 1, "score": 1, "done": true}'
    async with RawServer(ok(body)) as server, EnvClient(server.url) as client:
        assert await client.step(1, "up") == Step("x", 1, True, {})


async def test_every_other_call_checks_its_answer():
    async with RawServer(ok(b'{"id": "7"}')) as server, EnvClient(server.url) as client:
        for call in (client.create(), client.info(), client.actions(1), client.items("train")):
            with pytest.raises(EnvError, match="must answer with"):
                await call


async def test_chunked_answers_and_connection_close_are_supported():
    chunked = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{"id\r\n5\r\n": 8}\r\n0\r\n\r\n'
    async with RawServer(chunked) as server, EnvClient(server.url) as client:
        assert [await client.create(), await client.create()] == [8, 8]
        assert server.num_connections == 1
    closing = b'HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 9\r\n\r\n{"id": 8}'
    async with RawServer(closing) as server, EnvClient(server.url) as client:
        assert [await client.create(), await client.create()] == [8, 8]
        assert server.num_connections == 2


@pytest.mark.parametrize(
    "head", [b"Content-Length: 20000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n1312D00\r\n", b"\r\n"]
)
async def test_an_answer_over_the_size_limit_is_an_error(head):
    answer = b"HTTP/1.1 200 OK\r\n" + head + b"x" * 20_000_000
    async with RawServer(answer) as server, EnvClient(server.url) as client:
        with pytest.raises(EnvUnavailable, match=r"over (the limit of )?16777216"):
            await client.step(1, "up")


async def test_an_answer_without_a_length_ends_with_its_connection():
    answer = b'HTTP/1.1 200 OK\r\n\r\n{"observation": "' + b"x" * 1_000_000 + b'", "reward": 0, "done": false}'

    async def serve(reader, writer):
        await reader.readuntil(b"}")
        for start in range(0, len(answer), 1 << 18):
            writer.write(answer[start : start + (1 << 18)])
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with EnvClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        assert len((await client.step(1, "up")).observation) == 1_000_000
    server.close()


async def test_connections_are_reused():
    async with RawServer(ok(b'{"observation": "x", "reward": 0, "done": false}')) as server:
        async with EnvClient(server.url) as client:
            for _ in range(20):
                await client.step(1, "up")
        assert (server.num_requests, server.num_connections) == (20, 1)


async def test_text_that_is_not_unicode_is_an_error_and_is_not_sent():
    async with RawServer(b"") as server, EnvClient(server.url) as client:
        with pytest.raises(EnvError, match="cannot be written as JSON"):
            await client.step(1, "\ud800")
        assert server.num_requests == 0


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://host/", "http://", "http://host:port/x"])
def test_invalid_addresses_are_config_errors(url):
    with pytest.raises(ConfigError, match="address looks like"):
        EnvClient(url)


async def test_create_retries_while_the_server_is_full():
    with server_in_thread({"counting": Counting}, max_sessions=1) as server:
        async with EnvClient(server.url) as client, EnvClient(server.url, timeout_s=1.0) as short_timeout:
            first = await client.create()
            started_at = time.monotonic()
            with pytest.raises(Full, match="answered 429: all 1 sessions are in use"):
                await short_timeout.create()
            assert time.monotonic() - started_at < 18
            creating = asyncio.create_task(client.create(wait_timeout_s=20))
            await asyncio.sleep(0.2)
            assert not creating.done()
            async with EnvClient(server.url) as other:
                await other.close(first)
            assert await creating != first


async def test_more_sessions_than_the_servers_limit_wait_for_each_other():
    with server_in_thread({"counting": Counting}, max_sessions=4) as server:
        pool = RemotePool({"counting": server.url}, max_sessions=16)

        async def play(item):
            session = await pool.open("counting")
            await session.reset(item)
            answer = await session.step("up")
            await session.close()
            return answer.observation

        assert await asyncio.gather(*(play(item) for item in range(16))) == ["You are at 1."] * 16
        assert pool.num_open == server.sessions.num_open == 0
        await pool.close()


async def test_a_wrong_token_is_a_config_error():
    with server_in_thread({"counting": Counting}, token="secret") as server:
        async with EnvClient(server.url, token="secret") as client:
            assert (await client.health())["sessions"] == 0
        pool = RemotePool({"counting": server.url}, token="wrong")
        with pytest.raises(ConfigError, match="answered 401: a valid bearer token is needed"):
            await pool.open("counting")
        assert pool.num_open == 0
        await pool.close()


async def test_every_query_returns_the_servers_answer():
    with server_in_thread({"counting": Counting}) as server:
        async with EnvClient(f"{server.url}/counting/") as client:
            assert (await client.info())["splits"] == {"train": [0, 100], "test": [100, 120]}
            session_id = await client.create()
            await client.reset(session_id, 0)
            assert await client.observation(session_id) == "Goal: 2. You are at 0."
            assert await client.actions(session_id) == ["up", "down"]
            assert await client.oracle(session_id) == "up"
            assert await client.state_key(session_id) == "0"
            await client.close(session_id)
            with pytest.raises(NoSuchSession):
                await client.step(session_id, "up")
