"""The league of a learner's past: snapshots, ratings, and who is drawn from them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from agentgym_rl.agent.policy import OraclePolicy, Policy, PolicyFactory
from agentgym_rl.agent.team import play_team
from agentgym_rl.config import AgentConfig, ModelConfig, TeamConfig
from agentgym_rl.environment.envs.nim import Nim
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.collectors import session_wrapper
from agentgym_rl.run.teams import START_RATING, League, Team, demonstrating_cast, games_of, team_problem
from agentgym_rl.types import LEARNER, EnvSession, Group, Limits, StopReason, Task, Trajectory


def league(root: Path, size: int = 2, every: int = 1) -> League:
    return League(root, size, every, lambda folder: (folder / "model").touch())  # type: ignore[func-returns-value]


def game(
    number: int,
    reward: float,
    opponent: str = "past@0",
    stop: StopReason = StopReason.DONE,
    roles: tuple[str, str] = ("first", "second"),
) -> list[Group]:
    """Return the two groups of one game in which the learner earns `reward` and its opponent the opposite."""
    task, groups = Task("nim", 1), []
    for role, player, sign in zip(roles, (LEARNER, opponent), (1, -1), strict=True):
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


def test_names_of_roles_may_have_hyphens() -> None:
    groups = game(2, 1.0, roles=("player-one", "guest")) + game(3, 1.0, roles=("player-one", "player-two"))
    assert [len(others) for _, others in games_of(groups)] == [1, 1]


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


def test_games_against_a_pruned_snapshot_are_rated_with_its_rating(tmp_path: Path) -> None:
    """With rl.overlap = 1 a step's games are rated after the snapshot they were played against was pruned."""
    ratings = league(tmp_path, size=1)
    ratings.restart()
    ratings.ratings[LEARNER] = 1200.0
    ratings.add(1)
    ratings.add(2)
    ratings.prune(oldest_checkpoint=2)
    assert ratings.steps == [2]
    ratings.observe(game(0, 0.0, opponent="past@1"))
    assert ratings.ratings[LEARNER] == 1200.0, "a draw between equals"
    with pytest.raises(KeyError):
        ratings.observe(game(1, 0.0, opponent="past@7"))


def test_a_league_without_its_snapshots_cannot_be_restored(tmp_path: Path) -> None:
    snapshots = league(tmp_path / "league", size=2, every=2)
    snapshots.restart()
    for step in range(1, 7):
        snapshots.add(step)
    ratings = dict(snapshots.ratings)
    shutil.rmtree(snapshots.folder(2))
    snapshots.restore(6, ratings)  # 4 and 6 are enough
    shutil.rmtree(snapshots.folder(4))
    with pytest.raises(ConfigError, match=r"must hold the snapshots .* missing: step_000004$"):
        snapshots.restore(6, ratings)


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


async def test_an_api_gets_the_rules_that_the_recipe_leaves_out(tmp_path: Path) -> None:
    config = TeamConfig.model_validate(
        {"roles": {"first": {"policy": "learner"}, "second": {"policy": "openai:m@http://127.0.0.1:9/v1"}}}
    )
    agent, seen = AgentConfig(instruction=""), {}
    team = Team(config, agent, ModelConfig(path="unused"), 512, tmp_path, lambda folder: None)

    def keep(role: str) -> PolicyFactory:
        def make(session: EnvSession, seed: int) -> Policy:
            seen[role] = session.instruction
            return OraclePolicy(session)

        return make

    chosen = team.cast(keep("first"), 1.0, {}, evaluating=False)(0, 0)
    players = {role: replace(player, make_policy=keep(role)) for role, player in chosen.items()}
    pool = LocalPool({"nim": Nim})
    session = await pool.open("nim")
    ids = {role: role for role in players}
    wrap = session_wrapper(agent)
    await play_team(Task("nim", 0), session, players, Limits(8, 8, 512), ids=ids, seed=1, wrap=wrap)
    await session.close()
    await pool.close()
    await team.close()
    assert seen == {"first": "", "second": Nim.roles["second"]}
