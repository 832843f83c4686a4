"""Faults injected into a run while it trains, and what became of it: `make faults`.

A two-node Ray cluster on this machine trains with two learners, two engines and two environment hosts against an
environment server. One run survives, in turn: an engine killed, an environment host killed, a server that hangs, a
checkpoint without space on the disk, a node removed and added. Then the driver is told to stop, the run is resumed, a
learner is killed, and the run is resumed again. At the end every step is there once.

Each row is about its own fault, from where the one before had recovered: its events in events.jsonl, its steps that are
missing at the end, trajectories that are twice in them, and processes and sessions that are too many when it has
recovered. The server closes no session for being idle. A host is killed while it holds some, which the server must
close when its connection has ended; any session that is open while no episode is played has leaked.

`python tests/faults/suite.py engine host` leaves out those of `SURVIVED` that are not named.
"""

from __future__ import annotations

import argparse
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
    descendants,
    duplicates_by_step,
    events_of,
    leaked,
    steps_of,
    two_nodes,
    workers,
)

from agentgym_rl.environment.server_sessions import HOLD_GRACE_S

WORKERS = 6
"""Settings of the run: two workers of each role."""
MANY = 1000
"""Steps that no run here lives to see."""
HANG_S = 5
"""Longer than a step of an environment may take."""
IDLE_S = 24 * 3600
"""After which the server closes sessions: later than this ends, so that none of those that leak goes unseen."""
LEAVES_S = HOLD_GRACE_S + 10
"""In which the server notices that a host is gone."""
CALM_S = 5
"""Without a session opened or closed, where one process stands still and others wait for it."""
PATIENCE = 4
"""Steps, in one of whose pauses no session may be open."""
TINY_FILE = 2000
"""Bytes a file may have while the disk is `full`."""


@dataclass
class Row:
    fault: str
    how: str
    seconds: float
    events: list[str]
    """Return the events from the fault until the run had recovered."""
    last_step: int
    """Finished when it had recovered."""
    processes: int
    """Too many, likewise."""
    sessions: int


class Sessions:
    """Return the sessions that the server still holds."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.known = 0
        """Leaked, and told already."""
        self.held = 0
        """By hosts, when they were killed."""

    def counts(self) -> dict[str, int]:
        found = health(self._url)
        assert found is not None, "the environment server does not answer"
        return {name: found[name] for name in ("sessions", "created", "closed", "idle_closed", "left_closed")}

    def stop_with_some(self, host: int) -> None:
        """Let a process stand still while it holds sessions, and count them: it is to be killed. Other hosts finish
        what they have, and then the step waits for this one."""
        while True:
            wait(lambda: self.counts()["sessions"] > self.known, 300)
            os.kill(host, signal.SIGSTOP)
            before, since = self.counts(), time.monotonic()
            while time.monotonic() - since < CALM_S:
                time.sleep(0.1)
                if (now := self.counts()) != before:
                    before, since = now, time.monotonic()
            if found := before["sessions"] - self.known:
                print(f"    a host that holds {found} sessions is killed", flush=True)
                self.held += found
                return
            os.kill(host, signal.SIGCONT)

    def leaked(self, over: Callable[[], bool]) -> int:
        """Open although nobody plays: by how many there are always too many until it is over, and the server has had
        its time. Each is told once."""
        fewest, give_up_at = self.counts()["sessions"], time.monotonic() + LEAVES_S
        while fewest > self.known and not (over() and time.monotonic() > give_up_at):
            time.sleep(0.01)
            fewest = min(fewest, self.counts()["sessions"])
        found, self.known = max(0, fewest - self.known), fewest
        return found


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

    def __init__(self, sessions: Sessions) -> None:
        self.rows: list[Row] = []
        self.sessions = sessions

    def add(self, fault: Fault, name: str, how: str, *needed: str, leaked: tuple[int, int] | None = None) -> None:
        """`needed` are the events without which it has not happened; `leaked` those of a run that ended."""
        assert fault.has(*needed), f"{name}: {needed} are not all among {fault.events}"
        seconds, events, last = time.monotonic() - fault.since, fault.events, steps_of(fault.folder)[-1]
        if leaked is None:
            processes = max(0, sum(len(workers(role)) for role in ROLES) - WORKERS)
            leaked = processes, self.sessions.leaked(lambda: steps_of(fault.folder)[-1] > last + PATIENCE)
        self.rows.append(Row(name, how, seconds, events, last, *leaked))
        print(f"  {name}: {how}, {seconds:.1f} s; leaked {leaked}; {', '.join(events)}", flush=True)

    def left(self) -> tuple[int, int]:
        """Processes and sessions that outlive a run."""
        give_up_at = time.monotonic() + 30
        return leaked(), self.sessions.leaked(lambda: time.monotonic() > give_up_at)

    def show(self, folder: Path, last: int) -> bool:
        """Print the outcome; return whether nothing was lost, doubled or leaked."""
        steps, twice = steps_of(folder), duplicates_by_step(folder)
        heads = f"{'lost':>5} {'twice':>5} {'processes':>9} {'sessions':>8}  {'recovered':38} {'seconds':>7}  events"
        print(f"\n{'fault':34} {heads}")
        good = len(steps) == len(set(steps))
        first = 1
        for i, row in enumerate(self.rows):
            end = row.last_step if i + 1 < len(self.rows) else last
            own = range(first, end + 1)
            lost, doubled = sum(step not in steps for step in own), sum(twice.get(step, 0) for step in own)
            counted = ", ".join(f"{kind} {count}" for kind, count in Counter(row.events).items())
            numbers = f"{lost:>5} {doubled:>5} {row.processes:>9} {row.sessions:>8}"
            print(f"{row.fault:34} {numbers}  {row.how:38} {row.seconds:>7.1f}  {counted}")
            good = good and not (lost or doubled or row.processes or row.sessions)
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


# Faults that the run survives by itself.


def kill_an_engine(run: Command, table: Table, cluster: Any, server: subprocess.Popen[bytes]) -> None:
    fault = Fault(run.folder)
    os.kill(workers("engine")[0], signal.SIGKILL)
    run.until(lambda: fault.has("engine_lost", "engine_started"))
    table.add(fault, "engine killed", "started again, weights fetched", "engine_lost", "engine_started")


def kill_a_host(run: Command, table: Table, cluster: Any, server: subprocess.Popen[bytes]) -> None:
    host = workers("env_host")[0]
    table.sessions.stop_with_some(host)
    fault = Fault(run.folder)
    os.kill(host, signal.SIGKILL)
    run.until(lambda: fault.has("env_host_lost", "env_host_started"))
    table.add(fault, "environment host killed", "started again, groups played again", "env_host_lost")


def hang(run: Command, table: Table, cluster: Any, server: subprocess.Popen[bytes]) -> None:
    fault = Fault(run.folder)
    server.send_signal(signal.SIGSTOP)
    time.sleep(HANG_S)
    server.send_signal(signal.SIGCONT)
    run.until(lambda: fault.has("episodes_failed"))
    table.add(fault, f"environment server hangs for {HANG_S} s", "deadline, episodes tried again", "episodes_failed")


def fill_the_disk(run: Command, table: Table, cluster: Any, server: subprocess.Popen[bytes]) -> None:
    fault = Fault(run.folder)
    for pid in workers("learner"):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (TINY_FILE, resource.RLIM_INFINITY))
    run.until(lambda: fault.has("checkpoint_failed"))
    failed_at = steps_of(run.folder)[-1]
    for pid in workers("learner"):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.until(lambda: newest(run.folder) > failed_at)
    table.add(fault, "disk full at a checkpoint", "old one kept, next one written", "checkpoint_failed")


def remove_a_node_and_add_one(run: Command, table: Table, cluster: Any, server: subprocess.Popen[bytes]) -> None:
    (second,) = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]
    on_it = descendants(second.all_processes["raylet"][0].process.pid)
    (host,) = set(workers("env_host")) & set(on_it)
    table.sessions.stop_with_some(host)
    fault = Fault(run.folder)
    cluster.remove_node(second)
    run.until(lambda: fault.has("node_lost", "engine_lost", "env_host_lost"))
    run.until_step(steps_of(run.folder)[-1] + 1)
    table.add(fault, "node removed", "went on with the rest", "node_lost", "engine_lost", "env_host_lost")

    fault = Fault(run.folder)
    add_node(cluster)
    run.until(lambda: fault.has("node_added", "engine_started", "env_host_started"))
    table.add(fault, "node added", "engine and host started there", "node_added", "engine_started", "env_host_started")


SURVIVED = {
    "engine": kill_an_engine,
    "host": kill_a_host,
    "hang": hang,
    "disk": fill_the_disk,
    "node": remove_a_node_and_add_one,
}


def newest(folder: Path) -> int:
    return max(int(path.name.rpartition("_")[2]) for path in (folder / "checkpoints").glob("step_*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", help=f"of those it survives, {', '.join(SURVIVED)}; all by default")
    chosen = parser.parse_args().faults or list(SURVIVED)
    if unknown := set(chosen) - set(SURVIVED):
        parser.error(f"{', '.join(sorted(unknown))}: choose among {', '.join(SURVIVED)}")
    folder = Path(tempfile.mkdtemp(prefix="faults-")) / "run"
    print(f"the run is in {folder}", flush=True)
    started = time.monotonic()
    with contextlib.ExitStack() as running, served() as (url, server), two_nodes() as cluster:
        table = Table(Sessions(url))
        scale = (*SCALE, f"scale.address={cluster.address}", f"environments.0.url={url}/babyai", f"rl.steps={MANY}")
        run = Command(folder, *scale)
        running.callback(lambda: run.end())
        run.until_step(1)
        for name in chosen:
            SURVIVED[name](run, table, cluster, server)

        fault = Fault(folder)
        assert run.stop() == 0, run.output.read_text()[-3000:]
        assert json.loads((folder / "status.json").read_text())["state"] == "stopped"
        assert newest(folder) == steps_of(folder)[-1]
        left = table.left()
        run = Command(folder, *scale, "--resume")
        run.until_step(newest(folder) + 1)
        table.add(fault, "SIGTERM to the driver", "checkpoint, exit code 0, --resume", "stopped", leaked=left)

        fault = Fault(folder)
        os.kill(workers("learner")[1], signal.SIGKILL)
        assert run.wait() == 1, run.output.read_text()[-3000:]
        assert "Traceback" not in run.output.read_text(), run.output.read_text()[-3000:]
        left = table.left()
        last = newest(folder) + 3
        run = Command(folder, *scale, f"rl.steps={last}", "--resume")
        assert run.wait() == 0, run.output.read_text()[-3000:]
        at_the_end = table.left()
        both = left[0] + at_the_end[0], left[1] + at_the_end[1]
        table.add(fault, "learner rank killed", "exit code 1, --resume", "worker_lost", leaked=both)
        counts = table.sessions.counts()
    good = table.show(folder, last)
    print(
        f"\nprocesses and sessions: leaked; {counts['created']} sessions were opened, {counts['sessions']} are left; "
        f"killed hosts had {table.sessions.held}, the server closed {counts['left_closed']} of those who left; "
        f"{time.monotonic() - started:.0f} s in all"
    )
    cleared = counts["sessions"] == counts["idle_closed"] == 0 and counts["left_closed"] >= table.sessions.held
    sys.exit(0 if good and cleared else 1)


if __name__ == "__main__":
    main()
