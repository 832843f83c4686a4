"""Ranks of episodes before and after they are scored again."""

from __future__ import annotations

import pytest
from training_for_tests import trajectory

from agentgym_rl.rewards.rank_changes import compare, ranks, summary
from agentgym_rl.types import Verdict


def test_equal_scores_share_their_places() -> None:
    assert ranks([0.5, 1.0, 0.5, 0.0]) == [2.5, 1.0, 2.5, 4.0]
    assert ranks([]) == []


def test_a_summary_counts_pairs_that_changed_their_order() -> None:
    episodes = [trajectory(i, turns=1, reward=reward) for i, reward in enumerate([0.0, 1.0, 1.0])]
    for t, score in zip(episodes, [2.0, 0.0, 1.0], strict=True):
        t.verdicts = [Verdict("environment", 1.0, t.rewards), Verdict("judge", 1.0, [score])]
    found = summary([compare(1, episodes, [t.reward for t in episodes])])
    # Before: 1 and 2 beat 0. After (2, 1, 2): 0 beats 1 and equals 2.
    assert (found["pairs"], found["reversed_pairs"], found["tied_pairs"]) == (2, 0.5, 0.5)
    assert found["best_changed"] is None, "two were the best"
    assert found["mean_rank_change"] == pytest.approx((1.5 + 1.5 + 0.0) / 3)


def test_another_best_episode_is_counted() -> None:
    episodes = [trajectory(i, turns=1, reward=reward) for i, reward in enumerate([0.0, 1.0])]
    for t in episodes:
        t.verdicts = [Verdict("judge", 1.0, [1.0 - t.reward])]
    found = summary([compare(1, episodes, [t.reward for t in episodes]), compare(1, episodes[:1], [0.0])])
    assert (found["best_changed"], found["reversed_pairs"], found["groups"]) == (1.0, 1.0, 2)
