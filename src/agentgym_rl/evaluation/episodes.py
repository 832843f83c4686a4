"""Playing the episodes of an evaluation: so many at once, with deadlines and retries, each written as it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentgym_rl.agent.collect import Collector
from agentgym_rl.agent.engines.openai import Tokens
from agentgym_rl.agent.policy import Policy
from agentgym_rl.common.seeds import stable_seed
from agentgym_rl.errors import EngineError
from agentgym_rl.evaluation.folder import Folder
from agentgym_rl.evaluation.plan import Episode
from agentgym_rl.evaluation.records import Record
from agentgym_rl.types import EnvPool, EnvSession, Trajectory

MOST_FAILURES_IN_A_ROW = 20
"""So many episodes that failed one after the other, every attempt of each: then something is wrong with all of them."""


class Agent(Protocol):
    """Who is evaluated."""

    step: int
    """Training step of its weights; 0 where there is none."""

    @property
    def hopeless(self) -> str:
        """Why no episode of it will ever be played to an end; empty as long as that is not known."""
        ...

    def policy(self, session: EnvSession, seed: int) -> Policy: ...

    def usage(self, policy: Policy) -> Sequence[Tokens] | None:
        """What an API said this episode's answers took; None where the trajectory itself has the tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast and how patiently; none of it changes what is measured."""

    concurrency: int = 32
    retries: int = 2
    episode_timeout_s: float = 1800.0


async def play(
    episodes: Iterable[Episode],
    agent: Agent,
    pool: EnvPool,
    wrap: Callable[[EnvSession], EnvSession],
    folder: Folder,
    pace: Pace,
    seed: int,
    on_record: Callable[[Record, bool], None],
) -> None:
    """Play what `folder` does not hold yet. `on_record(record, last)` hears of every attempt.

    An episode's seed depends on the item, the sample and the attempt only: what was killed and played again, or played
    in another order, is the same.
    """
    waiting = iter([episode for episode in episodes if not folder.finished(episode.key)])
    failures = 0

    def ended(record: Record) -> None:
        nonlocal failures
        failures = failures + 1 if record.failed else 0
        if failures >= MOST_FAILURES_IN_A_ROW:
            raise EngineError(
                f"the last {failures} episodes all failed, the last one with: {record.error}: mend that and run the "
                "same command again, what was played is kept"
            )

    async def work() -> None:
        for episode in waiting:
            last = await _play_one(episode, agent, pool, wrap, folder, pace, seed, on_record)
            ended(last)

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(pace.concurrency):
                workers.create_task(work())
    except ExceptionGroup as errors:
        # The first failure is why the others were cancelled; a caller catches it by its own type.
        raise errors.exceptions[0] from None


async def _play_one(
    episode: Episode,
    agent: Agent,
    pool: EnvPool,
    wrap: Callable[[EnvSession], EnvSession],
    folder: Folder,
    pace: Pace,
    seed: int,
    on_record: Callable[[Record, bool], None],
) -> Record:
    """All attempts at one episode; returns the last."""
    earlier = len(folder.records.get(episode.key, ()))
    policies: list[Policy] = []
    written: list[Record] = []

    def make_policy(session: EnvSession, policy_seed: int) -> Policy:
        policies.append(agent.policy(session, policy_seed))
        return policies[-1]

    def write(trajectory: Trajectory) -> None:
        attempt = earlier + len(written)
        env, item, sample = episode.key
        trajectory.id = f"{env}-{item}-sample{sample}-attempt{attempt}"
        # A session that could not be opened never had a policy.
        usage = agent.usage(policies[-1]) if policies else None
        policies.clear()
        written.append(folder.write(episode, trajectory, attempt, usage, agent.step))
        on_record(written[-1], not written[-1].failed or len(written) > pace.retries)
        if agent.hopeless:
            raise EngineError(agent.hopeless)

    # One collector an episode: opening, deadlines, retries and closing are its business, the order of play is ours.
    collector = Collector(pool, make_policy, 1, 1, pace.retries, pace.episode_timeout_s, on_trajectory=write, wrap=wrap)
    await collector([episode.task], episode.limits, stable_seed(seed, *episode.key, earlier))
    return written[-1]
