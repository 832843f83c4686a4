"""Self-correction is learned: the second attempt beats two samples of the first."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

import pytest
from runs_for_tests import assert_same_run, comparable_metrics, finish, quiet, train_process

from agentgym_rl.commands.train import train
from agentgym_rl.config import load_config
from agentgym_rl.run.log import read_metrics

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.long
async def test_the_second_attempt_beats_two_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "lock", raising=False)
    await train(load_config(EXAMPLES / "lock.toml", ["threads=1"]), tmp_path / "run", console=quiet())
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    first, last = (
        {name: fmean(row[name] for row in part) for name in rows[0] if name.startswith("attempts/")}
        for part in (rows[:2], rows[-5:])
    )
    assert first["attempts/success_2"] < first["attempts/sampled_twice"]
    assert first["attempts/success_2"] < last["attempts/success_2"] - 0.15
    assert last["attempts/success_2"] > last["attempts/sampled_twice"] + 0.05
    assert last["attempts/wrong_to_right"] > last["attempts/right_to_wrong"] + 0.2
    assert abs(last["attempts/success_1"] - 1 / 3) < 0.15, "the code cannot be known"


async def test_a_held_out_evaluation_reports_every_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "lock", raising=False)
    changes = ["rl.steps=0", "warm_start.episodes=200", "eval.episodes=6", "eval.samples=2", "threads=1"]
    config = load_config(EXAMPLES / "lock.toml", changes)
    summary = await train(config, tmp_path / "run", console=quiet())
    result = summary["before"]
    played = [json.loads(line) for line in (tmp_path / "run/trajectories/eval_000000.jsonl").open()]
    assert result["episodes"] == len(played) == 12, "two samples of each item"
    outcomes = [[info["attempt_success"] for info in row["infos"] if "attempt_success" in info] for row in played]
    ends = [(row[0], row[-1]) for row in outcomes if row]
    assert result["attempts"]["success_1"] == pytest.approx(fmean(first for first, _ in ends))
    assert result["attempts"]["wrong_to_right"] == pytest.approx(fmean(last and not first for first, last in ends))
    assert "sampled_twice" in result["attempts"]


@pytest.mark.long
def test_a_killed_run_of_self_correction_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """It is killed in the second stage and resumes in the first."""
    correction = [
        *("agent.style=reflect", "agent.attempts=2", "agent.retry=always", "agent.turns_per_attempt=2"),
        *("horizon={kind='fixed', turns=[5]}", "eval.max_turns=5", "rl.correction={first_stage_steps=3}"),
        *("agent.max_new_tokens=16", "warm_start.max_turns=5"),  # replies reach the second attempt
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(whole, *correction)
    train_process(killed, *correction).kill_when(lambda: (killed / "trajectories" / "step_000004.jsonl").exists())
    finish(killed, *correction, "--resume")
    assert_same_run(killed, whole)
    assert any("attempts/success_2" in row for row in comparable_metrics(whole)), "there were second attempts"
