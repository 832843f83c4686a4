"""All sources of rewards of a run: they score the groups of a step and add their verdicts to the episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from agentgym_rl.agent.collect import together
from agentgym_rl.rewards.judge import Judge
from agentgym_rl.rewards.judge_questions import ranking_reward, rubric_reward
from agentgym_rl.rewards.scores import (
    Rewarder,
    environment_reward,
    format_reward,
    function_reward,
    length_reward,
    own_reward,
)
from agentgym_rl.training.reward_settings import RewardSettings
from agentgym_rl.types import ENVIRONMENT, Collect, CollectFrom, Group, Limits, Task, Verdict

BUILT_IN = {ENVIRONMENT: environment_reward, "format": format_reward, "length": length_reward}
"""Kinds that need no judge."""
JUDGED = {"rubric": rubric_reward, "ranking": ranking_reward}
Scorer = Callable[[Group], list[float | None]]
"""Scores the episodes of a group by a model in this process; None if it cannot read an episode."""
OWN_REWARD = RewardSettings(kind=ENVIRONMENT)
"""The environment's own reward, if the recipe has no entry for it."""


class Rewards:
    """The recipe's sources of rewards, the environment's own among them."""

    def __init__(
        self, settings: Sequence[RewardSettings], judge: Judge | None, scorers: Mapping[str, Scorer] | None = None
    ) -> None:
        """`scorers`: those of reward models, by the name of the source."""
        has_environment = any(source.kind == ENVIRONMENT for source in settings)
        self.sources = [*settings] if has_environment else [OWN_REWARD, *settings]
        self.judge = judge
        self._rewarders = [make_rewarder(source, judge, scorers or {}) for source in self.sources]

    async def score(self, groups: Sequence[Group]) -> None:
        """Replace the verdicts of every episode that did not fail and has at least one turn."""
        await asyncio.gather(*(self._score(group) for group in groups))

    async def _score(self, group: Group) -> None:
        played = Group(group.task, [t for t in group.usable if t.num_turns])
        if not played.trajectories:
            return
        by_source: list[list[Verdict]] = await asyncio.gather(*(reward(played) for reward in self._rewarders))
        for trajectory, verdicts in zip(played.trajectories, zip(*by_source, strict=True), strict=True):
            trajectory.verdicts = list(verdicts)

    def scoring(self, collect: CollectFrom) -> Collect:
        """Return a collector that scores the groups of a task as soon as they are played, while others are played.

        Roles that are not trained are not scored.
        """

        async def collect_and_score(task: Task, limits: Limits, seed: int, index: int) -> list[Group]:
            groups = await collect([task], limits, seed, index)  # several if the task has several roles
            await self.score([group for group in groups if group.learns])
            return groups

        async def collect_all(tasks: list[Task], limits: Limits, seed: int) -> list[Group]:
            played = await together(collect_and_score(task, limits, seed, index) for index, task in enumerate(tasks))
            return [group for groups in played for group in groups]

        return collect_all

    async def close(self) -> None:
        if self.judge is not None:
            await self.judge.close()


def make_rewarder(settings: RewardSettings, judge: Judge | None, scorers: Mapping[str, Scorer]) -> Rewarder:
    """Return the rewarder of one source."""
    if settings.kind in JUDGED:
        assert judge is not None
        return JUDGED[settings.kind](settings, judge)
    if settings.kind == "reward_model":
        return function_reward(settings, scorers[settings.source])
    return BUILT_IN.get(settings.kind, own_reward)(settings)
