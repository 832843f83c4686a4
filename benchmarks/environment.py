"""Measure steps per second of an environment: 64 concurrent sessions over HTTP, through our client, and in process.

    python benchmarks/environment.py [--sessions 64] [--seconds 2] [--out result.json]

The server is a separate process on loopback. The load generator is this process: one raw asyncio socket per session,
HTTP/1.1 keep-alive, one request at a time. Both share the machine, so the result includes the cost of both.
The sessions replay TextCraft's gold solutions with a reset after each. Only steps are counted and timed.
The floor is a bare ASGI endpoint under the same server and load: the cost of HTTP without an environment.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import uvloop

from agentgym_rl.environment import catalog
from agentgym_rl.environment.base import TextEnv
from agentgym_rl.environment.pool import LocalPool, RemotePool
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import EnvPool

ENV = "textcraft"
NUM_SOLUTIONS = 64
WARM_UP_S = 0.3
PEER = {"steps_per_s": 1300.0, "p50_ms": 45.0, "p99_ms": 92.0}
"""AgentGym's own TextCraft server in the same setup on two cores: an earlier result, possibly of another machine."""

SERVER = "import sys; from agentgym_rl.environment.server import serve; serve(sys.argv[2:], port=int(sys.argv[1]))"
FLOOR = """
import sys, uvicorn
ANSWER = b'{"observation":"ok","reward":0.0,"score":0.0,"done":false,"info":{}}'
START = {"type": "http.response.start", "status": 200,
         "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ANSWER))]}
async def app(scope, receive, send):
    await receive()
    await send(START)
    await send({"type": "http.response.body", "body": ANSWER})
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), loop="uvloop", http="httptools", lifespan="off",
            log_level="warning", access_log=False, server_header=False, date_header=False)
"""

Solution = tuple[int, list[str]]
"""An item and the actions that solve it."""


@dataclass(slots=True)
class Result:
    """One line of the table."""

    name: str
    steps_per_s: float
    p50_ms: float
    p99_ms: float


class Clock:
    """Latencies of the steps of the measured interval, which starts after the warm-up."""

    def __init__(self, num_sessions: int, seconds: float) -> None:
        self.seconds = seconds
        self.latencies_s: list[float] = []
        self._all_open = asyncio.Barrier(num_sessions)

    async def start(self) -> None:
        """Wait until every session is open, then start the interval."""
        await self._all_open.wait()
        self.begin = time.perf_counter() + WARM_UP_S
        self.end = self.begin + self.seconds

    @property
    def running(self) -> bool:
        return time.perf_counter() < self.end

    def add(self, started: float) -> None:
        now = time.perf_counter()
        if self.begin <= started and now <= self.end:
            self.latencies_s.append(now - started)

    def result(self, name: str) -> Result:
        if not self.latencies_s:
            raise SystemExit(f"{name}: no step was answered within {self.seconds:g} s")
        ordered = sorted(self.latencies_s)
        rate = len(ordered) / self.seconds
        return Result(name, rate, 1e3 * ordered[len(ordered) // 2], 1e3 * ordered[int(0.99 * len(ordered))])


class Connection:
    """A minimal keep-alive HTTP/1.1 connection."""

    LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def post(self, path: str, body: Any) -> Any:
        content = orjson.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        self._writer.write(head.encode() + content)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = self.LENGTH.search(answer)
        if length is None or not answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"{path} answered {answer[:200]!r}")
        return orjson.loads(await self._reader.readexactly(int(length[1])))

    def close(self) -> None:
        self._writer.close()


async def http_player(port: int, solutions: list[Solution], first: int, clock: Clock) -> None:
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
    session_id = (await connection.post("/create", {})).get("id", 0)
    await clock.start()
    turn = first
    while clock.running:
        item, actions = solutions[turn % len(solutions)]
        turn += 1
        await connection.post("/reset", {"id": session_id, "data_idx": item})
        for action in actions:
            started = time.perf_counter()
            await connection.post("/step", {"id": session_id, "action": action})
            clock.add(started)
    await connection.post("/close", {"id": session_id})
    connection.close()


async def pool_player(pool: EnvPool, solutions: list[Solution], first: int, clock: Clock) -> None:
    session = await pool.open(ENV)
    await clock.start()
    turn = first
    while clock.running:
        item, actions = solutions[turn % len(solutions)]
        turn += 1
        await session.reset(item)
        for action in actions:
            started = time.perf_counter()
            await session.step(action)
            clock.add(started)
        await asyncio.sleep(0)  # a local session never yields to the event loop
    await session.close()


async def run_players(
    name: str, num_sessions: int, seconds: float, play: Callable[[int, Clock], Awaitable[None]]
) -> Result:
    clock = Clock(num_sessions, seconds)
    await asyncio.gather(*(play(first, clock) for first in range(num_sessions)))
    return clock.result(name)


@contextlib.contextmanager
def start_server(program: str, *arguments: str) -> Iterator[int]:
    """Start a Python process on a free loopback port and yield the port once it accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    child = subprocess.Popen([sys.executable, "-c", program, str(port), *arguments])
    try:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if child.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start (exit code {child.poll()})")
            time.sleep(0.05)
        yield port
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()


def gold_solutions(env_class: type[TextEnv]) -> list[Solution]:
    """Return the oracle's solutions of the first items."""
    env: Any = env_class()
    solutions: list[Solution] = []
    for item in catalog.items(env_class, "train")[:NUM_SOLUTIONS]:
        env.reset(item)
        actions: list[str] = []
        done = False
        while not done and len(actions) < 100:
            actions.append(env.oracle())
            done = env.step(actions[-1]).done
        solutions.append((item, actions))
    env.close()
    return solutions


async def measure(num_sessions: int, seconds: float) -> list[Result]:
    env_class = catalog.load(ENV)
    solutions = gold_solutions(env_class)
    results = []
    with start_server(FLOOR) as port:
        name = "floor: bare ASGI endpoint"
        results.append(await run_players(name, num_sessions, seconds, lambda i, c: http_player(port, solutions, i, c)))
    with start_server(SERVER, ENV) as port:
        name = "HTTP, raw sockets"
        results.append(await run_players(name, num_sessions, seconds, lambda i, c: http_player(port, solutions, i, c)))
        remote = RemotePool({ENV: f"http://127.0.0.1:{port}/{ENV}"}, max_sessions=num_sessions)
        name = "HTTP, RemotePool"
        results.append(
            await run_players(name, num_sessions, seconds, lambda i, c: pool_player(remote, solutions, i, c))
        )
        await remote.close()
    local = LocalPool({ENV: env_class}, max_sessions=num_sessions)
    name = "in process, LocalPool"
    results.append(await run_players(name, num_sessions, seconds, lambda i, c: pool_player(local, solutions, i, c)))
    await local.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps per second and latency of the TextCraft environment.")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0, help="measured seconds of each of the four rows")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    try:
        results = uvloop.run(measure(options.sessions, options.seconds))
    except ConfigError as error:
        raise SystemExit(f"the benchmark cannot run: {error}") from None
    load = os.getloadavg()[0]
    print(f"{ENV}, {options.sessions} concurrent sessions, {os.cpu_count()} cores, load average {load:.1f}; ", end="")
    print("load generator: raw asyncio sockets on the same machine")
    print(f"{'':28}{'steps/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'x peer':>9}")
    for result in [*results, Result("peer: AgentGym's server", **PEER)]:
        ratio = result.steps_per_s / PEER["steps_per_s"]
        print(f"{result.name:28}{result.steps_per_s:10,.0f}{result.p50_ms:9.2f}{result.p99_ms:9.2f}{ratio:9.1f}")
    print("The peer's row is an earlier result (same setup, two cores, possibly another machine); the rest is new.")
    if options.out:
        figures = {
            "env": ENV,
            "sessions": options.sessions,
            "seconds": options.seconds,
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "load_average": load,
            "results": [asdict(result) for result in results],
            "peer": PEER,
        }
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
