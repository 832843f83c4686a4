"""Stages of an episode: slow resets, closes and judges overlap with playing, each within its own bound."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from test_collect import LIMITS, TASKS, Pool
from test_rollout import TASK, Corridor

from agentgym_rl.agent.collect import Collector
from agentgym_rl.agent.engines.openai import Answer, Tokens
from agentgym_rl.agent.policy import RandomPolicy, Reply, ScriptedPolicy
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.agent.stages import Stages
from agentgym_rl.config import AgentConfig, EnvironmentConfig
from agentgym_rl.errors import ConfigError
from agentgym_rl.rewards.judge import Judge
from agentgym_rl.rewards.rewards import Rewards
from agentgym_rl.run import collectors
from agentgym_rl.training.reward_settings import JudgeSettings, RewardSettings
from agentgym_rl.types import EnvSession, Limits, Message, Observation, Sampling, Step, StopReason, Task

DEADLINE_S = 60.0
"""Only a stage that waits for a later one ever reaches it."""


class InFlight:
    """Counts what is in each stage now, the most there ever was, and the order of events."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    def enter(self, stage: str) -> None:
        self.now[stage] += 1
        self.most[stage] = max(self.most[stage], self.now[stage])

    def leave(self, stage: str) -> None:
        self.now[stage] -= 1


class Staged(Corridor):
    """A corridor that counts its stages. Each takes a few iterations of the event loop."""

    flight: InFlight

    async def reset(self, item: int) -> Step:
        self.flight.enter("opening")
        for _ in range(7):
            await asyncio.sleep(0)
        self.flight.leave("opening")
        return await super().reset(item)

    async def close(self) -> None:
        self.flight.enter("closing")
        for _ in range(7):
            await asyncio.sleep(0)
        self.flight.leave("closing")


class CountingPolicy(RandomPolicy):
    """Random play that counts episodes between their first reply and their end."""

    def __init__(self, env: EnvSession, seed: int, flight: InFlight) -> None:
        super().__init__(env, seed)
        self.flight, self.started = flight, False

    async def reply(self, messages: list[Message], observation: Observation, limits: Limits) -> Reply:
        if not self.started:
            self.started = True
            self.flight.enter("playing")
        for _ in range(7):
            await asyncio.sleep(0)
        return await super().reply(messages, observation, limits)

    async def close(self) -> None:
        if self.started:
            self.flight.leave("playing")
        await super().close()


async def play_staged(stages: Stages) -> tuple[InFlight, int, list[list[str]]]:
    """Return the most in each stage, the most open sessions, and the episodes."""
    flight = InFlight()

    def make(number: int) -> Staged:
        session = Staged()
        session.flight = flight
        return session

    pool = Pool(make)
    collector = Collector(pool, lambda env, seed: CountingPolicy(env, seed, flight), 8, stages)
    groups = await collector(TASKS, LIMITS, 3)
    assert not +flight.now
    return flight, pool.most, [[m.content for m in t.messages] for g in groups for t in g.trajectories]


@pytest.mark.parametrize(("playing", "ahead", "opening"), [(4, 3, 2), (2, 6, 5), (24, 0, 1), (3, 0, None)])
async def test_each_stage_keeps_its_bound_and_the_episodes_stay_the_same(
    playing: int, ahead: int, opening: int | None
) -> None:
    _, _, alone = await play_staged(Stages(1))
    stages = Stages(playing, ahead, {} if opening is None else {"corridor": opening})
    flight, most_open, episodes = await play_staged(stages)
    assert episodes == alone
    assert flight.most["playing"] <= playing
    assert most_open <= playing + ahead
    assert flight.most["opening"] <= (opening or playing)
    if ahead:
        assert (flight.most["playing"], most_open) == (playing, playing + ahead), "every slot is used"


async def test_the_next_environment_is_reset_while_an_episode_is_played() -> None:
    """Every step waits until a later episode's environment was reset. With one slot for all stages none would be."""
    resets, changed = 0, asyncio.Condition()

    class Waiting(Corridor):
        number = 0

        async def reset(self, item: int) -> Step:
            nonlocal resets
            step = await super().reset(item)
            async with changed:
                resets += 1
                self.number = resets
                changed.notify_all()
            return step

        async def step(self, text: str) -> Step:
            async with changed:
                await changed.wait_for(lambda: resets > min(self.number, 5))
            return await super().step(text)

    collector = Collector(
        Pool(lambda number: Waiting()),
        lambda env, seed: ScriptedPolicy(["go"] * 3),
        6,
        Stages(1, 1),
        retries=0,
        episode_timeout_s=DEADLINE_S,
    )
    [group] = await collector(TASKS[:1], LIMITS, 0)
    assert [t.stop for t in group.trajectories] == [StopReason.DONE] * 6


async def test_an_episode_is_played_while_the_last_environment_closes() -> None:
    second_played = asyncio.Event()

    class Closing(Corridor):
        async def step(self, text: str) -> Step:
            if number_closing:
                second_played.set()
            return await super().step(text)

        async def close(self) -> None:
            number_closing.append(1)
            if len(number_closing) == 1:
                await second_played.wait()

    number_closing: list[int] = []
    collector = Collector(
        Pool(lambda number: Closing()),
        lambda env, seed: ScriptedPolicy(["go"] * 3),
        2,
        Stages(1, 1),
        close_timeout_s=DEADLINE_S,
    )
    await collector(TASKS[:1], LIMITS, 0)
    assert second_played.is_set()


async def test_the_wait_for_a_slot_does_not_count_for_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    real = loop.time

    async def wait_an_hour() -> None:
        monkeypatch.setattr(loop, "time", lambda: real() + 3600)
        await asyncio.sleep(0)

    trajectory = await rollout(
        TASK, Corridor(), ScriptedPolicy(["go"] * 3), LIMITS, id="t", timeout_s=DEADLINE_S, before_play=wait_an_hour
    )
    assert (trajectory.stop, trajectory.error) == (StopReason.DONE, None)
    assert trajectory.seconds < DEADLINE_S


async def test_the_deadline_holds_after_the_wait_for_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    real = loop.time

    class Endless(Corridor):
        async def step(self, text: str) -> Step:
            monkeypatch.setattr(loop, "time", lambda: real() + 3600)
            await asyncio.Event().wait()
            raise AssertionError

    trajectory = await rollout(
        TASK,
        Endless(),
        ScriptedPolicy(["go"]),
        LIMITS,
        id="t",
        timeout_s=DEADLINE_S,
        before_play=lambda: asyncio.sleep(0),
    )
    assert (trajectory.error or "").startswith("EpisodeTimeout: ")


async def test_a_failed_reset_and_a_cancelled_wait_free_their_slots() -> None:
    class Failing(Corridor):
        async def reset(self, item: int) -> Step:
            raise OSError("no display")

    pool = Pool(lambda number: Failing() if number < 3 else Corridor())
    stages = Stages(1, 1, {"corridor": 1})
    collector = Collector(pool, lambda env, seed: ScriptedPolicy(["go"] * 3), 3, stages, retries=1)
    [group] = await collector(TASKS[:1], LIMITS, 0)
    assert len(group.usable) == 3

    async with stages.episode("corridor") as stage:
        assert stage.play() is None
        waiting = asyncio.create_task(collector(TASKS[:1], LIMITS, 0))
        for _ in range(20):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(DEADLINE_S):
        [group] = await collector(TASKS[:1], LIMITS, 0)
    assert [t.stop for t in group.trajectories] == [StopReason.DONE] * 3


class SlowChat:
    """A judge whose first answer waits until the last group is being played."""

    def __init__(self, last_group: asyncio.Event) -> None:
        self.flight, self.last_group, self.asked = InFlight(), last_group, asyncio.Event()

    async def complete(self, messages: list[Message], sampling: Sampling, *, on_request: Callable[[], None]) -> Answer:
        self.flight.enter("judging")
        self.asked.set()
        await self.last_group.wait()
        for _ in range(3):
            await asyncio.sleep(0)
        self.flight.leave("judging")
        return Answer('{"score": 5}', False, Tokens(1, 1, reported=True))


async def test_a_slow_judge_scores_a_group_while_others_are_played(tmp_path: Path) -> None:
    """The last group is played only after a question about an earlier one was asked, and the answer waits for it."""
    last_group = asyncio.Event()
    chat = SlowChat(last_group)

    class Asking(Corridor):
        item = 0

        async def reset(self, item: int) -> Step:
            self.item = item
            return await super().reset(item)

        async def step(self, text: str) -> Step:
            if self.item == 2:
                await chat.asked.wait()
                last_group.set()
            return await super().step(text)

    judge = Judge(chat, "slow", JudgeSettings(path="none", concurrency=3), tmp_path / "judge.jsonl")
    source = RewardSettings(kind="rubric", name="tidy", rubric="Is the walk straight? From 0 to 10.")
    make_policy = lambda env, seed: ScriptedPolicy(["go"] * 3)  # noqa: E731
    collector = Collector(
        Pool(lambda number: Asking()), make_policy, 4, Stages(2, 1), retries=0, episode_timeout_s=DEADLINE_S
    )
    tasks = [Task("corridor", item) for item in (0, 1, 2)]
    groups = await Rewards([source], judge).scoring(collector)(tasks, LIMITS, 7)
    assert [t.id for g in groups for t in g.trajectories] == [f"7-{i}-{m}-0" for i in range(3) for m in range(4)]
    assert all(t.stop is StopReason.DONE and len(t.verdicts) == 2 for g in groups for t in g.trajectories)
    assert not any(t.judge_error for g in groups for t in g.trajectories)
    assert chat.flight.most["judging"] <= 3


def test_defaults_open_a_quarter_ahead_and_bound_resets_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [AgentConfig(concurrency=n).sessions for n in (1, 8, 64, 256)] == [1, 10, 80, 272]
    assert AgentConfig(concurrency=8, open_ahead=0).sessions == 8
    here, there = EnvironmentConfig(name="sciworld"), EnvironmentConfig(name="far", url="http://localhost:1/far")
    monkeypatch.setattr(collectors, "num_cores", lambda: 16)
    stages = collectors.make_stages(AgentConfig(), (here, there))
    assert {env: slots._free for env, slots in stages.opening.items()} == {"sciworld": 16}
    monkeypatch.setattr(collectors, "num_cores", lambda: 1)
    assert collectors.make_stages(AgentConfig(), (here,)).opening["sciworld"]._free == collectors.MIN_OPENING
    stages = collectors.make_stages(AgentConfig(opening=2), (here, there))
    assert {env: slots._free for env, slots in stages.opening.items()} == {"sciworld": 2, "far": 2}
    with pytest.raises(ConfigError, match="open_ahead must be 0 or more, got -1"):
        Stages(1, -1)
