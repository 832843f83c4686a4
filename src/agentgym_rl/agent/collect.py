"""Plays many episodes at once: bounded concurrency, deadlines, retries, groups.

Every episode runs independently from open to close. Only the batch waits for its slowest episode.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Literal, TypeVar

from agentgym_rl.agent.policy import Policy, PolicyFactory
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.agent.stages import EpisodeStage, Stages
from agentgym_rl.common.seeds import stable_seed
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import EnvPool, EnvSession, Group, Limits, StopReason, Task, Trajectory

Start = Callable[[EnvSession, Policy], tuple[EnvSession, Policy]]
"""Wraps the session and the policy of an episode that does not start at its first turn."""
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


async def together(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run calls concurrently and return their results in order. The first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(call) for call in calls]
    except ExceptionGroup as errors:
        # As it is, so that a caller can catch its type.
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


class Collector:
    """Plays `group_size` episodes of each task (`types.CollectFrom`). `concurrency` bounds concurrent episodes; as
    `Stages`, those of several collectors together, each stage of an episode on its own.

    An episode that ends as ERROR is played again up to `retries` times with another seed. Every attempt is in the
    group, ordered by member and attempt, and is passed to `on_trajectory` when it ends. An episode that takes longer
    than `episode_timeout_s` ends as ERROR, or with `on_timeout` "truncate" as TIMEOUT.
    """

    def __init__(
        self,
        pool: EnvPool,
        make_policy: PolicyFactory,
        group_size: int,
        concurrency: int | Stages,
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
        self._stages = concurrency if isinstance(concurrency, Stages) else Stages(concurrency)
        self._retries = retries
        self._episode_timeout_s = episode_timeout_s
        self._on_trajectory = on_trajectory
        self._wrap = wrap
        self._close_timeout_s = close_timeout_s
        self._truncate = on_timeout == "truncate"
        self.prefix = prefix
        """Prefix of every trajectory's id. Give each use of one seed in a run (training, evaluation) its own."""

    async def __call__(self, tasks: list[Task], limits: Limits, seed: int, first: int = 0) -> list[Group]:
        """Play the tasks. `first` is the index of the first one in the whole list; ids and seeds depend on it."""
        size = self._group_size
        episodes = await together(
            self._play_attempts(task, limits, seed, index, member)
            for index, task in enumerate(tasks, first)
            for member in range(size)
        )
        return [
            Group(task, [trajectory for attempts in episodes[i * size : (i + 1) * size] for trajectory in attempts])
            for i, task in enumerate(tasks)
        ]

    async def _play_attempts(
        self,
        task: Task,
        limits: Limits,
        seed: int,
        index: int,
        member: int,
        start: Start | None = None,
        parent: tuple[str, int] = ("", 0),
    ) -> list[Trajectory]:
        """Play all attempts at one episode of a group. `start` and `parent` (id, turns) are those of a branch."""

        async def play(stage: EpisodeStage, attempt: int) -> list[Trajectory]:
            trajectory = await self._episode(
                task,
                limits,
                stage,
                id=f"{self.prefix}{seed}-{index}-{member}-{attempt}",
                seed=stable_seed(seed, index, member, attempt),
                start=start,
            )
            trajectory.parent, trajectory.shared_turns = parent[0], min(parent[1], trajectory.num_turns)
            return [trajectory]

        return await self._attempt(task, play)

    async def _attempt(
        self, task: Task, play: Callable[[EpisodeStage, int], Awaitable[list[Trajectory]]]
    ) -> list[Trajectory]:
        """Call `play(stage, attempt)` until none of its episodes ends as ERROR, and return those of all attempts."""
        attempts: list[Trajectory] = []
        for attempt in range(self._retries + 1):
            async with self._stages.episode(task.env) as stage:
                played = await play(stage, attempt)
            attempts += played
            if self._on_trajectory is not None:
                for trajectory in played:
                    self._on_trajectory(trajectory)
            if all(trajectory.stop is not StopReason.ERROR for trajectory in played):
                break
        return attempts

    async def _episode(
        self,
        task: Task,
        limits: Limits,
        stage: EpisodeStage,
        *,
        id: str,  # noqa: A002
        seed: int,
        start: Start | None = None,
    ) -> Trajectory:
        session = await self._open(task)
        if isinstance(session, str):
            return Trajectory(id, task, stop=StopReason.ERROR, error=session, horizon=limits.max_turns)
        try:
            env = session if self._wrap is None else self._wrap(session)
            policy = self._make_policy(env, seed)
            if start is not None:
                env, policy = start(env, policy)
            return await rollout(
                task,
                env,
                policy,
                limits,
                id=id,
                timeout_s=self._episode_timeout_s,
                truncate=self._truncate,
                before_play=stage.play,
            )
        finally:
            stage.leave()  # a slow close must not keep another episode from the engine
            await self._close(session)

    async def _open(self, task: Task) -> EnvSession | str:
        """Return a session, or why there is none, which is recorded and retried like any failed episode."""
        try:
            async with asyncio.timeout(self._episode_timeout_s):
                return await self._pool.open(task.env)
        except ConfigError:
            raise
        except Exception as error:
            return f"{type(error).__name__}: cannot open a session of {task.env}: {str(error) or 'timeout'}"

    async def _close(self, session: EnvSession) -> None:
        try:
            async with asyncio.timeout(self._close_timeout_s):
                await session.close()
        except Exception as error:
            # The episode itself is complete.
            logger.info("a session of %s could not be closed: %r", session.name, error)
