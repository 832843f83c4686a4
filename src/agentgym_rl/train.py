"""A training run from start to summary: warm start, evaluation, RL under a growing horizon, evaluation, curve.

Killed at any moment and started again with `resume`, it goes on from its last checkpoint; what came after that is
played again and comes out the same.
"""

from __future__ import annotations

import copy
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from agentgym_rl import wiring
from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.config import Config
from agentgym_rl.console import Console
from agentgym_rl.demonstrations import require_files
from agentgym_rl.heldout import evaluate
from agentgym_rl.offline import train_offline
from agentgym_rl.plots import learning_curve
from agentgym_rl.runlog import RunLog, horizon_stages, read_metrics
from agentgym_rl.starting import starting_point
from agentgym_rl.training import lora
from agentgym_rl.training.checkpoint import export, list_checkpoints, load_state, save_checkpoint
from agentgym_rl.training.critic import ValueModel
from agentgym_rl.training.doctor import Doctor
from agentgym_rl.training.horizon import make_horizon
from agentgym_rl.training.learner import freeze
from agentgym_rl.training.model import Lent
from agentgym_rl.training.rl import Hooks, RLState, train_rl
from agentgym_rl.training.rl_learner import RLLearner
from agentgym_rl.training.tasks import TaskSource
from agentgym_rl.types import EnvPool, Group

MAY_CHANGE_ON_RESUME = (
    "rl.steps",
    "dpo.rounds",
    "agentevol.rounds",
    "eval",
    "checkpoint",
    "threads",
    "trackers",
    "agent.concurrency",
    "run_dir",
)


async def train(
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    console: Console | None = None,
    pool: EnvPool | None = None,
) -> dict[str, Any]:
    """Run the whole recipe in `folder` and return its summary.

    A `pool` handed in is played instead of the recipe's own environments and is left open: their names, splits and
    subsets must be in it, and it reads actions in the format of the recipe's style.
    """
    started = time.monotonic()
    console = console or Console()
    if config.threads:
        torch.set_num_threads(config.threads)
    playing = pool or wiring.EnvironmentsPool(config.environments, config.agent)
    try:
        # Before the run directory is made: what cannot be leaves nothing behind.
        wiring.require_model(config.model)
        require_files(config)
        items = await wiring.all_items(playing, config.environments)
        with RunLog.create(
            folder,
            config.resolved(),
            resume=resume,
            may_change=MAY_CHANGE_ON_RESUME,
            trackers=config.trackers,
        ) as log:
            if config.method != "rl":
                return await train_offline(config, playing, items, log, console, started)
            log.set_status("running", steps=config.rl.steps)
            run, saved = await _prepare(config, playing, items, log, console, started)
            try:
                await run.begin(saved)
                return await run.finish()
            finally:
                await run.engine.close()
    finally:
        if pool is None:
            await playing.close()


async def _prepare(
    config: Config, pool: EnvPool, items: wiring.Items, log: RunLog, console: Console, started: float
) -> tuple[Run, dict[str, Any] | None]:
    """A run with the model of its last checkpoint and what else that holds; or with a warmed-up model and None."""
    numbers = {env: [i for some in subsets.values() for i in some] for env, subsets in items.train.items()}
    tasks = TaskSource(numbers, config.seed, {env.name: env.weight for env in config.environments})
    horizons = {env.name: make_horizon(env.horizon or config.horizon) for env in config.environments}
    checkpoints = list_checkpoints(log.checkpoints_dir) if log.resumed else []
    reference_dir = log.root / "reference"
    saved = None
    if checkpoints:
        saved = load_state(checkpoints[-1])
        model, tokenizer = wiring.load_from(checkpoints[-1] / "model", config.model)
        console.stage("Resuming", f"after step {saved['step']}")
    else:
        model, tokenizer = await starting_point(config, pool, items, log, console)
        if config.rl.kl_coef:
            export(model, tokenizer, reference_dir)
    reference = _reference(model, reference_dir, config)
    state = RLState(tasks, horizons)
    return Run(config, pool, items, log, console, model, tokenizer, state, reference, started), saved


def _reference(model: Any, folder: Path, config: Config) -> Lent | None:
    """The model RL started from, frozen; None where no KL term needs it. With LoRA it costs no second copy."""
    if not config.rl.kl_coef:
        return None
    if config.model.lora is None:
        frozen = freeze(wiring.load_from(folder, config.model)[0])
        return lambda: nullcontext(frozen)
    if config.warm_start is None:
        return lambda: lora.adapter(model, None)
    lora.load_adapter(model, folder, lora.REFERENCE)
    return lambda: lora.adapter(model, lora.REFERENCE)


def _critic(model: Any, config: Config) -> ValueModel | None:
    """PPO's critic: a copy of the decoder, or with LoRA one more adapter on the same."""
    if config.rl.algorithm != "ppo":
        return None
    if config.model.lora is None:
        return ValueModel(copy.deepcopy(model.get_decoder()), model.config.hidden_size)
    lora.copy_adapter(model, config.model.lora, lora.CRITIC)
    return ValueModel(model.get_decoder(), model.config.hidden_size, lambda: lora.adapter(model, lora.CRITIC))


@dataclass(slots=True)
class Run:
    """A run in progress."""

    config: Config
    pool: EnvPool
    items: wiring.Items
    log: RunLog
    console: Console
    model: Any
    tokenizer: Any
    state: RLState
    reference: Lent | None
    started: float
    """When this process began, on the monotonic clock."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """{"step", "success", "episodes", "reward", "turns", "subsets": {name: {"success", "episodes"}}} in order."""
    seconds_before: float = 0.0
    """Wall time of the processes that ran until the checkpoint this one started from."""
    doctor: Doctor = field(default_factory=Doctor)
    renderer: Renderer = field(init=False)
    engine: NativeEngine = field(init=False)
    learner: RLLearner = field(init=False)

    def __post_init__(self) -> None:
        agent = self.config.agent
        self.renderer = Renderer(self.tokenizer, self.config.model.chat_template)
        self.learner = RLLearner(
            self.model, self.config.rl, agent.temperature, self.reference, _critic(self.model, self.config)
        )
        # Under overlap the learner changes its weights while episodes are played: the engine has a copy of its own.
        played = freeze(copy.deepcopy(self.model)) if self.config.rl.overlap else self.model
        self.engine = NativeEngine(
            played,
            decode=self.renderer.decode,
            max_sessions=agent.concurrency,
            max_context=max([agent.max_context, *(env.max_context or 0 for env in self.config.environments)]),
        )

    async def begin(self, saved: dict[str, Any] | None) -> None:
        """Go back to a checkpoint; or evaluate the start and keep it as the checkpoint of step 0."""
        if saved is None:
            self.console.stage("Held-out evaluation", "before RL")
            await self.evaluate()
            self.save()
        else:
            self.log.truncate_after(saved["step"])
            await self._restore(saved)

    async def finish(self) -> dict[str, Any]:
        """The steps that are left, the last evaluation and the summary."""
        config, total = self.config, self.config.rl.steps
        kind = config.horizon.kind
        self.console.stage("Reinforcement learning", f"{config.rl.algorithm} with a {kind} horizon, {total} steps")
        policies = wiring.engine_policies(self.engine, self.renderer, config.agent, config.agent.temperature)
        collect = wiring.collect_each(config, self.pool, policies, None, "train-")
        room = self.engine.max_context
        limits = {env.name: wiring.limits_of(config.agent, 1, room, env) for env in config.environments}
        with self.console.steps(total, start=self.state.step):
            hooks = Hooks(self._record, self.log.write_learned, self._log_step, self._after_step)
            await train_rl(self.state, self.learner, collect, self._publish, limits, config.rl, hooks, config.seed)
        return self._summarise()

    async def _publish(self, version: int) -> None:
        await self.engine.update_weights(self.model.state_dict() if self.config.rl.overlap else None, version)

    def _record(self, step: int, groups: list[Group]) -> None:
        for group in groups:
            for trajectory in group.trajectories:
                self.log.write_trajectory(step, trajectory)

    def _log_step(self, step: int, metrics: dict[str, float | str]) -> None:
        self.log.log(step, metrics)
        self.console.step(step, metrics)
        for finding in self.doctor.observe({"step": step, **metrics}):
            self.log.log_finding(finding.line())
            self.console.warn(f"doctor: {finding.message}")

    async def _after_step(self, step: int) -> None:
        last = step == self.config.rl.steps
        due = self.config.eval.every and step % self.config.eval.every == 0
        if last or due:
            await self.evaluate()
        if last or step % self.config.checkpoint.every == 0:
            self.save()

    async def evaluate(self) -> None:
        """Play held-out items, the same ones every time, and remember the result."""
        step = self.state.step
        result = await evaluate(self.config, self.pool, self.items, self.log, self.engine, self.renderer, step)
        self.evaluations.append(result)
        self.console.evaluation(step, result["success"], result["episodes"])

    def save(self) -> None:
        state = {
            "learner": self.learner.state(),
            "rl": self.state.state(),
            "evaluations": self.evaluations,
            "seconds": self._seconds(),
            "version": self.engine.version,
        }
        folder = self.log.checkpoints_dir
        save_checkpoint(folder, self.state.step, self.model, self.tokenizer, state, self.config.checkpoint.keep)

    async def _restore(self, saved: dict[str, Any]) -> None:
        self.learner.restore(saved["learner"])
        self.state.restore(saved["rl"], saved["step"])
        self.evaluations = saved["evaluations"]
        self.seconds_before = saved["seconds"]
        self.doctor = Doctor(read_metrics(self.log.metrics_path) if self.state.step else ())
        await self._publish(saved["version"])

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def _summarise(self) -> dict[str, Any]:
        metrics = read_metrics(self.log.metrics_path) if self.state.step else []  # rl.steps = 0: only a warm start
        stages = horizon_stages(metrics)
        before, after = self.evaluations[0], self.evaluations[-1]
        summary = {
            "name": self.config.name,
            "seed": self.config.seed,
            "before": before,
            "after": after,
            "evaluations": self.evaluations,
            "stages": stages,
            "steps": self.state.step,
            "parameters": self.model.num_parameters(),
            "seconds": round(self._seconds(), 1),
        }
        self.log.write_summary(summary)
        learning_curve(metrics, self.evaluations, stages, self.log.curve_path, self.config.name)
        model_dir = list_checkpoints(self.log.checkpoints_dir)[-1] / "model"
        self.console.table_before_after(before, after)
        self.console.horizon_stages(stages)
        self.console.files(
            {
                "learning curve": self.log.curve_path,
                "summary": self.log.summary_path,
                "trajectories": f"{self.log.trajectories_dir} (agentgym-rl show {self.log.root})",
                "model": model_dir,
            }
        )
        return summary
