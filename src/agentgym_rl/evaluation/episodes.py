"""Episodes of an evaluation: played concurrently, with timeouts and retries, each written as it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from agentgym_rl.agent.collect import Collector
from agentgym_rl.agent.engines.openai import Tokens
from agentgym_rl.agent.policy import Policy, PolicyFactory
from agentgym_rl.agent.team import Cast, TeamCollector
from agentgym_rl.common.seeds import stable_seed
from agentgym_rl.errors import EngineError
from agentgym_rl.evaluation.folder import Folder
from agentgym_rl.evaluation.plan import Episode
from agentgym_rl.evaluation.records import Record
from agentgym_rl.types import EnvPool, EnvSession, Trajectory

MAX_CONSECUTIVE_FAILURES = 20
"""Consecutive episodes without a successful attempt after which the evaluation stops: all have the same cause."""


class Agent(Protocol):
    """The agent that is evaluated."""

    step: int
    """Training step of its weights, or 0."""

    @property
    def fatal_error(self) -> str:
        """Reason for a permanent failure, or an empty string."""

    def policy(self, session: EnvSession, seed: int) -> Policy: ...

    def usage(self, policy: Policy) -> Sequence[Tokens] | None:
        """Return the token usage that an API reported for this episode. None if the trajectory has the tokens."""


@dataclass(frozen=True, slots=True)
class PlayOptions:
    """Concurrency, retries and timeout. None of them changes what is measured."""

    concurrency: int = 32
    retries: int = 2
    episode_timeout_s: float = 1800.0


async def play(
    episodes: Iterable[Episode],
    agent: Agent,
    pool: EnvPool,
    wrap: Callable[[EnvSession], EnvSession],
    folder: Folder,
    options: PlayOptions,
    seed: int,
    on_record: Callable[[Record, bool], None],
    cast: Callable[[PolicyFactory], Cast] | None = None,
) -> None:
    """Play the episodes that `folder` does not hold yet. Call `on_record(record, is_last)` after every attempt.

    An episode's seed depends only on the item, the sample and the attempt. The result is therefore the same after a
    kill, or in another order. With `cast` the agent plays one of several roles.
    """
    pending = iter([episode for episode in episodes if not folder.finished(episode.key)])
    failures = 0

    def count_failures(record: Record) -> None:
        nonlocal failures
        failures = failures + 1 if record.failed else 0
        if failures >= MAX_CONSECUTIVE_FAILURES:
            raise EngineError(
                f"the last {failures} episodes all failed, the last one with: {record.error}: fix that and run the "
                "same command again, finished episodes are kept"
            )

    async def work() -> None:
        for episode in pending:
            count_failures(await _play_episode(episode, agent, pool, wrap, folder, options, seed, on_record, cast))

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(options.concurrency):
                workers.create_task(work())
    except ExceptionGroup as errors:
        # The first failure cancelled the others. Raise it alone, so that a caller can catch it by type.
        raise errors.exceptions[0] from None


async def _play_episode(
    episode: Episode,
    agent: Agent,
    pool: EnvPool,
    wrap: Callable[[EnvSession], EnvSession],
    folder: Folder,
    options: PlayOptions,
    seed: int,
    on_record: Callable[[Record, bool], None],
    cast: Callable[[PolicyFactory], Cast] | None,
) -> Record:
    """Play all attempts at one episode and return the record of the last."""
    earlier_attempts = len(folder.records.get(episode.key, ()))
    policies: list[Policy] = []
    written: list[Record] = []

    def make_policy(session: EnvSession, policy_seed: int) -> Policy:
        policies.append(agent.policy(session, policy_seed))
        return policies[-1]

    def write(trajectory: Trajectory) -> None:
        attempt = earlier_attempts + len(written)
        env, item, sample = episode.key
        trajectory.id = f"{env}-{item}-sample{sample}-attempt{attempt}"
        # There is no policy if the session could not be opened.
        usage = agent.usage(policies[-1]) if policies else None
        policies.clear()
        written.append(folder.write(episode, trajectory, attempt, usage, agent.step))
        on_record(written[-1], not written[-1].failed or len(written) > options.retries)
        if agent.fatal_error:
            raise EngineError(agent.fatal_error)

    # One collector per episode handles opening, timeouts, retries and closing. This module keeps the order of play.
    make_collector: Callable[..., Collector] = Collector
    if cast is not None:
        make_collector = partial(TeamCollector, cast(make_policy), measured=True)
    collector = make_collector(
        pool, make_policy, 1, 1, options.retries, options.episode_timeout_s, on_trajectory=write, wrap=wrap
    )
    await collector([episode.task], episode.limits, stable_seed(seed, *episode.key, earlier_attempts))
    return written[-1]
