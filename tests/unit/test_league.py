"""The league of a learner's past: snapshots, ratings, and who is drawn from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentgym_rl.config import TeamConfig
from agentgym_rl.run.teams import START_RATING, League, demonstrating_cast, games_of, team_problem
from agentgym_rl.types import LEARNER, Group, StopReason, Task, Trajectory


def league(root: Path, size: int = 2, every: int = 1) -> League:
    return League(root, size, every, lambda folder: (folder / "model").touch())  # type: ignore[func-returns-value]


def game(number: int, reward: float, opponent: str = "past@0", stop: StopReason = StopReason.DONE) -> list[Group]:
    """Return the two groups of one game in which the learner earns `reward` and its opponent the opposite."""
    task, groups = Task("nim", 1), []
    for role, player, sign in (("first", LEARNER, 1), ("second", opponent, -1)):
        trajectory = Trajectory(f"7-0-{role}-{number}-0", task, rewards=[sign * reward], stop=stop)
        trajectory.role, trajectory.player = role, player
        groups.append(Group(task, [trajectory]))
    return groups


def test_a_win_raises_the_rating_and_a_snapshot_keeps_it(tmp_path: Path) -> None:
    ratings = league(tmp_path)
    ratings.restart()
    ratings.observe(game(0, 1.0))
    won = ratings.ratings[LEARNER]
    assert won == pytest.approx(START_RATING + 2.0), "half of the points of a game between equals"
    ratings.add(1)
    ratings.observe(game(1, -1.0))
    assert ratings.ratings[LEARNER] == pytest.approx(START_RATING, abs=0.1)
    assert ratings.ratings["past@1"] == won
    ratings.observe(game(2, 0.0))
    assert ratings.ratings[LEARNER] == pytest.approx(START_RATING, abs=0.1), "a draw between equals"
    assert ratings.metrics() == {"elo/learner": ratings.ratings[LEARNER]}


def test_a_better_player_gains_400_points_at_odds_of_ten_to_one(tmp_path: Path) -> None:
    ratings = league(tmp_path)
    ratings.restart()
    for number in range(4400):
        ratings.observe(game(number, -1.0 if number % 11 == 0 else 1.0))
    assert ratings.ratings[LEARNER] == pytest.approx(START_RATING + 400, abs=30)


def test_failed_games_and_games_of_the_learner_alone_do_not_count(tmp_path: Path) -> None:
    ratings = league(tmp_path)
    ratings.restart()
    ratings.observe([*game(0, 1.0, stop=StopReason.ERROR), *game(1, 1.0, opponent=LEARNER)])
    assert ratings.ratings[LEARNER] == START_RATING
    assert [len(others) for _, others in games_of(game(2, 1.0))] == [1]


def test_snapshots_are_taken_drawn_pruned_and_restored(tmp_path: Path) -> None:
    snapshots = league(tmp_path / "league", size=2, every=2)
    snapshots.restart()
    for step in range(1, 9):
        snapshots.add(step)
    assert snapshots.steps == [0, 2, 4, 6, 8]
    assert {snapshots.choose(2, seed) for seed in range(40)} == {6, 8}
    snapshots.prune(oldest_checkpoint=5)
    assert snapshots.steps == [2, 4, 6, 8], "a run resumed after step 5 draws from 2 and 4"
    snapshots.restore(5, {LEARNER: 1010.0})
    assert snapshots.steps == [2, 4]
    assert snapshots.ratings == {LEARNER: 1010.0}


def test_without_past_players_there_are_no_snapshots_and_no_rating(tmp_path: Path) -> None:
    empty = league(tmp_path / "league", size=0)
    empty.restart()
    assert empty.metrics() == {}
    assert not (tmp_path / "league").exists()


def test_roles_of_recipe_and_environment_must_agree() -> None:
    team = TeamConfig.model_validate({"roles": {"first": {}, "second": {"max_turns": 2}}})
    assert team_problem(team, "nim", {"first": "", "second": ""}) == ""
    assert "has the roles none" in team_problem(team, "keydoor", {})
    assert "[team.roles.second]" in team_problem(None, "nim", {"first": "", "second": ""})
    cast = demonstrating_cast(team, "random")
    assert cast is not None
    assert [player.max_turns for player in cast(0, 0).values()] == [None, 2]
