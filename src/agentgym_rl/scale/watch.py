"""What the driver of a cluster keeps in view: whether one is there, SIGTERM, threads that wait for workers, nodes that
come and go."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from agentgym_rl.errors import ConfigError, WorkerLost

REACH_S = 30.0
"""Granted to a cluster's head to take a connection."""
NEW_TASKS_S = 10.0
"""Between looks whether there are others to watch."""
LOOK_S = 0.5
"""Between looks of a thread that waits whether the run is being closed."""


@contextmanager
def sigterm_stays_ours() -> Iterator[None]:
    """Ray, when it starts, makes SIGTERM end its processes under the run, which could then write nothing down: from
    Python, which is not let, and from C++, after which the handler is put back."""
    ordinary = signal.signal

    def keep(number: Any, handler: Any) -> Any:
        return signal.getsignal(number) if number == signal.SIGTERM else ordinary(number, handler)

    signal.signal = cast("Any", keep)
    try:
        yield
    finally:
        signal.signal = ordinary
        ours = signal.getsignal(signal.SIGTERM)
        if ours is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ours)
            if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
                signal.alarm(0)  # set by the C++ handler, where SIGTERM came to it, to abort in 3 s


class Threads:
    """Waits for workers, in threads. A task that is cancelled leaves its thread behind, and Ray must not be shut down
    under it."""

    def __init__(self) -> None:
        self._closing = False
        self._running: set[asyncio.Future[Any]] = set()

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        call = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
        self._running.add(call)
        call.add_done_callback(self._running.discard)
        return await asyncio.shield(call)

    def until(self, done: Callable[[float], bool], timeout_s: float = float("inf")) -> bool:
        """Whether `done`, which waits for so many seconds at most, was true in time. Closing ends it."""
        give_up_at = time.monotonic() + timeout_s
        while not done(max(0.0, min(LOOK_S, give_up_at - time.monotonic()))):
            self.require_open()
            if time.monotonic() >= give_up_at:
                return False
        return True

    def require_open(self) -> None:
        if self._closing:
            raise WorkerLost("the run was closed while it waited for its workers")

    async def close(self) -> None:
        """Returns when no thread waits any more."""
        self._closing = True
        await asyncio.gather(*self._running, return_exceptions=True)


def require_none_failed(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """What nobody waits for must not fail unseen."""
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()


async def unless_one_fails(call: Awaitable[Any], tasks: Callable[[], Iterable[asyncio.Future[Any]]]) -> Any:
    """What is waited for; or, as soon as one of the `tasks` fails, its error, since it may never come then."""
    answer = asyncio.ensure_future(_of(call))
    try:
        while not answer.done():
            require_none_failed(tasks())
            others = [task for task in tasks() if not task.done()]
            await asyncio.wait({answer, *others}, timeout=NEW_TASKS_S, return_when=asyncio.FIRST_COMPLETED)
        return answer.result()
    finally:
        answer.cancel()


async def _of(call: Awaitable[Any]) -> Any:
    return await call


class Nodes:
    """Those of the cluster, and which came and went."""

    def __init__(self) -> None:
        self._there: dict[str, str] | None = None

    def changes(self, nodes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Events, from what `ray.nodes()` says; none of the first time."""
        there = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}
        before, self._there = self._there, there
        if before is None:
            return []
        lost = [f"node {name[:8]} ({before[name]}) is gone, and what ran there" for name in before if name not in there]
        came = [f"node {name[:8]} ({there[name]}) was added" for name in there if name not in before]
        return [{"kind": "node_lost", "message": message} for message in lost] + [
            {"kind": "node_added", "message": message} for message in came
        ]


@contextmanager
def reaching(address: str | None) -> Iterator[None]:
    """Around the connection to a cluster, or the start of one (None): what fails of an address is said in a line."""
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
            f"to a cluster, no address starts Ray for the run{_about_a_token()})"
        ) from error


def _about_a_token() -> str:
    """Ray asks for one where it finds one, and says so only to who knows."""
    if "RAY_AUTH_MODE" in os.environ or not (Path.home() / ".ray" / "auth_token").is_file():
        return ""
    return "; ~/.ray/auth_token is there, so the cluster may ask for it: try RAY_AUTH_MODE=token"


def require_cluster(address: str) -> None:
    """Ray itself would look for a cluster that is not there for a minute, without a word."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return  # auto, or a name that Ray knows what to do with
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"scale.address = {address!r}: no Ray cluster answers there ({error})") from error
