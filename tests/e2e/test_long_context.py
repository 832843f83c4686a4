"""The recipes for long contexts run two steps, and their runs resume and can be looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs_for_tests import Process
from tokenizers_for_tests import thinking_tokenizer

from agentgym_rl.config import load_config
from agentgym_rl.run.log import read_metrics
from agentgym_rl.training.scratch import build_model
from agentgym_rl.training.settings import ScratchSettings
from agentgym_rl.types import Trajectory

RECIPES = Path(__file__).parents[2] / "recipes" / "long_context"
SMALL_RL = ("rl.groups_per_step=2", "rl.group_size=2", "eval.episodes=2", "eval.every=0", "threads=1")


def train(recipe: str, folder: Path, *overrides: str) -> list[Trajectory]:
    """Train two steps; return the training episodes."""
    arguments = ["train", str(RECIPES / recipe), f"run_dir={folder / 'run'}", *overrides]
    process = Process(arguments, folder / "output")
    assert process.wait() == 0, (folder / "output").read_text()
    assert [row["step"] for row in read_metrics(folder / "run" / "metrics.jsonl")][-1] == 2
    lines = [
        line
        for path in sorted((folder / "run" / "trajectories").glob("step_*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [Trajectory.from_json(line) for line in lines]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("recipe", [pytest.param("tiny-window.toml", marks=pytest.mark.long), "tiny-summary.toml"])
def test_learned_values_cover_every_trained_token_of_all_segments(recipe: str, tmp_path: Path) -> None:
    played = train(recipe, tmp_path, "threads=1")
    assert max(t.num_segments for t in played) > 1
    max_context = load_config(RECIPES / recipe, []).agent.max_context
    assert max(sum(len(m.token_ids) for m in t.messages) for t in played) > max_context
    assert all(len(segment.token_ids) <= max_context for t in played for segment in t.segments)
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(row["mismatch/abs"] < 1e-4 for row in metrics if "mismatch/abs" in row)
    assert any(row.get("segments/per_episode", 1.0) > 1 for row in metrics)
    learned = {row["id"]: row for row in rows(tmp_path / "run" / "trajectories" / "learned_000002.jsonl")}
    branched = [t for t in played if t.id in learned and t.num_segments > 1]
    assert branched
    for trajectory in branched:
        trained = sum(sum(segment.loss_mask) for segment in trajectory.segments)
        assert len(learned[trajectory.id]["advantages"]) == len(learned[trajectory.id]["entropies"]) == trained


@pytest.mark.long
def test_a_run_with_segments_resumes(tmp_path: Path) -> None:
    # With overlap the checkpoint holds the episodes of the next step, segments included.
    overrides = ("threads=1", "rl.overlap=1", "rl.steps=3", "checkpoint.every=1")
    arguments = ["train", str(RECIPES / "tiny-window.toml"), f"run_dir={tmp_path / 'run'}", *overrides]
    assert Process([*arguments, "rl.steps=2"], tmp_path / "first").wait() == 0, (tmp_path / "first").read_text()
    resumed = Process([*arguments, "--resume"], tmp_path / "second")
    assert resumed.wait() == 0, (tmp_path / "second").read_text()
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


def test_a_thinking_model_trains_with_its_own_template(tmp_path: Path) -> None:
    tokenizer = thinking_tokenizer("r1")
    shape = ScratchSettings(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, max_context=4096)
    build_model(shape, tokenizer, 0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    played = train(
        "thinking.toml",
        tmp_path,
        *(f"model.path={tmp_path / 'model'}", "model.dtype=float32", "rl.steps=2", "agent.max_new_tokens=12"),
        *("agent.max_context=2000", "agent.summary_tokens=12", "rl.zero_variance=keep", *SMALL_RL),
    )
    assert played


def test_the_window_recipe_runs_two_steps(tmp_path: Path) -> None:
    played = train(
        "window.toml",
        tmp_path,
        *("rl.steps=2", "horizon.turns=[8]", "eval.max_turns=4", "warm_start.episodes=20", "warm_start.max_turns=4"),
        *SMALL_RL,
    )
    assert played
