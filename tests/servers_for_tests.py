"""Real environment servers: in a thread of the test process, for inspection, or in a process that can be killed."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from agentgym_rl.environment import conformance, server_sessions
from agentgym_rl.environment.base import TextEnv
from agentgym_rl.environment.pool import RemotePool
from agentgym_rl.environment.server import bind, create_app, uvicorn_server
from agentgym_rl.environment.server_sessions import Sessions


async def problems_over_http(name: str, env_class: type[TextEnv]) -> list[str]:
    """Serve an environment over HTTP and return what the conformance suite finds wrong with it there."""
    items = conformance.sample_items(env_class)
    sent = {kind: action for kind, action in conformance.HOSTILE.items() if kind not in ("lone surrogates", "noise")}
    with server_in_thread({name: env_class}) as server:
        pool = RemotePool({name: f"{server.url}/{name}"}, timeout_s=120)
        try:
            return [
                *await conformance.determinism_problems(pool, name, items),
                *await conformance.concurrency_problems(pool, name, items, sessions=3),
                *(await conformance.hostile_problems(pool, name, items[0], sent))[0],
                *(await conformance.random_problems(pool, name, items, turns=6))[0],
            ]
        finally:
            await pool.close()


@dataclass
class RunningServer:
    url: str
    sessions: Sessions
    app: Any


@contextlib.contextmanager
def server_in_thread(
    environments: Mapping[str, Callable[[], TextEnv]],
    port: int = 0,
    create: Callable[..., Any] = create_app,
    **options: Any,
) -> Iterator[RunningServer]:
    """Run the server on a free loopback port. Leaving the block shuts it down gracefully."""
    app = create(environments, **options)
    listener = bind("127.0.0.1", port)
    port = listener.getsockname()[1]
    server = uvicorn_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield RunningServer(f"http://127.0.0.1:{port}", app.state.sessions, app)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the server did not shut down within 60 s"


class Clock:
    """The clock by which sessions are idle. It moves only when a test moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(server_sessions, "time", SimpleNamespace(monotonic=lambda: self.now))


@contextlib.contextmanager
def server_process(env: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve a class of envs_for_tests in a separate process; yield its address and the process."""
    port = free_port()
    program = (
        "import envs_for_tests, agentgym_rl.environment.server as s;"
        f"env = envs_for_tests.{env};"
        f"s.run({{env.name: env}}, s.bind('127.0.0.1', {port}))"
    )
    folder = Path(__file__).parent
    child = subprocess.Popen([sys.executable, "-c", program], cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: listens(port))
        yield f"http://127.0.0.1:{port}", child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


@contextlib.contextmanager
def asgi_in_thread(app: Any) -> Iterator[str]:
    """Run any ASGI app on a free loopback port and yield its address."""
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"the condition did not hold within {timeout_s:g} s"
        time.sleep(0.01)


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
