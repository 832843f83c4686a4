"""AgentEvol: the choice of explored episodes to keep."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from training_for_tests import group, groups

from agentgym_rl.training.agentevol import select_episodes
from agentgym_rl.training.settings import AgentEvolSettings
from agentgym_rl.types import Group, StopReason

ALL = AgentEvolSettings(keep_per_item=0, min_reward=0.5)


def own_tasks(explored_groups: list[Group]) -> list[Group]:
    for explored in explored_groups:
        for episode in explored.trajectories:
            episode.task = explored.task
    return explored_groups


@settings(max_examples=60, deadline=None)
@given(
    explored_groups=groups().map(own_tasks),
    least=st.sampled_from([0.5, 1.0]),
    most=st.integers(0, 2),
    seed=st.integers(0, 3),
)
def test_kept_episodes_have_enough_reward_and_keep_to_the_limit(
    explored_groups: list[Group], least: float, most: int, seed: int
) -> None:
    chosen = replace(ALL, min_reward=least, keep_per_item=most)
    kept = [t.id for t in select_episodes(explored_groups, chosen, seed)]
    expected = 0
    for explored in explored_groups:
        usable = [t for t in explored.trajectories if t.stop is not StopReason.ERROR]
        good = [t.id for t in usable if sum(t.rewards) >= least]
        expected += min(len(good), most) if most else len(good)
        taken = [name for name in kept if name in {t.id for t in explored.trajectories}]
        assert set(taken) <= set(good)
    assert len(kept) == len(set(kept)) == expected
    assert kept == [t.id for t in select_episodes(explored_groups[::-1], chosen, seed)]


def test_the_seed_chooses_among_an_items_successes() -> None:
    explored_groups = own_tasks([group(1, [1.0] * 6)])
    once = AgentEvolSettings(keep_per_item=1)
    assert len({select_episodes(explored_groups, once, seed)[0].id for seed in range(8)}) > 1
