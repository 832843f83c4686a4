"""SFT, DPO, AgentEvol, DAgger and reward models as a run: rounds of data and updates on it.

A step is one update, counted over all rounds. Each round first gets its data (SFT has one round and reads it; the
others also play), keeps it in the run directory, and then makes its updates. A resumed run does not play again what
a round already has.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentgym_rl.run.backend import Backend, Trainer
from agentgym_rl.run.context import RunContext
from agentgym_rl.run.demonstrations import Demonstration
from agentgym_rl.run.heldout import held_out_pairs
from agentgym_rl.run.rounds import RETRAINED, Round, RoundMaker, read_round, round_path, write_round
from agentgym_rl.run.run import Run
from agentgym_rl.run.stopping import last_checkpoint, try_checkpoint
from agentgym_rl.run.system import join_metrics
from agentgym_rl.training.checkpoint import checkpoint_path

LINES_PER_ROUND = 100
"""Most lines that a round prints. metrics.jsonl has every update."""


class OfflineRun(Run):
    """A run of SFT, DPO, AgentEvol, DAgger or a reward model."""

    def __init__(
        self, context: RunContext, backend: Backend, demonstrations: Sequence[Demonstration] | None = None
    ) -> None:
        """`demonstrations`: the recipe's `[data]`, if it has been read already."""
        super().__init__(context, backend)
        self.rounds = RoundMaker(context, backend, demonstrations)
        self.judges = self.config.reward_model is not None
        """Whether the run trains a judge instead of an agent: it is measured on pairs, not by playing."""
        if self.judges:
            self.measure = ("pairs in order", "pairs")
        self.round: Round | None = None
        """The round in progress."""
        self.trainer: Trainer | None = None
        self.rounds_done = 0
        self.history: list[dict[str, Any]] = []
        """Data and held-out success of each finished round."""

    async def begin(self, saved: dict[str, Any] | None) -> None:
        if saved is None:
            shutil.rmtree(self.log.root / "rounds", ignore_errors=True)
        await super().begin(saved)

    async def train(self) -> None:
        while self.rounds_done < self.rounds.count:
            if self.round is None:
                await self._start_round()
            await self._train_round()

    async def held_out(self) -> dict[str, Any]:
        if self.judges:
            if self.round is None:  # held-out pairs are part of it
                await self._start_round()
            assert self.round is not None
            return held_out_pairs(self.step, self.round.held_out, self.backend.scores)
        await self.backend.publish(self.step)
        return await super().held_out()

    def state(self) -> dict[str, Any]:
        return {"in_round": self.trainer is not None, "rounds_done": self.rounds_done, "history": self.history}

    async def restore(self, saved: dict[str, Any]) -> None:
        self.step, self.rounds_done, self.history = saved["step"], saved["rounds_done"], saved["history"]
        played = self.log.trajectories_path(self.step + 1)
        self.log.truncate_after(self.step, keep=[] if self._kept_round() is None else [played])
        if saved["in_round"]:
            self.round = read_round(self.log.root, self.rounds_done + 1)
            self.trainer = self._make_trainer(self.round)
            await self.backend.restore(checkpoint_path(self.log.checkpoints_dir, self.step), saved)

    def can_resume_here(self) -> bool:
        return self.trainer is None or super().can_resume_here()

    def details(self) -> dict[str, Any]:
        return {"rounds": self.history}

    def files(self) -> dict[str, Path | str]:
        return {**super().files(), "data of each round": self.log.root / "rounds"}

    async def _start_round(self) -> None:
        self.round = await self._next_round()
        if self.config.method in RETRAINED:
            self.backend.load_model(self.log.root / "base")
        self.trainer = self._make_trainer(self.round)

    async def _next_round(self) -> Round:
        kept = self._kept_round()
        if kept is not None:
            return kept
        await self.backend.publish(self.step)
        current = await self.rounds.make(self.rounds_done + 1, self.step + 1)
        write_round(self.log.root, current)
        return current

    def _kept_round(self) -> Round | None:
        """Return the next round, if an earlier process has played and written all of it."""
        number = self.rounds_done + 1
        if not round_path(self.log.root, number).is_file():
            return None
        current = read_round(self.log.root, number)
        return current if current.first_step == self.step + 1 else None

    def _make_trainer(self, current: Round) -> Trainer:
        config, seed = self.config, f"{self.config.seed}/round{current.number}"
        if settings := config.dpo or config.reward_model:
            return self.backend.trainer(current.pairs, settings, seed)
        assert config.sft is not None
        return self.backend.trainer([s for samples in current.samples.values() for s in samples], config.sft, seed)

    async def _train_round(self) -> None:
        trainer, current, method = self.trainer, self.round, self.config.method
        assert trainer is not None
        assert current is not None
        last_step = current.first_step - 1 + trainer.total
        if self.rounds.count == 1:
            self.log.set_status("running", steps=last_step)
        data = (
            f"{len(current.pairs)} pairs"
            if current.pairs
            else f"{sum(map(len, current.samples.values()))} conversations"
        )
        stages = {"dpo": "Preferences", "reward_model": "Reward model"}
        self.console.stage(stages.get(method, "Imitation"), f"{trainer.total} updates on {data}")
        updates_per_line = -(-trainer.total // LINES_PER_ROUND)
        with self.console.steps(last_step, start=self.step, label=f"round {current.number}", method=method):
            while trainer.updates < trainer.total:
                started = time.perf_counter()
                metrics = trainer.step()
                metrics |= current.metrics if trainer.updates == 1 else {}
                metrics |= {"round": float(current.number), "time/step_s": time.perf_counter() - started}
                self.step += 1
                self.log.log(self.step, metrics | join_metrics([self.system.metrics(), metrics]))
                if trainer.updates % updates_per_line == 0 or trainer.updates == trainer.total:
                    self.console.step(self.step, metrics)
                if trainer.updates < trainer.total:
                    await self._after_update()
                await asyncio.sleep(0)  # a point at which the run can be stopped
        await self._end_round(current)

    async def _after_update(self) -> None:
        """Evaluate and save within a round."""
        if self.evaluation_is_due():
            await self.evaluate()
        await self.events.now()
        self.settle()
        if self.step % self.config.checkpoint.every == 0:
            try_checkpoint(self.save, self.step, self.context)

    async def _end_round(self, current: Round) -> None:
        if self.evaluations[-1]["step"] != self.step:  # a run that was stopped just here has evaluated already
            await self.evaluate()
        self.history.append(_summary_of(current, self.step, self.evaluations[-1]))
        self.rounds_done, self.round, self.trainer = current.number, None, None
        if not self.judges:  # the head of a reward model belongs into the last checkpoint, too
            self.backend.release_trainer()
        await self.events.now()
        if self.rounds_done == self.rounds.count:
            await last_checkpoint(self.save_now, self.step, self.context)
        else:
            try_checkpoint(self.save, self.step, self.context)


def _summary_of(current: Round, last_step: int, evaluation: dict[str, Any]) -> dict[str, Any]:
    return {
        "round": current.number,
        "first_step": current.first_step,
        "last_step": last_step,
        "episodes": current.metrics.get("episodes/usable", 0.0),
        "episodes_success": current.metrics.get("success/mean"),
        **{source: len(samples) for source, samples in current.samples.items() if samples},
        **({"pairs": len(current.pairs)} if current.pairs else {}),
        **({"held_out": len(current.held_out)} if current.held_out else {}),
        "success": evaluation["success"],
    }
