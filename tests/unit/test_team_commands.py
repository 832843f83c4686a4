"""Commands with games of several roles: play, eval, and the viewer's replay of one role."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentgym_rl.agent.policy import RandomPolicy
from agentgym_rl.agent.team import Player, TeamCollector
from agentgym_rl.cli import app
from agentgym_rl.commands.view import ViewerEnvironments
from agentgym_rl.environment.envs.keydoor_duo import KeyDoorDuo
from agentgym_rl.environment.envs.nim import Nim
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import LEARNER, Limits, Task
from agentgym_rl.viewer.replays import Picture, Replays


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None:
        raise result.exception
    return result.output


def test_play_takes_a_role_and_an_opponent() -> None:
    output = " ".join(
        invoke("play", "nim", "--item", "3", "--oracle", "--role", "second", "--opponent", "random").split()
    )
    assert "Your opponent:" in output
    assert "> take" in output
    assert "success done" in output
    with pytest.raises(ConfigError, match="--role 'third': nim has first, second"):
        invoke("play", "nim", "--oracle", "--role", "third")
    with pytest.raises(ConfigError, match="keydoor has a single agent"):
        invoke("play", "keydoor", "--oracle", "--role", "first")
    with pytest.raises(ConfigError, match="--opponent 'me' must be oracle or random"):
        invoke("play", "nim", "--oracle", "--opponent", "me")


def test_eval_plays_one_role_against_an_opponent(tmp_path: Path) -> None:
    options = ["--env", "nim", "--subset", "one", "--split", "train", "--out", str(tmp_path / "eval")]
    invoke("eval", "--agent", "oracle", *options, "--role", "second", "--opponent", "random", "--samples", "4")
    saved = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert (saved["config"]["role"], saved["config"]["opponent"]) == ("second", "random")
    assert saved["results"][0]["tasks"]["nim/one"]["success"]["value"] > 0.7, "random play rarely wins"
    (file,) = (tmp_path / "eval" / "trajectories").glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {(row["role"], row["player"]) for row in rows} == {("second", LEARNER)}
    with pytest.raises(ConfigError, match="opponent"):
        invoke("eval", "--agent", "oracle", *options, "--role", "second", "--opponent", "oracle", "--samples", "4")
    with pytest.raises(ConfigError, match="--role 'third': the roles are first, second"):
        invoke("eval", "--agent", "oracle", "--env", "nim", "--role", "third")
    with pytest.raises(ConfigError, match="for one environment with several roles"):
        invoke("eval", "--agent", "oracle", "--env", "keydoor", "--role", "first")


def test_eval_refuses_an_opponent_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--opponent 'me' is neither oracle, random"):
        invoke("eval", "--agent", "oracle", "--env", "nim", "--out", str(tmp_path / "eval"), "--opponent", "me")


@pytest.mark.parametrize("env", [Nim, KeyDoorDuo])
async def test_the_viewer_replays_the_episode_of_each_role(env: type[Nim] | type[KeyDoorDuo]) -> None:
    pool, replays = LocalPool({env.name: env}), Replays(ViewerEnvironments())
    players = {role: Player(LEARNER, RandomPolicy, 2) for role in env.roles}
    collector = TeamCollector(lambda seed, index: players, pool, RandomPolicy, 1, 4)
    groups = await collector([Task(env.name, 3)], Limits(6, 16, 4000), seed=2)
    await pool.close()
    try:
        for trajectory in (t for group in groups for t in group.trajectories):
            episode = json.loads(trajectory.to_json())
            frames = [
                await replays.frame(episode, ("act", None, None, "failure"), turn)
                for turn in range(trajectory.num_turns + 1)
            ]
            assert all(isinstance(frame, Picture) for frame in frames), frames
    finally:
        await replays.close()
