"""Offline methods from start to summary: SFT, DPO and AgentEvol are rounds of data and updates on it.

A step is one update, counted over all rounds. Each round first comes by its data (SFT has one round and reads it; DPO
and AgentEvol also play), keeps it in the run directory, and then makes its updates. Killed at any moment and started
again with `resume`, a run goes on from its last checkpoint, and does not play again what a round already has.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from agentgym_rl.config import Config
from agentgym_rl.run import build
from agentgym_rl.run.backend import OneProcess, Trainer, Workers
from agentgym_rl.run.console import Console
from agentgym_rl.run.demonstrations import Demonstration, load_demonstrations
from agentgym_rl.run.events import Telling
from agentgym_rl.run.exploration import Explorer
from agentgym_rl.run.heldout import evaluate
from agentgym_rl.run.log import RunLog
from agentgym_rl.run.plots import learning_curve
from agentgym_rl.run.rounds import Round, read_round, round_path, write_round
from agentgym_rl.run.start import prepare, resume_point, starting_point
from agentgym_rl.run.stopping import Stop, last_checkpoint, stop_with_checkpoint, try_checkpoint
from agentgym_rl.training.checkpoint import checkpoint_path, export, list_checkpoints
from agentgym_rl.types import EnvPool

LINES_PER_ROUND = 100
"""A round of more updates shows every n-th on the console; metrics.jsonl has all."""


async def train_offline(
    config: Config, pool: EnvPool, items: build.Items, log: RunLog, console: Console, started: float, stop: Stop
) -> dict[str, Any]:
    """The whole recipe in the run directory of `log`; returns its summary."""
    folder, saved = resume_point(log, console) or (None, None)
    loaded: list[Demonstration] | None = None
    if saved is None and config.model.scratch is not None and config.warm_start is None:
        console.stage("Data")
        loaded = await load_demonstrations(config, pool, items, log, console)
    workers = await _workers(config, pool, items, log, console, folder / "model" if folder else None, loaded)
    run = OfflineRun(config, pool, items, log, console, workers, started, loaded, stop)
    try:
        with stop.ending_with(run.stop_here):
            async with run.telling:
                await run.begin(saved)
                summary = await run.finish()
                stop.may_leave = lambda: False  # there is nothing left to stop
            return summary
    finally:
        stop.may_leave = lambda: False
        await workers.close()


async def _workers(
    config: Config,
    pool: EnvPool,
    items: build.Items,
    log: RunLog,
    console: Console,
    folder: Path | None,
    loaded: list[Demonstration] | None,
) -> Workers:
    """With the model in `folder`, a checkpoint's, or with the one the recipe starts from, which AgentEvol keeps."""
    base = log.root / "base"
    words = [one.messages for one in loaded or ()]
    if config.scale is not None:
        from agentgym_rl.run.backend_ray import Cluster

        as_it_is = config.warm_start is None and config.model.lora is None and config.method != "agentevol"
        if folder is None and as_it_is and config.model.path is not None:
            folder = Path(config.model.path)
        if folder is not None:
            return await Cluster.start(config, folder, console, log.root)
        start = await prepare(config, pool, items, log, console, words)
        return await Cluster.start(config, base, console, log.root, start=start)
    if folder is not None:
        model, tokenizer = build.load_from(folder, config.model)
    else:
        model, tokenizer = await starting_point(config, pool, items, log, console, words)
        if config.method == "agentevol":
            export(model, tokenizer, base)
    return OneProcess(config, pool, model, tokenizer, None)


@dataclass(slots=True)
class OfflineRun:
    """A run in progress."""

    config: Config
    pool: EnvPool
    items: build.Items
    log: RunLog
    console: Console
    workers: Workers
    started: float
    """When this process began, on the monotonic clock."""
    loaded: list[Demonstration] | None
    stop: Stop
    step: int = 0
    """Finished updates."""
    round: Round | None = None
    """The one in progress."""
    trainer: Trainer | None = None
    rounds_done: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    """One entry per finished round: what it had and how held-out items went after it."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    seconds_before: float = 0.0
    saved_step: int | None = None
    """Step of the last checkpoint: it is not written again if the run stops right after it."""
    explorer: Explorer = field(init=False)
    telling: Telling = field(init=False)

    def __post_init__(self) -> None:
        self.explorer = Explorer(self.config, self.pool, self.items, self.log, self.console, self.workers, self.loaded)
        self.loaded = None
        self.telling = Telling(self.workers.events, self._event)

    async def begin(self, saved: dict[str, Any] | None) -> None:
        """Go back to a checkpoint; or evaluate the start and keep it as the checkpoint of step 0."""
        if saved is not None:
            self.stop.may_leave = lambda: False  # a checkpoint of what is half restored would replace the good one
            await self._restore(saved)
            self.stop.may_leave = lambda: True
            if self.stop.asked:
                self.stop_here()
        else:
            shutil.rmtree(self.log.root / "rounds", ignore_errors=True)
        if not self._evaluation_is_due() or any(one["step"] == self.step for one in self.evaluations):
            return
        # At the start; or a run that was stopped while it evaluated makes up for it.
        self.console.stage("Held-out evaluation", f"after step {self.step}" if self.step else "before training")
        await self.evaluate()
        self.save()  # without room for one checkpoint there is no use in going on

    async def finish(self) -> dict[str, Any]:
        """The rounds that are left and the summary."""
        while self.rounds_done < self.explorer.num_rounds:
            if self.round is None:
                await self._begin_round()
            await self._train_round()
        return self._summarise()

    async def _begin_round(self) -> None:
        self.round = self._kept_round()
        if self.round is None:
            await self.workers.publish(self.step)
            self.round = await self.explorer.make(self.rounds_done + 1, self.step + 1)
            write_round(self.log.root, self.round)
        if self.config.method == "agentevol":
            self.workers.go_back(self.log.root / "base")
        self.trainer = self._make_trainer(self.round)

    def _kept_round(self) -> Round | None:
        """The next round, if a process that was killed has left all it had played for it."""
        number = self.rounds_done + 1
        if not round_path(self.log.root, number).is_file():
            return None
        made = read_round(self.log.root, number)
        return made if made.first_step == self.step + 1 else None

    def _make_trainer(self, made: Round) -> Trainer:
        config, seed = self.config, f"{self.config.seed}/round{made.number}"
        if config.dpo is not None:
            return self.workers.trainer(made.pairs, config.dpo, seed)
        assert config.sft is not None
        return self.workers.trainer([s for samples in made.samples.values() for s in samples], config.sft, seed)

    async def _train_round(self) -> None:
        trainer, made, method = self.trainer, self.round, self.config.method
        assert trainer is not None
        assert made is not None
        last_step = made.first_step - 1 + trainer.total
        num_rounds = self.explorer.num_rounds
        if num_rounds == 1:
            self.log.set_status("running", steps=last_step)
        what = f"{len(made.pairs)} pairs" if made.pairs else f"{sum(map(len, made.samples.values()))} conversations"
        self.console.stage({"dpo": "Preferences"}.get(method, "Imitation"), f"{trainer.total} updates on {what}")
        shown = -(-trainer.total // LINES_PER_ROUND)
        with self.console.steps(last_step, start=self.step, label=f"round {made.number}", method=method):
            while trainer.updates < trainer.total:
                started = time.perf_counter()
                metrics = trainer.step()
                metrics |= made.metrics if trainer.updates == 1 else {}
                metrics |= {"round": float(made.number), "time/step_s": time.perf_counter() - started}
                self.step += 1
                self.log.log(self.step, metrics)
                if trainer.updates % shown == 0 or trainer.updates == trainer.total:
                    self.console.step(self.step, metrics)
                if trainer.updates < trainer.total:
                    await self._after_step()
                await asyncio.sleep(0)  # where the run may be stopped
        await self._end_round(made)

    async def _after_step(self) -> None:
        """Within a round."""
        if self._evaluation_is_due():
            await self.evaluate()
        await self.telling.now()
        if self.step % self.config.checkpoint.every == 0:
            try_checkpoint(self.save, self.step, self.log, self.console)

    def _evaluation_is_due(self) -> bool:
        every = self.config.eval.every
        return self.step == 0 or bool(every and self.step % every == 0)

    async def _end_round(self, made: Round) -> None:
        if self.evaluations[-1]["step"] != self.step:  # a run that was stopped just here has evaluated already
            await self.evaluate()
        self.history.append(_described(made, self.step, self.evaluations[-1]))
        self.rounds_done, self.round, self.trainer = made.number, None, None
        self.workers.forget_trainer()
        await self.telling.now()
        if self.rounds_done == self.explorer.num_rounds:
            await last_checkpoint(self.save, self.step, self.log, self.console, lambda: self.stop.asked)
        else:
            try_checkpoint(self.save, self.step, self.log, self.console)

    def _event(self, kind: str, message: str, **detail: Any) -> None:
        self.log.log_event(kind, message, step=self.step, **detail)
        self.console.warn(message)

    def stop_here(self) -> NoReturn:
        """With a checkpoint: after the last update, without the episodes that were being played."""
        self.stop.may_leave = lambda: False  # it is on its way out: once is enough
        write = None if self.saved_step == self.step else self.save
        stop_with_checkpoint(write, self.step, self.log, self.console, self.stop.by)

    async def evaluate(self) -> None:
        """Play held-out items, the same ones every time, and remember the result."""
        await self.workers.publish(self.step)
        collect = self.workers.collector(f"eval{self.step}-", 1, self.config.eval.temperature)
        result = await evaluate(self.config, self.items, self.log, collect, self.workers.room, self.step)
        self.evaluations.append(result)
        self.console.evaluation(self.step, result["success"], result["episodes"])

    def save(self) -> None:
        state = {
            "in_round": self.trainer is not None,
            "rounds_done": self.rounds_done,
            "history": self.history,
            "evaluations": self.evaluations,
            "seconds": self._seconds(),
        }
        self.workers.save(self.log.checkpoints_dir, self.step, state, self.config.checkpoint.keep)
        self.saved_step = self.step

    async def _restore(self, saved: dict[str, Any]) -> None:
        self.step = self.saved_step = saved["step"]
        self.rounds_done = saved["rounds_done"]
        self.history, self.evaluations = saved["history"], saved["evaluations"]
        self.seconds_before = saved["seconds"]
        played = self.log.trajectories_path(self.step + 1)
        self.log.truncate_after(self.step, keep=[] if self._kept_round() is None else [played])
        if saved["in_round"]:
            self.round = read_round(self.log.root, self.rounds_done + 1)
            self.trainer = self._make_trainer(self.round)
            await self.workers.restore(checkpoint_path(self.log.checkpoints_dir, self.step), saved)

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def _summarise(self) -> dict[str, Any]:
        metrics = self.log.metrics()
        before, after = self.evaluations[0], self.evaluations[-1]
        summary = {
            "name": self.config.name,
            "method": self.config.method,
            "seed": self.config.seed,
            "before": before,
            "after": after,
            "evaluations": self.evaluations,
            "rounds": self.history,
            "stages": [],
            "steps": self.step,
            "parameters": self.workers.num_parameters,
            "seconds": round(self._seconds(), 1),
        }
        self.log.write_summary(summary)
        with self.log.if_there_is_room(self.log.curve_path.name):
            learning_curve(metrics, self.evaluations, [], self.log.curve_path, self.config.name)
        self.console.table_before_after(before, after)
        self.console.files(
            {
                "learning curve": self.log.curve_path,
                "summary": self.log.summary_path,
                "data of each round": self.log.root / "rounds",
                "trajectories": f"{self.log.trajectories_dir} (agentgym-rl show {self.log.root})",
                "model": list_checkpoints(self.log.checkpoints_dir)[-1] / "model",
            }
        )
        return summary


def _described(made: Round, last_step: int, evaluation: dict[str, Any]) -> dict[str, Any]:
    return {
        "round": made.number,
        "first_step": made.first_step,
        "last_step": last_step,
        "episodes": made.metrics.get("episodes/usable", 0.0),
        "episodes_success": made.metrics.get("success/mean"),
        **{source: len(samples) for source, samples in made.samples.items() if samples},
        **({"pairs": len(made.pairs)} if made.pairs else {}),
        "success": evaluation["success"],
    }
