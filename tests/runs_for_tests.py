"""Small training runs in separate processes, and the parts of two runs that can be compared."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import torch
from envs_for_tests import Counting
from processes_for_tests import CONTEXT
from safetensors.torch import load_file

from agentgym_rl.commands.train import train
from agentgym_rl.config import Config, load_config
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.run.console import Console
from agentgym_rl.run.context import RunContext
from agentgym_rl.run.items import Items, all_items
from agentgym_rl.run.log import RunLog, read_metrics
from agentgym_rl.run.stopping import Stop
from agentgym_rl.training.checkpoint import list_checkpoints
from agentgym_rl.types import EnvPool

TINY = """
name = "tiny"
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

[warm_start]
policy = "random"
episodes = 80
max_turns = 2
[warm_start.sft]
epochs = 5
batch_size = 16
optimizer = { lr = 1e-2 }

[horizon]
kind = "stepwise"
turns = [1, 2, 3]
steps_per_stage = 2

[rl]
steps = 6
groups_per_step = 4
group_size = 4
kl_coef = 0.01
entropy_coef = 0.001
zero_variance = "keep"
epochs = 2
minibatches = 2
optimizer = { lr = 1e-3, warmup_steps = 2, decay = "cosine", micro_batch_tokens = 600 }

[eval]
episodes = 8
max_turns = 3
every = 2

[checkpoint]
every = 2
keep = 2
"""
TWO_STEPS = [
    *("model.dtype=float32", "model.chat_template=chatml", "threads=1", "agent.concurrency=4"),
    *("agent.max_new_tokens=16", "agent.max_context=16384", "eval.episodes=2", "eval.max_turns=2", "eval.every=0"),
    *("rl.steps=2", "rl.groups_per_step=2", "rl.group_size=2", "horizon.kind=fixed", "horizon.turns=[2]"),
]
"""Overrides of a recipe for `train_two_steps`."""
CLOCK = ("time", "tokens/sampled_per_s", "system/")
"""Names and name prefixes of metrics that depend on wall time or on the machine."""


def counting_config(**changes: Any) -> Config:
    """Return the config of a two-step run in the counting game of envs_for_tests. `__` in a key stands for a dot."""
    raw: dict[str, Any] = {
        "threads": 1,
        "model": {"scratch": {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2}},
        "environments": [{"name": "counting"}],
        "agent": {"instruction": "", "max_new_tokens": 4, "max_context": 200, "concurrency": 16},
        "warm_start": {
            "policy": "random",
            "episodes": 48,
            "max_turns": 3,
            "sft": {"epochs": 6, "batch_size": 16, "optimizer": {"lr": 1e-2}},
        },
        "horizon": {"kind": "stepwise", "turns": [2, 4], "steps_per_stage": 1},
        "rl": {"steps": 2, "groups_per_step": 4, "group_size": 4, "kl_coef": 0.0, "optimizer": {"lr": 1e-3}},
        "eval": {"episodes": 6, "max_turns": 4},
        "checkpoint": {"every": 1},
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = raw
        for parent in parents:
            node = node[parent]
        node[last] = value
    return Config.model_validate(raw)


def quiet() -> Console:
    return Console(io.StringIO())


def _command_line(arguments: list[str], output: str) -> None:
    from agentgym_rl.cli import main

    sys.stdout = sys.stderr = Path(output).open("w")  # noqa: SIM115 - open until the process ends
    sys.argv = ["agentgym-rl", *arguments]
    main()


class Process:
    """`agentgym-rl <arguments>` in a separate process."""

    def __init__(self, arguments: list[str], output: Path) -> None:
        self.output = output
        self._process = CONTEXT.Process(target=_command_line, args=(arguments, str(output)))
        self._process.start()

    def wait(self, timeout_s: float = 280.0) -> int | None:
        """Return the exit code; a negative code is the signal that killed the process."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def kill_when(self, condition: Callable[[], bool], timeout_s: float = 280.0) -> None:
        """Send SIGKILL as soon as `condition` is true."""
        self._until(condition, timeout_s)
        self._process.kill()
        assert self.wait() == -9

    def stop_when(self, condition: Callable[[], bool], timeout_s: float = 280.0) -> None:
        """Send SIGTERM as soon as `condition` is true."""
        self._until(condition, timeout_s)
        self._process.terminate()
        assert self.wait() == 0, self.output.read_text()

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self._process.is_alive(), (
                f"the process ended before the condition was true:\n{self.output.read_text()}"
            )
            assert time.monotonic() < deadline, "the condition was never true"
            time.sleep(0.0005)


def train_process(folder: Path, *arguments: str) -> Process:
    """Start a run of the tiny recipe in `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    recipe = folder.parent / "tiny.toml"
    recipe.write_text(TINY)
    return Process(["train", str(recipe), f"run_dir={folder}", *arguments], folder.parent / f"{folder.name}.out")


def finish(folder: Path, *arguments: str) -> None:
    process = train_process(folder, *arguments)
    assert process.wait() == 0, process.output.read_text()


def comparable_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without metrics that depend on wall time."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith(CLOCK)} for row in rows]


def comparable_trajectories(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return every episode by file, without its duration."""
    episodes = {}
    for path in sorted((folder / "trajectories").glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        episodes[path.name] = [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
    return episodes


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted((list_checkpoints(folder / "checkpoints")[-1] / "model").glob("*.safetensors"))  # one of each rank
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def assert_same_weights(run: Path, expected: Path) -> None:
    weights, expected_weights = final_weights(run), final_weights(expected)
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)


def assert_same_run(run: Path, expected: Path) -> None:
    """Compare metrics, episodes and weights."""
    assert comparable_metrics(run) == comparable_metrics(expected)
    assert comparable_trajectories(run) == comparable_trajectories(expected)
    assert_same_weights(run, expected)


def trainer_state(folder: Path) -> dict[str, Any]:
    return torch.load(list_checkpoints(folder / "checkpoints")[-1] / "trainer.pt", weights_only=True)


@contextmanager
def context_of(
    config: Config, root: Path, pool: EnvPool | None = None, items: Items | None = None
) -> Iterator[RunContext]:
    """Yield the context of a run in `root` that shows nothing; without `items` none are known."""
    with RunLog.create(root, config.resolved()) as log:
        yield RunContext(
            config=config,
            pool=pool,  # type: ignore[arg-type]
            items=items or Items({}, {}),
            log=log,
            console=quiet(),
            stop=Stop(),
            started=time.monotonic(),
        )


@asynccontextmanager
async def context_with_items(config: Config, root: Path, pool: EnvPool) -> AsyncIterator[RunContext]:
    """Yield a `context_of` that knows the items of the environments in `pool`, and close the pool."""
    try:
        with context_of(config, root, pool, await all_items(pool, config.environments)) as context:
            yield context
    finally:
        await pool.close()


async def train_counting(config: Config, folder: Path, **options: Any) -> dict[str, Any]:
    """Train in the counting game; return the run's summary."""
    pool = LocalPool({"counting": Counting})
    try:
        return await train(config, folder, **{"console": quiet(), "pool": pool, **options})
    finally:
        assert pool.num_open == 0
        await pool.close()


async def train_two_steps(recipe: Path, model: Path, run: Path, *overrides: str) -> list[dict[str, Any]]:
    """Train two short steps by a recipe with a tiny model; return their metrics. No episode may fail."""
    config = load_config(recipe, [*TWO_STEPS, f"model.path={model}", *overrides])
    summary = await train(config, run)
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["episodes/error"] == 0 and row["turns/mean"] > 1 for row in rows)
    assert summary["after"]["episodes"] == 2
    return rows
