"""Monitoring by a cluster's driver: the connection, SIGTERM, threads that wait for workers, nodes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from agentgym_rl.errors import ConfigError, WorkerLost

CONNECT_TIMEOUT_S = 30.0
"""Seconds that a cluster's head has to accept a connection."""
POLL_INTERVAL_S = 0.5
"""Seconds between a waiting thread's checks whether the run is closing."""


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Keep the run's SIGTERM handler while Ray starts. Ray would end its processes on SIGTERM before the run can save.
    Its Python call is blocked; its C++ handler is replaced again afterwards."""
    original = signal.signal

    def ignore_sigterm(number: Any, handler: Any) -> Any:
        return signal.getsignal(number) if number == signal.SIGTERM else original(number, handler)

    signal.signal = cast("Any", ignore_sigterm)
    try:
        yield
    finally:
        signal.signal = original
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
            if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
                signal.alarm(0)  # the C++ handler sets an alarm that aborts 3 s after SIGTERM


class Threads:
    """Threads that wait for workers. A cancelled task leaves its thread running, so wait before Ray shuts down."""

    def __init__(self) -> None:
        self._closing = False
        self._running: set[asyncio.Future[Any]] = set()

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        call = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
        self._running.add(call)
        call.add_done_callback(self._running.discard)
        return await asyncio.shield(call)

    def until(self, done: Callable[[float], bool], timeout_s: float = float("inf")) -> bool:
        """Call `done(seconds to wait)` until it is true. Return False after the timeout; raise if the run closes."""
        deadline = time.monotonic() + timeout_s
        while not done(max(0.0, min(POLL_INTERVAL_S, deadline - time.monotonic()))):
            self.require_open()
            if time.monotonic() >= deadline:
                return False
        return True

    def require_open(self) -> None:
        if self._closing:
            raise WorkerLost("the run was closed while it waited for its workers")

    async def close(self) -> None:
        """Return after every thread has ended."""
        self._closing = True
        await asyncio.gather(*self._running, return_exceptions=True)


class Background:
    """Tasks beside a run's calls. A call ends as soon as one of them fails, because it might then never return."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._calls: set[asyncio.Future[Any]] = set()
        self._error: BaseException | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def require_none_failed(self) -> None:
        if self._error is not None:
            raise self._error

    async def unless_one_fails(self, call: asyncio.Future[Any]) -> Any:
        """Return the call's result, or raise the error of a task."""
        self._calls.add(call)
        try:
            self.require_none_failed()
            return await call
        except asyncio.CancelledError:
            self.require_none_failed()
            raise
        finally:
            self._calls.discard(call)
            call.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            for call in self._calls:
                call.cancel()


class Nodes:
    """The cluster's nodes and their changes."""

    def __init__(self) -> None:
        self._alive: dict[str, str] | None = None

    def changes(self, nodes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return events since the last call, from the answer of `ray.nodes()`. The first call returns none."""
        alive = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}
        before, self._alive = self._alive, alive
        if before is None:
            return []
        lost = [f"node {name[:8]} ({before[name]}) and its processes are gone" for name in before if name not in alive]
        added = [f"node {name[:8]} ({alive[name]}) was added" for name in alive if name not in before]
        return [{"kind": "node_lost", "message": message} for message in lost] + [
            {"kind": "node_added", "message": message} for message in added
        ]


@contextmanager
def connecting(address: str | None) -> Iterator[None]:
    """Turn a failed connection to `address` into a one-line error. None means that Ray is started here."""
    if address is None:
        yield
        return
    require_cluster(address)
    try:
        yield
    except (ConnectionError, ValueError, RuntimeError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"scale.address = {address!r}: {first_line} (`ray start` on this machine joins it "
            f"to a cluster, no address starts Ray for the run{_token_hint()})"
        ) from error


def _token_hint() -> str:
    """Return a hint if Ray has a token file: the cluster then asks for the token without saying so."""
    if "RAY_AUTH_MODE" in os.environ or not (Path.home() / ".ray" / "auth_token").is_file():
        return ""
    return "; ~/.ray/auth_token exists, so the cluster may require it: try RAY_AUTH_MODE=token"


def require_cluster(address: str) -> None:
    """Raise ConfigError if no cluster answers. Ray itself would search for a minute without a message."""
    host, _, port = (os.environ.get("RAY_ADDRESS", address) if address == "auto" else address).rpartition(":")
    if not (host and port.isdigit()):
        return  # `auto`, or a name that Ray resolves
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"scale.address = {address!r}: no Ray cluster answers there ({error})") from error
