"""Plays many episodes at once: bounded concurrency, deadlines, retries, groups.

Every episode runs independently from open to close. Only the batch waits for its slowest episode.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Literal

from agentgym_rl.agent.policy import PolicyFactory
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.common.seeds import stable_seed
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import EnvPool, EnvSession, Group, Limits, StopReason, Task, Trajectory

STARTS_PER_ITERATION = 16
"""Episodes that start in one iteration of the event loop, so that an engine plays the first while others are reset."""


class EpisodeSlots:
    """Slots for `total` concurrent episodes, shared by several collectors.

    If several environments wait, the next slot goes to the one with the fewest relative to its weight. An environment
    that plays alone may use all. `weights` default to 1.
    """

    def __init__(self, total: int, weights: Mapping[str, float] | None = None) -> None:
        if total < 1:
            raise ConfigError(f"concurrency must be 1 or more, got {total}")
        self._free = total
        self._weights = weights or {}
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = defaultdict(deque)
        self._scheduled_in: asyncio.AbstractEventLoop | None = None
        """Event loop in which slots will be handed out."""

    @asynccontextmanager
    async def taken(self, env: str) -> AsyncIterator[None]:
        """Hold a slot while the body runs."""
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[None] = loop.create_future()
        self._waiting[env].append(granted)
        # Later, so that environments that start together are all waiting by then.
        self._schedule(loop)
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self._free += 1
                self._taken[env] -= 1
                self._schedule(loop)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand out slots in the next iteration, once."""
        if self._scheduled_in is not loop:
            self._scheduled_in = loop
            loop.call_soon(self._hand_out)

    def _hand_out(self) -> None:
        self._scheduled_in = None
        for _ in range(STARTS_PER_ITERATION):
            envs = [env for env, queue in self._waiting.items() if queue]
            if not self._free or not envs:
                return
            env = min(envs, key=lambda env: self._taken[env] / self._weights.get(env, 1.0))
            granted = self._waiting[env].popleft()
            if not granted.cancelled():
                self._free -= 1
                self._taken[env] += 1
                granted.set_result(None)
        self._schedule(asyncio.get_running_loop())


class Collector:
    """Plays `group_size` episodes of each task (`types.Collect`). `concurrency` bounds concurrent episodes; as
    `EpisodeSlots`, those of several collectors together.

    An episode that ends as ERROR is played again up to `retries` times with another seed. Every attempt is in the
    group, ordered by member and attempt, and is passed to `on_trajectory` when it ends. An episode that takes longer
    than `episode_timeout_s` ends as ERROR, or with `on_timeout` "truncate" as TIMEOUT.
    """

    def __init__(
        self,
        pool: EnvPool,
        make_policy: PolicyFactory,
        group_size: int,
        concurrency: int | EpisodeSlots,
        retries: int = 1,
        episode_timeout_s: float = 600.0,
        on_trajectory: Callable[[Trajectory], None] | None = None,
        wrap: Callable[[EnvSession], EnvSession] | None = None,
        *,
        prefix: str = "",
        close_timeout_s: float = 30.0,
        on_timeout: Literal["retry", "truncate"] = "retry",
    ) -> None:
        for name, value, minimum in (("group_size", group_size, 1), ("retries", retries, 0)):
            if value < minimum:
                raise ConfigError(f"{name} must be {minimum} or more, got {value}")
        self._pool = pool
        self._make_policy = make_policy
        self._group_size = group_size
        self._slots = concurrency if isinstance(concurrency, EpisodeSlots) else EpisodeSlots(concurrency)
        self._retries = retries
        self._episode_timeout_s = episode_timeout_s
        self._on_trajectory = on_trajectory
        self._wrap = wrap
        self._close_timeout_s = close_timeout_s
        self._truncate = on_timeout == "truncate"
        self.prefix = prefix
        """Prefix of every trajectory's id. Give each use of one seed in a run (training, evaluation) its own."""
        self.counts: Counter[str] = Counter()
        """Counts since `drain_counts`: episodes, retries, timeouts (truncated), failed (no attempt left),
        errors/<kind>."""

    async def __call__(self, tasks: list[Task], limits: Limits, seed: int, first: int = 0) -> list[Group]:
        """Play the tasks. `first` is the index of the first one in the whole list; ids and seeds depend on it."""
        try:
            async with asyncio.TaskGroup() as running:
                episodes = [
                    [
                        running.create_task(self._play_attempts(task, limits, seed, index, member))
                        for member in range(self._group_size)
                    ]
                    for index, task in enumerate(tasks, first)
                ]
        except ExceptionGroup as errors:
            # The first failure cancelled the others. Raise it, so that a caller can catch its type.
            raise errors.exceptions[0] from None
        return [
            Group(task, [trajectory for episode in group for trajectory in episode.result()])
            for task, group in zip(tasks, episodes, strict=True)
        ]

    def drain_counts(self) -> dict[str, int]:
        """Return the counters since the last call."""
        counts, self.counts = dict(self.counts), Counter()
        return counts

    async def _play_attempts(self, task: Task, limits: Limits, seed: int, index: int, member: int) -> list[Trajectory]:
        """Play the attempts at one episode of a group."""
        attempts: list[Trajectory] = []
        for attempt in range(self._retries + 1):
            async with self._slots.taken(task.env):
                trajectory = await self._episode(
                    task,
                    limits,
                    id=f"{self.prefix}{seed}-{index}-{member}-{attempt}",
                    seed=stable_seed(seed, index, member, attempt),
                )
            attempts.append(trajectory)
            self._count(trajectory, attempt)
            if self._on_trajectory is not None:
                self._on_trajectory(trajectory)
            if trajectory.stop is not StopReason.ERROR:
                break
        return attempts

    async def _episode(self, task: Task, limits: Limits, *, id: str, seed: int) -> Trajectory:  # noqa: A002
        try:
            async with asyncio.timeout(self._episode_timeout_s):
                session = await self._pool.open(task.env)
        except ConfigError:
            raise
        except Exception as error:
            # Recorded and retried like any failed episode.
            text = f"{type(error).__name__}: cannot open a session of {task.env}: {str(error) or 'timeout'}"
            return Trajectory(id, task, stop=StopReason.ERROR, error=text, horizon=limits.max_turns)
        try:
            env = session if self._wrap is None else self._wrap(session)
            policy = self._make_policy(env, seed)
            timeout_s = self._episode_timeout_s
            return await rollout(task, env, policy, limits, id=id, timeout_s=timeout_s, truncate=self._truncate)
        finally:
            await self._close(session)

    async def _close(self, session: EnvSession) -> None:
        try:
            async with asyncio.timeout(self._close_timeout_s):
                await session.close()
        except Exception as error:
            # The episode itself is complete, so a failure to close is only counted.
            self.counts[f"errors/close {type(error).__name__}"] += 1

    def _count(self, trajectory: Trajectory, attempt: int) -> None:
        self.counts["episodes"] += 1
        self.counts["retries"] += attempt > 0
        if trajectory.stop is StopReason.TIMEOUT:
            self.counts["timeouts"] += 1
        if trajectory.stop is StopReason.ERROR:
            kind = (trajectory.error or "unknown").split(":")[0]
            self.counts[f"errors/{kind}"] += 1
            self.counts["failed"] += attempt == self._retries
