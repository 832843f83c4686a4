"""All sources of rewards of a run: they score the groups of a step and add their verdicts to the episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentgym_rl.rewards.judge import Judge
from agentgym_rl.rewards.judge_questions import ranking_reward, rubric_reward
from agentgym_rl.rewards.scores import Rewarder, environment_reward, format_reward, length_reward, own_reward
from agentgym_rl.training.reward_settings import RewardSettings
from agentgym_rl.types import ENVIRONMENT, Collect, Group, Limits, Task, Verdict

BUILT_IN = {ENVIRONMENT: environment_reward, "format": format_reward, "length": length_reward}
"""Kinds that need no judge."""
JUDGED = {"rubric": rubric_reward, "ranking": ranking_reward}
OWN_REWARD = RewardSettings(kind=ENVIRONMENT)
"""The environment's own reward, if the recipe has no entry for it."""


class Rewards:
    """The recipe's sources of rewards, the environment's own among them."""

    def __init__(self, settings: Sequence[RewardSettings], judge: Judge | None) -> None:
        has_environment = any(source.kind == ENVIRONMENT for source in settings)
        self.sources = [*settings] if has_environment else [OWN_REWARD, *settings]
        self.judge = judge
        self._rewarders = [make_rewarder(source, judge) for source in self.sources]

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

    def scoring(self, collect: Collect) -> Collect:
        """Return a collector that scores the groups it plays."""

        async def collect_and_score(tasks: list[Task], limits: Limits, seed: int) -> list[Group]:
            groups = await collect(tasks, limits, seed)
            await self.score(groups)
            return groups

        return collect_and_score

    async def close(self) -> None:
        if self.judge is not None:
            await self.judge.close()


def make_rewarder(settings: RewardSettings, judge: Judge | None) -> Rewarder:
    """Return the rewarder of one source."""
    if settings.kind in JUDGED:
        assert judge is not None
        return JUDGED[settings.kind](settings, judge)
    return BUILT_IN.get(settings.kind, own_reward)(settings)
