"""Choice of a step's groups with `rl.keep_groups`: by the spread of what they are trained on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_correction import SECOND_STAGE, SETTINGS, played
from training_for_tests import group, trajectory

from agentgym_rl.training.advantages import Episode, return_spread
from agentgym_rl.training.batch import estimate, gather, keep_widest, widest_groups
from agentgym_rl.training.metrics import group_metrics
from agentgym_rl.training.settings import RLSettings
from agentgym_rl.types import Group, Limits, StopReason, Task, Trajectory

HALF = RLSettings(keep_groups=0.5, kl_coef=0.0)


def episodes(*rewards: float) -> list[Episode]:
    return [Episode(0, [reward], [1]) for reward in rewards]


def test_the_groups_with_the_largest_reward_spread_are_kept() -> None:
    groups = [episodes(0, 0), episodes(0, 1), episodes(0.4, 0.6), episodes(1, 1), episodes(0, 0.5)]
    for share, kept in ((0.4, [1, 4]), (0.01, [1]), (1.0, [0, 1, 2, 3, 4])):
        assert widest_groups(groups, RLSettings(keep_groups=share)) == kept
    assert return_spread(episodes(1), HALF) == 0.0


def test_a_batch_keeps_all_episodes_of_its_widest_groups() -> None:
    groups = [group(1, [1.0, 1.0]), group(2, [0.0, 1.0]), group(3, [0.0, 0.0]), group(4, [0.5, 0.0, 1.0])]
    kept, expected = keep_widest(gather(groups, HALF), HALF), gather([groups[1], groups[3]], HALF)
    assert kept.samples == expected.samples
    assert kept.episode_of_sample == expected.episode_of_sample
    assert [e.rewards for e in kept.episodes] == [e.rewards for e in expected.episodes]
    estimated, alone = estimate(kept, HALF), estimate(expected, HALF)
    assert (estimated.samples, estimated.weights) == (alone.samples, alone.weights)


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 1.0])
def test_groups_that_are_left_out_count_as_groups_without_variance(share: float) -> None:
    groups = [group(1, [0.0, 1.0]), group(2, [0.4, 0.6]), *(group(n, [0.0, 0.0]) for n in range(3, 9))]
    failed = group(9, [0.0, 1.0])
    for member in failed.trajectories:
        member.stop = StopReason.ERROR
    settings = replace(HALF, keep_groups=share)
    batch = estimate(keep_widest(gather([*groups, failed], settings), settings), settings)
    assert (batch.zero_variance_groups, batch.groups) == (6, 8)


@pytest.mark.parametrize(("settings", "kept"), [(SECOND_STAGE, 1), (SETTINGS, 2)])
def test_attempts_are_compared_by_their_own_rewards(settings: RLSettings, kept: int) -> None:
    outcomes = {
        1: [(False, True), (True, True), (False, True), (True, True)],  # only the first attempts differ
        2: [(False, False), (False, False), (False, False), (False, True)],
        3: [(False, False)] * 4,
    }
    groups = [
        Group(Task("lock", item), [played(*pair, f"{item}-{i}") for i, pair in enumerate(pairs)])
        for item, pairs in outcomes.items()
    ]
    assert settings.correction is not None
    assert return_spread(gather(groups[2:], settings).episodes, settings) == 0.0
    quarter = replace(settings, keep_groups=0.25, correction=replace(settings.correction, bonus=0.0))
    samples = keep_widest(gather(groups, quarter), quarter).samples
    assert {sample.trajectory_id[0] for sample in samples} == {str(kept)}


def test_the_penalty_on_overlong_replies_counts_in_the_spread() -> None:
    settings = RLSettings(keep_groups=0.5, kl_coef=0.0, overlong="penalty", overlong_buffer=4)
    equal, longer = (Group(Task("toy", n), [trajectory(n, turns=1, reward=0.0) for _ in range(2)]) for n in (1, 2))
    for message in (m for t in [*equal.trajectories, longer.trajectories[0]] for m in t.messages if m.logprobs):
        message.token_ids, message.logprobs = [1, 2], [-1.0, -1.0]
    long = longer.trajectories[1].messages[-2]
    long.token_ids, long.logprobs = [1] * 8, [-1.0] * 8
    batch = gather([equal, longer], settings, {"toy": Limits(1, 8, 100)})
    assert [sample.trajectory_id for sample in keep_widest(batch, settings).samples] == ["t2", "t2"]


def test_episodes_without_a_turn_do_not_count_in_the_spread() -> None:
    lost = group(1, [-1.0, -1.0])
    lost.trajectories += [
        Trajectory(f"passive-{i}", lost.task, stop=StopReason.DONE, passive_reward=-1.0) for i in range(2)
    ]
    assert group_metrics([lost])["reward/spread"] == 0.0, "all four lost"
    batch = gather([lost, group(2, [-1.0, -0.9])], HALF)
    assert {episode.group for episode in keep_widest(batch, HALF).episodes} == {1}
