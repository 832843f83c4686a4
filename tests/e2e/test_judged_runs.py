"""Runs that learn from judged rewards: with a judge on loopback and with a function of the user's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from judge_for_tests import JudgeServer, judge_server
from runs_for_tests import (
    assert_same_run,
    comparable_metrics,
    comparable_trajectories,
    counting_config,
    finish,
    train_counting,
    train_process,
)
from typer.testing import CliRunner

from agentgym_rl.cli import app
from agentgym_rl.errors import EngineError
from agentgym_rl.run.log import read_metrics, read_trajectories

IGNORED = {"kind": "environment", "weight": 0.0}
OWN = {"kind": "own_rewards_for_tests:count_word", "kwargs": {"word": "down"}}
RUBRIC = {"kind": "rubric", "rubric": "The agent should count down."}
SHAPED = """
model.path = "unused"
environments = [{ name = "counting" }]
rewards = [{ kind = "length", tokens = 4 }]
"""
LONGER: dict[str, Any] = {
    "rl__steps": 12,
    "rl__groups_per_step": 8,
    "rl__optimizer": {"lr": 3e-3},
    "horizon": {"kind": "fixed", "turns": [3]},
    "checkpoint": {"every": 100},
}


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server("down") as judge:
        yield judge


def judged(server: JudgeServer, **changes: Any) -> dict[str, Any]:
    return {"judge": {"url": server.url, "model": "judge", "timeout_s": 60.0, "retries": 1, **changes}}


async def test_a_run_learns_from_a_judge_against_the_environment(server: JudgeServer, tmp_path: Path) -> None:
    """The environment pays for counting up, the judge for counting down."""
    config = counting_config(**LONGER, rewards=[IGNORED, RUBRIC], **judged(server))
    summary = await train_counting(config, tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    judged_means = [row["judged/rubric"] for row in rows]
    assert judged_means[0] < 0.7
    assert judged_means[-1] > 0.95, judged_means
    assert rows[-1]["reward/mean"] < rows[0]["reward/mean"], "the environment's own reward is recorded as it is"
    assert summary["after"]["success"] == 0.0
    assert summary["judge"]["calls"] == server.num_requests < 12 * 8 * 4, "equal episodes are judged once"
    (*_, last) = read_trajectories(tmp_path / "run" / "trajectories" / "step_000012.jsonl")
    assert [v.source for v in last.verdicts] == ["environment", "rubric"]
    assert "Score:" in last.verdicts[1].reason
    evaluated = list(read_trajectories(tmp_path / "run" / "trajectories" / "eval_000012.jsonl"))
    assert not any(t.verdicts for t in evaluated), "evaluation never uses judged rewards"


@pytest.mark.parametrize("max_chars", [200, 24_000])
async def test_a_run_warns_once_of_text_that_its_judge_does_not_read(
    max_chars: int, server: JudgeServer, tmp_path: Path
) -> None:
    ranking = {"kind": "ranking", "rubric": "The agent should count down."}
    await train_counting(
        counting_config(rewards=[ranking], **judged(server, max_chars=max_chars, max_calls=7)), tmp_path / "run"
    )
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    kinds = [event["kind"] for event in events]
    assert kinds.count("episodes_read_in_part") == (max_chars == 200)
    assert "judge_budget" in kinds, "2 steps of 4 groups need 8 answers"


async def test_a_run_learns_from_a_function(tmp_path: Path) -> None:
    config = counting_config(**LONGER, rewards=[IGNORED, OWN])
    await train_counting(config, tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[0]["judged/count_word"] < 0.7
    assert rows[-1]["judged/count_word"] > 0.95


async def test_a_step_without_its_judge_drops_episodes_and_a_dead_judge_ends_the_run(
    server: JudgeServer, tmp_path: Path
) -> None:
    server.faults = ["401"] * 3
    config = counting_config(rewards=[RUBRIC], **judged(server, concurrency=1))
    await train_counting(config, tmp_path / "some")
    rows = read_metrics(tmp_path / "some" / "metrics.jsonl")
    failed = [t for t in read_trajectories(tmp_path / "some" / "trajectories" / "step_000001.jsonl") if t.judge_error]
    assert rows[0]["judged/failed"] == len(failed) >= 3
    learned = (tmp_path / "some" / "trajectories" / "learned_000001.jsonl").read_text()
    assert not any(f'"{t.id}"' in learned for t in failed)
    events = [json.loads(line) for line in (tmp_path / "some" / "events.jsonl").read_text().splitlines()]
    assert "episodes_not_judged" in [event["kind"] for event in events]
    server.always = "401"
    with pytest.raises(EngineError, match="none of 16 episodes could be judged"):
        await train_counting(config, tmp_path / "none")


@pytest.mark.long
async def test_rescore_judges_stored_episodes_again_and_shows_how_ranks_change(
    server: JudgeServer, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    await train_counting(counting_config(rl__steps=2, rewards=[IGNORED, RUBRIC], **judged(server)), folder)
    stored = comparable_trajectories(folder)

    def rescored(*options: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, ["rescore", str(folder), "--json", *options])
        assert result.exit_code == 0, result.output
        return json.loads(result.output)

    asked = server.num_requests
    same = await asyncio.to_thread(rescored)
    assert (same["episodes"], same["groups"], same["failed"]) == (32, 8, 0)
    assert same["pairs"] > 0
    assert (same["reversed_pairs"], same["best_changed"], same["mean_rank_change"]) == (0.0, 0.0, 0.0)
    assert same["judge_calls"] == server.num_requests - asked > 0
    assert (await asyncio.to_thread(rescored))["judge_calls"] == 0, "a second time it is free"
    assert (await asyncio.to_thread(rescored, "--fresh", "--limit", "1"))["judge_calls"] > 0
    server.wanted = "up"
    other = await asyncio.to_thread(rescored, "--fresh")
    assert other["reversed_pairs"] > 0.5
    assert other["best_changed"] > 0.5
    rows = [json.loads(line) for line in (folder / "rescored.jsonl").read_text().splitlines()]
    assert len(rows) == 32
    assert {"before", "after", "rank_before", "rank_after", "verdicts"} <= rows[0].keys()
    (tmp_path / "shaped.toml").write_text(SHAPED)
    shaped = await asyncio.to_thread(rescored, "--recipe", str(tmp_path / "shaped.toml"), "--step", "2")
    assert (shaped["episodes"], "judge_calls" in shaped) == (16, False)
    assert comparable_trajectories(folder) == stored
    arguments = ["rescore", str(folder), "--out", str(tmp_path / "missing" / "rescored.jsonl")]
    missing = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert "there is no folder" in str(missing.exception)
    text = (await asyncio.to_thread(CliRunner().invoke, app, ["rescore", str(folder)])).output
    assert "are reversed now" in text
    assert "Largest changes" in text


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("silent_share", [0.0, 0.2])
def test_a_killed_and_resumed_judged_run_equals_an_uninterrupted_one(silent_share: float, tmp_path: Path) -> None:
    """Failures are asked for again, so they are repeated by a judge that always fails at the same episodes."""
    with judge_server("turn left") as server:
        server.silent_share = silent_share
        rewards = 'rewards=[{kind="rubric", rubric="Turn left.", weight=0.5, per_turn=true}]'
        options = [rewards, f'judge={{url="{server.url}", model="judge", retries=1}}', "rl.steps=4"]
        whole, killed = tmp_path / "whole", tmp_path / "killed"
        finish(whole, *options)
        calls = server.num_requests
        process = train_process(killed, *options)
        process.kill_when(lambda: (killed / "trajectories" / "step_000003.jsonl").exists())
        finish(killed, *options, "--resume")
    assert_same_run(killed, whole)
    failed = [row["judged/failed"] for row in comparable_metrics(killed)]
    if silent_share:
        assert any(failed[2:]), "the steps that are played again have failures"
        return
    assert not any(failed)
    answers = [json.loads(line)["key"] for line in (killed / "judge.jsonl").read_text().splitlines()]
    assert len(answers) == len(set(answers)) == calls
