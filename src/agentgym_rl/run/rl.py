"""Reinforcement learning as a run: episodes under a growing horizon, updates on them, held-out evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentgym_rl.rewards.rewards import Rewards
from agentgym_rl.run.backend import Backend
from agentgym_rl.run.collectors import limits_of
from agentgym_rl.run.context import RunContext
from agentgym_rl.run.judging import CACHE_NAME, make_rewards
from agentgym_rl.run.log import horizon_stages
from agentgym_rl.run.run import Run
from agentgym_rl.run.stopping import last_checkpoint, try_checkpoint
from agentgym_rl.run.system import join_metrics
from agentgym_rl.run.teaching import Taught, require_same_tokens
from agentgym_rl.training.checkpoint import checkpoint_path, list_checkpoints
from agentgym_rl.training.doctor import Doctor
from agentgym_rl.training.horizon import make_horizon
from agentgym_rl.training.reward_settings import budget_problem
from agentgym_rl.training.rl import Hooks, RLState, expected_steps, train_rl
from agentgym_rl.training.role_learners import RoleLearners
from agentgym_rl.types import Collect, Group, StopReason


class RLRun(Run):
    """A run of PPO, GRPO, RLOO or REINFORCE++."""

    def __init__(self, context: RunContext, backend: Backend) -> None:
        super().__init__(context, backend)
        horizons = {env.name: make_horizon(env.horizon or self.config.horizon) for env in self.config.environments}
        self.rl = RLState(context.items.task_source(self.config.environments, self.config.seed), horizons)
        self.doctor = Doctor()
        self.resumable: dict[str, Any] | None = None
        """State after the last finished step, until learning from the next one begins; then None."""
        self.waits_for_groups = False
        """Whether the loop waits for asynchronous groups, whose state can be saved at any moment."""
        self.rewards: Rewards | None = None
        """Sources of rewards of the recipe, if it has any."""
        self._warned_of_unread = False

    @property
    def step(self) -> int:  # type: ignore[override]
        return self.rl.step

    async def begin(self, saved: dict[str, Any] | None) -> None:
        if self.backend.team is not None and saved is None:
            self.backend.team.league.restart()
        distill = self.config.rl.distill
        if distill is not None and distill.url is not None:
            await require_same_tokens(distill, self.backend.renderer, self.backend.max_context)
        await super().begin(saved)

    async def train(self) -> None:
        config, total = self.config, self.config.rl.steps
        budget = f"{config.rl.token_budget:,} tokens, at most " if config.rl.token_budget else ""
        self.console.stage(
            "Reinforcement learning",
            f"{config.rl.algorithm} with a {config.horizon.kind} horizon, {budget}{total} steps",
        )
        backend = self.backend
        self.rewards = make_rewards(config.rewards, config.judge, self.log.root / CACHE_NAME)
        if problem := budget_problem(config.rewards, config.judge, *config.judged_groups()):
            self.warn("judge_budget", problem)
        if problem := config.rl.stage_problem():
            self.warn("correction_stage", problem)
        # Judges and teachers read the episodes here.
        keep = self.rewards is None and config.rl.distill is None and config.rl.correction is None
        playing = backend.collector("train-", None, config.agent.temperature, keep_tokens=keep)
        collect: Collect = playing if self.rewards is None else self.rewards.scoring(playing)
        learner = backend.learner
        if config.rl.distill is not None and config.rl.distill.url is not None:
            assert not isinstance(learner, RoleLearners)  # refused with [rl.distill]
            learner = Taught(learner, config.rl.distill)
        # The horizon replaces the 1 turn at every step.
        limits = {env.name: limits_of(config.agent, 1, backend.max_context, env) for env in config.environments}
        self._mark_resumable()
        if self.stop.asked:
            self.stop_here()
        hooks = Hooks(self._record, self.log.write_learned, self._log_step, self._after_step, backend.learning)
        try:
            with self.console.steps(total, start=self.step):
                await train_rl(self.rl, learner, collect, backend.publish, limits, config.rl, hooks, config.seed)
        finally:
            if self.rewards is not None:
                await self.rewards.close()

    def may_stop(self) -> bool:
        return self.resumable is not None or self.waits_for_groups

    def evaluation_is_due(self) -> bool:
        return self.rl.is_finished(self.config.rl) or super().evaluation_is_due()

    async def evaluate(self) -> None:
        self.resumable = self.rl.state()
        await super().evaluate()
        self.evaluations[-1] |= {"sampled_tokens": self.rl.sampled}
        self.resumable = None

    def state(self) -> dict[str, Any]:
        state = {"rl": self.resumable or self.rl.state(), "version": self.backend.version}
        team = self.backend.team
        return state if team is None else state | {"ratings": dict(team.league.ratings)}

    async def restore(self, saved: dict[str, Any]) -> None:
        self.log.truncate_after(saved["step"])
        await self.backend.restore(checkpoint_path(self.log.checkpoints_dir, saved["step"]), saved)
        self.rl.restore(saved["rl"], saved["step"])
        self.doctor = Doctor(self.log.metrics())
        if self.backend.team is not None:
            self.backend.team.league.restore(saved["step"], saved["ratings"])
        await self.backend.publish(saved["version"])

    def details(self) -> dict[str, Any]:
        details = {"stages": horizon_stages(self.log.metrics()), "sampled_tokens": self.rl.sampled}
        judge = self.rewards.judge if self.rewards is not None else None
        return details if judge is None else details | {"judge": {"calls": judge.calls, "tokens": judge.tokens}}

    def _mark_resumable(self) -> None:
        """Keep the state to save if the run is stopped now. With overlap, a stop waits for the end of the step."""
        self.resumable = None if self.config.rl.asynchronous else self.rl.state()
        self.waits_for_groups = self.config.rl.max_staleness > 0

    def _record(self, step: int, groups: list[Group]) -> None:
        self.resumable, self.waits_for_groups = None, False
        if self.backend.team is not None:
            self.backend.team.league.observe(groups)
        played = [trajectory for group in groups for trajectory in group.trajectories]
        for group in groups:
            self.log.write_lines(step, group.lines())
        failures = [trajectory.error for trajectory in played if trajectory.stop is StopReason.ERROR]
        if failures:
            message = f"{len(failures)} of {len(played)} attempts at episodes of step {step} failed and are left out"
            self.warn("episodes_failed", f"{message}; the first: {failures[0]}")
        if self.backend.team is not None:
            self.backend.team.require_clients()
        unjudged = [trajectory.judge_error for trajectory in played if trajectory.judge_error]
        if unjudged:
            message = f"{len(unjudged)} of {len(played)} episodes of step {step} were not judged and are left out"
            self.warn("episodes_not_judged", f"{message}; the first: {unjudged[0]}")
        unread = sum(any(verdict.cut_chars for verdict in trajectory.verdicts) for trajectory in played)
        if unread and not self._warned_of_unread:
            self._warned_of_unread = True
            message = (
                f"the judge does not read the whole text of {unread} of {len(played)} episodes of step {step}: raise "
                "judge.max_chars, which the episodes of a ranking share"
            )
            self.warn("episodes_read_in_part", message)
        timed_out = sum(trajectory.timed_out for trajectory in played)
        if timed_out and self.config.agent.on_timeout == "retry":
            message = (
                f"{timed_out} of {len(played)} attempts at episodes of step {step} took longer than "
                f"{self.config.agent.episode_timeout_s:g} s: slow episodes are missing from what is learned, raise "
                "agent.episode_timeout_s or set agent.on_timeout = 'truncate'"
            )
            self.warn("episodes_timed_out", message)

    def _log_step(self, step: int, metrics: dict[str, float | str]) -> None:
        expected = expected_steps(self.config.rl, step, float(metrics["tokens/total"]))
        if self.backend.team is not None and (rating := self.backend.team.league.metrics()):
            metrics = {**metrics, **rating, "heldout/success": self._held_out_success(step)}
        self.log.log(step, metrics | join_metrics([self.system.metrics(), metrics]), steps=expected)
        self.console.step(step, metrics, expected)
        for finding in self.doctor.observe({"step": step, **metrics}):
            self.log.log_finding(finding.line())
            self.console.warn(f"doctor: {finding.message}")

    def _held_out_success(self, step: int) -> float:
        """Return the success of the last evaluation by `eval.every` before `step`, the same if the run was resumed."""
        every = self.config.eval.every
        last = (step - 1) // every * every if every else 0
        return float([result["success"] for result in self.evaluations if result["step"] <= last][-1])

    async def _after_step(self, step: int) -> None:
        last = self.rl.is_finished(self.config.rl)
        team = self.backend.team
        if team is not None:
            await team.advance(step)  # before the checkpoint, which needs the snapshots up to its step
        if self.evaluation_is_due():
            await self.evaluate()
        await self.events.now()
        self.settle()
        if last:
            await last_checkpoint(self.save_now, step, self.context)
        elif step % self.config.checkpoint.every == 0:
            try_checkpoint(self.save, step, self.context)
        if team is not None:
            team.league.prune(_oldest(self.log.checkpoints_dir))
        self._mark_resumable()
        if self.stop.asked:
            self.stop_here()


def _oldest(checkpoints: Path) -> int:
    """Return the step of the oldest checkpoint; 0 if there is none yet."""
    return min((int(path.name.rpartition("_")[2]) for path in list_checkpoints(checkpoints)), default=0)
