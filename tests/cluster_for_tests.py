"""Ray clusters of two nodes on this machine, runs on them, and faults for both."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from processes_for_tests import Forked

SMALL = """
name = "small"
threads = 1

[model.scratch]
hidden_size = 32
intermediate_size = 64
num_layers = 2
num_heads = 2

[[environments]]
name = "babyai"
subsets = ["GoToRedBallNoDists", "PickupLoc"]

[agent]
instruction = ""
max_new_tokens = 6
max_context = 512
retries = 3
step_timeout_s = 3.0

[warm_start]
policy = "random"
episodes = 80
max_turns = 2
[warm_start.sft]
epochs = 5
batch_size = 16
optimizer = { lr = 1e-2 }

[horizon]
kind = "fixed"
turns = [3]

[rl]
steps = 4
groups_per_step = 6
group_size = 4
minibatches = 2
kl_coef = 0.01
entropy_coef = 0.001
zero_variance = "keep"
optimizer = { lr = 1e-3 }

[eval]
episodes = 8
max_turns = 3

[checkpoint]
every = 1
"""
PATIENT = {
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_niceness": "0",
    "RAY_gcs_rpc_server_connect_timeout_s": "60",
}
"""Settings of Ray for a busy machine."""
CLI = (sys.executable, "-c", "from agentgym_rl.cli import main; main()")
ROLES = {"learner": "LearnerRank", "engine": "EngineReplica", "env_host": "EnvHost"}
ACTORS = ROLES | {"shared_state": "SharedState"}
SCALE = (
    "scale.learners=2",
    "scale.engines=2",
    "scale.env_hosts=2",
    "scale.learner_cpus=1.5",  # both ranks fit the first node only
    "scale.worker_timeout_s=500",
)


@contextlib.contextmanager
def two_nodes() -> Iterator[Any]:
    """Start a cluster whose first node fits all learners and whose second node fits half of the other workers."""
    os.environ.update(PATIENT)
    from ray.cluster_utils import Cluster

    options = {"object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 5, **options})
    try:
        add_node(cluster)
        yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=2, object_store_memory=100 << 20)


def descendants(ancestor: int) -> dict[int, str]:
    """Return the command lines of all descendant processes by pid."""
    parents: dict[int, int] = {}
    titles: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (folder / "stat").read_text(errors="replace")
                if stat.rpartition(")")[2].split()[0] == "Z":
                    continue
                parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
                titles[int(folder.name)] = (folder / "cmdline").read_text(errors="replace").replace("\0", " ")

    def is_descendant(pid: int) -> bool:
        while pid > 1:
            pid = parents.get(pid, 0)
            if pid == ancestor:
                return True
        return False

    return {pid: title for pid, title in titles.items() if is_descendant(pid)}


def workers(role: str) -> list[int]:
    """Return the pids of the actors of `role` among this process's descendants, oldest first."""
    titles = descendants(os.getpid())
    return sorted(pid for pid, title in titles.items() if title.startswith("ray::") and ACTORS[role] in title)


class Command:
    """`agentgym-rl train` in a separate process."""

    def __init__(self, folder: Path, *arguments: str, text: str = SMALL) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        recipe = folder.parent / "small.toml"
        recipe.write_text(text)
        self.folder, self.output = folder, folder.parent / f"{folder.name}.out"
        self.process = self.start(["train", str(recipe), f"run_dir={folder}", *arguments])

    def start(self, arguments: list[str]) -> subprocess.Popen[bytes] | Forked:
        with self.output.open("ab") as output:
            return subprocess.Popen([*CLI, *arguments], stdout=output, stderr=subprocess.STDOUT)

    def wait(self, timeout_s: float = 600.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the run did not end:\n{self.output.read_text()[-3000:]}") from None

    def until(self, condition: Callable[[], bool], timeout_s: float = 600.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            text = self.output.read_text()[-3000:]
            assert self.process.poll() is None, f"the run ended before the condition was true:\n{text}"
            assert time.monotonic() < deadline, f"the condition was never true:\n{text}"
            time.sleep(0.02)

    def until_step(self, step: int) -> None:
        self.until(lambda: steps_of(self.folder)[-1:] >= [step])

    def end(self) -> None:
        """Kill the run if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.wait()


class ForkedCommand(Command):
    """A Command in a forked process, which saves imports that take longer than most of these runs."""

    def start(self, arguments: list[str]) -> subprocess.Popen[bytes] | Forked:
        self.output.touch()
        return Forked(arguments, self.output)


def steps_of(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}\n")]


def events_of(folder: Path) -> list[str]:
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["kind"] for line in lines if line.endswith("}\n")]  # the last line may be incomplete


def duplicates(folder: Path) -> int:
    """Return the number of trajectories that a step played or learned from twice."""
    return sum(duplicates_by_step(folder).values())


def duplicates_by_step(folder: Path) -> dict[int, int]:
    counts: dict[int, int] = {}
    for path in (folder / "trajectories").glob("*.jsonl"):
        ids = [json.loads(line)["id"] for line in path.read_text().splitlines()]
        step = int(path.stem.rpartition("_")[2])
        counts[step] = counts.get(step, 0) + len(ids) - len(set(ids))
    return counts


def tokens(folder: Path) -> dict[str, list[Any]]:
    """Return the ids, tokens and rewards of the episodes of each file, in order."""
    episodes = {}
    for path in sorted((folder / "trajectories").glob("[es][vt]*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        episodes[path.name] = [(r["id"], [m["token_ids"] for m in r["messages"]], r["rewards"]) for r in rows]
    return episodes


def leaked(timeout_s: float = 60.0) -> int:
    """Return the number of worker processes that outlive their run."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = [pid for role in ACTORS for pid in workers(role)]
        if not left or time.monotonic() > deadline:
            return len(left)
        time.sleep(0.2)
