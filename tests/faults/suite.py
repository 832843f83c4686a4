"""Faults injected into a run while it trains, and what became of it: `make faults`.

A two-node Ray cluster on this machine trains with two learners, two engines and two environment hosts against an
environment server. One run survives, in turn: an engine killed, an environment host killed, a server that hangs, a
checkpoint without room on the disk, a node removed and added. Then the driver is told to stop, the run is resumed, a
learner is killed, and the run is resumed again. At the end every step is there once.

Each row is about its own fault, from where the one before had recovered: its events in events.jsonl, its steps that are
missing at the end, trajectories that are twice in them, and processes that are too many when it has recovered.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from cluster_for_tests import (
    CLI,
    ROLES,
    SCALE,
    Command,
    add_node,
    duplicates_by_step,
    events_of,
    leaked,
    steps_of,
    two_nodes,
    workers,
)

WORKERS = 6
"""Of the run: two of each role."""
MANY = 1000
"""Steps that no run here lives to see."""
HANG_S = 5
"""Longer than a step of an environment may take."""
IDLE_S = 20
"""After which the server closes the sessions of a host that was killed."""
TINY_FILE = 2000
"""Bytes a file may have while the disk is `full`."""


@dataclass
class Row:
    fault: str
    how: str
    seconds: float
    events: list[str]
    """What the run logged from the fault until it had recovered."""
    last_step: int
    """Finished when it had recovered."""
    leaked: int


class Fault:
    """One that is under way."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.since, self._before = folder, time.monotonic(), len(events_of(folder))

    @property
    def events(self) -> list[str]:
        return events_of(self.folder)[self._before :]

    def has(self, *kinds: str) -> bool:
        return set(kinds) <= set(self.events)


class Table:
    """One row a fault."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, fault: Fault, name: str, how: str, *needed: str, leaked: int | None = None) -> None:
        """`needed` are the events without which it has not happened."""
        assert fault.has(*needed), f"{name}: {needed} are not all among {fault.events}"
        seconds = time.monotonic() - fault.since
        if leaked is None:  # of a run that goes on
            leaked = max(0, sum(len(workers(role)) for role in ROLES) - WORKERS)
        self.rows.append(Row(name, how, seconds, fault.events, steps_of(fault.folder)[-1], leaked))
        print(f"  {name}: {how}, {seconds:.1f} s; {', '.join(fault.events)}", flush=True)

    def show(self, folder: Path, last: int) -> bool:
        """Whether nothing was lost, doubled or leaked."""
        steps, twice = steps_of(folder), duplicates_by_step(folder)
        heads = f"{'lost steps':>10} {'duplicates':>10} {'leaked':>6}  {'recovered':38} {'seconds':>7}  events"
        print(f"\n{'fault':34} {heads}")
        good = len(steps) == len(set(steps))
        first = 1
        for i, row in enumerate(self.rows):
            end = row.last_step if i + 1 < len(self.rows) else last
            own = range(first, end + 1)
            lost, doubled = sum(step not in steps for step in own), sum(twice.get(step, 0) for step in own)
            counted = ", ".join(f"{kind} {count}" for kind, count in Counter(row.events).items())
            print(
                f"{row.fault:34} {lost:>10} {doubled:>10} {row.leaked:>6}  {row.how:38} {row.seconds:>7.1f}  {counted}"
            )
            good = good and not (lost or doubled or row.leaked)
            first = end + 1
        return good


@contextlib.contextmanager
def served() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = subprocess.Popen([*CLI, "serve", "babyai", "--port", str(port), "--idle-timeout", str(IDLE_S)])
    url = f"http://127.0.0.1:{port}"
    try:
        wait(lambda: health(url) is not None, 120)
        yield url, server
    finally:
        server.send_signal(signal.SIGCONT)
        server.terminate()
        server.wait(20)


def health(url: str) -> Any:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return json.load(answer)
    return None


def wait(moment: Callable[[], bool], timeout_s: float) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not moment():
        assert time.monotonic() < give_up_at, "the moment never came"
        time.sleep(0.05)


def while_it_trains(run: Command, table: Table, cluster: Any, server: subprocess.Popen[bytes]) -> None:
    """Faults that the run survives by itself. Each has recovered when the step after it is finished, too."""
    folder = run.folder
    run.until_step(1)

    fault = Fault(folder)
    os.kill(workers("engine")[0], signal.SIGKILL)
    run.until(lambda: fault.has("engine_lost", "engine_started"))
    table.add(fault, "engine killed", "started again, weights fetched", "engine_lost", "engine_started")

    fault = Fault(folder)
    os.kill(workers("env_host")[0], signal.SIGKILL)
    run.until(lambda: fault.has("env_host_lost", "env_host_started"))
    table.add(fault, "environment host killed", "started again, groups played again", "env_host_lost")

    fault = Fault(folder)
    server.send_signal(signal.SIGSTOP)
    time.sleep(HANG_S)
    server.send_signal(signal.SIGCONT)
    run.until(lambda: fault.has("episodes_failed"))
    table.add(fault, f"environment server hangs for {HANG_S} s", "deadline, episodes tried again", "episodes_failed")

    fault = Fault(folder)
    for pid in workers("learner"):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (TINY_FILE, resource.RLIM_INFINITY))
    run.until(lambda: fault.has("checkpoint_failed"))
    failed_at = steps_of(folder)[-1]
    for pid in workers("learner"):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.until(lambda: newest(folder) > failed_at)
    table.add(fault, "disk full at a checkpoint", "old one kept, next one written", "checkpoint_failed")

    fault = Fault(folder)
    (second,) = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]
    cluster.remove_node(second)
    run.until(lambda: fault.has("node_lost", "engine_lost", "env_host_lost"))
    run.until_step(steps_of(folder)[-1] + 1)
    table.add(fault, "node removed", "went on with the rest", "node_lost", "engine_lost", "env_host_lost")

    fault = Fault(folder)
    add_node(cluster)
    run.until(lambda: fault.has("node_added", "engine_started", "env_host_started"))
    table.add(fault, "node added", "engine and host started there", "node_added", "engine_started", "env_host_started")


def newest(folder: Path) -> int:
    return max(int(path.name.rpartition("_")[2]) for path in (folder / "checkpoints").glob("step_*"))


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="faults-")) / "run"
    print(f"the run is in {folder}", flush=True)
    table, started = Table(), time.monotonic()
    with contextlib.ExitStack() as running, served() as (url, server), two_nodes() as cluster:
        scale = (*SCALE, f"scale.address={cluster.address}", f"environments.0.url={url}/babyai", f"rl.steps={MANY}")
        run = Command(folder, *scale)
        running.callback(lambda: run.end())
        while_it_trains(run, table, cluster, server)

        fault = Fault(folder)
        assert run.stop() == 0, run.output.read_text()[-3000:]
        assert json.loads((folder / "status.json").read_text())["state"] == "stopped"
        assert newest(folder) == steps_of(folder)[-1]
        left = leaked()
        run = Command(folder, *scale, "--resume")
        run.until_step(newest(folder) + 1)
        table.add(fault, "SIGTERM to the driver", "checkpoint, exit code 0, --resume", "stopped", leaked=left)

        fault = Fault(folder)
        os.kill(workers("learner")[1], signal.SIGKILL)
        assert run.wait() == 1, run.output.read_text()[-3000:]
        assert "Traceback" not in run.output.read_text(), run.output.read_text()[-3000:]
        left = leaked()
        last = newest(folder) + 3
        run = Command(folder, *scale, f"rl.steps={last}", "--resume")
        assert run.wait() == 0, run.output.read_text()[-3000:]
        left += leaked()
        table.add(fault, "learner rank killed", "exit code 1, --resume", "worker_lost", leaked=left)
        with contextlib.suppress(AssertionError):
            wait(lambda: health(url)["sessions"] == 0, 4 * IDLE_S)
        sessions = health(url)["sessions"]
    good = table.show(folder, last)
    print(f"\nleaked: processes; sessions left on the server: {sessions}; {time.monotonic() - started:.0f} s in all")
    sys.exit(0 if good and not sessions else 1)


if __name__ == "__main__":
    main()
