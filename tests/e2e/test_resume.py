"""A run killed with SIGKILL and resumed with --resume equals an uninterrupted run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs_for_tests import (
    TINY,
    Process,
    assert_same_weights,
    comparable_metrics,
    comparable_trajectories,
    final_weights,
    finish,
    train_process,
    trainer_state,
)

from agentgym_rl.run.log import read_metrics
from agentgym_rl.training.checkpoint import list_checkpoints


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    finish(folder)
    return folder


def count_steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "in the warm start": lambda run: (run / "trajectories" / "warmstart_000000.jsonl").exists(),
    "right after a checkpoint": lambda run: (run / "checkpoints" / "step_000002").exists(),
    "between checkpoints": lambda run: count_steps(run) >= 3,
    "while a checkpoint is written": lambda run: (run / "checkpoints" / ".step_000004.tmp").exists(),
    "in the last evaluation": lambda run: (run / "trajectories" / "eval_000006.jsonl").exists(),
}
QUICK = ("between checkpoints",)
"""Moments of `make test`; `make test-long` has the others."""


def assert_equal(run: Path, expected: Path) -> None:
    metrics, expected_metrics = comparable_metrics(run), comparable_metrics(expected)
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    for row, expected_row in zip(metrics, expected_metrics, strict=True):
        assert row == expected_row
    episodes, expected_episodes = comparable_trajectories(run), comparable_trajectories(expected)
    assert list(episodes) == list(expected_episodes)
    for name, rows in expected_episodes.items():
        assert episodes[name] == rows, name
    assert_same_weights(run, expected)
    state, expected_state = trainer_state(run), trainer_state(expected)
    for name in ("rl", "step", "version"):
        assert state[name] == expected_state[name]
    assert state["learner"]["updates"] == expected_state["learner"]["updates"] == 6 * 2 * 2
    moments, expected_moments = (s["learner"]["optimizer"]["state"] for s in (state, expected_state))
    assert moments.keys() == expected_moments.keys()
    for key, value in moments.items():
        assert all(torch.equal(value[name], expected_moments[key][name]) for name in value)


def test_the_reference_run_is_not_trivial(uninterrupted: Path) -> None:
    """Check that episodes differ, weights change and the horizon grows, because two empty runs would be equal too."""
    rows = comparable_metrics(uninterrupted)
    assert [row["horizon/babyai"] for row in rows] == [1, 1, 2, 2, 3, 3]
    assert len({row["loss"] for row in rows}) == 6
    assert all("system/load" in row for row in read_metrics(uninterrupted / "metrics.jsonl"))
    assert any(row["groups/zero_variance"] < 1 for row in rows)
    assert all(row["grad/norm"] > 0 for row in rows)
    assert all(row["mismatch/abs"] < 1e-4 for row in rows)
    tasks = [(row["env"], row["item"]) for row in comparable_trajectories(uninterrupted)["step_000001.jsonl"]]
    assert len(set(tasks)) == 4


@pytest.mark.parametrize("moment", [m if m in QUICK else pytest.param(m, marks=pytest.mark.long) for m in MOMENTS])
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(moment: str, uninterrupted: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_process(run).kill_when(lambda: MOMENTS[moment](run))
    finish(run, "--resume")
    assert_equal(run, uninterrupted)
    assert not list((run / "checkpoints").glob(".*"))


@pytest.mark.long
def test_a_run_killed_twice_equals_an_uninterrupted_one(uninterrupted: Path, tmp_path: Path) -> None:
    """Change how checkpoints are written, which has no effect on what is learned."""
    run, background = tmp_path / "run", "checkpoint.background=true"
    train_process(run, "checkpoint.every=1").kill_when(lambda: count_steps(run) >= 1)
    train_process(run, "checkpoint.every=1", background, "--resume").kill_when(lambda: count_steps(run) >= 4)
    finish(run, background, "--resume")
    assert_equal(run, uninterrupted)


@pytest.mark.long
def test_resuming_a_finished_run_does_nothing_and_can_extend_it(uninterrupted: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finish(run, "rl.steps=4", "rl.optimizer.decay=constant")
    assert count_steps(run) == 4
    before = final_weights(run)
    finish(run, "rl.steps=4", "rl.optimizer.decay=constant", "--resume")
    assert count_steps(run) == 4
    assert all(torch.equal(before[name], value) for name, value in final_weights(run).items())
    finish(run, "rl.steps=6", "rl.optimizer.decay=constant", "--resume")
    in_one_go = tmp_path / "straight"
    finish(in_one_go, "rl.optimizer.decay=constant")
    assert_equal(run, in_one_go)


@pytest.mark.long
def test_the_installed_command_can_be_killed_and_resumed(uninterrupted: Path, tmp_path: Path) -> None:
    """Repeat the test with the command that a user types."""
    run, recipe = tmp_path / "run", tmp_path / "tiny.toml"
    recipe.write_text(TINY)
    command = [str(Path(sys.executable).with_name("agentgym-rl")), "train", str(recipe), f"run_dir={run}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while count_steps(run) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    killed_at = read_metrics(run / "metrics.jsonl")[-1]["step"]
    assert 3 <= killed_at < 6
    assert [p.name for p in list_checkpoints(run / "checkpoints")][-1] in ("step_000002", "step_000004")
    refused = train_process(run)
    assert refused.wait() == 2
    assert "add --resume" in refused.output.read_text()
    finish(run, "--resume")
    assert_equal(run, uninterrupted)


def test_a_run_is_not_resumed_with_other_settings(uninterrupted: Path) -> None:
    process = train_process(uninterrupted, "--resume", "rl.group_size=8")
    assert process.wait() == 2
    output = process.output.read_text()
    assert "rl.group_size (saved 4, given 8)" in output
    assert "Traceback" not in output


def test_a_run_that_needs_too_much_memory_is_resumed_with_settings_that_save_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    finish(run, "rl.steps=2", "rl.optimizer.decay=constant")
    switches = ("checkpoint_activations", "offload_activations", "offload_moments")
    saving = [*(f"rl.optimizer.{name}=true" for name in switches), "rl.optimizer.micro_batch_tokens=300"]
    finish(run, "rl.steps=3", "rl.optimizer.decay=constant", *saving, "--resume")
    assert [row["step"] for row in comparable_metrics(run)] == [1, 2, 3]


@pytest.mark.long
def test_checkpoints_without_optimizer_hold_the_model_and_refuse_resume(tmp_path: Path) -> None:
    run, overrides = tmp_path / "run", ("checkpoint.optimizer=false", "rl.optimizer.decay=constant")
    finish(run, "rl.steps=2", *overrides)
    assert trainer_state(run)["learner"] is None
    assert final_weights(run)
    process = train_process(run, "rl.steps=4", *overrides, "--resume")
    assert process.wait() == 2
    assert "cannot be resumed from" in process.output.read_text()


def test_a_run_saved_by_an_earlier_version_is_resumed(tmp_path: Path) -> None:
    """The archive holds two steps of recipes/keydoor/tiny.toml, trained before files.json and RunContext existed."""
    with tarfile.open(Path(__file__).parents[1] / "data" / "run_of_0.1.0.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    run = tmp_path / "run"
    before = read_metrics(run / "metrics.jsonl")
    saved = tomllib.loads((run / "config.toml").read_text())
    shape = [
        f"model.scratch.{name}={value}" for name, value in saved["model"]["scratch"].items() if name != "max_context"
    ]
    sizes = [
        "rl.groups_per_step=2",
        "rl.group_size=2",
        "eval.episodes=4",
        "warm_start.episodes=24",
        "checkpoint.keep=1",
    ]
    overrides = [f"run_dir={run}", "threads=1", "rl.steps=4", *sizes, *shape]
    process = Process(["train", "keydoor/tiny", *overrides, "--resume"], tmp_path / "output")
    assert process.wait() == 0, (tmp_path / "output").read_text()
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert read_metrics(run / "metrics.jsonl")[:2] == before


@pytest.mark.long
def test_an_asynchronous_run_is_killed_and_resumed_within_its_bound(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_process(run, "rl.max_staleness=2").kill_when(lambda: count_steps(run) >= 3)
    finish(run, "rl.max_staleness=2", "--resume")
    rows = comparable_metrics(run)
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert 0 < max(row["staleness/max"] for row in rows) <= 2
    played = comparable_trajectories(run)
    episodes = [row["id"] for name in played if name.startswith("step") for row in played[name]]
    assert len(set(episodes)) == len(episodes)


def test_a_run_whose_starting_model_was_not_kept_resumes_with_the_model_of_its_path(
    uninterrupted: Path, tmp_path: Path
) -> None:
    """Ranks keep no copy of a model that no warm start changed. One process can continue their run all the same."""
    model = list_checkpoints(uninterrupted / "checkpoints")[-1] / "model"
    text = re.sub(r"\[warm_start\].*?(?=\[horizon\])", "", TINY, flags=re.DOTALL)
    text = re.sub(r"\[model.scratch\].*?\n\n", f"[model]\npath = '{model}'\n\n", text, flags=re.DOTALL)
    (tmp_path / "recipe.toml").write_text(text)
    folders = {"kept": tmp_path / "kept", "removed": tmp_path / "removed"}
    for name, folder in folders.items():
        for arguments in (("rl.steps=2",), ("rl.steps=3", "--resume")):
            command = ["train", str(tmp_path / "recipe.toml"), f"run_dir={folder}", *arguments]
            process = Process([*command, "rl.optimizer.decay=constant"], tmp_path / f"{name}.out")
            assert process.wait() == 0, process.output.read_text()
            if name == "removed":
                shutil.rmtree(folder / "reference", ignore_errors=True)
    metrics = {name: comparable_metrics(folder) for name, folder in folders.items()}
    assert metrics["removed"] == metrics["kept"]
    assert metrics["kept"][-1]["kl/reference"] > 0
