"""The RL loop with scripted collaborators, then with a real engine, collector and learner."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from envs_for_tests import Counting
from test_segment_batch import split_groups
from training_for_tests import batch_of, counting_player, trajectory

from agentgym_rl.agent.collect import Collector
from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.policy import EnginePolicy
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.common.seeds import derive_seed
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.errors import EngineError, EnvError
from agentgym_rl.training.batch import Batch
from agentgym_rl.training.horizon import make_horizon
from agentgym_rl.training.microbatch import micro_batches
from agentgym_rl.training.model import action_logprobs
from agentgym_rl.training.rl import MONITORED_EPISODES, Hooks, RLState, expected_steps, train_rl
from agentgym_rl.training.rl_learner import RLLearner
from agentgym_rl.training.settings import DistillSettings, HorizonSettings, OptimizerSettings, RLSettings
from agentgym_rl.training.task_source import TaskSource
from agentgym_rl.types import Group, Limits, Sample, Sampling, StopReason, Task, Trajectory

SETTINGS = RLSettings(steps=7, groups_per_step=4, group_size=2, kl_coef=0.0)
LIMITS = Limits(max_turns=1, max_new_tokens=4, max_context=200)
HORIZONS = {
    "a": HorizonSettings(kind="stepwise", turns=(2, 4), steps_per_stage=3),
    "b": HorizonSettings(kind="linear", turns=(1, 7), steps_per_stage=6),
}
torch.set_num_threads(1)


def new_state() -> RLState:
    tasks = TaskSource({"a": list(range(9)), "b": list(range(50, 57))}, seed=3)
    return RLState(tasks, {env: make_horizon(settings) for env, settings in HORIZONS.items()})


class Bench:
    """Collector, learner and hooks that record their calls. Episodes have the last published version."""

    kl_coef = 0.0

    def __init__(
        self,
        *,
        rewards: tuple[float, float] = (0.0, 1.0),
        failing: bool = False,
        flat: Callable[[Task], bool] = lambda task: False,
        stuck: bool = False,
    ) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.rows: list[dict[str, Any]] = []
        self.saved: dict[int, dict[str, Any]] = {}
        self.state = new_state()
        self._rewards, self._failing, self._flat, self._stuck = rewards, failing, flat, stuck
        self.version = 0

    async def collect(self, tasks: list[Task], limits: Limits, seed: int) -> list[Group]:
        self.calls.append(("collect", [t.key for t in tasks], limits, seed))
        groups = []
        for task in tasks:
            rewards = (1.0, 1.0) if self._flat(task) else self._rewards
            members = [trajectory(task.item * 10 + i, reward=r) for i, r in enumerate(rewards)]
            for member in members:
                member.task = task
                for message in member.messages:
                    message.version = self.version if message.logprobs is not None else None
                if self._failing:
                    member.stop, member.error = StopReason.ERROR, "EnvError: the game broke"
            groups.append(Group(task, members))
        return groups

    def score(self, samples: list[Sample], *, policy_only: bool = False) -> None:
        self.calls.append(("score", len(samples)))
        for sample in samples if policy_only else ():
            sample.old_logprobs = [logprob - 0.25 for logprob in sample.logprobs]
            sample.entropies = [0.5] * len(sample.logprobs)

    def learn(self, batch: Batch, seed: int) -> dict[str, float]:
        self.calls.append(("learn", len(batch.samples), seed))
        return {"loss": 0.5, "mismatch/abs": 0.0}

    async def publish(self, version: int) -> None:
        self.calls.append(("publish", version))
        self.version = 0 if self._stuck else version

    def record(self, step: int, groups: list[Group]) -> None:
        self.calls.append(("record", step, sum(len(g.trajectories) for g in groups)))

    def learned(self, step: int, samples: list[Sample]) -> None:
        self.calls.append(("learned", step, len(samples)))

    def log(self, step: int, metrics: dict[str, float | str]) -> None:
        self.calls.append(("log", step))
        self.rows.append(metrics)

    async def after_step(self, step: int) -> None:
        self.calls.append(("after", step))
        self.saved[step] = json.loads(json.dumps(self.state.state()))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == kind]

    async def run(self, settings: RLSettings = SETTINGS) -> None:
        limits = {"a": LIMITS, "b": replace(LIMITS, max_new_tokens=9)}
        hooks = Hooks(self.record, self.learned, self.log, self.after_step, nullcontext)
        await train_rl(self.state, self, self.collect, self.publish, limits, settings, hooks, seed=11)


async def test_every_step_runs_its_parts_in_order() -> None:
    bench = Bench()
    await bench.run()
    assert bench.state.step == 7
    assert [c[1] for c in bench.calls if c[0] == "after"] == list(range(1, 8))
    names = [c[0] for c in bench.calls if c[0] != "collect"]
    assert names == ["record", "learn", "publish", "learned", "log", "after"] * 7
    await bench.run()  # no step is left
    assert len([c for c in bench.calls if c[0] == "learn"]) == 7


async def test_each_environment_plays_under_its_own_horizon_and_limits() -> None:
    bench = Bench()
    await bench.run()
    for row, a, b in zip(bench.rows, [2, 2, 2, 4, 4, 4, 4], range(1, 8), strict=True):
        assert (row["horizon/a"], row["horizon/b"]) == (a, b)
    for _, keys, limits, _ in (c for c in bench.calls if c[0] == "collect"):
        (env,) = {key.partition("/")[0] for key in keys}
        assert limits.max_new_tokens == {"a": 4, "b": 9}[env]
        assert limits.max_context == 200
    turns = [(c[1][0][0], c[2].max_turns) for c in bench.calls if c[0] == "collect"]
    assert [t for env, t in turns if env == "a"] == sorted(t for env, t in turns if env == "a")
    assert {t for env, t in turns if env == "a"} == {2, 4}


@pytest.mark.parametrize("overlap", [0, 1])
async def test_a_run_ends_when_its_tokens_are_spent(overlap: int) -> None:
    settings, free = replace(SETTINGS, overlap=overlap), Bench()
    await free.run(settings)
    totals = [row["tokens/total"] for row in free.rows]
    each = [row["tokens/sampled"] for row in free.rows]
    assert totals == [sum(each[: i + 1]) for i in range(7)]
    for budget, steps in ((totals[2], 3), (totals[2] + 1, 4), (1, 1), (10 * totals[-1], 7)):
        bench = Bench()
        await bench.run(replace(settings, token_budget=int(budget)))
        assert bench.state.step == len(bench.of("learn")) == steps
        assert bench.state.sampled == totals[steps - 1]
        assert bench.of("collect") == free.of("collect")[: len(bench.of("collect"))]
        assert sum(len(c[1]) for c in bench.of("collect")) == 4 * steps  # every played episode is learned from


def test_the_token_budget_predicts_the_number_of_steps() -> None:
    settings = replace(SETTINGS, steps=50, token_budget=1000)
    assert expected_steps(settings, 2, 300) == 7
    assert expected_steps(settings, 20, 330) == 50
    assert expected_steps(settings, 9, 1010) == 9
    assert expected_steps(replace(settings, token_budget=0), 2, 300) == 50


@pytest.mark.parametrize("killed_after", range(8))
async def test_a_run_resumed_after_any_step_makes_the_same_calls(killed_after: int) -> None:
    whole, resumed = Bench(), Bench()
    start = json.loads(json.dumps(whole.state.state()))
    await whole.run()
    resumed.state.restore(whole.saved.get(killed_after, start), killed_after)
    resumed.version = resumed.state.version
    await resumed.run()
    first = ("after", killed_after)
    expected = whole.calls[whole.calls.index(first) + 1 :] if killed_after else whole.calls
    assert resumed.calls == expected
    assert len(resumed.rows) == 7 - killed_after


async def test_no_variance_anywhere_means_no_update_and_no_new_version() -> None:
    bench = Bench(rewards=(1.0, 1.0))
    await bench.run(replace(SETTINGS, steps=1))
    assert [c[0] for c in bench.calls if c[0] in ("learn", "publish")] == []
    (row,) = bench.rows
    assert (row["groups/zero_variance"], row["samples"], row["success/mean"]) == (1.0, 0.0, 1.0)
    assert row["mismatch/abs"] == pytest.approx(0.25)  # scored for metrics only
    assert row["mismatch/turn_1"] == pytest.approx(0.25)
    assert (row["entropy/mean"], row["mismatch/kl"]) == pytest.approx((0.5, math.exp(-0.25) - 0.75))

    class CriticOnly(Bench):
        def learn(self, batch: Batch, seed: int) -> dict[str, float]:
            super().learn(batch, seed)
            return {"value/loss": 0.5}

    waiting = CriticOnly()
    await waiting.run(replace(SETTINGS, steps=1))
    assert waiting.rows[0]["mismatch/abs"] == pytest.approx(0.25)  # also while only the critic learns
    kept = Bench(rewards=(1.0, 1.0))
    await kept.run(replace(SETTINGS, steps=1, zero_variance="keep"))
    assert [c[1] for c in kept.calls if c[0] == "learn"] == [8]


async def test_all_segments_of_an_episode_are_scored_or_none() -> None:
    class CriticOnly(Bench):
        scored: tuple[set[bool], ...] = ()

        async def collect(self, tasks: list[Task], limits: Limits, seed: int) -> list[Group]:
            groups = split_groups(await super().collect(tasks, limits, seed))
            for number, played in enumerate(t for group in groups for t in group.trajectories):
                played.id = f"{seed}-{number}"
            return groups

        def learn(self, batch: Batch, seed: int) -> dict[str, float]:
            super().learn(batch, seed)
            return {"value/loss": 0.5}

        def learned(self, step: int, samples: list[Sample]) -> None:
            names = {sample.trajectory_id for sample in samples}
            self.scored = tuple({bool(s.entropies) for s in samples if s.trajectory_id == name} for name in names)

    bench = CriticOnly()
    await bench.run(replace(SETTINGS, steps=1, groups_per_step=30))
    assert sorted(map(len, bench.scored)) == [1] * 60
    assert sum(True in states for states in bench.scored) == MONITORED_EPISODES


async def test_all_episodes_failing_is_recorded_and_then_an_error() -> None:
    bench = Bench(failing=True)
    with pytest.raises(EnvError, match="step 1: all 8 episodes failed; the first: EnvError: the game broke"):
        await bench.run()
    assert bench.calls[-1] == ("record", 1, 8)


async def test_seeds_differ_between_steps_environments_and_uses() -> None:
    bench = Bench()
    await bench.run()
    seeds = [c[-1] for c in bench.calls if c[0] in ("collect", "learn")]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= derive_seed(i, "x") < 2**63 for i in range(50))


OVERLAPPED = replace(SETTINGS, overlap=1)


async def test_overlap_is_one_version_old_from_the_second_step_on() -> None:
    exact, overlapped = Bench(), Bench()
    await exact.run()
    await overlapped.run(OVERLAPPED)
    ages = [(row["staleness/mean"], row["staleness/max"]) for row in overlapped.rows]
    assert ages == [(0.0, 0.0)] + [(1.0, 1.0)] * 6
    assert [row["staleness/max"] for row in exact.rows] == [0.0] * 7
    assert {row["importance"] for row in overlapped.rows} == {"token"}


async def test_overlap_plays_the_same_tasks_under_the_same_horizons_and_seeds() -> None:
    exact, overlapped = Bench(), Bench()
    await exact.run()
    await overlapped.run(OVERLAPPED)
    for kind in ("collect", "record", "learn", "publish", "learned", "log", "after"):
        assert overlapped.of(kind) == exact.of(kind)
    horizons = [[row["horizon/a"], row["horizon/b"]] for row in exact.rows]
    assert [[row["horizon/a"], row["horizon/b"]] for row in overlapped.rows] == horizons
    # With overlap the next step starts before this one is published.
    names = [call[0] for call in overlapped.calls]
    second = [i for i, call in enumerate(overlapped.calls) if call[0] == "collect"][2]
    assert second < names.index("publish")


@pytest.mark.parametrize("killed_after", [1, 3, 6])
async def test_a_resumed_run_with_overlap_learns_from_what_was_played_before(killed_after: int) -> None:
    whole, resumed = Bench(), Bench()
    await whole.run(OVERLAPPED)
    saved = whole.saved[killed_after]
    assert len(saved["played"]) == 4
    resumed.state.restore(saved, killed_after)
    resumed.version = resumed.state.version
    await resumed.run(OVERLAPPED)
    for kind in ("record", "learn", "publish", "learned", "log", "after"):
        assert resumed.of(kind) == whole.of(kind)[killed_after:]
    played_before = sum(len(c[1]) for c in whole.of("collect")) - sum(len(c[1]) for c in resumed.of("collect"))
    assert played_before == 4 * (killed_after + 1)
    timed = {name for name in whole.rows[0] if name.startswith("time/") or name.endswith("_per_s")}
    for actual, expected in zip(resumed.rows, whole.rows[killed_after:], strict=True):
        assert {k: v for k, v in actual.items() if k not in timed} == {
            k: v for k, v in expected.items() if k not in timed
        }
    assert whole.saved[7]["played"] == []


@pytest.mark.parametrize(("settings", "step"), [(SETTINGS, 2), (OVERLAPPED, 3)])
async def test_an_engine_that_does_not_load_updates_is_an_error(settings: RLSettings, step: int) -> None:
    bench = Bench(stuck=True)
    with pytest.raises(EngineError, match=f"at most {settings.overlap} versions old, got one sampled by version 0"):
        await bench.run(settings)
    assert len(bench.rows) == step - 1


async def test_an_error_during_overlap_is_raised_unchanged() -> None:
    class Breaking(Bench):
        async def collect(self, tasks: list[Task], limits: Limits, seed: int) -> list[Group]:
            if len(self.of("collect")) == 4:
                raise EngineError("the engine broke")
            return await super().collect(tasks, limits, seed)

    with pytest.raises(EngineError, match="the engine broke"):
        await Breaking().run(OVERLAPPED)


async def test_dynamic_sampling_replaces_groups_of_equal_rewards_by_new_tasks() -> None:
    bench = Bench(flat=lambda task: task.item % 2 == 0)
    await bench.run(replace(SETTINGS, steps=1, resample_rounds=3))
    kept, rounds = 0, []
    asked = [task for call in bench.of("collect") for task in call[1]]
    (_, _, recorded), (_, learned, _) = bench.of("record")[0], bench.of("learn")[0]
    assert recorded == 2 * len(asked)  # replaced groups are recorded too
    assert learned == 2 * sum(int(key.partition("/")[2]) % 2 for key in asked)
    seeds = [call[3] for call in bench.of("collect")]
    assert len(set(seeds)) == len(seeds)
    # Each round plays as many new tasks as are missing, and no round follows once there are enough.
    remaining = iter(bench.of("collect"))
    wanted = SETTINGS.groups_per_step
    while wanted > 0 and len(rounds) < 4:
        count = 0
        while count < wanted:
            call = next(remaining)
            count += len(call[1])
            kept += sum(int(key.partition("/")[2]) % 2 for key in call[1])
        assert count == wanted
        rounds.append(count)
        wanted = SETTINGS.groups_per_step - kept
    assert next(remaining, None) is None
    assert rounds[0] == 4
    assert len(rounds) > 1


class Resampling(Bench):
    """Every second task has equal rewards. The learner adds KL penalties and a teacher's scores."""

    kl_coef = 0.1

    def __init__(self) -> None:
        super().__init__(flat=lambda task: task.item % 2 == 0)

    def score(self, samples: list[Sample], *, policy_only: bool = False) -> None:
        super().score(samples, policy_only=policy_only)
        for i, sample in enumerate(samples, 1):
            sample.old_logprobs = list(sample.logprobs)
            sample.reference_logprobs = sample.teacher_logprobs = [p - 0.1 * i for p in sample.logprobs]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(
    "changes",
    [
        {"zero_variance": "keep"},
        {"kl_in": "reward", "kl_coef": 0.1},
        {"distill": DistillSettings(teacher="x", reward_weight=1.0)},
    ],
)
async def test_a_replaced_group_is_not_learned_from(changes: Any, overlap: int) -> None:
    bench = Resampling()
    await bench.run(replace(SETTINGS, steps=2, resample_rounds=3, overlap=overlap, **changes))
    num_played = sum(len(call[1]) for call in bench.of("collect"))
    assert num_played > 2 * SETTINGS.groups_per_step
    assert [call[1] for call in bench.of("learn")] == [SETTINGS.groups_per_step * SETTINGS.group_size] * 2
    assert sum(row["episodes/usable"] for row in bench.rows) == SETTINGS.group_size * num_played


async def test_groups_without_variance_are_counted_with_those_that_were_replaced() -> None:
    bench = Resampling()
    await bench.run(replace(SETTINGS, steps=1, resample_rounds=9))
    played = [int(key.partition("/")[2]) for call in bench.of("collect") for key in call[1]]
    assert bench.rows[0]["groups/zero_variance"] == sum(item % 2 == 0 for item in played) / len(played) > 0.0
    assert bench.rows[0]["samples"] == SETTINGS.groups_per_step * SETTINGS.group_size


async def test_groups_that_differ_in_the_rewards_of_their_turns_are_not_replaced() -> None:
    bench = Resampling()  # equal totals after different numbers of turns
    await bench.run(replace(SETTINGS, steps=1, resample_rounds=3, credit="turns", turn_discount=0.5))
    assert sum(len(call[1]) for call in bench.of("collect")) == SETTINGS.groups_per_step
    assert bench.rows[0]["samples"] == SETTINGS.groups_per_step * SETTINGS.group_size


async def test_dynamic_sampling_ends_after_its_rounds() -> None:
    bench = Bench(rewards=(1.0, 1.0))
    await bench.run(replace(SETTINGS, steps=1, resample_rounds=2))
    assert sum(len(call[1]) for call in bench.of("collect")) == 3 * 4
    assert bench.of("learn") == []


async def test_samples_are_scored_before_advantages_are_estimated() -> None:
    class Valuing(Bench):
        def score(self, samples: list[Sample], *, policy_only: bool = False) -> None:
            super().score(samples, policy_only=policy_only)
            for sample in samples:
                sample.values = [0.25] * len(sample.logprobs)
                sample.old_logprobs = sample.reference_logprobs = [-1.0] * len(sample.logprobs)

    for chosen in ({"algorithm": "ppo"}, {"kl_in": "reward", "kl_coef": 0.1}):
        bench = Valuing()
        await bench.run(replace(SETTINGS, steps=1, **chosen))  # type: ignore[arg-type]
        names = [call[0] for call in bench.calls]
        assert names.index("score") < names.index("learn")
    plain = Valuing()
    await plain.run(replace(SETTINGS, steps=1))
    assert plain.of("score") == []


class RealCollector:
    """Engine, renderer, pool and collector around one model."""

    def __init__(self, model: Any, tokenizer: Any, temperature: float = 1.0) -> None:
        self.renderer = Renderer(tokenizer)
        self.engine = NativeEngine(model, decode=self.renderer.decode, max_sessions=32, max_context=200)
        self.pool = LocalPool({"counting": Counting})
        sampling = Sampling(max_new_tokens=4, temperature=temperature)
        self.collect = Collector(
            self.pool,
            lambda session, seed: EnginePolicy(self.engine, self.renderer, replace(sampling, seed=seed)),
            group_size=4,
            concurrency=32,
        )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_engine_and_learner_agree_on_real_multi_turn_episodes(temperature: float) -> None:
    model, tokenizer = counting_player()
    real = RealCollector(model, tokenizer, temperature)
    groups = await real.collect([Task("counting", i) for i in range(8)], replace(LIMITS, max_turns=5), 1)
    played = [t for g in groups for t in g.trajectories]
    assert max(t.num_turns for t in played) == 5
    batch = batch_of(groups, replace(SETTINGS, zero_variance="keep"))
    for micro in micro_batches(batch.samples, batch.weights, 500):
        learner_A, _ = action_logprobs(model, micro, temperature)
        assert (learner_A - micro.logprobs_A).abs().max() < 1e-4
    await real.engine.close()
    assert real.pool.num_open == 0


@pytest.mark.parametrize("overlap", [0, 1])
async def test_the_whole_loop_learns_to_count(overlap: int) -> None:
    """The smallest real run: engine and learner share weights, or with overlap the engine has a copy."""
    model, tokenizer = counting_player()
    real = RealCollector(copy.deepcopy(model) if overlap else model, tokenizer)
    settings = RLSettings(
        steps=12, groups_per_step=8, group_size=4, kl_coef=0.0, overlap=overlap, optimizer=OptimizerSettings(lr=3e-3)
    )
    state = RLState(
        TaskSource({"counting": list(range(100))}, 0),
        {"counting": make_horizon(HorizonSettings(kind="stepwise", turns=(3, 6), steps_per_stage=6))},
    )
    rows: list[dict[str, Any]] = []
    recorded_episodes: list[list[Trajectory]] = []

    async def nothing(step: int) -> None:
        assert real.pool.num_open == 0

    async def publish(version: int) -> None:
        await real.engine.update_weights(model.state_dict() if overlap else None, version)

    hooks = Hooks(
        lambda step, groups: recorded_episodes.append([t for g in groups for t in g.trajectories]),
        lambda *_: None,
        lambda step, metrics: rows.append(copy.copy(metrics)),
        nothing,
        nullcontext,
    )
    learner = RLLearner(model, settings, 1.0)
    await train_rl(state, learner, real.collect, publish, {"counting": LIMITS}, settings, hooks, 0)
    await real.engine.close()
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 0.3
    learned = [step for step, row in enumerate(rows, 1) if row["samples"]]
    assert len(learned) > 3
    published = 0
    for step, (row, played) in enumerate(zip(rows, recorded_episodes, strict=True), 1):
        version = published - (step - 1 in learned) * overlap
        assert {v for t in played for v in t.versions} == {version}
        if step in learned:
            assert row["staleness/max"] == published - version
            # The weights that sampled must give the same log-probabilities; stale keys and values would show here.
            assert (row["mismatch/abs"] < 1e-4) == (published == version)
            published += 1
