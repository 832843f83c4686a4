"""Games of several roles: turn order, rewards, horizons and failures of each role, and what is trained on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
from scripted_engine_for_tests import ScriptedEngine
from servers_for_tests import server_in_thread
from tokenizers_for_tests import byte_level_bpe

from agentgym_rl.agent.policy import EnginePolicy, OraclePolicy, Policy, PolicyFactory, RandomPolicy, ScriptedPolicy
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.session_wrapper import SessionWrapper
from agentgym_rl.agent.stages import Stages
from agentgym_rl.agent.team import Player, TeamCollector, World
from agentgym_rl.environment.envs.keydoor_duo import GUIDE, WALKER, KeyDoorDuo
from agentgym_rl.environment.envs.nim import FIRST, SECOND, STARTS, Nim
from agentgym_rl.environment.pool import LocalPool, RemotePool
from agentgym_rl.errors import ConfigError
from agentgym_rl.evaluation.records import record_of
from agentgym_rl.training.batch import estimate, gather
from agentgym_rl.training.metrics import episode_metrics
from agentgym_rl.training.settings import RLSettings
from agentgym_rl.types import LEARNER, EnvSession, Group, Limits, Message, Sampling, Step, StopReason, Task, Trajectory

LIMITS = Limits(max_turns=12, max_new_tokens=16, max_context=4000)
FIVE, SIX = STARTS.index((5,)), STARTS.index((6,))
RENDERER = Renderer(byte_level_bpe("chatml"), "chatml")
Pool = LocalPool | RemotePool


def oracle(session: EnvSession, seed: int) -> Policy:
    return OraclePolicy(session)


def saying(*replies: str) -> PolicyFactory:
    return lambda session, seed: ScriptedPolicy(replies, session.instruction)


def sampling(*replies: str) -> PolicyFactory:
    engine = ScriptedEngine(replies, RENDERER.reply_ids)
    return lambda session, seed: EnginePolicy(engine, RENDERER, Sampling(16), instruction=session.instruction)


async def play(
    env: type[Any],
    item: int,
    players: Mapping[str, Player],
    *,
    limits: Limits = LIMITS,
    pool: Pool | None = None,
    group_size: int = 1,
    **options: Any,
) -> dict[str, list[Trajectory]]:
    """Play games of one item and return the episodes of each role. Every session must be closed afterwards."""
    pool = pool or LocalPool({env.name: env})
    collector = TeamCollector(lambda seed, index: players, pool, oracle, group_size, 4, **options)
    try:
        groups = await collector([Task(env.name, item)], limits, seed=1)
        assert pool.num_open == 0
    finally:
        await pool.close()
    return {group.trajectories[0].role: group.trajectories for group in groups}


def texts(trajectory: Trajectory) -> list[str]:
    return [message.content for message in trajectory.messages if message.role != "system"]


async def test_roles_take_turns_and_each_sees_its_own_conversation() -> None:
    players = {FIRST: Player(LEARNER, saying("take 1 from red", "take 2 from red")), SECOND: Player("random", oracle)}
    episodes = await play(Nim, SIX, players)
    (first,), (second,) = episodes[FIRST], episodes[SECOND]
    assert texts(first) == [
        *("Piles: red 6.", "take 1 from red"),
        *("Your opponent: take 1 from red. Piles: red 4.", "take 2 from red"),
        "The last stone is taken: second wins.",
    ]
    assert texts(second)[:2] == ["Your opponent: take 1 from red. Piles: red 5.", "take 1 from red"]
    assert first.messages[0].content == Nim.roles[FIRST]
    assert second.messages[0].content == Nim.roles[SECOND]
    assert (first.rewards, second.rewards) == ([0.0, -1.0], [0.0, 1.0])
    assert (first.success, second.success) == (False, True)
    assert (first.player, second.player) == (LEARNER, "random")
    assert first.infos[0]["after"] == [[SECOND, "take 1 from red"]]
    assert second.infos[0]["before"] == [[FIRST, "take 1 from red"]]
    assert Trajectory.from_json(second.to_json()).to_json() == second.to_json()


async def test_a_role_without_turns_is_silent_and_still_shares_the_reward() -> None:
    players = {GUIDE: Player(LEARNER, oracle, max_turns=1), WALKER: Player(LEARNER, oracle)}
    for item in range(20):
        episodes = await play(KeyDoorDuo, item, players)
        (guide,), (walker,) = episodes[GUIDE], episodes[WALKER]
        assert guide.rewards == [1.0]
        assert guide.stop is walker.stop is StopReason.DONE
        assert guide.success
        assert walker.success
        assert guide.horizon == 1
        assert "The guide says nothing." in texts(walker)[2]


async def test_the_walker_needs_the_guide() -> None:
    told = {GUIDE: Player("a", oracle, 1), WALKER: Player("b", oracle)}
    silent = {GUIDE: Player("a", saying(""), 1), WALKER: Player("b", oracle)}
    wins = {}
    for name, players in (("told", told), ("silent", silent)):
        episodes = [await play(KeyDoorDuo, item, players) for item in range(40)]
        wins[name] = sum(episode[WALKER][0].success for episode in episodes)
    assert wins["told"] == 40
    assert wins["silent"] < 30, "it can only guess"


async def test_a_cut_reply_is_an_empty_move_and_its_loss_is_paid_to_that_reply() -> None:
    short = Limits(max_turns=12, max_new_tokens=4, max_context=4000)
    players = {FIRST: Player(LEARNER, sampling("take 1 from red please")), SECOND: Player("oracle", oracle)}
    episodes = await play(Nim, SIX, players, limits=short)
    (first,), (second,) = episodes[FIRST], episodes[SECOND]
    assert first.stop is StopReason.LENGTH
    assert first.rewards == [-1.0]
    assert second.stop is StopReason.DONE
    assert (second.num_turns, second.messages) == (0, second.messages[-1:]), "it won before its first move"
    ppo = RLSettings(algorithm="ppo", normalize_std=False, kl_coef=0.0)
    batch = gather([Group(first.task, [first])], ppo)
    (sample,) = batch.samples
    sample.values, sample.last_value = [0.5] * len(sample.logprobs), 0.5
    assert estimate(batch, ppo).samples[0].returns[-1] == -1.0, "the game is lost: no value is added to that"


async def test_a_role_that_wins_before_its_first_reply_has_won() -> None:
    players = {FIRST: Player("random", saying("pass")), SECOND: Player(LEARNER, oracle)}
    episodes = await play(Nim, SIX, players)
    (loser,), (winner,) = episodes[FIRST], episodes[SECOND]
    assert (loser.reward, loser.success) == (-1.0, False)
    assert (winner.num_turns, winner.reward, winner.success) == (0, 1.0, True)
    again = Trajectory.from_json(winner.to_json())
    assert (again.reward, again.success) == (1.0, True)
    outcome = record_of(winner, 0, ("nim",), None).at_horizon(8)
    assert outcome is not None
    assert (outcome.success, outcome.reward, outcome.turns) == (True, 1.0, 0)
    metrics = episode_metrics([Group(winner.task, [winner])])
    assert (metrics["roles/second_reward"], metrics["roles/second_success"]) == (1.0, 1.0)
    assert gather([Group(winner.task, [winner])], RLSettings()).samples == [], "there is nothing to train on"


async def test_a_game_without_turns_left_is_truncated_for_every_role() -> None:
    players = {FIRST: Player(LEARNER, oracle), SECOND: Player(LEARNER, oracle)}
    episodes = await play(Nim, STARTS.index((12,)), players, limits=Limits(2, 16, 4000))
    for (trajectory,) in episodes.values():
        assert trajectory.stop is StopReason.MAX_TURNS
        assert trajectory.rewards == [0.0, 0.0]


def failing(session: EnvSession, seed: int) -> Policy:
    return ScriptedPolicy([], session.instruction)


@pytest.mark.parametrize("role", [FIRST, SECOND])
async def test_a_player_that_fails_ends_the_game_as_an_error_of_every_role(role: str) -> None:
    players = {name: Player(LEARNER, failing if name == role else oracle) for name in (FIRST, SECOND)}
    episodes = await play(Nim, SIX, players, retries=1)
    for name, attempts in episodes.items():
        assert [t.stop for t in attempts] == [StopReason.ERROR] * 2, "played again, and failed again"
        assert all("EngineError" in (t.error or "") for t in attempts), name
    assert f"{role} failed" in (episodes[SECOND if role == FIRST else FIRST][0].error or "")


class Hanging:
    """A policy that never answers."""

    closed: ClassVar[int] = 0

    async def reply(self, messages: list[Message], observation: Any, limits: Limits) -> Any:
        await asyncio.Event().wait()

    def unanswered(self, messages: list[Message], observation: Any, limits: Limits) -> list[Message]:
        return []

    async def close(self) -> None:
        Hanging.closed += 1


@pytest.mark.parametrize(("on_timeout", "stop"), [("retry", StopReason.ERROR), ("truncate", StopReason.TIMEOUT)])
async def test_a_player_that_hangs_ends_the_game_and_leaves_nothing_behind(on_timeout: Any, stop: StopReason) -> None:
    Hanging.closed, before = 0, len(asyncio.all_tasks())
    players = {FIRST: Player(LEARNER, oracle), SECOND: Player("hanging", lambda session, seed: Hanging())}
    options: dict[str, Any] = {"retries": 0, "episode_timeout_s": 0.5, "on_timeout": on_timeout}
    episodes = await play(Nim, SIX, players, **options)
    for (trajectory,) in episodes.values():
        assert trajectory.stop is stop
        assert trajectory.timed_out
    assert len(episodes[FIRST][0].rewards) == 1
    assert Hanging.closed == 1
    assert len(asyncio.all_tasks()) == before


class SlowSession(SessionWrapper):
    """A session of several roles whose reset takes a few iterations, and whose step may never end."""

    def __init__(self, env: Any, pool: SlowPool) -> None:
        super().__init__(env)
        self.roles, self._pool = env.roles, pool

    async def reset(self, item: int) -> Step:
        self._pool.resets += 1
        self._pool.most_resets = max(self._pool.most_resets, self._pool.resets)
        for _ in range(7):
            await asyncio.sleep(0)
        self._pool.resets -= 1
        self._pool.num_reset += 1
        if self._pool.num_reset == 2:
            self._pool.two_reset.set()
        return await super().reset(item)

    async def step(self, text: str) -> Step:
        if self._pool.hangs:
            await asyncio.Event().wait()
        return await super().step(text)


class SlowPool:
    """A pool of such sessions. It counts resets."""

    def __init__(self, *, hangs: bool = False) -> None:
        self._pool, self.hangs = LocalPool({"nim": Nim}), hangs
        self.resets = self.most_resets = self.num_reset = 0
        self.two_reset = asyncio.Event()

    @property
    def num_open(self) -> int:
        return self._pool.num_open

    async def open(self, env: str) -> EnvSession:
        return SlowSession(await self._pool.open(env), self)

    async def items(self, env: str, split: str, subset: str | None = None) -> list[int]:
        return await self._pool.items(env, split, subset)

    async def close(self) -> None:
        await self._pool.close()


async def play_slowly(pool: SlowPool, group_size: int, stages: Stages, policy: PolicyFactory, **options: Any) -> Group:
    players = {FIRST: Player(LEARNER, policy), SECOND: Player(LEARNER, oracle)}
    collector = TeamCollector(lambda seed, index: players, pool, policy, group_size, stages, **options)
    try:
        return (await collector([Task("nim", SIX)], LIMITS, seed=1))[0]
    finally:
        await pool.close()


async def test_a_step_that_the_deadline_cuts_does_not_fail_the_other_roles() -> None:
    """With on_timeout = "truncate" the deadline, which all roles have, must end the game as TIMEOUT for all."""
    pool = SlowPool(hangs=True)
    world = World(await pool.open("nim"), Nim.roles)
    await world.reset(SIX)
    acting = asyncio.create_task(world.act(FIRST, "take 1 from red", last=False))
    waiting = asyncio.create_task(world.wait(SECOND, until_end=False))
    await asyncio.sleep(0)
    acting.cancel()
    await asyncio.wait({waiting}, timeout=0.05)
    assert acting.cancelled()
    assert not waiting.done(), "it waits for its own deadline"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await pool.close()


async def test_resets_of_games_have_the_bound_of_their_stage() -> None:
    pool = SlowPool()
    group = await play_slowly(pool, 8, Stages(8, 0, {"nim": 2}), oracle)
    assert {t.stop for t in group.trajectories} == {StopReason.DONE}
    assert pool.most_resets == 2


async def test_the_next_game_is_reset_while_one_is_played() -> None:
    pool = SlowPool()

    class Waiting(OraclePolicy):
        async def reply(self, messages: list[Message], observation: Any, limits: Limits) -> Any:
            await pool.two_reset.wait()
            return await super().reply(messages, observation, limits)

    options: dict[str, Any] = {"retries": 0, "episode_timeout_s": 5.0}
    group = await play_slowly(pool, 2, Stages(1, 1), lambda session, seed: Waiting(session), **options)
    assert {t.stop for t in group.trajectories} == {StopReason.DONE}, "else the first game waits until its deadline"


async def test_a_game_that_is_cancelled_leaves_nothing_behind() -> None:
    pool, before = LocalPool({"nim": Nim}), len(asyncio.all_tasks())
    players = {FIRST: Player(LEARNER, oracle), SECOND: Player("hanging", lambda session, seed: Hanging())}
    collector = TeamCollector(lambda seed, index: players, pool, oracle, 2, 4)
    playing = asyncio.create_task(collector([Task("nim", SIX)], LIMITS, 1))
    await asyncio.sleep(0.05)
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    assert pool.num_open == 0
    assert len(asyncio.all_tasks()) == before


class Broken(Nim):
    """Nim that answers the second move wrongly."""

    answer: ClassVar[Callable[[Step], Step]]

    def step(self, text: str) -> Step:
        step = super().step(text)
        return type(self).answer(step) if self._role == FIRST else step

    def role(self) -> str:
        return "third" if self._role == FIRST and self._last else super().role()


def crash(step: Step) -> Step:
    raise RuntimeError("out of stones")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (crash, "out of stones"),
        (lambda step: step, "must name the role whose turn it is, one of first, second, got 'third'"),
        (lambda step: Step("x", done=True, info={"rewards": {"third": 1.0}}), r"info\['rewards'\] = {role: reward}"),
        (lambda step: Step("x", done=True, info={"rewards": {FIRST: float("nan")}}), "rewards"),
    ],
)
async def test_a_broken_environment_ends_the_game_as_an_error(answer: Any, message: str) -> None:
    env = type("BrokenNim", (Broken,), {"answer": staticmethod(answer)})
    players = {FIRST: Player(LEARNER, oracle), SECOND: Player(LEARNER, oracle)}
    episodes = await play(env, SIX, players, retries=0)
    for (trajectory,) in episodes.values():
        assert trajectory.stop is StopReason.ERROR
        assert re.search(message, trajectory.error or ""), trajectory.error


class FailingReward(SessionWrapper):
    """A session whose steps fail after the move was made, as one with a broken reward function does."""

    async def step(self, text: str) -> Step:
        await super().step(text)
        raise RuntimeError("no reward")


async def test_a_role_that_fails_outside_its_policy_ends_the_game_before_the_deadline() -> None:
    players = {FIRST: Player(LEARNER, oracle), SECOND: Player(LEARNER, oracle)}
    episodes = await play(Nim, SIX, players, retries=0, episode_timeout_s=5.0, wrap=FailingReward)
    assert [t.stop for (t,) in episodes.values()] == [StopReason.ERROR] * 2
    assert not any(t.timed_out for (t,) in episodes.values())
    assert "the game cannot continue: first failed with RuntimeError: no reward" in (episodes[SECOND][0].error or "")


async def test_players_must_be_those_of_the_roles() -> None:
    with pytest.raises(ConfigError, match="nim has the roles first, second, players were given for first"):
        await play(Nim, SIX, {FIRST: Player(LEARNER, oracle)})


async def test_only_what_the_learner_sampled_is_trained_on() -> None:
    replies = ("take 1 from red", "take 1 from red", "take 1 from red")
    players = {FIRST: Player(LEARNER, sampling(*replies)), SECOND: Player("past@5", sampling(*replies))}
    episodes = await play(Nim, SIX, players, group_size=2)
    assert all(m.logprobs for t in episodes[FIRST] for m in t.messages if m.role == "assistant")
    assert not any(m.logprobs for t in episodes[SECOND] for m in t.messages)
    groups = [Group(Task("nim", SIX), trajectories) for trajectories in episodes.values()]
    assert [group.learns for group in groups] == [True, False]
    batch = gather(groups, RLSettings())
    assert {sample.trajectory_id for sample in batch.samples} == {t.id for t in episodes[FIRST]}


async def test_each_role_is_compared_with_its_own_kind() -> None:
    """The first role wins one of two games, so the second does, too. Each winner gets the same advantage."""

    def moody(session: EnvSession, seed: int) -> Policy:
        return sampling("take 1 from red", "take 3 from red" if seed % 2 else "nothing")(session, seed)

    players = {FIRST: Player(LEARNER, moody), SECOND: Player(LEARNER, sampling("take 1 from red"))}
    episodes = await play(Nim, FIVE, players, group_size=8)
    groups = [Group(Task("nim", FIVE), trajectories) for trajectories in episodes.values()]
    wins = sum(t.success for t in groups[0].trajectories)
    assert 0 < wins < 8
    batch = estimate(gather(groups, RLSettings(zero_variance="keep")), RLSettings(zero_variance="keep"))
    advantage = {sample.trajectory_id: sample.advantages[0] for sample in batch.samples}
    for group in groups:
        values = [advantage[t.id] for t in group.trajectories]
        assert sum(values) == pytest.approx(0.0, abs=1e-5)
        assert all((advantage[t.id] > 0) == t.success for t in group.trajectories)
    metrics = episode_metrics(groups)
    assert metrics["roles/first_success"] == wins / 8 == 1 - metrics["roles/second_success"]
    assert metrics["roles/first_reward"] == -metrics["roles/second_reward"]


async def test_a_served_game_is_the_same_as_one_in_process() -> None:
    players = {FIRST: Player(LEARNER, RandomPolicy), SECOND: Player("random", RandomPolicy)}
    here = await play(Nim, SIX, players, group_size=4)
    with server_in_thread({"nim": Nim}) as server:
        served = await play(Nim, SIX, players, group_size=4, pool=RemotePool({"nim": f"{server.url}/nim"}))
    for role, episodes in here.items():
        assert [texts(t) for t in episodes] == [texts(t) for t in served[role]]
        assert [t.rewards for t in episodes] == [t.rewards for t in served[role]]


async def test_a_measured_collector_returns_the_first_role_of_the_learner() -> None:
    pool = LocalPool({"nim": Nim})
    players = {FIRST: Player("oracle", oracle), SECOND: Player(LEARNER, RandomPolicy)}
    played: list[Trajectory] = []
    collector = TeamCollector(
        lambda seed, index: players, pool, oracle, 1, 4, on_trajectory=played.append, measured=True
    )
    groups = await collector([Task("nim", FIVE), Task("nim", SIX)], LIMITS, seed=1)
    await pool.close()
    assert [[t.role for t in group.trajectories] for group in groups] == [[SECOND], [SECOND]]
    assert [t.role for t in played] == [SECOND, SECOND]


def test_the_oracle_of_nim_wins_every_position_that_can_be_won() -> None:
    for item, start in enumerate(STARTS):
        env, winning = Nim(), 0
        for size in start:
            winning ^= size % 4
        env.reset(item)
        step = env.step(env.oracle())
        while not step.done:
            step = env.step(env.oracle())
        assert step.info["rewards"][FIRST] == (1.0 if winning else -1.0)
