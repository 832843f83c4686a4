"""Asynchronous groups: the bound on staleness, token versions within a reply, checkpoints, and a run that learns."""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from test_rl import LIMITS, SETTINGS, Bench, RealCollector
from training_for_tests import counting_player

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.errors import EngineError
from agentgym_rl.run.local_engine import native_engine
from agentgym_rl.training.horizon import make_horizon
from agentgym_rl.training.rl import Hooks, RLState, train_rl
from agentgym_rl.training.rl_learner import RLLearner
from agentgym_rl.training.settings import HorizonSettings, OptimizerSettings, RLSettings
from agentgym_rl.training.task_source import TaskSource
from agentgym_rl.types import Group, Limits, Message, Sampling, Task, Trajectory

torch.set_num_threads(1)


class Uneven(Bench):
    """Every seventh group goes on through the next update."""

    def __init__(self) -> None:
        super().__init__()
        self.ages: list[list[int]] = []
        """Updates since the start of the groups of each step."""
        self._started_at: dict[int, int] = {}

    async def collect(self, tasks: list[Task], limits: Limits, seed: int) -> list[Group]:
        number, version = len(self.of("collect")), self.version
        (group,) = await super().collect(tasks, limits, seed)
        self._started_at[id(group)] = version
        while number % 7 == 3 and 0 < version == self.version:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return [group]

    def record(self, step: int, groups: list[Group]) -> None:
        self.ages.append([self.version - self._started_at.get(id(group), self.version) for group in groups])
        super().record(step, groups)


@pytest.mark.parametrize("bound", [1, 2, 4])
async def test_no_group_is_older_than_the_bound_and_none_is_thrown_away(bound: int) -> None:
    bench = Uneven()
    await bench.run(replace(SETTINGS, steps=30, max_staleness=bound))
    assert len(bench.ages) == 30
    assert all(len(ages) == SETTINGS.groups_per_step for ages in bench.ages)
    assert max(max(ages) for ages in bench.ages) == bound
    assert len(bench.of("collect")) == 30 * SETTINGS.groups_per_step  # each one that was started was learned from
    assert [row["staleness/max"] for row in bench.rows] == [min(step, bound) for step in range(30)]
    assert all(row["time/wait_s"] <= row["time/step_s"] for row in bench.rows)


async def test_a_step_has_the_same_tasks_as_a_synchronous_one() -> None:
    class Recording(Uneven):
        tasks: tuple[list[str], ...] = ()

        def record(self, step: int, groups: list[Group]) -> None:
            super().record(step, groups)
            self.tasks += (sorted(group.task.key for group in groups),)

    synchronous, asynchronous = Recording(), Recording()
    synchronous.collect = partial(Bench.collect, synchronous)  # type: ignore[method-assign]
    await synchronous.run()
    await asynchronous.run(replace(SETTINGS, max_staleness=3))
    assert asynchronous.tasks == synchronous.tasks


@pytest.mark.parametrize("bound", [0, 1, 3])
async def test_steps_have_the_horizons_of_the_schedule_however_early_their_groups_start(bound: int) -> None:
    bench = Bench()
    await bench.run(replace(SETTINGS, max_staleness=bound))
    assert [(row["horizon/a"], row["horizon/b"]) for row in bench.rows] == list(
        zip([2, 2, 2, 4, 4, 4, 4], range(1, 8), strict=True)
    )
    played_under = {(c[2].max_turns, key.partition("/")[0]) for c in bench.of("collect") for key in c[1]}
    assert played_under == {(2, "a"), (4, "a"), *((turns, "b") for turns in range(1, 8))}


async def test_an_adaptive_stage_counts_the_groups_that_were_played_under_it_only() -> None:
    bench = Bench()
    settings = HorizonSettings(kind="adaptive", turns=(2, 4, 6), window=1, steps_per_stage=2)
    for env in bench.state.horizons:
        bench.state.horizons[env] = make_horizon(settings)
    await bench.run(replace(SETTINGS, steps=12, groups_per_step=8, max_staleness=2))
    turns = [row["horizon/a"] for row in bench.rows]
    # Each stage lasts two steps, and two more until the groups that were under way have been learned from.
    assert turns == [2.0] * 4 + [4.0] * 4 + [6.0] * 4
    asked = [call[2].max_turns for call in bench.of("collect")]
    assert [asked[i : i + 8] for i in range(0, 96, 8)] == [[int(t)] * 8 for t in turns]


@pytest.mark.parametrize("bound", [1, 3])
async def test_the_horizon_of_an_environment_without_a_group_in_a_step_does_not_flicker(bound: int) -> None:
    bench = Bench()
    settings = HorizonSettings(kind="adaptive", turns=(2, 4, 6, 8), window=1, steps_per_stage=2)
    bench.state.horizons["a"] = make_horizon(settings)
    await bench.run(replace(SETTINGS, steps=40, groups_per_step=1, max_staleness=bound))
    turns = [row["horizon/a"] for row in bench.rows]
    assert turns == sorted(turns)
    assert turns[-1] > turns[0]
    assert [row["horizon/b"] for row in bench.rows] == [*range(1, 8), *[7] * 33], "a schedule is reported as it is"


async def test_groups_under_way_are_played_again_after_a_resume_and_ended_ones_are_kept() -> None:
    settings = replace(SETTINGS, steps=12, max_staleness=2)
    whole, resumed = Uneven(), Uneven()
    await whole.run(settings)
    queued = whole.saved[5]["queued"]
    assert len(queued) == 2 * SETTINGS.groups_per_step
    open_seeds = [row["seed"] for row in queued if row["trajectories"] is None]
    assert 0 < len(open_seeds) < len(queued)
    resumed.state.restore(json.loads(json.dumps(whole.saved[5])), 5)
    resumed.version = resumed.state.version
    await resumed.run(settings)
    assert [len(ages) for ages in resumed.ages] == [4] * 7
    assert [call[3] for call in resumed.of("collect")][: len(open_seeds)] == open_seeds
    seeds = {call[3] for call in whole.of("collect")}
    assert {call[3] for call in resumed.of("collect")} == seeds - {c[3] for c in whole.of("collect")[: 7 * 4]} | set(
        open_seeds
    )


async def test_an_error_of_a_group_ends_the_run_unchanged_and_cancels_the_others() -> None:
    cancelled = []

    class Breaking(Bench):
        async def collect(self, tasks: list[Task], limits: Limits, seed: int) -> list[Group]:
            if len(self.of("collect")) == 6:
                raise EngineError("the engine broke")
            groups = await super().collect(tasks, limits, seed)
            try:
                await asyncio.sleep(0 if len(self.of("collect")) < 5 else 3600)
            except asyncio.CancelledError:
                cancelled.append(seed)
                raise
            return groups

    with pytest.raises(EngineError, match="the engine broke"):
        await Breaking().run(replace(SETTINGS, max_staleness=2))
    assert cancelled


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overlap": 1}, "set overlap = 0"),
        ({"resample_rounds": 2}, "set resample_rounds = 0"),
        ({"max_staleness": -1}, "max_staleness"),
    ],
)
def test_settings_that_cannot_be_asynchronous_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SETTINGS, **({"max_staleness": 1} | changes))


@pytest.mark.parametrize("keep_cache", [False, True])
async def test_tokens_of_a_reply_know_the_version_that_sampled_them(keep_cache: bool) -> None:
    model, _ = counting_player()
    before = copy.deepcopy(model.state_dict())
    after = {
        name: value + 0.05 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
        for name, value in before.items()
    }
    engine = NativeEngine(model, max_context=200, keep_cache=keep_cache)
    prompt = [5, 6, 7]
    pending = asyncio.create_task(engine.generate(prompt, Sampling(max_new_tokens=40, seed=3), "a"))
    while engine.stats()["new_tokens"] < 15:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await engine.update_weights(after, 1)
    completion = await pending
    await engine.close()
    count = completion.versions.index(1)
    assert completion.version == 0
    assert completion.versions == [0] * count + [1] * (40 - count)
    assert 15 <= count < 40
    token_ids = torch.tensor([prompt + completion.token_ids])
    differences = []
    for state in (before, after):
        model.load_state_dict(state)
        with torch.no_grad():
            logprobs = model(token_ids).logits[0, 2:-1].log_softmax(-1)
        exact = logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        differences.append((exact - torch.tensor(completion.logprobs)).abs())
    assert differences[0][:count].max() < 1e-4
    assert (differences[1][count:].max() < 1e-4) == (not keep_cache)
    assert differences[0][count:].max() > 1e-3


def test_versions_of_tokens_survive_a_file_and_reach_the_learner() -> None:
    messages = [
        Message("user", "a", [1, 2]),
        Message("assistant", "b", [3, 4, 5], [-1.0] * 3, 7, [7, 8, 8], untrained=1),
    ]
    trajectory = Trajectory("t", Task("a", 0), messages, rewards=[1.0], infos=[{}])
    restored = Trajectory.from_json(trajectory.to_json())
    assert restored.messages[1].versions == [7, 8, 8]
    assert restored.versions == [7, 8]
    assert restored.segments[0].versions == [8, 8]


@pytest.mark.parametrize("keep_cache", [False, True])
async def test_an_asynchronous_run_learns_to_count(keep_cache: bool) -> None:
    model, tokenizer = counting_player()
    real = RealCollector(model, tokenizer)
    real.engine._keep_cache = keep_cache
    settings = RLSettings(
        steps=14, groups_per_step=8, group_size=4, kl_coef=0.0, max_staleness=2, optimizer=OptimizerSettings(lr=3e-3)
    )
    horizon = make_horizon(HorizonSettings(kind="stepwise", turns=(3, 6), steps_per_stage=6))
    state = RLState(TaskSource({"counting": list(range(100))}, 0), {"counting": horizon})
    rows: list[dict[str, Any]] = []

    async def after_step(step: int) -> None:
        return None

    publish, learning = partial(real.engine.update_weights, None), real.engine.paused
    hooks = Hooks(lambda *_: None, lambda *_: None, lambda step, row: rows.append(copy.copy(row)), after_step, learning)
    learner = RLLearner(model, settings, 1.0)
    await train_rl(state, learner, real.collect, publish, {"counting": LIMITS}, settings, hooks, 0)
    await real.engine.close()
    assert real.pool.num_open == 0
    assert state.queued == []
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 0.3
    assert 0 < max(row.get("staleness/max", 0.0) for row in rows) <= 2


@pytest.mark.parametrize(("settings", "shared"), [({"max_staleness": 2}, True), ({"overlap": 1}, False), ({}, True)])
async def test_an_engine_copies_the_weights_only_to_play_while_the_learner_works(
    settings: dict[str, Any], shared: bool
) -> None:
    model, tokenizer = counting_player()
    local = native_engine(RLSettings(**settings), 4, 64, model)(Renderer(tokenizer))
    engine: Any = local.engine
    assert (engine._model is model) is shared
    async with local.learning():
        assert engine._may_step.is_set() is not shared
    await engine.close()
