"""Assignment of groups to environment hosts."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from agentgym_rl.config import Config
from agentgym_rl.errors import WorkerLost
from agentgym_rl.run.backend_ray import plan_of
from agentgym_rl.scale.host_scheduler import HostScheduler


class Playing:
    """Groups that are played until `end`."""

    def __init__(self, scheduler: HostScheduler) -> None:
        self.scheduler = scheduler
        self.now: list[tuple[int, int]] = []
        """(host, episodes) of each."""
        self.tasks: list[asyncio.Task[None]] = []
        self._end = asyncio.Event()

    async def begin(self, *sizes: int) -> None:
        self.tasks += [asyncio.create_task(self._play(size)) for size in sizes]
        await settled()

    async def end(self) -> None:
        self._end.set()
        await asyncio.gather(*self.tasks)

    async def _play(self, size: int) -> None:
        async with self.scheduler.host(size) as host:
            self.now.append((host, size))
            await self._end.wait()
            self.now.remove((host, size))


async def settled() -> None:
    """Wait until no task can continue without an event."""
    for _ in range(2000):
        await asyncio.sleep(0)


def on_hosts(playing: Playing) -> list[int]:
    """Return the concurrent episodes of each host, largest first."""
    counts: Counter[int] = Counter()
    for host, size in playing.now:
        counts[host] += size
    return sorted(counts.values(), reverse=True)


@pytest.mark.parametrize(("size", "groups", "on_each"), [(1, 400, 68), (8, 50, 64)])
async def test_evaluation_plays_as_many_episodes_at_once_as_training(size: int, groups: int, on_each: int) -> None:
    """256 are played at once, and up to 16 more environments are opened ahead: 68 on each host."""
    recipe = {"model": {"path": "anywhere"}, "environments": [{"name": "keydoor"}], "agent": {"concurrency": 256}}
    plan = plan_of(Config.model_validate(recipe | {"scale": {"env_hosts": 4, "address": "auto"}}))
    playing = Playing(HostScheduler(plan.env_hosts, plan.episodes_per_host, 60.0))
    await playing.begin(*[size] * groups)
    assert on_hosts(playing) == [on_each] * 4
    await playing.end()
    assert playing.now == []


async def test_a_large_group_is_not_overtaken_forever_and_an_oversized_one_plays_alone() -> None:
    scheduler = HostScheduler(1, 8, 60.0)
    first, second = Playing(scheduler), Playing(scheduler)
    await first.begin(2)
    await second.begin(12, 4)
    assert (first.now, second.now) == ([(0, 2)], []), (
        "the small group waits behind the large one, which waits for capacity"
    )
    await first.end()
    await settled()
    assert second.now == [(0, 12)]
    await second.end()
    assert second.now == []


@pytest.mark.parametrize(("most", "at_once"), [(1, [4]), (2, [4, 4]), (4, [4, 4, 4, 4])])
async def test_groups_larger_than_a_hosts_share_do_not_exceed_what_all_may_play(most: int, at_once: list[int]) -> None:
    playing = Playing(HostScheduler(4, most, 60.0))
    await playing.begin(4, 4, 4, 4)
    assert on_hosts(playing) == at_once
    await playing.end()
    assert playing.now == []


async def test_hosts_that_are_down_play_nothing_until_they_are_back() -> None:
    scheduler = HostScheduler(2, 4, 0.01)
    assert scheduler.mark_lost(0)
    assert not scheduler.mark_lost(0), "it was already marked"
    playing = Playing(scheduler)
    await playing.begin(2, 2, 2)
    assert playing.now == [(1, 2), (1, 2)], "a busy host may take as long as its episodes do"
    await scheduler.mark_back(0)
    await settled()
    assert playing.now == [(1, 2), (1, 2), (0, 2)]
    await playing.end()
    for host in (0, 1):
        scheduler.mark_lost(host)
    with pytest.raises(WorkerLost, match="all 2 environment hosts died and none came back"):
        async with scheduler.host(1):
            pass
