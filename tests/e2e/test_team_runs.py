"""Runs with several agents: a league of past selves, a team that talks, resuming, and what is refused."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs_for_tests import (
    assert_same_run,
    finish,
    quiet,
    train_process,
)
from servers_for_tests import server_in_thread

from agentgym_rl import cli
from agentgym_rl.agent.engines import openai
from agentgym_rl.agent.policy import Policy, ScriptedPolicy
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.commands.evaluate import evaluate, request_of
from agentgym_rl.commands.train import train
from agentgym_rl.config import Config, ScaleConfig, load_config
from agentgym_rl.environment.envs.nim import Nim
from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.run.backend import LocalBackend
from agentgym_rl.run.backend_ray import Job, Player
from agentgym_rl.run.environments_pool import EnvironmentsPool
from agentgym_rl.run.load_model import load_from
from agentgym_rl.run.log import read_metrics, read_trajectories
from agentgym_rl.run.teams import team_of_host
from agentgym_rl.types import EnvSession, Group, Limits, Task

ROOT = Path(__file__).parents[2]
SHORT = ["threads=1", "rl.steps=4", "eval.episodes=2", "warm_start.sft.epochs=1", "checkpoint.every=2"]


def config_of(name: str, *overrides: str) -> Config:
    return load_config(ROOT / "recipes" / name, [*SHORT, *overrides])


def players_of(run: Path, step: int) -> set[tuple[str, str]]:
    episodes = read_trajectories(run / "trajectories" / f"step_{step:06d}.jsonl")
    return {(t.role, t.player) for t in episodes}


async def test_a_run_against_its_past_that_is_resumed_equals_one_in_one_go(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    await train(config_of("nim/tiny.toml"), whole, console=quiet())
    await train(config_of("nim/tiny.toml", "rl.steps=2"), parts, console=quiet())
    await train(config_of("nim/tiny.toml"), parts, console=quiet(), resume=True)
    (parts / "trajectories" / "eval_000002.jsonl").unlink()  # the end of the first part
    assert_same_run(parts, whole)
    metrics = read_metrics(whole / "metrics.jsonl")
    assert all(row["mismatch/abs"] < 1e-4 for row in metrics), "each role is trained on exactly what it saw"
    assert len({row["elo/learner"] for row in metrics}) == 4, "every step has games against the past"
    before = json.loads((whole / "summary.json").read_text())["before"]["success"]
    assert [row["heldout/success"] for row in metrics] == [before] * 4, "the first part's end is not in eval.every"
    assert {player for _, player in players_of(whole, 1)} == {"learner", "past@0"}
    later = {player for step in (2, 3, 4) for _, player in players_of(whole, step)}
    assert later <= {"learner", "past@0", "past@1", "past@2", "past@3"}
    assert len(later) > 2
    assert {role for role, player in players_of(whole, 4) if player == "learner"} == {"first", "second"}, "they rotate"
    learned = (whole / "trajectories" / "learned_000004.jsonl").read_text()
    for trajectory in read_trajectories(whole / "trajectories" / "step_000004.jsonl"):
        if trajectory.player != "learner":
            assert f'"{trajectory.id}"' not in learned


async def test_a_host_of_a_cluster_plays_the_games_of_one_process(tmp_path: Path) -> None:
    """Its team draws from the snapshots that the driver names, not from those it finds."""
    config = config_of("nim/tiny.toml", "rl.steps=1")
    await train(config, tmp_path / "run", console=quiet())
    league, folder = tmp_path / "run" / "league", tmp_path / "run" / "checkpoints" / "step_000001" / "model"
    model, tokenizer = load_from(folder, config.model)
    pool = EnvironmentsPool(config.environments, config.agent)
    backend = LocalBackend(config, pool, model, tokenizer, None, league_dir=league)
    assert backend.team is not None
    make_team = partial(team_of_host, config.model_copy(update={"scale": ScaleConfig()}), league)
    renderer = Renderer(tokenizer, config.model.chat_template)
    engine = SimpleNamespace(at_least=lambda version: backend._engine)
    host = Player(config.environments, config.agent, lambda: renderer, {}, True, make_team, engine)
    tasks, limits = [Task("nim", item) for item in (3, 4, 5)], Limits(max_turns=8, max_new_tokens=8, max_context=512)
    for prefix, size in (("train-", None), ("eval-", 1)):
        expected = await backend.collector(prefix, size, 1.0)(tasks, limits, 7)
        options: dict[str, Any] = {"measured": size is not None, "snapshots": backend.team.snapshots}
        group_size = config.group_sizes(size)["nim"]
        jobs = [Job(task, limits, 7, i, prefix, group_size, 1.0, 0, **options) for i, task in enumerate(tasks)]
        played = await asyncio.gather(*(host.play(job) for job in jobs))
        assert [comparable(group) for groups in played for group in groups] == [comparable(g) for g in expected]
    assert {t.player for group in expected for t in group.trajectories} == {"learner"}
    only_first = Job(tasks[0], limits, 7, 0, "train-", 2, 1.0, 0, snapshots=(0,))
    players = {t.player for group in await host.play(only_first) for t in group.trajectories}
    assert players == {"learner", "past@0"}
    await host.close()
    await backend.close()
    await pool.close()


def comparable(group: Group) -> list[tuple[Any, ...]]:
    return [(t.id, t.role, t.player, t.token_ids, t.rewards) for t in group.trajectories]


@pytest.mark.long
def test_a_run_against_its_past_that_is_killed_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    roles = "team.roles={first={policy='learner'}, second={policy='past:2', eval_policy='random'}}"
    nim = ["environments=[{name='nim', subsets=['one']}]", roles, "team.rotate=true", "team.snapshot_every=1"]
    finish(tmp_path / "whole", *nim)
    killed = tmp_path / "killed"
    train_process(killed, *nim).kill_when(lambda: (killed / "league" / "step_000005").exists())
    finish(killed, *nim, "--resume")
    assert_same_run(killed, tmp_path / "whole")


@pytest.mark.long
async def test_the_budget_of_a_judge_is_compared_with_what_all_trained_roles_need(tmp_path: Path) -> None:
    judge = "judge={url='http://127.0.0.1:1/v1', model='none', retries=0, max_calls=20}"
    config = config_of("keydoor_duo/tiny.toml", judge, "rewards=[{kind='rubric', rubric='Be short.'}]", "rl.steps=2")
    with pytest.raises(EngineError, match="none of 16 episodes could be judged"):
        await train(config, tmp_path / "run", console=quiet())
    (event, *_) = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    assert "max_calls = 20 is less than the 32 answers that all steps are expected to need" in event["message"]


async def test_snapshots_that_no_checkpoint_needs_are_deleted(tmp_path: Path) -> None:
    overrides = ["rl.steps=6", "checkpoint.keep=1", "rl.group_size=2"]
    await train(config_of("nim/tiny.toml", *overrides), tmp_path / "run", console=quiet())
    kept = sorted(path.name for path in (tmp_path / "run" / "league").iterdir())
    assert kept == ["step_000005", "step_000006"]


class Silent:
    """A guide that says nothing."""

    def __new__(cls, session: EnvSession, seed: int) -> Policy:  # type: ignore[misc]
        return ScriptedPolicy([""] * 50, session.instruction)


@pytest.mark.long
async def test_a_scripted_player_and_a_checkpoint_play_roles(tmp_path: Path) -> None:
    guide = f"team.roles.guide.policy=scripted:{__name__}:Silent"
    await train(config_of("keydoor_duo/tiny.toml", "rl.steps=1", guide), tmp_path / "first", console=quiet())
    assert players_of(tmp_path / "first", 1) == {("guide", f"scripted:{__name__}:Silent"), ("walker", "learner")}
    assert "elo/learner" not in read_metrics(tmp_path / "first" / "metrics.jsonl")[0]
    model = f"checkpoint:{tmp_path / 'first'}"
    config = config_of("keydoor_duo/tiny.toml", "rl.steps=1", f"team.roles.guide.policy={model}")
    await train(config, tmp_path / "second", console=quiet())
    assert players_of(tmp_path / "second", 1) == {("guide", model), ("walker", "learner")}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["team.roles.first.policy=oracle"], "at least one role must have policy = 'learner' or 'adapters'"),
        (["team.roles.second.policy=past"], "must be learner, adapters, oracle, random, past:N"),
        (["team.measure=third"], "name one of first, second"),
        (["rl.max_staleness=1"], "remove rl.max_staleness"),
        (["rl.tree={}"], r"remove \[rl.tree\]"),
        (["agent.style=tool"], "remove agent.style = 'tool'"),
    ],
)
def test_what_a_team_cannot_be_combined_with_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(ROOT / "recipes" / "nim" / "tiny.toml", overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["environments.0.name=keydoor"], r"\[team.roles\] has first, second, keydoor has the roles none"),
        (["team.roles.second.policy=checkpoint:nowhere/at/all"], "team.roles: checkpoint = 'nowhere/at/all': no"),
        (["team.roles.second.policy=scripted:no_such_module:Player"], "there is no module 'no_such_module'"),
    ],
)
async def test_roles_and_players_are_checked_before_the_run(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        await train(config_of("nim/tiny.toml", *overrides), tmp_path / "run", console=quiet())
    assert not (tmp_path / "run" / "trajectories").exists()


async def test_a_run_ends_if_the_api_of_a_role_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this it goes on with the games that the learner loses before the API's first move."""
    monkeypatch.setattr(openai, "FIRST_CONNECT_RETRIES", 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]  # nobody listens there once it is closed
    first = f"{{policy='openai:m@http://127.0.0.1:{port}/v1', eval_policy='random'}}"
    team = f"team={{roles={{first={first}, second={{policy='learner'}}}}}}"
    with pytest.raises(EngineError, match=r"a player never answered: .* check the address \(team.roles: openai\)"):
        await train(config_of("nim/tiny.toml", team), tmp_path / "run", console=quiet())


async def test_a_run_ends_if_the_api_of_a_role_stops_answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes of its step that failed are recorded. Those that failed beside answers do not end the run."""
    calls, metrics = 0, tmp_path / "run" / "metrics.jsonl"

    async def answer(client: openai.ChatClient, body: dict[str, Any], on_request: object) -> openai.Answer:
        nonlocal calls
        calls += 1
        if calls == 5 or (metrics.exists() and len(read_metrics(metrics)) >= 2):
            raise EngineError("the server is gone")
        return openai.Answer("take 1 from red", cut=False, tokens=openai.Tokens())

    monkeypatch.setattr(openai.ChatClient, "_with_retries", answer)
    first = "{policy='openai:m@http://127.0.0.1:9/v1', eval_policy='random'}"
    team = f"team={{roles={{first={first}, second={{policy='learner'}}}}}}"
    with pytest.raises(EngineError, match="a player answers no more: the server is gone"):
        await train(config_of("nim/tiny.toml", team), tmp_path / "run", console=quiet())
    assert [row["step"] for row in read_metrics(metrics)] == [1, 2]
    assert calls > 5


async def test_an_environment_with_roles_needs_a_team(tmp_path: Path) -> None:
    raw: dict[str, Any] = config_of("nim/tiny.toml").model_dump(exclude={"team"})
    with pytest.raises(ConfigError, match="nim has several roles, say who plays each"):
        await train(Config.model_validate(raw), tmp_path / "run", console=quiet())


async def test_roles_of_a_server_are_checked_before_the_run(tmp_path: Path) -> None:
    with server_in_thread({"nim": Nim}) as server:
        served = {"name": "nim", "url": f"{server.url}/nim"}
        raw: dict[str, Any] = config_of("nim/tiny.toml").model_dump() | {"environments": [served]}
        for team, message in (
            (None, "nim has several roles, say who plays each"),
            (
                {"roles": {"first": {}, "third": {}}},
                r"has first, third, nim has the roles first, second",
            ),
        ):
            with pytest.raises(ConfigError, match=message):
                await train(Config.model_validate(raw | {"team": team}), tmp_path / "run", console=quiet())
            assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_an_agent_learns_nim_from_games_against_its_past(tmp_path: Path) -> None:
    overrides = ["threads=1", "eval.every=0", "eval.episodes=2", "checkpoint.every=100"]
    config = load_config(ROOT / "recipes" / "nim" / "league.toml", overrides)
    await train(config, tmp_path / "run", console=quiet())
    success = {}
    for step in (0, config.rl.steps):
        options: dict[str, Any] = {"env": "nim", "subset": ["one"], "split": "train", "samples": 30, "turns": "8"}
        given = {"role": "first", "opponent": "random", "out": tmp_path / f"eval-{step}"} | options
        defaults = {n: p.default for n, p in inspect.signature(cli.evaluate).parameters.items()}
        request = request_of(defaults | given | {"agent": f"{tmp_path / 'run'}@{step}"})
        success[step] = (await evaluate(request, quiet()))["results"][-1]["tasks"]["nim/one"]["success"]["value"]
    assert success[config.rl.steps] > success[0] + 0.15
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["elo/learner"] > 1050


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_two_agents_learn_to_talk(tmp_path: Path) -> None:
    config = load_config(ROOT / "recipes" / "keydoor_duo" / "cpu.toml", ["threads=1"])
    summary = await train(config, tmp_path / "run", console=quiet())
    assert summary["after"]["success"] > summary["before"]["success"] + 0.3
