"""Runs in which each role of a team has adapters of its own: checkpoints, resuming, evaluation, export, errors."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from runs_for_tests import comparable_metrics, comparable_trajectories, finish, quiet, train_process
from safetensors.torch import load_file

from agentgym_rl.commands.eval_team import Opponent, find_team
from agentgym_rl.commands.evaluate import Request, evaluate
from agentgym_rl.commands.export import export_merged
from agentgym_rl.commands.load_agent import AgentOptions, find_agent
from agentgym_rl.commands.train import train
from agentgym_rl.config import Config, EnvironmentConfig, load_config
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.log import read_metrics, read_trajectories
from agentgym_rl.training.checkpoint import list_checkpoints

TINY = Path(__file__).parents[2] / "recipes" / "nim" / "tiny.toml"
ROLES = "team.roles={first={policy='adapters'}, second={policy='adapters', eval_policy='random'}}"
SHORT = ["threads=1", "eval.episodes=1", "warm_start.sft.epochs=1", "warm_start.episodes=8"]
OWN = [*SHORT, ROLES, "team.rotate=false", "checkpoint.every=2"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model that knows the words of Nim."""
    root = tmp_path_factory.mktemp("base") / "run"
    config = load_config(
        TINY, ["threads=1", "eval.episodes=1", "rl.steps=1", "rl.groups_per_step=1", "rl.group_size=2"]
    )
    asyncio.run(train(config, root, console=quiet()))
    return root / "checkpoints" / "step_000000" / "model"


def model_of(base: Path) -> str:
    return f"model={{path='{base}', lora={{rank=4, alpha=8}}}}"


def config_of(base: Path, *overrides: str) -> Config:
    """Return the tiny recipe with adapters per role, and a rate at which they soon differ."""
    rate = "rl.optimizer={lr = 3e-2}"
    return load_config(TINY, [model_of(base), *OWN, rate, "rl.steps=4", "rl.groups_per_step=4", *overrides])


def adapters_of(run: Path, role: str = "", step: int = -1) -> dict[str, torch.Tensor]:
    return load_file(list_checkpoints(run / "checkpoints")[step] / "model" / role / "adapter_model.safetensors")


def assert_equal(run: Path, expected: Path) -> None:
    assert comparable_metrics(run) == comparable_metrics(expected)
    assert comparable_trajectories(run) == comparable_trajectories(expected)
    for role in ("first", "second"):
        weights = adapters_of(run, role)
        assert all(torch.equal(weights[name], value) for name, value in adapters_of(expected, role).items())


async def test_roles_train_their_own_adapters_and_resume_exactly(base: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    await train(config_of(base), whole, console=quiet())
    await train(config_of(base, "rl.steps=2", "checkpoint.background=true"), parts, console=quiet())
    await train(config_of(base), parts, console=quiet(), resume=True)
    (parts / "trajectories" / "eval_000002.jsonl").unlink()  # the end of the first part
    assert_equal(parts, whole)
    metrics = read_metrics(whole / "metrics.jsonl")
    assert all(row["mismatch/abs"] < 1e-4 for row in metrics), "each role is trained on what its adapters sampled"
    assert metrics[-1]["roles/first_entropy"] != metrics[-1]["roles/second_entropy"]
    first, second, start = (adapters_of(whole, role) for role in ("first", "second", ""))
    assert any(not torch.equal(first[name], start[name]) for name in start)
    assert any(not torch.equal(second[name], start[name]) for name in start)
    assert any(not torch.allclose(first[name], second[name], atol=1e-3) for name in start)
    assert all(torch.equal(start[name], value) for name, value in adapters_of(whole, step=0).items())
    episodes = read_trajectories(whole / "trajectories" / "step_000004.jsonl")
    assert {(t.role, t.player) for t in episodes} == {("first", "learner"), ("second", "learner")}

    model = list_checkpoints(whole / "checkpoints")[-1] / "model"
    for role in ("first", "second"):
        assert find_agent(AgentOptions(str(whole), role)).weights == str(model / role)
    with pytest.raises(ConfigError, match="adapters for the roles first, second, and none for a single agent"):
        find_agent(AgentOptions(str(whole)))
    row = await evaluate(
        Request(
            AgentOptions(str(whole)), env="nim", role="second", opponent=str(whole), limit=2, out=tmp_path / "eval"
        ),
        quiet(),
    )
    assert row["config"]["agent"]["weights"] == find_agent(AgentOptions(str(whole), "second")).identity["weights"]
    assert export_merged(whole, None, tmp_path / "merged", "float32", "first").startswith("merged")


async def test_an_opponent_plays_every_role_with_its_own_adapters(base: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    await train(config_of(base, "rl.steps=1", "checkpoint.every=1"), run, console=quiet())
    team = await find_team(EnvironmentConfig(name="nim"), "second", str(run))
    assert team is not None
    opponent = Opponent(team, AgentOptions("oracle"))
    opponent.load(2, 512)
    assert [Path(weights).name for weights in opponent._agents] == ["first"]
    await opponent.close()
    # As a frozen player of another run it plays with the adapters of its role.
    frozen = [f"team.roles={{first={{policy='learner'}}, second={{policy='checkpoint:{run}'}}}}", "rl.steps=1"]
    await train(config_of(base, *frozen), tmp_path / "other", console=quiet())
    episodes = read_trajectories(tmp_path / "other" / "trajectories" / "step_000001.jsonl")
    assert {(t.role, t.player) for t in episodes} == {("first", "learner"), ("second", f"checkpoint:{run}")}


@pytest.mark.long
def test_a_killed_run_with_adapters_per_role_equals_an_uninterrupted_one(base: Path, tmp_path: Path) -> None:
    nim = ["environments=[{name='nim', subsets=['one']}]", ROLES, model_of(base)]
    finish(tmp_path / "whole", *nim)
    killed = tmp_path / "killed"
    train_process(killed, *nim).kill_when(lambda: (killed / "trajectories" / "step_000005.jsonl").exists())
    finish(killed, *nim, "--resume")
    assert_equal(killed, tmp_path / "whole")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model={path='here'}"], r"team.roles.first.policy = 'adapters' needs \[model.lora\]"),
        (["team.rotate=true"], "trains adapters for one role, remove rotate"),
        (["rl.overlap=1"], "remove rl.overlap"),
        (["engine.kind=vllm"], "remove engine.kind = 'vllm'"),
        (["team.roles.second.policy=past:2"], "past:N is the past of a role with"),
        (
            ["team.roles.first={policy='oracle', eval_policy='adapters'}"],
            "needs policy = 'adapters'",
        ),
        (["scale={}"], r"remove \[scale\]"),
    ],
)
def test_what_adapters_per_role_cannot_be_combined_with_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(TINY, [model_of(Path("here")), *OWN, *overrides])
