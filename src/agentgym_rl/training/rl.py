"""The loop of online RL: collect episodes, learn from them, publish the weights. Independent of engine and model."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from agentgym_rl.common.garbage import rare_collections
from agentgym_rl.common.seeds import derive_seed
from agentgym_rl.errors import EngineError, EnvError
from agentgym_rl.training.batch import Batch, estimate, gather, is_flat, keep_widest, version_counts
from agentgym_rl.training.distill import teacher_metrics
from agentgym_rl.training.group_queue import GroupQueue, QueuedGroup
from agentgym_rl.training.horizon import Horizon, turns_after
from agentgym_rl.training.metrics import digest_of, episode_metrics
from agentgym_rl.training.rl_learner import policy_metrics
from agentgym_rl.training.role_learners import RoleLearners, joined_metrics
from agentgym_rl.training.settings import RLSettings
from agentgym_rl.training.task_source import TaskSource
from agentgym_rl.types import Collect, Group, Limits, Sample, StopReason, Task, Trajectory

MONITORED_EPISODES = 32
"""Episodes that the learner scores, for metrics only, in a step without anything to learn from."""


class Learner(Protocol):
    """Interface of the learner."""

    @property
    def kl_coef(self) -> float: ...
    def score(self, samples: list[Sample], *, policy_only: bool = False) -> None: ...
    def learn(self, batch: Batch, seed: int) -> dict[str, float]: ...


@dataclass(slots=True)
class Hooks:
    """Callbacks around a step. The first argument is the number of the step, from 1."""

    record: Callable[[int, list[Group]], None]
    """Receives every episode of a step, before any filtering."""
    learned: Callable[[int, list[Sample]], None]
    """Receives the trained samples, with advantages and the learner's values of every token."""
    log: Callable[[int, dict[str, float | str]], None]
    """Receives a finished step's metrics."""
    after_step: Callable[[int], Awaitable[None]]
    """Saves checkpoints and runs evaluations."""
    learning: Callable[[], AbstractAsyncContextManager[None]]
    """Makes a context for an update and its publication. Episodes of later steps may be under way in it."""


@dataclass(slots=True)
class RLState:
    """State that a run needs to resume, apart from the model."""

    tasks: TaskSource
    horizons: dict[str, Horizon]
    step: int = 0
    """Finished steps."""
    sampled: int = 0
    """Tokens sampled in the finished steps, failed episodes included."""
    version: int = 0
    """Version of the last published weights. A step without anything to learn from publishes none."""
    played: list[Group] = field(default_factory=list)
    """With overlap: the next step's episodes, already played with older weights."""
    played_s: float = 0.0
    """Seconds it took to play them."""
    queued: list[QueuedGroup] = field(default_factory=list)
    """With max_staleness: groups that were started and not learned from."""
    started_steps: int = 0
    """With max_staleness: steps whose groups were started."""

    def state(self) -> dict[str, Any]:
        return {
            "tasks": self.tasks.state(),
            "horizons": {e: h.state() for e, h in self.horizons.items()},
            "sampled": self.sampled,
            "version": self.version,
            "played": [[str(line, "utf-8") for line in group.lines()] for group in self.played],
            "played_s": self.played_s if self.played else 0.0,
            "queued": [queued.to_json() for queued in self.queued],
            "started_steps": self.started_steps,
        }

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        self.tasks.restore(state["tasks"])
        for env, horizon in self.horizons.items():
            horizon.restore(state["horizons"][env])
        groups = [[Trajectory.from_json(line) for line in lines] for lines in state["played"]]
        self.played = [Group(trajectories[0].task, trajectories) for trajectories in groups]
        self.version, self.played_s = state["version"], state["played_s"]
        self.queued = [QueuedGroup.from_json(row) for row in state.get("queued", ())]
        self.started_steps = state.get("started_steps", step)
        self.step, self.sampled = step, state["sampled"]

    def is_finished(self, settings: RLSettings) -> bool:
        """Return whether the run has reached its steps or its token budget."""
        return self.step >= settings.steps or 0 < settings.token_budget <= self.sampled


def settings_at(settings: RLSettings, step: int) -> RLSettings:
    """Return the settings of a step, from 0. In the second stage of self-correction the first has no steps."""
    correction = settings.correction
    if correction is None or step < correction.first_stage_steps:
        return settings
    return replace(settings, correction=replace(correction, first_stage_steps=0))


def expected_steps(settings: RLSettings, step: int, tokens: float) -> int:
    """Return the expected number of steps: `steps`, or fewer if the token budget runs out at the average rate."""
    if not settings.token_budget or not tokens:
        return settings.steps
    return max(step, min(settings.steps, math.ceil(step * settings.token_budget / tokens)))


async def train_rl(
    state: RLState,
    learner: Learner | RoleLearners,
    collect: Collect,
    publish: Callable[[int], Awaitable[None]],
    limits: dict[str, Limits],
    settings: RLSettings,
    hooks: Hooks,
    seed: int,
) -> None:
    """Train until the state `is_finished`. `limits` are by environment; the horizon overrides their max_turns.

    With `overlap` the learner works in a thread while the next step's episodes are played with the current weights, of
    which the engine needs its own copy. With `max_staleness` it works while groups of later steps are under way.
    """
    async with GroupQueue(collect, limits, state.queued) as queue:
        while not state.is_finished(settings):
            step, started = state.step, time.perf_counter()
            turns = {env: horizon.turns for env, horizon in state.horizons.items()}
            if settings.max_staleness:
                turns |= await _take_step(step, state, queue, settings, seed)
            elif not state.played:
                await _play_step(step, state, collect, limits, settings, seed)
            groups, rollout_s = state.played, state.played_s
            state.played = []
            hooks.record(step + 1, groups)
            groups = [group for group in groups if group.learns]
            sampled = state.sampled + _sampled_tokens(groups)
            metrics: dict[str, float | str] = {**episode_metrics(groups, state.horizons)}
            metrics["tokens/total"] = float(sampled)
            _require_episodes(groups, step)
            _require_judged(groups, step)
            metrics |= {f"horizon/{env}": float(of_env) for env, of_env in turns.items()}
            _advance(state.horizons, groups, turns)
            learning_since = time.perf_counter()
            arguments = groups, state, learner, limits, settings, seed
            async with hooks.learning():
                if settings.max_staleness:
                    learned, samples = await asyncio.to_thread(_learn, *arguments)
                elif settings.overlap and not replace(state, step=step + 1, sampled=sampled).is_finished(settings):
                    # No TaskGroup: an error must be raised as it is, not inside an ExceptionGroup.
                    playing = asyncio.create_task(_play_step(step + 1, state, collect, limits, settings, seed))
                    try:
                        learned, samples = await asyncio.to_thread(_learn, *arguments)
                    except BaseException:
                        playing.cancel()
                        await asyncio.gather(playing, return_exceptions=True)
                        raise
                    await playing
                else:
                    learned, samples = _learn(*arguments)
                if samples:
                    state.version += 1
                    await publish(state.version)
            now = time.perf_counter()
            if settings.max_staleness:  # episodes were played during the whole step
                metrics["time/wait_s"], rollout_s = rollout_s, now - started
            metrics |= learned | _times(rollout_s, now - learning_since, now - started, metrics)
            hooks.learned(step + 1, samples)
            state.step, state.sampled = step + 1, sampled
            hooks.log(state.step, metrics)
            await hooks.after_step(state.step)


def _sampled_tokens(groups: list[Group]) -> int:
    return sum(sum(digest_of(t).sampled) for g in groups for t in g.trajectories)


def _learn(
    groups: list[Group], state: RLState, learner: Learner | RoleLearners, *arguments: Any
) -> tuple[dict[str, float | str], list[Sample]]:
    """Learn from a step's groups, of each role with its own learner. Return (metrics, trained samples)."""
    if not isinstance(learner, RoleLearners):
        return _learn_from(groups, state, learner, *arguments)
    parts = [(role, own, _learn_from(own, state, each, *arguments)) for role, each, own in learner.split(groups)]
    samples = [sample for _, _, (_, trained) in parts for sample in trained]
    return joined_metrics([(role, len(own), metrics) for role, own, (metrics, _) in parts]), samples


def _learn_from(
    groups: list[Group],
    state: RLState,
    learner: Learner,
    limits: Mapping[str, Limits],
    settings: RLSettings,
    seed: int,
) -> tuple[dict[str, float | str], list[Sample]]:
    """Learn from groups with one learner. Return (metrics, trained samples)."""
    settings = settings_at(settings, state.step)
    replaced: list[Group] = []
    if settings.resample_rounds:  # see _play_step
        replaced, groups = groups[: -settings.groups_per_step], groups[-settings.groups_per_step :]
    with rare_collections():
        batch = played = keep_widest(gather(groups, settings, limits), settings)
    needs_models = settings.distill is not None or settings.correction is not None
    if settings.algorithm == "ppo" or settings.kl_in == "reward" or needs_models:
        learner.score(batch.samples)
    with rare_collections():
        batch = estimate(batch, settings, learner.kl_coef)
    num_replaced = sum(bool(group.trainable) for group in replaced)
    metrics: dict[str, float | str] = {
        "groups/zero_variance": (batch.zero_variance_groups + num_replaced) / max(1, batch.groups + num_replaced),
        "samples": float(len(batch.samples)),
        "importance": settings.importance,
        **_staleness(batch.samples, state.version, settings.overlap or settings.max_staleness),
        **teacher_metrics(played.samples),
    }
    if batch.samples:
        metrics |= learner.learn(batch, derive_seed(seed, "minibatches", state.step))
    if "mismatch/abs" not in metrics:  # no policy update: score a few samples, so that the metrics are there
        pairs = zip(played.samples, played.episode_of_sample, strict=True)
        monitored = [sample for sample, episode in pairs if episode < MONITORED_EPISODES]  # all segments of each
        learner.score(monitored, policy_only=True)
        metrics |= policy_metrics(monitored)
    return metrics, batch.samples


def _staleness(samples: list[Sample], version: int, bound: int) -> dict[str, float]:
    """Return the age in versions of the weights that sampled each token. Raise EngineError if it exceeds `bound`."""
    ages: Counter[int] = Counter()
    for sample in samples:
        for sampled_by, tokens in version_counts(sample).items():
            ages[version - sampled_by] += tokens
    if not ages:
        return {}
    if max(ages) > bound:
        raise EngineError(
            f"episodes must be at most {bound} versions old, got one sampled by version {version - max(ages)} while "
            f"the learner is at {version}: the engine did not load the last update"
        )
    mean = sum(age * tokens for age, tokens in ages.items()) / ages.total()
    return {"staleness/mean": mean, "staleness/max": float(max(ages))}


async def _play_step(
    step: int, state: RLState, collect: Collect, limits: dict[str, Limits], settings: RLSettings, seed: int
) -> None:
    """Play a step's groups into `state.played`.

    With resample_rounds new groups replace the flat ones. The replaced groups come first: a step learns from the last
    groups_per_step.
    """
    started = time.perf_counter()
    replaced: list[Group] = []
    useful: list[Group] = []
    flat: list[Group] = []
    with rare_collections():
        for attempt in range(settings.resample_rounds + 1):
            replaced, flat = replaced + flat, []
            tasks = state.tasks.take(settings.groups_per_step - len(useful))
            parts = ("rollout", step) if attempt == 0 else ("rollout", step, attempt)
            for group in await _collect(tasks, collect, limits, state.horizons, derive_seed(seed, *parts)):
                resampled = settings.resample_rounds > 0 and is_flat(group, settings_at(settings, step), limits)
                (flat if resampled else useful).append(group)
            if not flat:
                break
    state.played, state.played_s = replaced + useful + flat, time.perf_counter() - started


async def _take_step(step: int, state: RLState, queue: GroupQueue, settings: RLSettings, seed: int) -> dict[str, int]:
    """Start the groups of steps up to max_staleness ahead, and take a step's groups into `state.played`.

    Return the horizons of these, by environment. An environment without a group in this step has its present horizon,
    or a smaller one that its next group was started under.
    """
    started = time.perf_counter()
    while state.started_steps < min(settings.steps, step + settings.max_staleness + 1):
        for index, task in enumerate(state.tasks.take(settings.groups_per_step)):
            group_seed = derive_seed(seed, "rollout", state.started_steps, "group", index)
            turns = turns_after(state.horizons[task.env], state.started_steps - step)
            queue.groups.append(QueuedGroup(task, turns, group_seed))
        state.started_steps += 1
    queue.play()
    oldest = {queued.task.env: queued.turns for queued in reversed(queue.groups)}
    played_under = {env: min(turns, state.horizons[env].turns) for env, turns in oldest.items()}
    played_under |= {queued.task.env: queued.turns for queued in queue.groups[: settings.groups_per_step]}
    with rare_collections():
        state.played = await queue.take(settings.groups_per_step)
    state.played_s = time.perf_counter() - started
    return played_under


async def _collect(
    tasks: list[Task], collect: Collect, limits: dict[str, Limits], horizons: dict[str, Horizon], seed: int
) -> list[Group]:
    """Play the tasks of all environments concurrently, each under its own horizon."""
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


def _require_episodes(groups: list[Group], step: int) -> None:
    if not any(g.usable for g in groups):
        failures = [t.error for g in groups for t in g.trajectories if t.error]
        raise EnvError(f"step {step + 1}: all {len(failures)} episodes failed; the first: {failures[0]}")


def _require_judged(groups: list[Group], step: int) -> None:
    if not any(g.trainable for g in groups):
        errors = [t.judge_error for g in groups for t in g.usable]
        raise EngineError(f"step {step + 1}: none of {len(errors)} episodes could be judged; the first: {errors[0]}")


def _advance(horizons: dict[str, Horizon], groups: list[Group], turns: Mapping[str, int]) -> None:
    """Update each horizon with the success and truncation rates of its environment.

    Groups that started in an earlier stage, under fewer `turns`, say nothing about the present one.
    """
    for env, horizon in horizons.items():
        usable = [t for g in groups if g.task.env == env for t in g.usable]
        if usable and turns[env] == horizon.turns:
            success = sum(t.success for t in usable) / len(usable)
            horizon.advance(success, sum(t.stop is StopReason.MAX_TURNS for t in usable) / len(usable))
        else:
            horizon.advance(None, None)


def _times(rollout_s: float, learn_s: float, step_s: float, metrics: Mapping[str, float | str]) -> dict[str, float]:
    """Return the time metrics. With overlap the rollout ran during the previous step, so the parts exceed the step."""
    sampled = float(metrics.get("tokens/sampled", 0.0))
    return {
        "time/rollout_s": rollout_s,
        "time/learn_s": learn_s,
        "time/step_s": step_s,
        "tokens/sampled_per_s": sampled / rollout_s if rollout_s else 0.0,
    }
