"""Load-test one environment server: 2,000 concurrent sessions, 20,000 episodes in a run, a soak, and a cost curve.

    python benchmarks/load.py [--sessions 2000] [--episodes 20000] [--soak-s 600] [--train-s 300] [--out FOLDER]

The server is a separate process on loopback with TextCraft and BabyAI. This process plays through RemotePool and
Collector, as training does, and writes every trajectory to a run directory. Replies come from a list, so the test
measures environments and HTTP, not a model. Both processes share the machine. `--train-s` also runs `agentgym-rl
train` with a tiny model on the same server, with checkpoints and evaluations, and watches that process.

Exits with code 1 if a session is refused, answers for another or stays open, or if the memory (Theil-Sen slope after
the first quarter of the run), open files or threads of a process grow. `--out` gets load.json and load.png.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
from environment import Solution, gold_solutions, start_server

from agentgym_rl.agent.collect import Collector
from agentgym_rl.agent.policy import Policy, ScriptedPolicy
from agentgym_rl.environment import catalog
from agentgym_rl.environment.client import EnvClient
from agentgym_rl.environment.open_files import allow_open_files
from agentgym_rl.environment.pool import LocalPool, RemotePool
from agentgym_rl.errors import EnvError
from agentgym_rl.run.log import RunLog
from agentgym_rl.types import EnvSession, Limits, StopReason, Task

SERVER = "import sys; from agentgym_rl.environment.server import serve; serve(sys.argv[2:], port=int(sys.argv[1]))"
REPLIES = {
    "textcraft": ("inventory", "get 1 oak log", "get 2 stick", "craft 1 torch using 1 stick"),
    "babyai": ("turn left", "move forward", "turn right", "toggle"),
}
CURVE_SESSIONS = (1, 8, 64, 256, 512, 1024, 2000)
TURNS_PER_EPISODE = 3
"""Turns of an episode in the run and the soak."""
TRAIN_PROGRAM = "from agentgym_rl.cli import main; main()"
EPISODES_PER_STEP = 64
"""Episodes of a training step of RECIPE."""
MAX_BYTES_PER_STEP = 8 << 10
"""Bytes that a run may keep per step: file names, evaluations, caches that are not full yet. It keeps about 2 KB."""
SMALL_CACHE = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
"""PyTorch's CPU kernels cache 1,024 prepared shapes (17 MB). Steps differ in their shapes, so the cache takes 85 steps
to fill and looks like growth until then. A cache of 32 fills at once."""
RECIPE = """
name = "load"
threads = 1

[model]
device = "cpu"
scratch = { hidden_size = 32, intermediate_size = 64, num_layers = 2, num_heads = 2 }

[[environments]]
name = "babyai"
subsets = ["GoToRedBallNoDists"]

[agent]
instruction = ""
max_new_tokens = 6
max_context = 512

[warm_start]
policy = "random"
episodes = 80
max_turns = 2
sft = { epochs = 5, batch_size = 16, optimizer = { lr = 1e-2 } }

[horizon]
kind = "fixed"
turns = [3]

[rl]
steps = 1000000
groups_per_step = 8
group_size = 8

[eval]
every = 20
episodes = 16
max_turns = 3

[checkpoint]
every = 10
"""
WARM_UP_SHARE = 0.25
"""Share of a run after which memory may no longer grow."""
MAX_GROWTH_BYTES = 4 << 20
MAX_BYTES_PER_EPISODE = 64
"""The larger of both limits applies: allocator noise in a short run, a fraction of a trajectory in a long one."""


class LoadError(Exception):
    """A requirement of the load test does not hold."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of one process at one moment, from /proc."""

    memory_bytes: int
    open_files: int
    threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Usage of both processes between two steps, when no session is open."""

    episodes: int
    seconds: float
    player: Usage
    server: Usage


def usage(pid: int) -> Usage:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    # Anonymous memory, because file pages depend on the machine's other work.
    return Usage(1024 * int(fields["RssAnon"].split()[0]), len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"]))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the Theil-Sen slope: the median of the slopes between all pairs, robust to single jumps."""
    thinned = points[:: max(1, len(points) // 200)]
    pairs = [(y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(thinned) for x2, y2 in thinned[i + 1 :] if x2 > x1]
    return statistics.median(pairs)


def check_growth(
    samples: Sequence[Sample], per_episode: int = MAX_BYTES_PER_EPISODE
) -> tuple[dict[str, float], list[str]]:
    """Return (bytes per episode by process, problems) after the warm-up."""
    last = samples[-1].episodes
    steady = [sample for sample in samples if sample.episodes >= WARM_UP_SHARE * last]
    if len(steady) < 8:
        raise LoadError(f"at least 8 samples after the warm-up are needed, got {len(steady)}: play more episodes")
    span = last - steady[0].episodes
    allowed = max(MAX_GROWTH_BYTES, per_episode * span)
    slopes, problems = {}, []
    for name in ("player", "server"):
        usages: list[Usage] = [getattr(sample, name) for sample in steady]
        slopes[name] = slope([(s.episodes, u.memory_bytes) for s, u in zip(steady, usages, strict=True)])
        if slopes[name] * span > allowed:
            problems.append(
                f"the {name}'s memory grows by {slopes[name]:.0f} bytes per episode, "
                f"{slopes[name] * span / 2**20:.1f} MiB in {span} episodes; {allowed / 2**20:.1f} MiB are allowed"
            )
        problems += [
            f"the {name} had {first} {resource} after the warm-up and {end} at the end"
            for resource in ("open_files", "threads")
            if (end := getattr(usages[-1], resource)) > (first := getattr(usages[0], resource))
        ]
    return slopes, problems


class Server:
    """A server process of TextCraft and BabyAI, and its URLs."""

    def __init__(self, port: int) -> None:
        self.urls = {env: f"http://127.0.0.1:{port}/{env}" for env in REPLIES}
        self.pid = _find_server(port)

    def pool(self, max_sessions: int) -> RemotePool:
        return RemotePool(self.urls, max_sessions=max_sessions, timeout_s=300.0)

    async def health(self) -> dict[str, Any]:
        async with EnvClient(self.urls["textcraft"]) as client:
            return await client.health()


def _find_server(port: int) -> int:
    """Return the pid of the child process that serves `port`."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().split(b"\0")
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid() and str(port).encode() in command:
                return int(entry.name)
    raise LoadError(f"no child of this process serves port {port}")


def items_of(env: str) -> list[int]:
    """Return items of one easy subset, so that an episode's cost is HTTP and not the generation of a level."""
    subset = {"textcraft": "depth1", "babyai": "GoToRedBallGrey"}[env]
    return list(catalog.items(catalog.load(env), "train", subset)[:256])


# 2,000 concurrent sessions.


async def hold_sessions(server: Server, num_sessions: int) -> dict[str, Any]:
    """Open all sessions together. Each must return its own item's observation and answer a step."""
    before = usage(server.pid)
    names = list(REPLIES)
    items = {env: items_of(env) for env in names}
    local = LocalPool({env: catalog.load(env) for env in names})
    expected = {}
    for env in names:
        session = await local.open(env)
        for item in items[env]:
            expected[env, item] = (await session.reset(item)).observation
        await session.close()
    tasks = []
    for number in range(num_sessions):
        env = names[number % len(names)]
        tasks.append((env, items[env][number // len(names) % len(items[env])]))
    pool = server.pool(num_sessions)
    started = time.perf_counter()
    sessions = await asyncio.gather(*(pool.open(env) for env, _ in tasks))
    opened_s = time.perf_counter() - started
    started = time.perf_counter()
    first = await asyncio.gather(*(s.reset(item) for s, (_, item) in zip(sessions, tasks, strict=True)))
    reset_s = time.perf_counter() - started
    wrong = sum(step.observation != expected[task] for step, task in zip(first, tasks, strict=True))
    started = time.perf_counter()
    await asyncio.gather(*(s.step(REPLIES[env][0]) for s, (env, _) in zip(sessions, tasks, strict=True)))
    step_s = time.perf_counter() - started
    during, num_open = usage(server.pid), (await server.health())["sessions"]
    await pool.close()
    left = (await server.health())["sessions"]
    if num_open != num_sessions or wrong or left:
        raise LoadError(
            f"of {num_sessions} sessions {num_open} were open at once, {wrong} answered for another item, "
            f"{left} remained open"
        )
    return {
        "sessions": num_sessions,
        "open_s": opened_s,
        "reset_s": reset_s,
        "step_s": step_s,
        "open_files": during.open_files,
        "kib_per_session": (during.memory_bytes - before.memory_bytes) / num_sessions / 1024,
    }


# 20,000 episodes in one run, and the soak.


def script(session: EnvSession, seed: int) -> Policy:
    replies = REPLIES[session.name]
    return ScriptedPolicy(
        (replies[(seed + turn) % len(replies)] for turn in range(TURNS_PER_EPISODE)), session.instruction
    )


async def play(
    server: Server,
    log: RunLog,
    *,
    concurrency: int,
    group_size: int,
    until: Callable[[int, float], bool],
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Play steps of `concurrency` episodes until `until(episodes, seconds)` returns true."""
    before = usage(os.getpid()), usage(server.pid)
    pool = server.pool(concurrency)
    limits = Limits(max_turns=TURNS_PER_EPISODE, max_new_tokens=64, max_context=4096)
    share = concurrency // len(REPLIES)
    collectors = {env: Collector(pool, script, group_size, share) for env in REPLIES}
    items = {env: items_of(env) for env in REPLIES}
    samples: list[Sample] = []
    started, step, episodes = time.perf_counter(), 0, 0
    while True:
        step += 1
        tasks = {
            env: [Task(env, items[env][(step + i) % len(items[env])]) for i in range(share // group_size)]
            for env in REPLIES
        }
        groups = await asyncio.gather(*(collectors[env](tasks[env], limits, step) for env in REPLIES))
        played = [t for env_groups in groups for group in env_groups for t in group.trajectories]
        errors = [t.error for t in played if t.stop is StopReason.ERROR]
        if errors:
            raise LoadError(f"step {step}: {len(errors)} of {len(played)} episodes failed, the first: {errors[0]}")
        for trajectory in played:
            log.write_trajectory(step, trajectory)
        episodes += len(played)
        seconds = time.perf_counter() - started
        log.log(step, {"episodes": episodes, "episodes_per_s": episodes / seconds})
        del groups, played
        left = (await server.health())["sessions"]
        if left or pool.num_open:
            raise LoadError(f"after step {step} {left} sessions of the server and {pool.num_open} of the pool are open")
        samples.append(Sample(episodes, seconds, usage(os.getpid()), usage(server.pid)))
        if step % 50 == 0:
            say(f"    {episodes} episodes in {seconds:.0f} s")
        if until(episodes, seconds):
            break
    slopes, problems = check_growth(samples)
    await pool.close()
    await _check_open_files(before, server, problems)
    if problems:
        raise LoadError("; ".join(problems))
    first, last = next(s for s in samples if s.episodes >= WARM_UP_SHARE * episodes), samples[-1]
    return {
        "episodes": episodes,
        "seconds": seconds,
        "steps": step,
        "concurrency": concurrency,
        "episodes_per_s": episodes / seconds,
        "bytes_per_episode": slopes,
        "after_warm_up": {"player": asdict(first.player), "server": asdict(first.server)},
        "at_the_end": {"player": asdict(last.player), "server": asdict(last.server)},
    }


async def _check_open_files(before: tuple[Usage, Usage], server: Server, problems: list[str]) -> None:
    """Add a problem if a process has more open files than before 10 s after the pool was closed."""
    deadline = time.monotonic() + 10
    while True:
        after = usage(os.getpid()), usage(server.pid)
        left = [a.open_files - b.open_files for a, b in zip(after, before, strict=True)]
        if not any(n > 0 for n in left):
            return
        if time.monotonic() > deadline:
            problems.append(f"{left[0]} files of the player and {left[1]} of the server remain open")
            return
        await asyncio.sleep(0.1)


# A real training run with a tiny model.


def train(server: Server, folder: Path, seconds: float) -> dict[str, Any]:
    """Train for `seconds`. A sample is the minimum of the polls during a step, because usage varies within a step."""
    (folder / "load.toml").write_text(RECIPE)
    run = folder / "train"
    arguments = [str(folder / "load.toml"), f"run_dir={run}", f"environments.0.url={server.urls['babyai']}"]
    with (folder / "train.out").open("wb") as output:
        driver = subprocess.Popen(
            [sys.executable, "-c", TRAIN_PROGRAM, "train", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | SMALL_CACHE,
        )
    samples: list[Sample] = []
    polls: list[tuple[Usage, Usage]] = []
    started, num_steps = 0.0, 0
    try:
        while not started or time.perf_counter() - started < seconds:
            time.sleep(0.05)
            if driver.poll() is not None:
                raise LoadError(
                    f"train ended with code {driver.returncode}: {(folder / 'train.out').read_text()[-2000:]}"
                )
            lines = (run / "metrics.jsonl").read_bytes().count(b"\n") if (run / "metrics.jsonl").exists() else 0
            if not lines:
                continue
            started = started or time.perf_counter()
            polls.append((usage(driver.pid), usage(server.pid)))
            if lines > num_steps:
                num_steps = lines
                players, servers = zip(*polls, strict=True)
                now = time.perf_counter() - started
                samples.append(Sample(EPISODES_PER_STEP * lines, now, _minimum(players), _minimum(servers)))
                polls.clear()
        driver.send_signal(signal.SIGTERM)
        if driver.wait(300):
            raise LoadError(f"train did not stop cleanly: {(folder / 'train.out').read_text()[-2000:]}")
    finally:
        driver.kill()
        driver.wait()
    slopes, problems = check_growth(samples, MAX_BYTES_PER_STEP // EPISODES_PER_STEP)
    if problems:
        raise LoadError("train: " + "; ".join(problems).replace("player", "driver"))
    last = samples[-1]
    return {
        "episodes": last.episodes,
        "seconds": last.seconds,
        "episodes_per_s": last.episodes / last.seconds,
        "steps": num_steps,
        "bytes_per_episode": slopes,
        "at_the_end": {"player": asdict(last.player), "server": asdict(last.server)},
    }


def _minimum(usages: Sequence[Usage]) -> Usage:
    return Usage(*(min(getattr(u, name) for u in usages) for name in ("memory_bytes", "open_files", "threads")))


# Episodes per second against sessions.


@dataclass(slots=True)
class Point:
    """One point of the curve."""

    sessions: int
    episodes_per_s: float
    steps_per_s: float
    p50_ms: float
    p99_ms: float
    server_cpu_ms: float
    """CPU time of the server per episode. One core could serve 1000 / this episodes per second."""
    player_cpu_ms: float


async def measure_point(server: Server, solutions: list[Solution], num_sessions: int, seconds: float) -> Point:
    """Replay TextCraft's gold solutions on `num_sessions` concurrent sessions and return the rates."""
    pool = server.pool(num_sessions)
    sessions = await asyncio.gather(*(pool.open("textcraft") for _ in range(num_sessions)))
    answers: list[tuple[float, float]] = []
    finished: list[float] = []

    def is_over() -> bool:
        # The first episode of each session is the warm-up. Then at least two more each, and `seconds`.
        if len(finished) < 3 * num_sessions:
            return False
        return time.perf_counter() - finished[num_sessions] >= seconds

    async def player(session: EnvSession, turn: int) -> None:
        while not is_over():
            item, actions = solutions[turn % len(solutions)]
            turn += 1
            await session.reset(item)
            for action in actions:
                started = time.perf_counter()
                await session.step(action)
                answers.append((time.perf_counter(), time.perf_counter() - started))
            finished.append(time.perf_counter())

    before = cpu_seconds(os.getpid()), cpu_seconds(server.pid)
    await asyncio.gather(*(player(session, i) for i, session in enumerate(sessions)))
    after = cpu_seconds(os.getpid()), cpu_seconds(server.pid)
    player_ms, server_ms = (1e3 * (b - a) / len(finished) for a, b in zip(before, after, strict=True))
    await pool.close()
    # Until the first session ends its last episode: afterwards fewer sessions are active.
    begin, end = finished[num_sessions], finished[-num_sessions]
    measured = sorted(latency for at, latency in answers if begin < at <= end)
    episodes = sum(begin < at <= end for at in finished)
    p50, p99 = measured[len(measured) // 2], measured[int(0.99 * len(measured))]
    window = end - begin
    rates = episodes / window, len(measured) / window
    return Point(num_sessions, *rates, 1e3 * p50, 1e3 * p99, server_ms, player_ms)


async def curve(options: argparse.Namespace, server: Server, say: Callable[[str], None]) -> list[Point]:
    """Return the best of several sweeps, because other work on the machine only slows a sweep down."""
    solutions = gold_solutions(catalog.load("textcraft"))
    best: dict[int, Point] = {}
    for _ in range(options.repeats):
        for sessions in options.curve:
            point = await measure_point(server, solutions, sessions, options.seconds)
            if sessions not in best or point.episodes_per_s > best[sessions].episodes_per_s:
                best[sessions] = point
    say(
        f"{'sessions':>10}{'episodes/s':>12}{'steps/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'server ms':>11}{'player ms':>11}"
    )
    for p in best.values():
        say(
            f"{p.sessions:10}{p.episodes_per_s:12,.0f}{p.steps_per_s:10,.0f}{p.p50_ms:9.2f}{p.p99_ms:9.2f}"
            f"{p.server_cpu_ms:11.2f}{p.player_cpu_ms:11.2f}"
        )
    return list(best.values())


def draw(points: Sequence[Point], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.2), dpi=150, facecolor="white")
    axes = figure.subplots()
    sessions = [p.sessions for p in points]
    axes.plot(sessions, [p.episodes_per_s for p in points], "o-", color="#0f766e", label="measured")
    bound = [1000 / p.server_cpu_ms for p in points]
    axes.plot(sessions, bound, "o:", color="#7b8794", label="one core for the server alone")
    axes.legend(loc="lower right", frameon=False)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sessions, [str(n) for n in sessions])
    axes.set_xlabel("concurrent sessions on one server")
    axes.set_ylabel("episodes per second", color="#0f766e")
    axes.set_ylim(bottom=0)
    axes.grid(color="#e4e7eb")
    latency_axes = axes.twinx()
    latency_axes.plot(sessions, [p.p50_ms for p in points], "s--", color="#c2410c", label="step, p50")
    latency_axes.plot(sessions, [p.p99_ms for p in points], "^:", color="#c2410c", label="step, p99")
    latency_axes.set_yscale("log")
    latency_axes.set_ylabel("milliseconds per step", color="#c2410c")
    latency_axes.legend(loc="upper left", frameon=False)
    axes.set_title("TextCraft over HTTP: throughput and latency by sessions", loc="left", fontsize=11)
    figure.tight_layout()
    figure.savefig(path)


async def measure(options: argparse.Namespace, server: Server, say: Callable[[str], None]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    held = results["sessions"] = await hold_sessions(server, options.sessions)
    say(
        f"{held['sessions']} concurrent sessions: opened in {held['open_s']:.1f} s, reset in {held['reset_s']:.1f} s, "
        f"one step each in {held['step_s']:.2f} s; {held['kib_per_session']:.0f} KiB per session, "
        f"{held['open_files']} open files in the server; no session refused, mixed up or left open"
    )
    if options.curve:
        results["curve"] = [asdict(p) for p in await curve(options, server, say)]
    parts: dict[str, Callable[[int, float], bool]] = {"run": lambda episodes, _: episodes >= options.episodes}
    if options.soak_s:
        parts["soak"] = lambda _, seconds: seconds >= options.soak_s
    for name, until in parts.items():
        with (
            tempfile.TemporaryDirectory() as folder,
            RunLog.create(Path(folder) / name, {"name": name}) as log,
        ):
            part = results[name] = await play(
                server, log, concurrency=options.concurrency, group_size=options.group_size, until=until, say=say
            )
        say(f"{name}: {_summary(part)}")
    if options.train_s:
        with tempfile.TemporaryDirectory() as folder:
            results["train"] = await asyncio.to_thread(train, server, Path(folder), options.train_s)
        if left := (await server.health())["sessions"]:
            raise LoadError(f"{left} sessions of the server are open after train was stopped")
        say(f"train: {_summary(results['train'])}, {results['train']['steps']} steps")
    return results


def _summary(part: dict[str, Any]) -> str:
    end = part["at_the_end"]
    return f"{part['episodes']} episodes in {part['seconds']:.0f} s ({part['episodes_per_s']:.0f}/s); " + "; ".join(
        f"{name} {end[name]['memory_bytes'] / 2**20:.0f} MiB, {part['bytes_per_episode'][name]:+.1f} bytes per "
        f"episode, {end[name]['open_files']} files, {end[name]['threads']} threads"
        for name in ("player", "server")
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=2000, help="concurrent sessions")
    parser.add_argument("--episodes", type=int, default=20_000, help="episodes of the run")
    parser.add_argument("--concurrency", type=int, default=256, help="parallel episodes in run and soak")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--soak-s", type=float, default=0.0, help="seconds of the soak; 0 skips it")
    parser.add_argument("--train-s", type=float, default=0.0, help="seconds of a training run; 0 skips it")
    parser.add_argument(
        "--curve", type=int, nargs="*", default=CURVE_SESSIONS, help="numbers of sessions; none skips it"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="measured seconds of each point of the curve")
    parser.add_argument("--repeats", type=int, default=3, help="sweeps of the curve; each point's best counts")
    parser.add_argument("--out", type=Path, help="folder for load.json and load.png")
    options = parser.parse_args(arguments)
    if options.concurrency % (len(REPLIES) * options.group_size):
        parser.error(f"--concurrency must be a multiple of {len(REPLIES) * options.group_size}")
    allow_open_files(max([options.sessions, options.concurrency, *options.curve]))

    def say(line: str) -> None:
        print(line, flush=True)

    say(f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before")
    try:
        with start_server(SERVER, *REPLIES) as port:
            results = uvloop.run(measure(options, Server(port), say))
    except (LoadError, EnvError) as error:
        say(f"FAILED: {error}")
        return 1
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        machine = {"machine": platform.machine(), "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
        (options.out / "load.json").write_text(json.dumps(machine | results, indent=2) + "\n")
        if "curve" in results:
            draw([Point(**p) for p in results["curve"]], options.out / "load.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
