"""Runs with trees of rollouts: they learn, and resume exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from envs_for_tests import Counting
from runs_for_tests import (
    assert_same_run,
    counting_config,
    finish,
    quiet,
    train_counting,
    train_process,
)

from agentgym_rl.commands.train import train
from agentgym_rl.config import load_config
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.log import read_metrics, read_trajectories

RECIPES = Path(__file__).parents[2] / "recipes" / "evidence"
TREE = {"roots": 2, "branches": 2, "depth": 2, "branch": "anchor"}


@pytest.mark.long
async def test_a_run_of_trees_learns(tmp_path: Path) -> None:
    fixed = {"kind": "fixed", "turns": [6]}
    settings = {"rl__steps": 10, "rl__groups_per_step": 8, "rl__optimizer": {"lr": 3e-3}, "horizon": fixed}
    await train_counting(counting_config(rl__tree=TREE, checkpoint={"every": 100}, **settings), tmp_path / "run")
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 0.1
    assert all(row["mismatch/abs"] < 1e-4 for row in metrics), "branches are trained after exactly what they followed"
    assert all(row["tree/shared_rate"] > 0.1 for row in metrics)
    episodes = list(read_trajectories(tmp_path / "run" / "trajectories" / "step_000001.jsonl"))
    sampled = sum(len(m.token_ids) for t in episodes for m in t.messages if m.logprobs is not None)
    assert metrics[0]["tokens/total"] == metrics[0]["tokens/sampled"] == sampled
    assert 60 < len(episodes) <= 8 * 2 * (1 + 2 * 2), "a tree of short paths has few places to branch"


@pytest.mark.long
async def test_a_run_that_keeps_the_widest_groups_learns(tmp_path: Path) -> None:
    """RAGEN's StarPO-S: a quarter of the groups, no KL term, a wider clip above 1 than below."""
    fixed = {"kind": "fixed", "turns": [6]}
    settings = {"rl__steps": 12, "rl__groups_per_step": 16, "rl__optimizer": {"lr": 3e-3}, "horizon": fixed}
    settings |= {"rl__keep_groups": 0.25, "rl__clip_high": 0.28}
    await train_counting(counting_config(checkpoint={"every": 100}, **settings), tmp_path / "run")
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 0.1
    assert all(row["samples"] <= 4 * 4 for row in metrics), "four groups of four are learned from"


@pytest.mark.long
async def test_a_run_of_trees_that_is_resumed_equals_one_in_one_go(tmp_path: Path) -> None:
    settings = {"rl__tree": TREE, "rl__keep_groups": 0.25, "rl__zero_variance": "keep"}
    await train_counting(counting_config(**settings, rl__steps=2), tmp_path / "whole")
    await train_counting(counting_config(**settings, rl__steps=1), tmp_path / "parts")
    await train_counting(counting_config(**settings, rl__steps=2), tmp_path / "parts", resume=True)
    trajectories = tmp_path / "parts" / "trajectories"
    (trajectories / "eval_000001.jsonl").unlink()  # the end of the first part
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    for step in (1, 2):
        played = list(read_trajectories(trajectories / f"step_{step:06d}.jsonl"))
        learned = (trajectories / f"learned_{step:06d}.jsonl").read_text().splitlines()
        assert len({t.task for t in played}) == 4
        tasks = {t.task for t in played if any(f'"{t.id}"' in line for line in learned)}
        assert len(tasks) == 1, "one of four groups is kept"


@pytest.mark.long
def test_a_run_of_trees_that_is_killed_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    tree = "rl.tree={roots=2, branches=1, depth=2, branch='entropy'}"
    finish(tmp_path / "whole", tree)
    killed = tmp_path / "killed"
    train_process(killed, tree).kill_when(lambda: (killed / "trajectories" / "step_000004.jsonl").exists())
    finish(killed, tree, "--resume")
    assert_same_run(killed, tmp_path / "whole")


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_trees_learn_keydoor(tmp_path: Path) -> None:
    """Repeat a run of the study `trees`, from the starting model on."""
    start = load_config(RECIPES / "keydoor-base.toml", ["threads=1"])
    await train(start, tmp_path / "start", console=quiet())
    (last,) = sorted((tmp_path / "start" / "checkpoints").glob("step_*"))[-1:]
    tree = "rl.tree={roots=4, branches=1, depth=1}"
    config = load_config(RECIPES / "keydoor-rl.toml", [f"model.path={last / 'model'}", "threads=1", tree])
    summary = await train(config, tmp_path / "run", console=quiet())
    assert summary["before"]["success"] < 0.1
    assert summary["after"]["success"] > 0.4


async def test_anchors_need_a_state_key(tmp_path: Path) -> None:
    class Anonymous(Counting):
        name = "counting"
        state_key = None  # type: ignore[assignment]

    pool = LocalPool({"counting": Anonymous})
    with pytest.raises(ConfigError, match=r"has no state_key\(\): use 'entropy' or 'random'"):
        await train(counting_config(rl__tree=TREE), tmp_path / "run", console=quiet(), pool=pool)
    await pool.close()


async def test_trees_are_played_ahead_of_the_learner(tmp_path: Path) -> None:
    """Trees of later steps grow while the learner works, and no turn is older than the bound."""
    settings = {"rl__tree": TREE, "rl__max_staleness": 2, "rl__steps": 3, "rl__zero_variance": "keep"}
    await train_counting(counting_config(**settings), tmp_path / "run")
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert 0 < max(row["staleness/max"] for row in metrics) <= 2
    assert all(row["tree/shared_rate"] > 0 for row in metrics)
