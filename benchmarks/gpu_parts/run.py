"""Parts run and large: whole RL steps of the recipes qwen/textcraft and qwen/babyai, and where their time goes.

The recipes play with the model of --model-folder. Without one the model has random weights of the 1.5B shape: a reply
then has a random length of 16 to 47 tokens and means a random valid action, so that episodes have turns as in a real
run.

The first steps are warm-up, the next ones are counted. Two more are not counted: one under a sampling profiler of the
host (a timer interrupts the main thread every millisecond), one under torch's profiler of the device. Host time is
divided by the file of the innermost frame: environment, parse, render (and tokenise), engine (bookkeeping), launches,
loop (policy, rollout and collector), learner, idle (waiting for the device), other.

Part large has random weights of larger shapes and replies that fill the context (--model, --lora, --reply-tokens). On
CUDA the peak of the device's memory is reported beside the doctor's estimate, and tokens/s beside the ceilings: each
decoded token of a batch reads the weights and the keys and values once, and learning takes 6 operations per token and
parameter (4 with adapters), without attention and without what checkpointed activations compute again.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import signal
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from common import SHAPES, Report, ceilings, make_model, part_parser

from agentgym_rl.agent.policy import EnginePolicy, Reply
from agentgym_rl.common.seeds import stable_seed
from agentgym_rl.config import Config, load_config
from agentgym_rl.run.backend import LocalBackend
from agentgym_rl.run.collectors import collect_each, limits_of
from agentgym_rl.run.environments_pool import EnvironmentsPool
from agentgym_rl.run.items import all_items
from agentgym_rl.run.load_model import choose_device
from agentgym_rl.run.memory_demand import demand_of
from agentgym_rl.scale.memory import GIB, on_each_device
from agentgym_rl.training.horizon import make_horizon
from agentgym_rl.training.lora import add_adapter
from agentgym_rl.training.model import load_model
from agentgym_rl.training.rl import Hooks, RLState, train_rl
from agentgym_rl.training.scratch import build_tokenizer
from agentgym_rl.training.task_source import TaskSource
from agentgym_rl.types import Collect, EnvSession, Group, Limits, Message, Observation, Sampling

RECIPES = Path(__file__).parents[2] / "recipes" / "qwen"
TURNS = {"textcraft": 14, "babyai": 20}
PARTS = {
    "agent/engines/native/cuda/": "launches",
    "common/cuda_graphs": "launches",
    "agent/engines/": "engine",
    "concurrent/futures/": "engine",
    "environment/formats": "parse",
    "agent/styles": "parse",
    "environment/": "environment",
    "minigrid/": "environment",
    "gymnasium/": "environment",
    "agent/renderer": "render",
    "agent/word_encoder": "render",
    "agent/observation_frame": "render",
    "jinja2/": "render",
    "transformers/tokenization": "render",
    "transformers/utils/chat_template": "render",
    "tokenizers/": "render",
    "agentgym_rl/training/": "learner",
    "torch/optim": "learner",
    "torch/autograd": "learner",
    "agentgym_rl/": "loop",
    "asyncio/": "loop",
}
"""Parts of the host's time by a piece of a file's path. The first match counts."""


class HostProfile:
    """Samples the main thread every millisecond and counts samples by part."""

    def __init__(self, interval_s: float = 0.001) -> None:
        self._interval_s = interval_s
        self.samples: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()

    def start(self) -> None:
        signal.signal(signal.SIGALRM, self._sample)
        signal.siginterrupt(signal.SIGALRM, False)
        signal.setitimer(signal.ITIMER_REAL, self._interval_s, self._interval_s)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _sample(self, _: int, frame: FrameType | None) -> None:
        self.samples[part_of(frame)] += 1
        if frame is not None:
            self.functions[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1

    def shares(self) -> dict[str, float]:
        """Return each part's share of the samples."""
        total = max(1, sum(self.samples.values()))
        return {part: round(count / total, 4) for part, count in self.samples.most_common()}


def part_of(frame: FrameType | None) -> str:
    """Return the part of the innermost frame that belongs to one."""
    if frame is not None and frame.f_code.co_filename.endswith("selectors.py"):
        return "idle"
    while frame is not None:
        for piece, part in PARTS.items():
            if piece in frame.f_code.co_filename:
                return part
        frame = frame.f_back
    return "other"


def longest(kernels: Iterable[tuple[str, float]], count: int = 24) -> list[dict[str, Any]]:
    """Return the names with the largest sums of seconds, and how often each ran."""
    seconds, runs = Counter[str](), Counter[str]()
    for name, duration in kernels:
        seconds[name[:80]] += duration  # type: ignore[assignment]
        runs[name[:80]] += 1
    return [{"name": name, "s": round(total, 4), "runs": runs[name]} for name, total in seconds.most_common(count)]


def busy_share(intervals: Iterable[tuple[int, int]]) -> dict[str, Any]:
    """Return how long at least one of the intervals (start and end in ns) runs, and the gaps between them."""
    ordered = sorted(intervals)
    if not ordered:
        return {"busy_s": 0.0, "span_s": 0.0, "gaps_s": {}}
    busy, gaps = 0, Counter[str]()
    low, high = ordered[0]
    for start, end in ordered[1:]:
        if start > high:
            gap = start - high
            size = next(
                (name for limit, name in ((1e5, "<0.1ms"), (1e6, "<1ms"), (1e7, "<10ms")) if gap < limit), "more"
            )
            gaps[size] += gap
            busy += high - low
            low = start
        high = max(high, end)
    busy += high - low
    span = high - ordered[0][0]
    return {"busy_s": busy / 1e9, "span_s": span / 1e9, "gaps_s": {name: gap / 1e9 for name, gap in gaps.items()}}


class ForcedPolicy(EnginePolicy):
    """A policy for random weights: replies of a random length that mean a random valid action."""

    def __init__(
        self, session: EnvSession, seed: int, tokens: tuple[int, int], *arguments: Any, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._session, self._seed, self._tokens = session, seed, tokens

    async def reply(self, messages: list[Message], observation: Observation, limits: Limits) -> Reply:
        choice = random.Random(stable_seed(self._seed, len(messages)))
        reply = await super().reply(
            messages, observation, replace(limits, max_new_tokens=choice.randrange(*self._tokens))
        )
        if reply.action is None or reply.finish == "max_context":
            return reply
        action = choice.choice(sorted(await self._session.actions()))
        return Reply(reply.observation, replace(reply.action, content=action), "stop")


def config_of(options: argparse.Namespace, recipe: str, episodes: int) -> Config:
    group_size = 2 if options.tiny else 8
    overrides = [
        f"agent.concurrency={episodes}",
        f"rl.groups_per_step={episodes // group_size}",
        f"rl.group_size={group_size}",
        f"rl.steps={options.warm + options.steps + 2 * (options.part == 'run')}",
        "horizon.kind=fixed",
        f"horizon.turns=[{options.turns or TURNS[recipe]}]",
        f"model.device={options.device}",
    ]
    if options.model_folder:
        overrides.append(f"model.path={options.model_folder}")
    else:
        # No reference model, which would be read from a folder. This one holds only the shape, for the doctor.
        overrides += ["rl.kl_coef=0.0", f"model.path={options.shape_folder}"]
    if options.lora:
        overrides.append(f"model.lora.rank={options.lora}")
    if options.tiny:
        overrides += ["model.dtype=float32", "agent.max_context=1024", "rl.optimizer.micro_batch_tokens=2048"]
    overrides += options.set
    return load_config(RECIPES / f"{recipe}.toml", overrides)


async def load(config: Config, options: argparse.Namespace, pool: EnvironmentsPool) -> tuple[Any, Any]:
    """Return (model, tokenizer): of the folder, or random weights with a tokenizer of the environment's words."""
    if options.model_folder:
        return load_model(options.model_folder, device=options.device, dtype=choose_device(config.model)[1])
    env = config.environments[0].name
    session = await pool.open(env)
    items = await pool.items(env, "train")
    texts = [session.instruction, *[(await session.reset(item)).observation for item in items[:8]]]
    await session.close()
    model = make_model(options.model, options.device)
    if config.model.lora is not None:
        add_adapter(model, config.model.lora, 0)
    return model, build_tokenizer(texts)


def forced_collector(config: Config, workers: LocalBackend, pool: EnvironmentsPool, tokens: tuple[int, int]) -> Collect:
    """Return a collector for random weights, with replies of a range of `tokens`."""

    def make(session: EnvSession, seed: int) -> ForcedPolicy:
        sampling = Sampling(config.agent.max_new_tokens, 1.0, seed=seed)
        engine: Any = workers._engine
        return ForcedPolicy(session, seed, tokens, engine, workers.renderer, sampling, instruction=session.instruction)

    return collect_each(config.agent, config.environments, pool, make, config.group_sizes(None), "bench-")


class Measured:
    """Metrics of every step, the profiles of two more, and a digest of the first step's episodes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rows: list[dict[str, Any]] = []
        self.host = HostProfile()
        self.digests: list[str] = []
        self.device: dict[str, Any] = {}
        self.memory: dict[str, float] = {}
        self.ceilings: dict[str, float] = {}
        self._counted = options.warm + options.steps
        self._profiles = options.part == "run"
        self._profiler: Any = None
        if options.device == "cuda":
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def record(self, step: int, groups: list[Group]) -> None:
        if step == 1:
            ids = [[m.token_ids for m in t.messages] for g in groups for t in g.trajectories]
            self.digests = [hashlib.sha256(json.dumps(each).encode()).hexdigest()[:16] for each in ids]

    async def after_step(self, step: int) -> None:
        if not self._profiles:
            return
        if step == self._counted:
            self.host.start()
        elif step == self._counted + 1:
            self.host.stop()
            if self._profiler is not None:
                self._profiler.start()
        elif step == self._counted + 2 and self._profiler is not None:
            torch.cuda.synchronize()
            self._profiler.stop()
            events = self._profiler.profiler.kineto_results.events()
            on_device = [e for e in events if e.device_type() == torch.autograd.DeviceType.CUDA]
            self.device = busy_share((e.start_ns(), e.start_ns() + e.duration_ns()) for e in on_device)
            self.device["kernels"] = longest((e.name(), e.duration_ns() / 1e9) for e in on_device)


async def measure(options: argparse.Namespace, recipe: str, episodes: int) -> Measured:
    config = config_of(options, recipe, episodes)
    measured = Measured(options)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    pool = EnvironmentsPool(config.environments, config.agent)
    model, tokenizer = await load(config, options, pool)
    workers = LocalBackend(config, pool, model, tokenizer, Path(options.model_folder or "."))
    items = await all_items(pool, config.environments)
    numbers = {env: [i for items in subsets.values() for i in items] for env, subsets in items.train.items()}
    state = RLState(TaskSource(numbers, 0, {recipe: 1.0}), {recipe: make_horizon(config.horizon)})
    hooks = Hooks(
        measured.record,
        lambda *_: None,
        lambda _, metrics: measured.rows.append(metrics),
        measured.after_step,
        workers.learning,
    )
    collect = (
        workers.collector("bench-", None, 1.0)
        if options.model_folder
        else forced_collector(config, workers, pool, tuple(options.reply_tokens))
    )
    limits = {recipe: limits_of(config.agent, 1, workers.max_context)}
    await train_rl(state, workers.learner, collect, workers.publish, limits, config.rl, hooks, 0)
    if options.device == "cuda":
        measured.memory = memory_of(config)
    if not options.model_folder and options.device == "cuda":
        measured.ceilings = ceilings_of(config, measured.rows)
    await workers.close()
    await pool.close()
    return measured


def memory_of(config: Config) -> dict[str, float]:
    """Return GiB: the peaks of this process's tensors and of its allocator, and the doctor's estimate."""
    total = torch.cuda.get_device_properties(0).total_memory
    return {
        "tensors": torch.cuda.max_memory_allocated() / GIB,
        "allocator": torch.cuda.max_memory_reserved() / GIB,
        "doctor": on_each_device(demand_of(config), total)["device"].total / GIB,
    }


def ceilings_of(config: Config, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the tokens/s that memory bandwidth allows in a rollout and the matrix units in learning.

    The rollout's bound: all episodes decode at once, and each token reads its episode's keys and values, half of the
    final context on average. The embedding is looked up, not multiplied.
    """
    torch.cuda.empty_cache()
    limits, shape = ceilings("cuda"), demand_of(config).shape
    episodes, tokens = config.agent.concurrency, statistics.mean(row["tokens/per_episode"] for row in rows)
    multiplied = shape.count - (0 if shape.tied else shape.vocabulary * shape.hidden)
    cached = 4 * shape.layers * shape.kv_heads * shape.width * tokens / 2
    operations = 4 if config.model.lora is not None else 6
    return {
        "rollout_tokens_per_s": episodes * limits["bytes_per_s"] / (2 * multiplied + episodes * cached),
        "learner_tokens_per_s": limits["operations_per_s"] / (operations * multiplied),
    }


def report(options: argparse.Namespace, recipe: str, episodes: int, measured: Measured) -> None:
    counted = measured.rows[options.warm : options.warm + options.steps]
    # Of part run: the step under the host's profiler, before the one under the device's.
    profiled_s = measured.rows[-2]["time/step_s"] if options.part == "run" else 0.0
    numbers: dict[str, Any] = {
        "tokens_per_s": statistics.median(m["tokens/sampled_per_s"] for m in counted),
        "step_s": statistics.median(m["time/step_s"] for m in counted),
        "rollout_s": statistics.median(m["time/rollout_s"] for m in counted),
        "learn_s": statistics.median(m["time/learn_s"] for m in counted),
        "sampled_tokens": statistics.mean(m["tokens/sampled"] for m in counted),
        "turns": statistics.mean(m["turns/mean"] for m in counted),
        "success": statistics.mean(m["success/mean"] for m in counted),
        "all_rollout_s": [m["time/rollout_s"] for m in measured.rows],
        "host_s": {part: round(share * profiled_s, 3) for part, share in measured.host.shares().items()},
        "host_functions": measured.host.functions.most_common(40),
        "digests": measured.digests,
    }
    numbers["learner_tokens_per_s"] = statistics.median(
        m["tokens/per_episode"] * m["episodes/usable"] / m["time/learn_s"] for m in counted
    )
    numbers |= {"memory_gib": measured.memory, "ceilings": measured.ceilings}
    if measured.device:
        numbers |= {"busy": measured.device["busy_s"] / measured.device["span_s"], "device": measured.device}
    kind = ", LoRA" if options.lora else ""
    case = f"{recipe} x {episodes}" if options.part == "run" else f"{options.model}{kind} x {episodes}"
    Report(options.lines).add(options.part, case, options.who, **numbers)


def main() -> None:
    parser = part_parser(__doc__)
    parser.add_argument("--model-folder", help="Hugging Face folder of a chat model; default: random weights")
    parser.add_argument("--tiny", action="store_true", help="few and short episodes of a tiny model")
    parser.add_argument("--part", choices=["run", "large"], default="run")
    parser.add_argument("--model", choices=list(SHAPES), help="shape of random weights; default: qwen2.5-1.5b")
    parser.add_argument("--lora", type=int, help="train adapters of this rank")
    parser.add_argument("--reply-tokens", nargs=2, type=int, default=[16, 48], help="range of forced replies")
    parser.add_argument("--set", nargs="*", default=[], help="settings of the recipe, as key=value")
    parser.add_argument("--recipe", choices=list(TURNS), required=True)
    parser.add_argument("--episodes", nargs="+", type=int, default=[128, 256])
    parser.add_argument("--turns", type=int, help="turns of an episode; default: 14 in textcraft, 20 in babyai")
    parser.add_argument("--warm", type=int, default=1, help="steps before the counted ones")
    parser.add_argument("--steps", type=int, default=3, help="counted steps")
    parser.add_argument("--who", default="ours", help="name of the source tree in the report")
    options = parser.parse_args()
    options.model = options.model or ("tiny" if options.tiny else "qwen2.5-1.5b")
    with tempfile.TemporaryDirectory() as folder:
        SHAPES[options.model].save_pretrained(folder)
        options.shape_folder = folder
        for episodes in options.episodes:
            report(options, options.recipe, episodes, asyncio.run(measure(options, options.recipe, episodes)))


if __name__ == "__main__":
    main()
