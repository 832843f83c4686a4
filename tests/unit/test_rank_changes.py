"""Ranks of episodes before and after they are scored again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from training_for_tests import trajectory

from agentgym_rl.commands.rescore import stored_groups
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


def test_groups_of_one_task_in_a_step_are_not_merged(tmp_path: Path) -> None:
    """A team has a group for each role; an environment with few items has several groups of one."""
    names = {"train-7-0-white": "white", "train-7-0-black": "black", "train-7-1-white": "white"}
    episodes = [trajectory(1, turns=1) for _ in range(6)]
    for number, (episode, (name, role)) in enumerate(zip(episodes, [*names.items()] * 2, strict=True)):
        episode.id, episode.role, episode.player = f"{name}-{number // 3}-0", role, "learner"
    assert len({episode.task for episode in episodes}) == 1
    (tmp_path / "trajectories").mkdir()
    lines = "".join(f"{episode.to_json()}\n" for episode in episodes)
    opponent = replace(episodes[0], id="train-7-1-black-0-0", role="black", player="past@0")  # it is not trained
    lines += f"{opponent.to_json()}\n"
    (tmp_path / "trajectories" / "step_000003.jsonl").write_text(lines)
    groups = stored_groups(tmp_path, None)
    assert [(step, [t.id for t in group.trajectories]) for step, group in groups] == [
        (3, [f"{name}-0-0", f"{name}-1-0"]) for name in names
    ]
