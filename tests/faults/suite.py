"""Faults injected into a run while it trains, and what became of it: `make faults`.

A two-node Ray cluster on this machine trains with two learners, two engines and two environment hosts against an
environment server. One run survives, in turn: an engine killed, an environment host killed, a server that hangs, a
checkpoint without room on the disk, a node removed and added. Then the driver is told to stop, the run is resumed, a
learner is killed, and the run is resumed again. At the end every step is there once.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from cluster_for_tests import CLI, SCALE, Command, add_node, duplicates, events_of, leaked, steps_of, two_nodes, workers

MANY = 1000
"""Steps that no run here lives to see."""
IDLE_S = 20
"""After which the server closes the sessions of a host that was killed."""
TINY_FILE = 2000
"""Bytes a file may have while the disk is `full`."""


class Table:
    """One row a fault."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, float]] = []

    def add(self, fault: str, how: str, since: float) -> None:
        self.rows.append((fault, how, time.monotonic() - since))
        print(f"  {fault}: {how}, {self.rows[-1][2]:.1f} s", flush=True)

    def show(self, lost: int, twice: int, left: int) -> None:
        print(f"\n{'fault':34} {'lost steps':>10} {'duplicates':>10} {'leaked':>6}  {'recovered':42} {'seconds':>7}")
        for fault, how, seconds in self.rows:
            print(f"{fault:34} {lost:>10} {twice:>10} {left:>6}  {how:42} {seconds:>7.1f}")


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
    """Faults that the run survives by itself."""
    folder = run.folder
    run.until_step(1)
    since = time.monotonic()
    os.kill(workers("engine")[0], signal.SIGKILL)
    run.until(lambda: "engine_started" in events_of(folder))
    table.add("engine killed", "started again, weights fetched", since)

    since = time.monotonic()
    os.kill(workers("env_host")[0], signal.SIGKILL)
    run.until(lambda: "env_host_started" in events_of(folder))
    table.add("environment host killed", "started again, groups played again", since)

    step, since = steps_of(folder)[-1], time.monotonic()
    server.send_signal(signal.SIGSTOP)
    time.sleep(5)
    server.send_signal(signal.SIGCONT)
    run.until_step(step + 1)
    table.add("environment server hangs for 5 s", "deadline, episodes tried again", since)

    step, since = steps_of(folder)[-1], time.monotonic()
    for pid in workers("learner"):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (TINY_FILE, resource.RLIM_INFINITY))
    run.until(lambda: "checkpoint_failed" in events_of(folder))
    for pid in workers("learner"):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.until(lambda: newest(folder) > step + 1)
    table.add("disk full at a checkpoint", "old checkpoint kept, next one written", since)

    step, since = steps_of(folder)[-1], time.monotonic()
    (second,) = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]
    cluster.remove_node(second)
    run.until_step(step + 1)
    table.add("node removed", "went on with the rest", since)
    since = time.monotonic()
    add_node(cluster)
    run.until(lambda: len(workers("engine")) == 2)
    table.add("node added", "engine and host started there", since)


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

        since = time.monotonic()
        assert run.stop() == 0, run.output.read_text()[-3000:]
        assert json.loads((folder / "status.json").read_text())["state"] == "stopped"
        assert newest(folder) == steps_of(folder)[-1]
        left = leaked()
        run = Command(folder, *scale, "--resume")
        run.until_step(newest(folder) + 1)
        table.add("SIGTERM to the driver", "checkpoint, exit code 0, --resume", since)

        since = time.monotonic()
        os.kill(workers("learner")[1], signal.SIGKILL)
        assert run.wait() == 1, run.output.read_text()[-3000:]
        left += leaked()
        last = newest(folder) + 3
        run = Command(folder, *scale, f"rl.steps={last}", "--resume")
        assert run.wait() == 0, run.output.read_text()[-3000:]
        table.add("learner rank killed", "exit code 1, --resume", since)
        left += leaked()
        lost = sum(step not in steps_of(folder) for step in range(1, last + 1))
        assert len(steps_of(folder)) == last - lost, "a step is there twice"
        with contextlib.suppress(AssertionError):
            wait(lambda: health(url)["sessions"] == 0, 4 * IDLE_S)
        left += health(url)["sessions"]
    table.show(lost, duplicates(folder), left)
    print(f"\nleaked: processes, and sessions on the server; {time.monotonic() - started:.0f} s in all")
    sys.exit(1 if lost or left or duplicates(folder) else 0)


if __name__ == "__main__":
    main()
