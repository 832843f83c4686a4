"""A run in progress: begin, evaluate, save, stop and summarise. `rl.py` and `offline.py` have what differs.

Killed at any moment and started again with `resume`, a run continues from its last checkpoint. Everything after that
checkpoint is played again with the same result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from agentgym_rl.run.backend import Backend
from agentgym_rl.run.context import RunContext
from agentgym_rl.run.events import EventPoller
from agentgym_rl.run.heldout import evaluate
from agentgym_rl.run.load_model import choose_device
from agentgym_rl.run.plots import learning_curve
from agentgym_rl.run.stopping import stop_with_checkpoint, try_checkpoint
from agentgym_rl.run.system import SystemMonitor, devices_of
from agentgym_rl.training.checkpoint import checkpoint_path


class Run(ABC):
    """One training run of any method."""

    step = 0
    """Finished steps: RL's, or updates of an offline method."""
    measure = ("success", "episodes")
    """Name of the share that evaluations measure, and what it is a share of."""

    def __init__(self, context: RunContext, backend: Backend) -> None:
        self.context, self.backend = context, backend
        self.config, self.log, self.console, self.stop = context.config, context.log, context.console, context.stop
        self.evaluations: list[dict[str, Any]] = []
        """Results of `heldout.evaluate`, in order."""
        self.saved_step: int | None = None
        """Step of the last checkpoint, which is not written again if the run stops right after it."""
        self.saved_resumable = True
        """Whether the run can be resumed from the last checkpoint."""
        self.events = EventPoller(backend.events, self.warn)
        on_this_machine = self.config.scale is None
        self.system = SystemMonitor(devices_of(choose_device(self.config.model)[0]) if on_this_machine else ())

    async def run(self, saved: dict[str, Any] | None) -> dict[str, Any]:
        """Run from the start, or from what a checkpoint holds, to the end; return the summary."""
        try:
            with self.stop.ending_with(self.stop_here):
                async with self.events:
                    await self.begin(saved)
                    await self.train()
                    summary = self.summarise()
                    self.stop.may_cancel = lambda: False  # there is nothing left to stop
                return summary
        finally:
            self.stop.may_cancel = lambda: False
            await self.backend.close()

    async def begin(self, saved: dict[str, Any] | None) -> None:
        """Restore a checkpoint, or evaluate the starting model and save it as the checkpoint of step 0."""
        if saved is not None:
            self.stop.may_cancel = lambda: False  # a checkpoint of a half-restored run would replace the good one
            self.evaluations, self.context.seconds_before = saved["evaluations"], saved["seconds"]
            self.saved_step = saved["step"]
            await self.restore(saved)
        elif self.log.resumed:
            self.log.truncate_after(0)  # earlier processes may have left steps whose checkpoints are gone
        self.stop.may_cancel = self.may_stop
        if saved is not None and self.stop.asked:
            self.stop_here()
        if not self.evaluation_is_due() or any(result["step"] == self.step for result in self.evaluations):
            return
        # At the start, or after a resume of a run that was stopped while it evaluated.
        before = "before RL" if self.config.online else "before training"
        self.console.stage("Held-out evaluation", f"after step {self.step}" if self.step else before)
        await self.evaluate()
        self.save_now()  # a run without space for one checkpoint fails here

    @abstractmethod
    async def train(self) -> None:
        """Make the steps that are left."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside the model, the learner and what every run has."""

    @abstractmethod
    async def restore(self, saved: dict[str, Any]) -> None:
        """Return to a checkpoint; the model has been loaded from it already."""

    @abstractmethod
    def details(self) -> dict[str, Any]:
        """Return what the summary says about this kind of run alone."""

    def evaluation_is_due(self) -> bool:
        """Return whether held-out items are played after this step."""
        every = self.config.eval.every
        return self.step == 0 or bool(every and self.step % every == 0)

    def may_stop(self) -> bool:
        """Return whether the run can be interrupted now and saved in its current state."""
        return True

    def can_resume_here(self) -> bool:
        """Return whether a checkpoint of the current state has all that a resumed run needs."""
        return self.config.checkpoint.optimizer

    async def evaluate(self) -> None:
        """Play held-out items, the same ones every time, and keep the result."""
        result = await self.held_out()
        self.evaluations.append(result)
        self.console.evaluation(self.step, result["success"], result["episodes"], self.measure)
        if "attempts" in result:
            self.console.attempts(result["attempts"])

    async def held_out(self) -> dict[str, Any]:
        """Return how held-out episodes went, as `heldout.evaluate` does."""
        collect = self.backend.collector(f"eval{self.step}-", self.config.eval.samples, self.config.eval.temperature)
        return await evaluate(self.context, collect, self.backend.max_context, self.step)

    def save(self) -> None:
        """Write a checkpoint of this step, or begin to (`checkpoint.background`)."""
        self.settle(wait=True)
        state = self.state() | {"evaluations": self.evaluations, "seconds": self.context.seconds()}
        self.backend.save(self.log.checkpoints_dir, self.step, state, self.config.checkpoint.keep)
        self.saved_step, self.saved_resumable = self.step, self.can_resume_here()

    def save_now(self) -> None:
        """Write a checkpoint of this step and wait until it is complete."""
        self.save()
        self.backend.finish_saving()

    def settle(self, *, wait: bool = False) -> None:
        """Complete a checkpoint that is being written, if it can be at once or with `wait`. A full disk is recorded."""
        finish = partial(self.backend.finish_saving, wait=wait)
        if not try_checkpoint(finish, self.saved_step or 0, self.context):
            self.saved_step = None

    def stop_here(self) -> NoReturn:
        """Write a checkpoint and end the run: after the last finished step, without episodes under way."""
        self.stop.may_cancel = lambda: False  # once is enough
        self.settle(wait=True)
        saved = self.saved_step == self.step
        resumable = self.saved_resumable if saved else self.can_resume_here()
        stop_with_checkpoint(None if saved else self.save_now, self.step, self.context, resumable=resumable)

    def warn(self, kind: str, message: str, **detail: Any) -> None:
        """Record an event at this step and show it."""
        self.context.warn(kind, message, step=self.step, **detail)

    def summarise(self) -> dict[str, Any]:
        """Write and show the summary and the learning curve."""
        log, details = self.log, self.details()
        before, after = self.evaluations[0], self.evaluations[-1]
        summary: dict[str, Any] = {
            "name": self.config.name,
            "method": self.config.method,
            "seed": self.config.seed,
            "before": before,
            "after": after,
            "evaluations": self.evaluations,
            "stages": [],
            "steps": self.step,
            "parameters": self.backend.num_parameters,
            "seconds": round(self.context.seconds(), 1),
        } | details
        log.write_summary(summary)
        with log.skip_if_disk_full(log.curve_path.name):
            learning_curve(log.metrics(), self.evaluations, summary["stages"], log.curve_path, self.config.name)
        self.console.table_before_after(before, after, self.measure)
        if summary["stages"]:
            self.console.horizon_stages(summary["stages"])
        self.console.files(self.files())
        return summary

    def files(self) -> dict[str, Path | str]:
        """Return what to look at after the run, by name."""
        return {
            "learning curve": self.log.curve_path,
            "summary": self.log.summary_path,
            "trajectories": f"{self.log.trajectories_dir} (agentgym-rl show {self.log.root})",
            "model": checkpoint_path(self.log.checkpoints_dir, self.step) / "model",
        }
