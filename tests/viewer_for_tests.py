"""Run directories for the viewer's tests, written by the real writers from real episodes, and a running viewer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from servers_for_tests import wait_until

from agentgym_rl.agent.policy import OraclePolicy, RandomPolicy
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.commands.view import ViewerEnvironments
from agentgym_rl.environment.envs.maze import Maze
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.environment.server import bind
from agentgym_rl.run.log import RunLog
from agentgym_rl.types import Limits, Sample, Task, Trajectory
from agentgym_rl.viewer.index import Index
from agentgym_rl.viewer.library import Library
from agentgym_rl.viewer.server import create_app, uvicorn_config

Value = TypeVar("Value")
WORDS = ["<|start|>", "<|end|>", "up", "down", "left", "right", "maze", "wall", "goal"]
STEPS, GROUPS, GROUP_SIZE = 3, 2, 4
CONFIG = {"name": "small", "environments": [{"name": "maze"}], "agent": {"style": "act"}}


def run(coroutine: Coroutine[Any, Any, Value]) -> Value:
    """Run a coroutine in another thread, because Playwright's synchronous API runs an event loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def played(env: str, items: list[int], policy: str, max_turns: int, name: str) -> list[Trajectory]:
    """Play episodes of an environment with the oracle or the random policy."""

    async def play() -> list[Trajectory]:
        pool = LocalPool({"maze": Maze})
        trajectories = []
        for number, item in enumerate(items):
            session = await pool.open(env)
            player = OraclePolicy(session) if policy == "oracle" else RandomPolicy(session, number)
            limits = Limits(max_turns, 8, 4096)
            group, member = list(dict.fromkeys(items)).index(item), items[:number].count(item)
            trajectories.append(
                await rollout(Task(env, item), session, player, limits, id=f"{name}-{group}-{member}-0")
            )
            await session.close()
        await pool.close()
        return trajectories

    return run(play())


def with_tokens(trajectory: Trajectory, source: random.Random) -> Trajectory:
    """Add token ids, and log-probabilities to the replies."""
    for message in trajectory.messages:
        message.token_ids = [0, *source.choices(range(2, len(WORDS)), k=4), 1]
        if message.role == "assistant":
            message.logprobs = [-source.expovariate(1.0) for _ in message.token_ids]
            message.version = 1
    return trajectory


def write_run(root: Path, *, finished: bool = True) -> Path:
    """Write a run of three steps in the maze with evaluations, learner data, a doctor warning and a tokenizer."""
    source = random.Random(0)
    log = RunLog.create(root, CONFIG)
    for step in range(STEPS + 1):
        for trajectory in played("maze", [0, 1, 2, 3], "oracle" if step else "random", 30, f"eval{step}"):
            log.write_trajectory(step, trajectory, "eval")
        if step == 0:
            continue
        items = [item for item in range(10 * step, 10 * step + GROUPS) for _ in range(GROUP_SIZE)]
        episodes = played("maze", items, "random", 4 + step, f"train-{step}")
        episodes[0] = played("maze", items[:1], "oracle", 30, f"train-{step}")[0]
        for trajectory in episodes:
            log.write_trajectory(step, with_tokens(trajectory, source))
        if step > 1:
            log.write_learned(step, [_sample(t) for t in episodes])
        metrics = {"success/mean": 0.1 * step, "reward/mean": 0.1 * step, "turns/mean": 3.0, "entropy/mean": 1.0 / step}
        log.log(step, {**metrics, "horizon/maze": 4 + step, "kl/reference": 0.01, "tokens/sampled_per_s": 900.0})
    (root / "doctor.jsonl").write_text('{"step": 2, "rule": "entropy_collapse", "message": "entropy fell to 0.5"}\n')
    model = root / "checkpoints" / "step_000003" / "model"
    model.mkdir(parents=True)
    added = [{"id": number, "content": WORDS[number]} for number in range(2)]
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = {"model": {"type": "WordLevel", "vocab": vocabulary}, "added_tokens": added}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    if finished:
        log.set_status("finished", step=STEPS, steps=STEPS)
    log.close()
    return root


def write_episodes(root: Path, episodes: Iterable[Trajectory], *metrics: dict[str, float | str]) -> None:
    """Write a run of one environment with its episodes in step 1, and one line of metrics a step."""
    episodes = list(episodes)
    environments = [{"name": episodes[0].task.env}]
    log = RunLog.create(root, {"name": root.name, "environments": environments, "agent": {"style": "act"}})
    for trajectory in episodes:
        log.write_trajectory(1, trajectory)
    for step, row in enumerate(metrics, 1):
        log.log(step, row)
    log.close()


def _sample(trajectory: Trajectory) -> Sample:
    count = sum(trajectory.loss_mask)
    return Sample(
        trajectory.token_ids,
        trajectory.loss_mask,
        advantages=[trajectory.reward - 0.5] * count,
        entropies=[0.7] * count,
        old_logprobs=[-1.0] * count,
        trajectory_id=trajectory.id,
    )


def write_evaluation(root: Path) -> Path:
    """Write an evaluation of the oracle at two horizons, in the format of `agentgym-rl eval`."""

    def cell(value: float) -> dict[str, object]:
        rate = {"value": value, "low": value / 2, "high": 1.0}
        counts = {"items": 4, "episodes": 4, "errors": 0, "unplayed": 0}
        return {**counts, "success": rate, "reward": rate, "turns": 5.0, "sampled_tokens": None, "cost_usd": None}

    def result(turns: int, value: float) -> dict[str, object]:
        tasks = {"Maze/small": cell(value), "Maze/large": cell(value / 2)}
        total = {"items": 4, "episodes": 4, "errors": 0, "unplayed": 0, "cost_usd": None}
        return {"max_turns": turns, "tasks": tasks, "scenarios": {"Maze": cell(value)}, "overall": None, "total": total}

    plans = [{"scenario": "Maze", "name": n, "env": "maze", "subset": None, "style": "act"} for n in ("small", "large")]
    (root / "trajectories").mkdir(parents=True)
    row = {"format": 1, "state": "finished", "config": {"agent": {"name": "the oracle"}, "tasks": plans}}
    (root / "eval.json").write_text(json.dumps({**row, "results": [result(4, 0.25), result(30, 0.75)]}))
    lines = []
    for trajectory in played("maze", [0, 1, 2, 3], "oracle", 30, "x"):
        trajectory.id = f"maze-{trajectory.task.item}-sample0-attempt0"
        lines.append(f'{{"step": 0, "kind": "eval", "sample": 0, "attempt": 0, {trajectory.to_json()[1:]}\n')
    (root / "trajectories" / "maze.jsonl").write_text("".join(lines))
    return root


def library_of(root: Path, cache: Path) -> Library:
    """Return a library with its own index, up to date."""
    library = Library([root], ViewerEnvironments(), Index(cache / "index.sqlite3"))
    library.indexer.update()
    return library


@contextlib.contextmanager
def viewer_in_thread(library: Library, *, token: str | None = None, loopback: bool = True) -> Iterator[str]:
    """Run the viewer on a free loopback port. Yield its address."""
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn_config(create_app(library, token=token, loopback=loopback)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(60)
        library.close()
        assert not thread.is_alive(), "the viewer did not shut down within 60 s"


def wait_for_index(library: Library, episodes: int, run: str) -> None:
    """Wait until the viewer has indexed this many episodes of a run."""
    deadline = time.monotonic() + 60
    while library.queries.counts(library.run_folder(run).path)["episodes"] != episodes:
        assert time.monotonic() < deadline, "the index is not up to date after 60 s"
        time.sleep(0.02)
