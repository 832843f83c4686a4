"""Part step: whole RL steps on TextCraft, GRPO on a real chat model, after a short imitation.

32 tasks of depth 1 and 2, 8 episodes each, 8 turns of at most 48 tokens. A few updates of imitating the oracle make the
model play as in training, with short replies and some successes. The peers start from the same model.
The timed part is `train_rl` with its own workers: episodes in this process, advantages, the update and the engine's new
weights, without writes to disk. One more step under torch's profiler, which is not counted, measures how long the
device was busy. A separate clock measures the environments.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Report, part_parser

from agentgym_rl.commands.train import train
from agentgym_rl.config import Config
from agentgym_rl.environment.envs.textcraft.env import TextCraft
from agentgym_rl.run.backend import LocalBackend
from agentgym_rl.run.collectors import limits_of
from agentgym_rl.run.environments_pool import EnvironmentsPool
from agentgym_rl.run.items import all_items
from agentgym_rl.run.load_model import choose_device
from agentgym_rl.training.horizon import make_horizon
from agentgym_rl.training.model import load_model
from agentgym_rl.training.rl import Hooks, RLState, train_rl
from agentgym_rl.training.task_source import TaskSource

SUBSETS = ["depth1", "depth2"]
SIZES = {"groups": 32, "group_size": 8, "turns": 8, "max_new_tokens": 48, "max_context": 2048}
TINY_SIZES = {"groups": 2, "group_size": 2, "turns": 2, "max_new_tokens": 12, "max_context": 1024}
INSTRUCTION = "You play a crafting game. Reply with one command: get N ITEM, craft N ITEM using N ITEM, or inventory."


def config_of(model: dict[str, Any], sizes: dict[str, int], device: str, **sections: Any) -> Config:
    raw = {
        "name": "gpu-step",
        "model": {**model, "device": device, "dtype": "bfloat16" if device == "cuda" else "float32"},
        "environments": [{"name": "textcraft", "subsets": SUBSETS}],
        "agent": {
            "instruction": INSTRUCTION,
            "max_new_tokens": sizes["max_new_tokens"],
            "max_context": sizes["max_context"],
            "concurrency": sizes["groups"] * sizes["group_size"],
        },
        "horizon": {"kind": "fixed", "turns": [sizes["turns"]]},
        **sections,
    }
    return Config.model_validate(raw)


def imitate_oracle(model: dict[str, Any], sizes: dict[str, int], device: str, folder: Path) -> Path:
    """Train `model` by a short imitation of the oracle and return the folder of the model."""
    tiny = sizes is TINY_SIZES
    imitation = {"epochs": 30 if "scratch" in model else 2, "batch_size": 4 if tiny else 32}
    config = config_of(
        model,
        sizes,
        device,
        rl={"steps": 0, "kl_coef": 0.0},
        warm_start={
            "policy": "oracle",
            "episodes": 8 if tiny else 280,
            "max_turns": 8,
            "sft": {**imitation, "optimizer": {"lr": 1e-2 if "scratch" in model else 1e-4, "warmup_steps": 4}},
        },
        eval={"episodes": 4 if tiny else 128, "max_turns": sizes["turns"]},
    )
    asyncio.run(train(config, folder))
    return folder / "checkpoints" / "step_000000" / "model"


class Clock:
    """Seconds spent in a function, by step."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.by_step: list[float] = []

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - started

        return timed

    def end_step(self) -> None:
        self.by_step.append(self.seconds)
        self.seconds = 0.0


def busy_seconds(recorded: torch.profiler.profile, rollout_s: float) -> tuple[float, float]:
    """Return the seconds of the device's kernels and copies in a step: during the episodes, and afterwards."""
    events = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    begin = min(event.time_range.start for event in events)
    playing = sum(e.time_range.elapsed_us() for e in events if e.time_range.start - begin < 1e6 * rollout_s)
    return playing / 1e6, sum(e.time_range.elapsed_us() for e in events) / 1e6 - playing / 1e6


def rl_steps(
    model_dir: Path, sizes: dict[str, int], device: str, steps: int
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the metrics of each step, and the split of one more, profiled step that is not among them."""
    config = config_of(
        {"path": str(model_dir)},
        sizes,
        device,
        rl={
            "steps": steps + 1,
            "groups_per_step": sizes["groups"],
            "group_size": sizes["group_size"],
            "kl_coef": 0.0,
            "zero_variance": "keep",  # as the peer, which learns from every episode
            "optimizer": {"lr": 1e-6, "micro_batch_tokens": 65536},
        },
    )
    rows: list[dict[str, Any]] = []
    environments = Clock()
    for name in ("reset", "step"):
        setattr(TextCraft, name, environments.around(getattr(TextCraft, name)))
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) if device == "cuda" else None

    async def run() -> None:
        pool = EnvironmentsPool(config.environments, config.agent)
        items = await all_items(pool, config.environments)
        numbers = {env: [i for items in subsets.values() for i in items] for env, subsets in items.train.items()}
        model, tokenizer = load_model(str(model_dir), device=device, dtype=choose_device(config.model)[1])
        workers = LocalBackend(config, pool, model, tokenizer, model_dir)
        state = RLState(TaskSource(numbers, 0, {"textcraft": 1.0}), {"textcraft": make_horizon(config.horizon)})

        async def after_step(step: int) -> None:
            environments.end_step()
            if profiler is not None and step == steps:
                profiler.start()

        hooks = Hooks(
            lambda *_: None, lambda *_: None, lambda _, metrics: rows.append(metrics), after_step, workers.learning
        )
        limits = {"textcraft": limits_of(config.agent, 1, workers.max_context)}
        collect = workers.collector("bench-", None, 1.0)
        await train_rl(state, workers.learner, collect, workers.publish, limits, config.rl, hooks, 0)
        if profiler is not None:
            torch.cuda.synchronize()
            profiler.stop()
        await workers.close()
        await pool.close()

    asyncio.run(run())
    split = {"environments_s": statistics.median(environments.by_step[min(2, steps - 1) : steps])}
    if profiler is not None:
        busy = busy_seconds(profiler, float(rows[-1]["time/rollout_s"]))
        split |= {"kernels_playing_s": busy[0], "kernels_learning_s": busy[1], "profiled_s": rows[-1]["time/step_s"]}
    return rows[:steps], split


def main() -> None:
    parser = part_parser(__doc__)
    parser.add_argument("--model-folder", help="Hugging Face folder of a chat model; default: a tiny new one")
    parser.add_argument("--tiny", action="store_true", help="few and short episodes")
    parser.add_argument("--work", type=Path, required=True, help="folder for output")
    parser.add_argument("--steps", type=int, default=6, help="the first two are not counted")
    options = parser.parse_args()
    sizes = TINY_SIZES if options.tiny else SIZES
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2}
    model = {"path": options.model_folder} if options.model_folder else {"scratch": shape}
    model_dir = imitate_oracle(model, sizes, options.device, options.work / "teach")
    summary = json.loads((options.work / "teach" / "summary.json").read_text())
    settings = {"folder": str(model_dir), "instruction": INSTRUCTION, "subsets": SUBSETS, **sizes}
    (options.work / "taught.json").write_text(json.dumps(settings))
    metrics, split = rl_steps(model_dir, sizes, options.device, options.steps)
    counted = metrics[min(2, len(metrics) - 1) :]
    episodes = sizes["groups"] * sizes["group_size"]
    step_s = statistics.median(m["time/step_s"] for m in counted)
    Report(options.lines).add(
        "step",
        "textcraft",
        "ours",
        episodes_per_s=episodes / step_s,
        step_s=step_s,
        rollout_s=statistics.median(m["time/rollout_s"] for m in counted),
        learn_s=statistics.median(m["time/learn_s"] for m in counted),
        sampled_tokens=statistics.mean(m["tokens/sampled"] for m in counted),
        turns=statistics.mean(m["turns/mean"] for m in counted),
        success=statistics.mean(m["success/mean"] for m in counted),
        mismatch=statistics.mean(m["mismatch/abs"] for m in counted),
        all_seconds=[m["time/step_s"] for m in metrics],
        taught_success=summary["before"]["success"],
        **split,
    )


if __name__ == "__main__":
    main()
