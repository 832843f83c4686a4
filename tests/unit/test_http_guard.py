"""Requests that are too large, too slow or sent by other sites, against the environment server and the viewer."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from envs_for_tests import Counting
from servers_for_tests import server_in_thread
from viewer_for_tests import library_of, viewer_in_thread

from agentgym_rl.common.http_guard import MAX_HEAD_BYTES

START = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module", params=["environment server", "viewer"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    if request.param == "viewer":
        library = library_of(tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("cache"))
        with viewer_in_thread(library) as url:
            yield "127.0.0.1", int(url.rstrip("/").rpartition(":")[2])
    else:
        with server_in_thread({"counting": Counting}) as server:
            yield "127.0.0.1", int(server.url.rpartition(":")[2])


@pytest.fixture
def connection(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=30) as made:
        yield made


@pytest.fixture
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgym_rl.common.http_guard.REQUEST_TIMEOUT_S", 0.3)
    monkeypatch.setattr("agentgym_rl.common.http_guard.LATE_READ_S", 0.1)


def read_to_the_end(connection: socket.socket) -> bytes:
    """Everything until the server closes; a connection that stays open is a TimeoutError."""
    received = b""
    try:
        while part := connection.recv(1 << 16):
            received += part
    except ConnectionResetError:  # the server left before it read everything
        pass
    return received


def answer(connection: socket.socket) -> bytes:
    received = connection.recv(1 << 16)
    assert received.startswith(b"HTTP/1.1 "), received[:100]
    return received.split(b" ")[1]


def test_a_head_within_the_limit_is_answered(connection: socket.socket) -> None:
    for part in (START, b"X-Long: " + b"a" * (MAX_HEAD_BYTES - 500), b"\r\n\r\n"):
        connection.sendall(part)
    assert answer(connection) == b"200"


@pytest.mark.parametrize(
    "head",
    [
        START + b"X-Long: " + b"a" * MAX_HEAD_BYTES,
        START + b"X-Long: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n",
        START + b"".join(b"X-%d: a\r\n" % i for i in range(MAX_HEAD_BYTES // 8)) + b"\r\n",
        b"GET /?" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["a header without an end", "a long header", "many headers", "a long address"],
)
def test_a_head_over_the_limit_is_refused(connection: socket.socket, head: bytes) -> None:
    connection.sendall(head)
    received = read_to_the_end(connection)
    assert received.startswith(b"HTTP/1.1 431 ")
    assert b"may have 65536 bytes" in received


@pytest.mark.parametrize("before", [START, START + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"], ids=["head", "trailer"])
def test_an_endless_header_is_not_read_on(connection: socket.socket, before: bytes) -> None:
    connection.sendall(before + b"X-Long: ")
    with pytest.raises(ConnectionError):
        connection.sendall(b"a" * (64 << 20))  # more than the system buffers


@pytest.mark.usefixtures("short_deadline")
@pytest.mark.parametrize("part", [b"", START, START + b"Content-Length: 5\r\n\r\n"], ids=["nothing", "head", "body"])
def test_a_request_that_does_not_arrive_ends_its_connection(address: tuple[str, int], part: bytes) -> None:
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(part)
        read_to_the_end(connection)


@pytest.mark.usefixtures("short_deadline")
@pytest.mark.parametrize("part", [START, b"\r\n"], ids=["head", "blank line"])
def test_a_later_request_has_a_deadline_too(address: tuple[str, int], part: bytes) -> None:
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(START + b"\r\n")
        assert answer(connection) == b"200"
        connection.sendall(part)
        read_to_the_end(connection)


@pytest.mark.usefixtures("short_deadline")
def test_a_connection_between_requests_outlives_the_deadline_of_one(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=30) as connection:
        for _ in range(2):
            connection.sendall(START + b"\r\n")
            assert answer(connection) == b"200"
            time.sleep(0.6)


@pytest.fixture(scope="module")
def environments() -> Iterator[httpx.Client]:
    with (
        server_in_thread({"counting": Counting}) as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"host": "evil.example"}, 421),
        ({"host": "[::1"}, 400),
    ],
)
def test_another_site_cannot_open_a_session(environments: httpx.Client, headers: dict[str, str], status: int) -> None:
    before = environments.get("/health").json()["created"]
    refused = environments.post("/create", headers=headers)
    assert refused.status_code == status
    assert refused.json()["detail"]
    assert environments.get("/health").json()["created"] == before


def test_clients_on_this_machine_and_a_page_of_the_server_itself_can_play(environments: httpx.Client) -> None:
    here = str(environments.base_url).rstrip("/")
    own_page = {"origin": here, "sec-fetch-site": "same-origin"}
    for headers in ({}, {"host": "localhost:1"}, {"host": "[::1]:8"}, own_page):
        assert environments.post("/create", headers=headers).status_code == 200


def test_with_a_token_every_host_name_is_answered() -> None:
    with server_in_thread({"counting": Counting}, token="secret") as server:
        headers = {"host": "games.example", "authorization": "Bearer secret"}
        assert httpx.post(f"{server.url}/create", headers=headers, trust_env=False).status_code == 200


def test_session_ids_cannot_be_guessed(environments: httpx.Client) -> None:
    ids = [environments.post("/create").json()["id"] for _ in range(40)]
    assert all(type(session_id) is int and 0 < session_id < 1 << 53 for session_id in ids)
    assert max(ids) - min(ids) > 1 << 45  # by chance not: a probability of 2**-300
    assert ids != sorted(ids)
