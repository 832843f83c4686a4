"""Advantage estimators against slow numpy versions."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_for_tests import group, trajectory

from agentgym_rl.errors import ConfigError
from agentgym_rl.training.advantages import ESTIMATORS, grpo, rloo, zero_variance
from agentgym_rl.types import Trajectory

REWARDS = st.lists(st.floats(-3, 3).map(lambda r: round(r, 3)), min_size=2, max_size=8)


def by_hand(rewards: list[float], algorithm: str, normalize_std: bool) -> list[float]:
    array = numpy.array(rewards, dtype=numpy.float64)
    if array.max() - array.min() < 1e-6:
        return [0.0] * len(rewards)
    if algorithm == "rloo":
        return [float(array[i] - numpy.delete(array, i).mean()) for i in range(len(array))]
    centred = array - array.mean()
    return list(centred / (array.std() + 1e-6) if normalize_std else centred)


@given(rewards=REWARDS, algorithm=st.sampled_from(sorted(ESTIMATORS)), normalize_std=st.booleans())
def test_estimators_agree_with_numpy_and_reach_every_turn(
    rewards: list[float], algorithm: str, normalize_std: bool
) -> None:
    trajectories = group(3, rewards).trajectories
    found = ESTIMATORS[algorithm](trajectories, normalize_std)
    expected = by_hand(rewards, algorithm, normalize_std)
    for turns, value, played in zip(found, expected, trajectories, strict=True):
        assert len(turns) == played.num_turns
        numpy.testing.assert_allclose(turns, value, rtol=1e-9, atol=1e-12)


@given(rewards=REWARDS, shift=st.sampled_from([-2.0, 0.5, 7.0]), algorithm=st.sampled_from(sorted(ESTIMATORS)))
def test_a_reward_given_to_all_changes_nothing(rewards: list[float], shift: float, algorithm: str) -> None:
    plain = ESTIMATORS[algorithm](group(3, rewards).trajectories, True)
    shifted = ESTIMATORS[algorithm](group(3, [r + shift for r in rewards]).trajectories, True)
    numpy.testing.assert_allclose([t[0] for t in plain], [t[0] for t in shifted], rtol=1e-6, atol=1e-6)


def test_the_sum_of_all_turns_rewards_counts() -> None:
    early, late = trajectory(1, turns=3, reward=0.0), trajectory(2, turns=3, reward=1.0)
    early.rewards[0] = 1.0
    assert zero_variance([early, late])
    first, second, third = grpo([early, late, trajectory(3, turns=1, reward=0.0)], False)
    assert first == second == pytest.approx([1 / 3] * 3)
    assert third == pytest.approx([-2 / 3])


def test_equal_rewards_are_zero_variance_and_give_exactly_nothing() -> None:
    for rewards in ([1.0, 1.0, 1.0], [0.1 + 0.2, 0.3], [0.0]):
        members = group(1, rewards).trajectories
        assert zero_variance(members)
        assert all(a == 0.0 for turns in grpo(members, True) for a in turns)
    assert not zero_variance(group(1, [0.0, 1e-3]).trajectories)


def test_rloo_alone_says_what_to_do() -> None:
    alone: list[Trajectory] = [trajectory(1)]
    with pytest.raises(ConfigError, match="at least 2 trajectories, got 1: set group_size"):
        rloo(alone, True)
