"""Online RL, step by step: collect, learn, publish. It does not know who collects or what a model is."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agentgym_rl.errors import EnvError
from agentgym_rl.training.batch import Batch, to_batch
from agentgym_rl.training.horizon import Horizon
from agentgym_rl.training.metrics import episode_metrics
from agentgym_rl.training.settings import RLSettings
from agentgym_rl.training.tasks import TaskSource
from agentgym_rl.types import Collect, Group, Limits, StopReason, Task


class Learner(Protocol):
    """What learns from a step's samples."""

    def learn(self, batch: Batch, seed: int) -> dict[str, float]: ...


@dataclass(slots=True)
class Hooks:
    """What happens around a step; wired by the caller."""

    record: Callable[[int, list[Group]], None]
    """Every episode of a step, before any filtering. Steps are numbered from 1 in what is written down."""
    log: Callable[[int, dict[str, float]], None]
    """A finished step's metrics."""
    after_step: Callable[[int], Awaitable[None]]
    """Called with the number of finished steps: checkpoints and evaluations."""


@dataclass(slots=True)
class RLState:
    """Where a run stands: everything but the model that a resumed run needs."""

    tasks: TaskSource
    horizons: dict[str, Horizon]
    step: int = 0
    """Finished steps."""

    def state(self) -> dict[str, Any]:
        return {"tasks": self.tasks.state(), "horizons": {e: h.state() for e, h in self.horizons.items()}}

    def restore(self, state: dict[str, Any], step: int) -> None:
        self.tasks.restore(state["tasks"])
        for env, horizon in self.horizons.items():
            horizon.restore(state["horizons"][env])
        self.step = step


async def train_rl(
    state: RLState,
    learner: Learner,
    collect: Collect,
    publish: Callable[[int], Awaitable[None]],
    limits: dict[str, Limits],
    settings: RLSettings,
    hooks: Hooks,
    seed: int,
) -> None:
    """Run until `settings.steps` steps are finished. `limits` is by environment; max_turns is the horizon's to set."""
    while state.step < settings.steps:
        step = state.step
        started = time.perf_counter()
        tasks = state.tasks.take(settings.groups_per_step)
        groups = await _collect(tasks, collect, limits, state.horizons, derive_seed(seed, "rollout", step))
        collected = time.perf_counter()
        hooks.record(step + 1, groups)
        metrics = episode_metrics(groups)
        if not metrics["episodes/usable"]:
            failures = [t.error for g in groups for t in g.trajectories if t.error]
            raise EnvError(f"step {step + 1}: all {len(failures)} episodes failed; the first: {failures[0]}")
        batch = to_batch(
            groups,
            settings.algorithm,
            normalize_std=settings.normalize_std,
            drop_zero_variance=settings.zero_variance == "drop",
            aggregate=settings.aggregate,
        )
        metrics["groups/zero_variance"] = batch.zero_variance_groups / max(1, batch.groups)
        metrics["samples"] = float(len(batch.samples))
        if batch.samples:
            metrics |= learner.learn(batch, derive_seed(seed, "minibatches", step))
            await publish(step + 1)
        learned = time.perf_counter()
        metrics |= {f"horizon/{env}": float(h.turns) for env, h in state.horizons.items()}
        metrics |= _times(started, collected, learned, metrics.get("tokens/sampled", 0.0))
        _advance(state.horizons, groups)
        state.step += 1
        hooks.log(state.step, metrics)
        await hooks.after_step(state.step)


async def _collect(
    tasks: list[Task], collect: Collect, limits: dict[str, Limits], horizons: dict[str, Horizon], seed: int
) -> list[Group]:
    """All environments at once, each under its own horizon."""
    environments = sorted({task.env for task in tasks})
    parts = await asyncio.gather(
        *(
            collect(
                [t for t in tasks if t.env == env],
                replace(limits[env], max_turns=horizons[env].turns),
                derive_seed(seed, env),
            )
            for env in environments
        )
    )
    return [group for part in parts for group in part]


def _advance(horizons: dict[str, Horizon], groups: list[Group]) -> None:
    """Tell each horizon how its environment went."""
    for env, horizon in horizons.items():
        usable = [t for g in groups if g.task.env == env for t in g.usable]
        if usable:
            success = sum(t.success for t in usable) / len(usable)
            horizon.advance(success, sum(t.stop is StopReason.MAX_TURNS for t in usable) / len(usable))
        else:
            horizon.advance(None, None)


def _times(started: float, collected: float, learned: float, sampled: float) -> dict[str, float]:
    rollout_s, learn_s = collected - started, learned - collected
    return {
        "time/rollout_s": rollout_s,
        "time/learn_s": learn_s,
        "time/step_s": rollout_s + learn_s,
        "tokens/sampled_per_s": sampled / rollout_s,
    }


def derive_seed(*parts: object) -> int:
    """A stable 63-bit seed from anything that prints."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
