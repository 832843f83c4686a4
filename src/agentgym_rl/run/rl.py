"""A training run from start to summary: warm start, evaluation, RL under a growing horizon, evaluation, curve.

Killed at any moment and started again with `resume`, it goes on from its last checkpoint; what came after that is
played again and comes out the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from agentgym_rl.config import Config, completed
from agentgym_rl.run import backend_vllm, build, preflight
from agentgym_rl.run.backend import OneProcess, Workers
from agentgym_rl.run.console import Console
from agentgym_rl.run.events import Telling
from agentgym_rl.run.heldout import evaluate
from agentgym_rl.run.log import RunLog, horizon_stages
from agentgym_rl.run.offline import train_offline
from agentgym_rl.run.plots import learning_curve
from agentgym_rl.run.start import prepare, resume_point, starting_point
from agentgym_rl.run.stopping import (
    Stop,
    last_checkpoint,
    nothing_left_of_a_failed_start,
    room_or_error,
    stop_before_there_is_a_run,
    stop_before_training,
    stop_with_checkpoint,
    try_checkpoint,
)
from agentgym_rl.training.checkpoint import checkpoint_path, export, list_checkpoints
from agentgym_rl.training.doctor import Doctor
from agentgym_rl.training.horizon import make_horizon
from agentgym_rl.training.rl import Hooks, RLState, expected_steps, train_rl
from agentgym_rl.training.tasks import TaskSource
from agentgym_rl.types import EnvPool, Group, StopReason

MAY_CHANGE_ON_RESUME = (
    "rl.steps",
    "rl.token_budget",
    "dpo.rounds",
    "agentevol.rounds",
    "eval",
    "checkpoint",
    "threads",
    "trackers",
    "agent.concurrency",
    "run_dir",
    "scale",
    "engine",
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
    stop, console = Stop(), console or Console()
    with stop.listening(), stop.ending_with(lambda: stop_before_there_is_a_run(console, stop.by)):
        return await _train(config, folder, resume, console, pool, stop)


async def _train(
    config: Config, folder: Path, resume: bool, console: Console, pool: EnvPool | None, stop: Stop
) -> dict[str, Any]:
    started = time.monotonic()
    if config.threads:
        torch.set_num_threads(config.threads)
    playing = pool or build.EnvironmentsPool(config.environments, config.agent)
    try:
        # Before the run directory is made: what cannot be leaves nothing behind.
        preflight.require_recipe(config, environments=pool is None)
        build.choose_device(config.model)
        backend_vllm.require_engine(config)
        if config.scale is not None:
            from agentgym_rl.run.backend_ray import plan_of

            plan_of(config)  # refuses what it cannot read of the environment's variables
        items = await build.all_items(playing, config.environments)
        with (
            room_or_error(folder),
            nothing_left_of_a_failed_start(folder),
            RunLog.create(
                folder,
                config.resolved(),
                resume=resume,
                may_change=MAY_CHANGE_ON_RESUME,
                completed=completed,
                trackers=config.trackers,
                say=console.warn,
            ) as log,
            room_or_error(folder),  # so that status.json has that line too
            stop.ending_with(lambda: stop_before_training(log, console, stop.by)),
        ):
            stop.last_words = lambda: log.set_status("stopped", error="ended at once by Ctrl-C")
            if config.method != "rl":
                return await train_offline(config, playing, items, log, console, started, stop)
            log.set_status("running", steps=config.rl.steps)
            run, saved = await _prepare(config, playing, items, log, console, started, stop)
            try:
                with stop.ending_with(run.stop_here):
                    async with run.telling:
                        await run.begin(saved)
                        summary = await run.finish()
                        stop.may_leave = lambda: False  # there is nothing left to stop
                    return summary
            finally:
                stop.may_leave = lambda: False
                await run.workers.close()
    finally:
        if pool is None:
            await playing.close()


async def _prepare(
    config: Config, pool: EnvPool, items: build.Items, log: RunLog, console: Console, started: float, stop: Stop
) -> tuple[Run, dict[str, Any] | None]:
    """A run with the model of its last checkpoint and what else that holds; or with a warmed-up model and None."""
    numbers = {env: [i for some in subsets.values() for i in some] for env, subsets in items.train.items()}
    tasks = TaskSource(numbers, config.seed, {env.name: env.weight for env in config.environments})
    horizons = {env.name: make_horizon(env.horizon or config.horizon) for env in config.environments}
    folder, saved = resume_point(log, console) or (None, None)
    workers = await _workers(config, pool, items, log, console, folder / "model" if folder else None)
    return Run(config, items, log, console, workers, RLState(tasks, horizons), started, stop), saved


async def _workers(
    config: Config, pool: EnvPool, items: build.Items, log: RunLog, console: Console, folder: Path | None
) -> Workers:
    """With the model in `folder`, that of a checkpoint, or with the one the recipe starts from."""
    reference_dir = log.root / "reference"
    if config.scale is not None:
        from agentgym_rl.run.backend_ray import Cluster

        if folder is not None:
            kept = reference_dir.is_dir() or config.model.path is None
            reference_dir = reference_dir if kept else Path(str(config.model.path))
            return await Cluster.start(config, folder, console, log.root, reference_dir)
        if config.model.path is not None and config.warm_start is None and config.model.lora is None:
            return await Cluster.start(config, Path(config.model.path), console, log.root)
        start = await prepare(config, pool, items, log, console)
        return await Cluster.start(config, reference_dir, console, log.root, start=start)
    if folder is None:
        model, tokenizer = await starting_point(config, pool, items, log, console)
        if config.rl.kl_coef:
            export(model, tokenizer, reference_dir)
    else:
        model, tokenizer = build.load_from(folder, config.model)
    if config.engine.kind == "native":
        return OneProcess(config, pool, model, tokenizer, reference_dir)
    console.stage("vLLM", ", ".join(config.engine.urls) or f"{config.engine.replicas} started here")
    handover = log.root / "engine"
    engine = await backend_vllm.start_vllm(config, model, tokenizer, handover)
    try:
        return OneProcess(config, pool, model, tokenizer, reference_dir, engine, handover)
    except BaseException:
        await engine.close()
        raise


@dataclass(slots=True)
class Run:
    """A run in progress."""

    config: Config
    items: build.Items
    log: RunLog
    console: Console
    workers: Workers
    state: RLState
    started: float
    """When this process began, on the monotonic clock."""
    stop: Stop
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """What `heldout.evaluate` says, and "sampled_tokens" of training until then, in order."""
    seconds_before: float = 0.0
    """Wall time of the processes that ran until the checkpoint this one started from."""
    doctor: Doctor = field(default_factory=Doctor)
    between: dict[str, Any] | None = None
    """Where the run stood after the last finished step, while nothing of the next one was learned; else None."""
    saved_step: int | None = None
    """Step of the last checkpoint: it is not written again if the run stops right after it."""
    telling: Telling = field(init=False)

    def __post_init__(self) -> None:
        self.telling = Telling(self.workers.events, self._event)

    async def begin(self, saved: dict[str, Any] | None) -> None:
        """Go back to a checkpoint; or evaluate the start and keep it as the checkpoint of step 0."""
        self.stop.may_leave = lambda: self.between is not None
        if saved is not None:
            self.log.truncate_after(saved["step"])
            await self._restore(saved)
        step = self.state.step
        if self._evaluation_is_due() and not any(one["step"] == step for one in self.evaluations):
            # At the start; or a run that was stopped while it evaluated makes up for it.
            self.console.stage("Held-out evaluation", f"after step {step}" if step else "before RL")
            await self.evaluate()
            self.save()  # without room for one checkpoint there is no use in going on

    async def finish(self) -> dict[str, Any]:
        """The steps that are left, the last evaluation and the summary."""
        config, total = self.config, self.config.rl.steps
        kind = config.horizon.kind
        budget = f"{config.rl.token_budget:,} tokens, at most " if config.rl.token_budget else ""
        self.console.stage(
            "Reinforcement learning", f"{config.rl.algorithm} with a {kind} horizon, {budget}{total} steps"
        )
        workers, room = self.workers, self.workers.room
        collect = workers.collector("train-", None, config.agent.temperature)
        limits = {env.name: build.limits_of(config.agent, 1, room, env) for env in config.environments}
        self.between = self._standing()
        if self.stop.asked:
            self.stop_here()
        with self.console.steps(total, start=self.state.step):
            hooks = Hooks(self._record, self.log.write_learned, self._log_step, self._after_step)
            await train_rl(self.state, workers.learner, collect, workers.publish, limits, config.rl, hooks, config.seed)
        return self._summarise()

    def stop_here(self) -> NoReturn:
        """With a checkpoint: after the step that was being learned from, or without the episodes that were being
        played."""
        self.stop.may_leave = lambda: False  # it is on its way out: once is enough
        write = None if self.saved_step == self.state.step else self.save
        stop_with_checkpoint(write, self.state.step, self.log, self.console, self.stop.by)

    def _standing(self) -> dict[str, Any] | None:
        """Under overlap the next step is being learned from as soon as this one is over."""
        return None if self.config.rl.overlap else self.state.state()

    def _event(self, kind: str, message: str, **detail: Any) -> None:
        self.log.log_event(kind, message, step=self.state.step, **detail)
        self.console.warn(message)

    def _record(self, step: int, groups: list[Group]) -> None:
        self.between = None
        played = [trajectory for group in groups for trajectory in group.trajectories]
        for trajectory in played:
            self.log.write_trajectory(step, trajectory)
        failures = [trajectory.error for trajectory in played if trajectory.stop is StopReason.ERROR]
        if failures:
            message = f"{len(failures)} of {len(played)} attempts at episodes of step {step} failed and are left out"
            self._event("episodes_failed", f"{message}; the first: {failures[0]}")
        slow = sum(trajectory.timed_out for trajectory in played)
        if slow and self.config.agent.on_timeout == "retry":
            message = (
                f"{slow} of {len(played)} attempts at episodes of step {step} took longer than "
                f"{self.config.agent.episode_timeout_s:g} s: slow episodes are missing from what is learned, raise "
                "agent.episode_timeout_s or set agent.on_timeout = 'truncate'"
            )
            self._event("episodes_timed_out", message)

    def _log_step(self, step: int, metrics: dict[str, float | str]) -> None:
        expected = expected_steps(self.config.rl, step, float(metrics["tokens/total"]))
        self.log.log(step, metrics, steps=expected)
        self.console.step(step, metrics, expected)
        for finding in self.doctor.observe({"step": step, **metrics}):
            self.log.log_finding(finding.line())
            self.console.warn(f"doctor: {finding.message}")

    async def _after_step(self, step: int) -> None:
        last = self.state.over(self.config.rl)
        if self._evaluation_is_due():
            await self.evaluate()
        await self.telling.now()
        if last:
            await last_checkpoint(self.save, step, self.log, self.console, lambda: self.stop.asked)
        elif step % self.config.checkpoint.every == 0:
            try_checkpoint(self.save, step, self.log, self.console)
        self.between = self._standing()
        if self.stop.asked:
            self.stop_here()

    def _evaluation_is_due(self) -> bool:
        """After this step: after the last, and before the first."""
        step, every = self.state.step, self.config.eval.every
        return step == 0 or self.state.over(self.config.rl) or bool(every and step % every == 0)

    async def evaluate(self) -> None:
        """Play held-out items, the same ones every time, and remember the result."""
        step = self.state.step
        self.between = self.state.state()
        collect = self.workers.collector(f"eval{step}-", 1, self.config.eval.temperature)
        result = await evaluate(self.config, self.items, self.log, collect, self.workers.room, step)
        self.evaluations.append(result | {"sampled_tokens": self.state.sampled})
        self.between = None
        self.console.evaluation(step, result["success"], result["episodes"])

    def save(self) -> None:
        """A checkpoint."""
        state = {
            "rl": self.between or self.state.state(),
            "evaluations": self.evaluations,
            "seconds": self._seconds(),
            "version": self.workers.version,
        }
        self.workers.save(self.log.checkpoints_dir, self.state.step, state, self.config.checkpoint.keep)
        self.saved_step = self.state.step

    async def _restore(self, saved: dict[str, Any]) -> None:
        await self.workers.restore(checkpoint_path(self.log.checkpoints_dir, saved["step"]), saved)
        self.state.restore(saved["rl"], saved["step"])
        self.saved_step = saved["step"]
        self.evaluations = saved["evaluations"]
        self.seconds_before = saved["seconds"]
        self.doctor = Doctor(self.log.metrics())
        await self.workers.publish(saved["version"])

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def _summarise(self) -> dict[str, Any]:
        metrics = self.log.metrics()
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
            "sampled_tokens": self.state.sampled,
            "parameters": self.workers.num_parameters,
            "seconds": round(self._seconds(), 1),
        }
        self.log.write_summary(summary)
        with self.log.if_there_is_room(self.log.curve_path.name):
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
