"""AgentEvol: which explored episodes are kept."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from training_for_tests import group, groups

from agentgym_rl.training.agentevol import keep
from agentgym_rl.training.settings import AgentEvolSettings
from agentgym_rl.types import Group, StopReason

ALL = AgentEvolSettings(keep_per_item=0, min_reward=0.5)


def own_tasks(some: list[Group]) -> list[Group]:
    for one in some:
        for episode in one.trajectories:
            episode.task = one.task
    return some


@settings(max_examples=60, deadline=None)
@given(some=groups().map(own_tasks), least=st.sampled_from([0.5, 1.0]), most=st.integers(0, 2), seed=st.integers(0, 3))
def test_what_is_kept_was_paid_enough_and_is_no_more_than_asked(
    some: list[Group], least: float, most: int, seed: int
) -> None:
    chosen = replace(ALL, min_reward=least, keep_per_item=most)
    kept = [t.id for t in keep(some, chosen, seed)]
    expected = 0
    for one in some:  # one after the other, as slowly as it goes
        usable = [t for t in one.trajectories if t.stop is not StopReason.ERROR]
        good = [t.id for t in usable if sum(t.rewards) >= least]
        expected += min(len(good), most) if most else len(good)
        taken = [name for name in kept if name in {t.id for t in one.trajectories}]
        assert set(taken) <= set(good)
    assert len(kept) == len(set(kept)) == expected
    assert kept == [t.id for t in keep(some[::-1], chosen, seed)]


def test_the_seed_chooses_among_an_items_successes() -> None:
    some = own_tasks([group(1, [1.0] * 6)])
    once = AgentEvolSettings(keep_per_item=1)
    assert len({keep(some, once, seed)[0].id for seed in range(8)}) > 1
