"""Many episodes at once: no lock-step, deadlines, retries, order, and nothing left open."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from envs_for_tests import Counting
from envs_for_tests import Garbage as GarbageEnv
from envs_for_tests import Hanging as HangingEnv
from envs_for_tests import Raising as RaisingEnv
from scripted_engine_for_tests import ScriptedEngine
from servers_for_tests import server_in_thread, server_process
from test_rollout import Corridor, Garbage, Hanging, Raising, RaisingReset
from tokenizers_for_tests import byte_level_bpe

from agentgym_rl.agent.collect import Collector
from agentgym_rl.agent.policy import EnginePolicy, HumanPolicy, OraclePolicy, RandomPolicy, ScriptedPolicy
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.stages import STARTS_PER_ITERATION, EpisodeSlots
from agentgym_rl.agent.styles import STYLES
from agentgym_rl.common.seeds import stable_seed
from agentgym_rl.config import Config
from agentgym_rl.environment.pool import LocalPool, RemotePool
from agentgym_rl.errors import ConfigError, EnvUnavailable
from agentgym_rl.run.collectors import collect_each
from agentgym_rl.types import EnvSession, Limits, Sampling, Step, StopReason, Task, Trajectory

LIMITS = Limits(max_turns=6, max_new_tokens=32, max_context=4000)
TASKS = [Task("corridor", item) for item in (3, 1, 2)]


class Pool:
    """Sessions made by `make(n)` for the n-th open; counts those that are open."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make
        self.opened = 0
        self.running: set[int] = set()
        self.most = 0

    async def open(self, env: str) -> EnvSession:
        number, self.opened = self.opened, self.opened + 1
        session = self.make(number)
        if isinstance(session, BaseException):
            raise session
        self.running.add(number)
        self.most = max(self.most, len(self.running))
        close = session.close

        async def closing() -> None:
            self.running.discard(number)
            await close()

        session.close = closing
        return session

    async def items(self, env: str, split: str, subset: str | None = None) -> list[int]:
        return [1, 2, 3]

    async def close(self) -> None:
        return None


def oracle(env: EnvSession, seed: int) -> OraclePolicy:
    return OraclePolicy(env)


async def test_groups_come_in_order_whatever_finishes_first() -> None:
    class Sleepy(Corridor):
        nap_s = 0.0

        async def reset(self, item: int) -> Step:
            await asyncio.sleep(self.nap_s)
            return await super().reset(item)

    def make(number: int) -> Sleepy:
        session = Sleepy()
        session.nap_s = 0.05 - number * 0.008
        return session

    pool = Pool(make)
    finished: list[str] = []
    collector = Collector(pool, oracle, 2, 8, on_trajectory=lambda t: finished.append(t.id), prefix="eval-")
    groups = await collector(TASKS, LIMITS, 9)
    assert [group.task for group in groups] == TASKS
    ids = [[t.id for t in group.trajectories] for group in groups]
    assert ids == [[f"eval-9-{index}-{place}-0" for place in range(2)] for index in range(3)]
    flat = [i for group in ids for i in group]
    assert sorted(finished) == sorted(flat)
    assert finished != flat
    assert all(t.success and t.task == group.task for group in groups for t in group.trajectories)
    assert pool.running == set()


async def test_a_slow_environment_does_not_gate_the_others() -> None:
    """Eleven fast episodes play all their turns and end while the slow one is still at its first."""
    release = asyncio.Event()

    class Slow(Corridor):
        async def step(self, text: str) -> Step:
            await release.wait()
            return await super().step(text)

    finished: list[Trajectory] = []

    def on_trajectory(trajectory: Trajectory) -> None:
        finished.append(trajectory)
        if len(finished) == 11:
            release.set()

    # Fewer places than episodes: the free place is reused over and over while the slow episode holds the other.
    pool = Pool(lambda number: Slow() if number == 0 else Corridor())
    collector = Collector(pool, oracle, 4, 2, episode_timeout_s=20, on_trajectory=on_trajectory)
    await collector(TASKS, LIMITS, 0)
    assert [t.id for t in finished][-1] == "0-0-0-0"
    assert all(t.success for t in finished)
    assert pool.most == 2


async def test_episodes_overlap() -> None:
    class Waiting(Corridor):
        async def step(self, text: str) -> Step:
            await asyncio.sleep(0.2)
            return await super().step(text)

    started = time.monotonic()
    await Collector(Pool(lambda number: Waiting()), oracle, 10, 30)(TASKS, LIMITS, 0)
    assert time.monotonic() - started < 30 * 3 * 0.2 / 2


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (Raising, "EnvError"),
    "dies": (RaisingReset, "ConnectionResetError"),
    "hangs": (Hanging, "EpisodeTimeout"),
    "garbage": (Garbage, "EnvError"),
    "no place": (lambda: EnvUnavailable("full"), "EnvUnavailable"),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
async def test_a_failed_episode_is_recorded_and_played_again(fault: str) -> None:
    make, kind = FAULTS[fault]
    patience_s = 3 if fault == "hangs" else 60
    pool = Pool(lambda number: make() if number < 2 else Corridor())
    seen: list[Trajectory] = []
    collector = Collector(pool, oracle, 2, 4, retries=2, episode_timeout_s=patience_s, on_trajectory=seen.append)
    groups = await collector(TASKS[:2], LIMITS, 5)
    everything = [t for group in groups for t in group.trajectories]
    errors = [t for t in everything if t.stop is StopReason.ERROR]
    assert len(everything) == 6 == len(seen)
    assert len(errors) == 2
    assert all((t.error or "").startswith(f"{kind}: ") for t in errors)
    assert [len(group.usable) for group in groups] == [2, 2]
    assert all(t.success for group in groups for t in group.usable)
    assert len({t.id for t in everything}) == 6
    assert pool.running == set()


async def test_retries_end() -> None:
    pool = Pool(lambda number: Raising())
    collector = Collector(pool, oracle, 2, 4, retries=2)
    [group] = await collector(TASKS[:1], LIMITS, 5)
    assert [t.id for t in group.trajectories] == [f"5-0-{place}-{attempt}" for place in (0, 1) for attempt in (0, 1, 2)]
    assert group.usable == []
    assert pool.running == set()


async def test_seeds_are_deterministic_and_differ_by_place_and_attempt() -> None:
    async def seeds(seed: int) -> list[int]:
        given: list[int] = []

        def make_policy(env: EnvSession, seed: int) -> RandomPolicy:
            given.append(seed)
            return RandomPolicy(env, seed)

        await Collector(Pool(lambda number: Raising()), make_policy, 2, 1, retries=1)(TASKS, LIMITS, seed)
        return given

    first = await seeds(1)
    assert len(set(first)) == 12
    assert await seeds(1) == first
    assert not set(await seeds(2)) & set(first)


async def test_the_same_seed_plays_the_same_episodes() -> None:
    async def played(seed: int, concurrency: int) -> list[list[str]]:
        collector = Collector(Pool(lambda number: Corridor()), RandomPolicy, 4, concurrency)
        groups = await collector(TASKS, LIMITS, seed)
        return [[m.content for m in t.messages] for group in groups for t in group.trajectories]

    assert await played(1, 1) == await played(1, 12)
    assert await played(1, 4) != await played(2, 4)


@pytest.mark.parametrize("on_timeout", ["retry", "truncate"])
async def test_a_slow_episode_is_retried_or_truncated(on_timeout: Any) -> None:
    pool = Pool(lambda number: Hanging() if number == 0 else Corridor())
    collector = Collector(pool, oracle, 2, 1, retries=1, episode_timeout_s=1.0, on_timeout=on_timeout)
    [group] = await collector(TASKS[:1], LIMITS, 0)
    stops = [t.stop for t in group.trajectories]
    if on_timeout == "retry":
        assert stops == [StopReason.ERROR, StopReason.DONE, StopReason.DONE]
        assert len(group.usable) == 2
    else:
        assert stops == [StopReason.TIMEOUT, StopReason.DONE]
        assert group.usable == group.trajectories


async def test_concurrency_bounds_all_environments_together_and_is_shared_by_weight() -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 1.0, "d": 3.0, "e": 1.0}
    raw = {"model": {"path": "m"}, "agent": {"concurrency": 16, "open_ahead": 0, "opening": 16, "instruction": ""}}
    config = Config.model_validate(raw | {"environments": [{"name": e, "weight": w} for e, w in weights.items()]})
    playing: Counter[str] = Counter()
    seen: list[dict[str, int]] = []

    class Slow(Corridor):
        async def reset(self, item: int) -> Step:
            playing[self.name] += 1
            seen.append(dict(playing))
            await asyncio.sleep(0.01)
            return await super().reset(item)

        async def close(self) -> None:
            playing[self.name] -= 1

    class Named(Pool):
        async def open(self, env: str) -> EnvSession:
            session = await super().open(env)
            session.name = env
            return session

    pool = Named(lambda number: Slow())
    collect = collect_each(config.agent, config.environments, pool, oracle, config.group_sizes(4), "")  # type: ignore[arg-type]
    groups = await asyncio.gather(*(collect([Task(e, 1)] * 16, LIMITS, 0) for e in weights))
    assert all(t.success for part in groups for group in part for t in group.trajectories)
    assert max(sum(row.values()) for row in seen) == 16
    assert seen[15] == {"a": 2, "b": 4, "c": 2, "d": 6, "e": 2}, "all wait: places go by weight"
    pool.most, before = 0, pool.most
    await collect([Task("a", 1)] * 16, LIMITS, 0)
    assert (pool.most, before) == (16, 16), "an environment that plays alone may have all"


async def test_episodes_start_in_portions_so_that_the_first_are_played_early() -> None:
    slots, started = EpisodeSlots(100), 0

    async def episode() -> None:
        nonlocal started
        async with slots.taken("a"):
            started += 1
            await asyncio.sleep(0.01)

    running = [asyncio.create_task(episode()) for _ in range(40)]
    counts = []
    for _ in range(8):
        await asyncio.sleep(0)
        counts.append(started)
    await asyncio.gather(*running)
    steps = {after - before for before, after in zip([0, *counts], counts, strict=False)}
    assert steps <= {0, STARTS_PER_ITERATION, 40 % STARTS_PER_ITERATION}, counts
    assert started == 40


async def test_a_cancelled_waiter_frees_its_slot() -> None:
    places = EpisodeSlots(1)

    async def hold(until: asyncio.Event) -> None:
        async with places.taken("a"):
            await until.wait()

    end = asyncio.Event()
    first, second, third = (asyncio.create_task(hold(end)) for _ in range(3))
    await asyncio.sleep(0.01)
    second.cancel()
    first.cancel()
    end.set()
    async with asyncio.timeout(20):
        await third
    assert [first.cancelled(), second.cancelled()] == [True, True]


async def test_a_close_that_fails_or_hangs_does_not_affect_the_episode(caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(Corridor):
        async def close(self) -> None:
            await asyncio.sleep(3600)

    class Rude(Corridor):
        async def close(self) -> None:
            raise OSError("gone")

    caplog.set_level("INFO", "agentgym_rl")
    collector = Collector(Pool(lambda number: Stubborn() if number else Rude()), oracle, 2, 2, close_timeout_s=0.05)
    [group] = await collector(TASKS[:1], LIMITS, 0)
    assert all(t.success for t in group.trajectories)
    assert sorted(caplog.messages) == [
        "a session of corridor could not be closed: OSError('gone')",
        "a session of corridor could not be closed: TimeoutError()",
    ]


async def test_opening_that_hangs_is_an_error_too() -> None:
    class Full(Pool):
        async def open(self, env: str) -> EnvSession:
            await asyncio.sleep(3600)
            raise AssertionError("it was to be cancelled")

    collector = Collector(Full(lambda number: None), oracle, 1, 2, retries=0, episode_timeout_s=0.05)
    [group] = await collector(TASKS[:1], LIMITS, 0)
    assert group.trajectories[0].error == "TimeoutError: cannot open a session of corridor: timeout"


async def test_cancellation_closes_everything() -> None:
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    engine = ScriptedEngine(["go"] * 3, encode=renderer.reply_ids)
    all_waiting = asyncio.Barrier(7)

    class Stuck(Hanging):
        async def step(self, text: str) -> Step:
            await all_waiting.wait()
            return await super().step(text)

    def make_policy(env: EnvSession, seed: int) -> EnginePolicy:
        return EnginePolicy(engine, renderer, Sampling(max_new_tokens=1, seed=seed), instruction=env.instruction)

    pool = Pool(lambda number: Stuck())
    running = asyncio.create_task(Collector(pool, make_policy, 4, 6)(TASKS, LIMITS, 0))
    await all_waiting.wait()
    assert len(pool.running) == len(engine.sessions) == 6
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert pool.running == set()
    assert engine.sessions == {}
    assert pool.opened == 6


async def test_a_user_error_is_raised_unchanged_and_closes_everything() -> None:
    def make_policy(env: EnvSession, seed: int) -> OraclePolicy:
        raise ConfigError("no such model")

    pool = Pool(lambda number: Corridor())
    with pytest.raises(ConfigError, match="no such model"):
        await Collector(pool, make_policy, 2, 4)(TASKS, LIMITS, 0)
    assert pool.running == set()
    with pytest.raises(ConfigError, match="unknown"):
        await Collector(Pool(lambda number: ConfigError("unknown environment")), oracle, 1, 1)(TASKS, LIMITS, 0)
    with pytest.raises(ConfigError, match="group_size must be 1 or more, got 0"):
        Collector(pool, oracle, 0, 1)


async def test_a_full_disk_stops_the_run_and_closes_everything() -> None:
    def on_trajectory(trajectory: Trajectory) -> None:
        raise OSError("no space left")

    pool = Pool(lambda number: Corridor())
    with pytest.raises(OSError, match="no space left"):
        await Collector(pool, oracle, 2, 4, on_trajectory=on_trajectory)(TASKS, LIMITS, 0)
    assert pool.running == set()


async def test_wrap_applies_a_style() -> None:
    pool = Pool(lambda number: Raising())
    style = STYLES["reflect"]
    collector = Collector(pool, oracle, 1, 1, retries=0, wrap=lambda env: style.wrap(env, turns_per_attempt=1))
    [group] = await collector(TASKS[:1], LIMITS, 0)
    assert style.suffix in group.trajectories[0].messages[0].content
    assert pool.running == set()


REAL_FAULTS = {"raise": RaisingEnv, "hang": HangingEnv, "nan": GarbageEnv}


@pytest.mark.parametrize("where", ["local", "remote"])
@pytest.mark.parametrize("fault", sorted(REAL_FAULTS))
async def test_faults_through_the_real_pools(fault: str, where: str) -> None:
    """Two first attempts meet the fault after one good turn; in the end pool and server have nothing open."""
    env = REAL_FAULTS[fault]
    HangingEnv.release.clear()
    unlucky = {stable_seed(0, 0, place, 0) for place in (0, 1)}

    def make_policy(session: EnvSession, seed: int) -> ScriptedPolicy:
        return ScriptedPolicy(["up", fault] if seed in unlucky else ["up"] * 6)

    patience_s = 4 if fault == "hang" else 60
    with server_in_thread({env.name: env}, step_timeout_s=patience_s) as server:
        pool: Any = (
            LocalPool({env.name: env}, timeout_s=patience_s)
            if where == "local"
            else RemotePool({env.name: f"{server.url}/{env.name}"}, timeout_s=60)
        )
        try:
            collector = Collector(pool, make_policy, 3, 3, retries=1, episode_timeout_s=120)
            [group] = await collector([Task(env.name, 1)], LIMITS, 0)
            assert pool.num_open == 0
            assert server.sessions.num_open == 0
        finally:
            HangingEnv.release.set()
            await pool.close()
    errors = [t for t in group.trajectories if t.stop is StopReason.ERROR]
    assert [(t.num_turns, t.messages[-1].content) for t in errors] == [(2, fault)] * 2, [t.error for t in errors]
    assert len(group.usable) == 3
    assert all(t.success for t in group.usable)


async def test_a_server_that_is_killed_in_the_middle_of_episodes() -> None:
    with server_process("Counting") as (url, server):
        turns = 0

        def ask(observation: str) -> str:
            nonlocal turns
            turns += 1
            if turns == 5:
                server.kill()
                server.wait()
            return "up"

        pool = RemotePool({Counting.name: url}, timeout_s=5, wait_timeout_s=1)
        collector = Collector(pool, lambda env, seed: HumanPolicy(ask), 3, 3, retries=1, episode_timeout_s=20)
        groups = await collector([Task(Counting.name, 4)], LIMITS, 0)
        assert pool.num_open == 0
        await pool.close()
    trajectories = groups[0].trajectories
    assert [t.stop for t in trajectories] == [StopReason.ERROR] * 6
    assert sum(t.num_turns for t in trajectories) == turns
    assert [t.num_turns for t in trajectories[1::2]] == [0, 0, 0]  # the retries cannot even open a session
