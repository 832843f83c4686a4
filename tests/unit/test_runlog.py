"""The run directory: its files, what survives a kill, and what is refused."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy
import pytest

from agentgym_rl.errors import ConfigError, WorkerLost
from agentgym_rl.run.disk import write_atomically
from agentgym_rl.run.log import LINES_PER_WRITE, RunLog, horizon_stages, read_metrics, read_trajectories
from agentgym_rl.types import Message, StopReason, Task, Trajectory

CONFIG = {"seed": 7, "train": {"steps": 100, "learning_rate": 1e-6, "clip": None}, "horizon": {"turns": [2, 3, 4]}}


def episode(identifier: str = "a", reward: float = 1.0) -> Trajectory:
    return Trajectory(
        id=identifier,
        task=Task("babyai", 12),
        messages=[
            Message("user", "Goal: go to the ball — naïve\n", [1, 2]),
            Message("assistant", "go to ball 1", [3, 4], [-0.5, -0.25], version=3),
        ],
        rewards=[reward],
        infos=[{"success": True}],
        stop=StopReason.DONE,
        horizon=4,
        seconds=0.5,
    )


def test_create_saves_the_resolved_config_without_nulls(tmp_path: Path) -> None:
    with RunLog.create(tmp_path / "runs" / "one", CONFIG | {"model": tmp_path}) as log:
        saved = tomllib.loads((log.root / "config.toml").read_text())
        assert log.checkpoints_dir.is_dir()
        assert not log.resumed
    assert saved == {
        "seed": 7,
        "train": {"steps": 100, "learning_rate": 1e-6},
        "horizon": {"turns": [2, 3, 4]},
        "model": str(tmp_path),
    }


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    with RunLog.create(tmp_path / "one", CONFIG) as log:
        log.log(1, {"reward/mean": 0.5})
    with pytest.raises(ConfigError, match=r"already holds a run: add --resume"):
        RunLog.create(tmp_path / "one", CONFIG)
    assert len(read_metrics(tmp_path / "one" / "metrics.jsonl")) == 1


def test_a_foreign_directory_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"holds no run .*thesis.tex"):
        RunLog.create(tmp_path, CONFIG, resume=True)
    with pytest.raises(ConfigError, match="is a file"):
        RunLog.create(tmp_path / "thesis.tex", CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_resuming_a_run_killed_before_its_config_was_written_starts_it(tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    (tmp_path / ".config.toml.123.tmp").write_text("half a con")
    with RunLog.create(tmp_path, CONFIG, resume=True) as log:
        assert not log.resumed
    assert tomllib.loads((tmp_path / "config.toml").read_text())["seed"] == 7
    assert not list(tmp_path.glob(".*.tmp"))


def test_resume_names_every_key_that_differs(tmp_path: Path) -> None:
    RunLog.create(tmp_path, CONFIG).close()
    changed = {"seed": 7, "train": {"steps": 200, "learning_rate": 2e-6, "clip": 0.2}, "horizon": {"turns": [2, 3]}}
    with pytest.raises(ConfigError) as caught:
        RunLog.create(tmp_path, changed, resume=True, may_change={"train.steps"})
    message = str(caught.value)
    assert "train.learning_rate (saved 1e-06, given 2e-06)" in message
    assert "train.clip (saved nothing, given 0.2)" in message
    assert "horizon.turns" in message
    assert "train.steps" not in message
    assert "seed" not in message
    assert tomllib.loads((tmp_path / "config.toml").read_text())["train"]["learning_rate"] == 1e-6


def test_a_run_without_a_newer_key_resumes_if_the_key_has_its_default(tmp_path: Path) -> None:
    RunLog.create(tmp_path, CONFIG).close()

    def completed(saved: dict[str, Any]) -> dict[str, Any]:
        return {"groups": 32, **saved}

    with pytest.raises(ConfigError, match=r"groups \(saved 32, given 64\)"):
        RunLog.create(tmp_path, {**CONFIG, "groups": 64}, resume=True, completed=completed)
    RunLog.create(tmp_path, {**CONFIG, "groups": 32}, resume=True, completed=completed).close()
    assert tomllib.loads((tmp_path / "config.toml").read_text())["groups"] == 32


def test_resume_adopts_the_keys_that_may_change(tmp_path: Path) -> None:
    RunLog.create(tmp_path, CONFIG).close()
    longer = {"seed": 7, "train": {"steps": 200, "learning_rate": 5e-6}, "horizon": {"turns": [2, 3, 4]}}
    with RunLog.create(tmp_path, longer, resume=True, may_change={"train"}) as log:
        assert log.resumed
    assert tomllib.loads((tmp_path / "config.toml").read_text())["train"]["steps"] == 200


def test_two_processes_cannot_write_to_one_run(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, CONFIG), pytest.raises(ConfigError, match="another process is writing"):
        RunLog.create(tmp_path, CONFIG, resume=True)
    RunLog.create(tmp_path, CONFIG, resume=True).close()


def test_metrics_list_the_values_that_are_not_finite(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, CONFIG) as log:
        log.log(3, {"reward/mean": 0.5, "kl/reference": math.nan, "grad/norm": -math.inf, "note": "x"})
        log.log(4, {"reward/mean": numpy.float32(0.25), "episodes": numpy.int64(8), "flag": True})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert first["step"] == 3
    assert first["time"] > 1e9
    assert (first["kl/reference"], first["grad/norm"], first["note"]) == (None, None, "x")
    assert first["nonfinite"] == ["grad/norm", "kl/reference"]
    assert (second["reward/mean"], second["episodes"], second["flag"]) == (0.25, 8, 1)
    assert "nonfinite" not in second


def test_metrics_must_be_numbers_without_reserved_names(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, CONFIG) as log:
        with pytest.raises(TypeError, match="'loss' needs a number or a string, got list"):
            log.log(1, {"loss": [1.0]})  # type: ignore[dict-item]
        with pytest.raises(ValueError, match="'time' has a reserved name"):
            log.log(1, {"time": 1.0})
        assert not log.metrics_path.exists()


def test_trajectories_are_read_as_written(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, CONFIG) as log:
        for name in "ab":
            log.write_trajectory(12, episode(name))
        log.write_trajectory(12, episode("c"), kind="eval")
        log.write_trajectory(0, episode("d"), kind="warmstart")
    folder = tmp_path / "trajectories"
    assert sorted(path.name for path in folder.iterdir()) == [
        "eval_000012.jsonl",
        "step_000012.jsonl",
        "warmstart_000000.jsonl",
    ]
    assert list(read_trajectories(folder / "step_000012.jsonl")) == [episode("a"), episode("b")]
    row = json.loads((folder / "eval_000012.jsonl").read_text())
    assert (row["step"], row["kind"], row["id"]) == (12, "eval", "c")


def test_a_large_group_is_written_completely_and_in_order(tmp_path: Path) -> None:
    episodes = [episode(str(n)) for n in range(2 * LINES_PER_WRITE + 1)]
    with RunLog.create(tmp_path, CONFIG) as log:
        for part in (episodes[:-1], episodes[-1:], []):
            log.write_lines(3, [trajectory.to_json().encode() for trajectory in part])
        assert list(read_trajectories(log.trajectories_path(3))) == episodes


def test_readers_skip_an_incomplete_last_line_and_refuse_other_damage(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, CONFIG) as log:
        for name in "abc":
            log.write_trajectory(1, episode(name))
        path = log.trajectories_path(1)
    whole = path.read_bytes()
    last_line = whole.rstrip().rindex(b"\n") + 1
    for end in (last_line, last_line + 1, len(whole) - 20, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert [t.id for t in read_trajectories(path)] == ["a", "b"]
    path.write_bytes(whole[:10] + b"\n" + whole)
    with pytest.raises(ConfigError, match=r"step_000001.jsonl line 1 is not a JSON object"):
        list(read_trajectories(path))


def test_truncate_after_deletes_only_later_steps(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, CONFIG) as log:
        log.write_trajectory(0, episode(), kind="warmstart")
        for step in range(1, 6):
            log.log(step, {"reward/mean": step / 10})
            log.write_trajectory(step, episode(f"old{step}"))
        log.log(3, {"eval/success": 0.5})
        log.write_trajectory(5, episode(), kind="eval")
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "rewar')
    with RunLog.create(tmp_path, CONFIG, resume=True) as log:
        assert [row["step"] for row in read_metrics(log.metrics_path)] == [1, 2, 3, 4, 5, 3]
        log.truncate_after(3)
        assert [row["step"] for row in read_metrics(log.metrics_path)] == [1, 2, 3, 3]
        log.log(4, {"reward/mean": 0.9})
        log.write_trajectory(4, episode("new4"))
        names = sorted(path.name for path in log.trajectories_dir.iterdir())
        assert names == [*(f"step_{step:06d}.jsonl" for step in range(1, 5)), "warmstart_000000.jsonl"]
        assert [t.id for t in read_trajectories(log.trajectories_path(3))] == ["old3"]
        assert [t.id for t in read_trajectories(log.trajectories_path(4))] == ["new4"]
        assert read_metrics(log.metrics_path)[-1]["reward/mean"] == 0.9
        log.truncate_after(-1)
        assert read_metrics(log.metrics_path) == []
        assert not list(log.trajectories_dir.iterdir())


def test_a_repeated_step_replaces_its_earlier_trajectories(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, CONFIG) as log:
        log.write_trajectory(4, episode("left"), kind="eval")
    with RunLog.create(tmp_path, CONFIG, resume=True) as log:
        log.write_trajectory(4, episode("again"), kind="eval")
        log.write_trajectory(4, episode("more"), kind="eval")
        assert [t.id for t in read_trajectories(log.trajectories_path(4, "eval"))] == ["again", "more"]


WRITER = """
import sys
from pathlib import Path
from agentgym_rl.run.log import RunLog
from agentgym_rl.types import Task, Trajectory
log = RunLog.create(Path(sys.argv[1]), {"seed": 1})
step = 0
while True:
    step += 1
    log.write_trajectory(step, Trajectory(id=str(step), task=Task("babyai", step)))
    log.log(step, {"reward/mean": 0.5})
    if step == 20:
        print("ready", flush=True)
"""


def test_a_killed_run_can_be_resumed_immediately(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "run")], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"ready\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "running"
    assert status["pid"] == writer.pid
    with RunLog.create(tmp_path / "run", {"seed": 1}, resume=True) as log:
        log.truncate_after(15)
        log.log(16, {"reward/mean": 1.0})
        assert [row["step"] for row in read_metrics(log.metrics_path)] == list(range(1, 17))
        assert len(list(log.trajectories_dir.iterdir())) == 15


def test_the_status_records_how_the_run_ended(tmp_path: Path) -> None:
    def status(root: Path) -> dict[str, object]:
        return json.loads((root / "status.json").read_text())

    with RunLog.create(tmp_path / "good", CONFIG) as log:
        log.set_status("running", steps=50)
        log.log(12, {"reward/mean": 1.0})
        running = status(log.root)
        assert (running["state"], running["step"], running["steps"]) == ("running", 12, 50)
        assert running["pid"] == os.getpid()
        log.log(13, {"reward/mean": 1.0}, steps=20)
        assert (status(log.root)["step"], status(log.root)["steps"]) == (13, 20)
        log.log(12, {"reward/mean": 1.0})
    assert (status(tmp_path / "good")["state"], status(tmp_path / "good")["step"]) == ("finished", 12)
    with pytest.raises(RuntimeError), RunLog.create(tmp_path / "bad", CONFIG):
        raise RuntimeError("out of memory")
    assert status(tmp_path / "bad")["state"] == "failed"
    assert status(tmp_path / "bad")["error"] == "RuntimeError: out of memory"
    with RunLog.create(tmp_path / "bad", CONFIG, resume=True):
        assert "error" not in status(tmp_path / "bad")
    with pytest.raises(WorkerLost), RunLog.create(tmp_path / "bad", CONFIG, resume=True):
        raise WorkerLost("learner rank 1 of 2 died")
    events = [(event["kind"], event["message"]) for event in read_metrics(tmp_path / "bad" / "events.jsonl")]
    assert events == [("failed", "out of memory"), ("worker_lost", "learner rank 1 of 2 died")]
    with pytest.raises(KeyboardInterrupt), RunLog.create(tmp_path / "stopped", CONFIG):
        raise KeyboardInterrupt
    assert status(tmp_path / "stopped")["state"] == "stopped"


def test_the_summary_is_valid_json_without_nan(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, CONFIG) as log:
        log.write_summary({"before": {"success": 0.1, "episodes": 200}, "seconds": math.nan})
    assert json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail) == {
        "before": {"success": 0.1, "episodes": 200},
        "seconds": None,
    }


def test_a_failed_atomic_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def test_tensorboard_drops_steps_that_are_played_again(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with RunLog.create(tmp_path, CONFIG, trackers=("tensorboard",)) as log:
        for step in (1, 2, 3):
            log.log(step, {"reward/mean": step / 10, "note": "x"})
    with RunLog.create(tmp_path, CONFIG, resume=True, trackers=("tensorboard",)) as log:
        log.truncate_after(2)
        log.log(3, {"reward/mean": 0.9})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(e.step, round(e.value, 4)) for e in events.Scalars("reward/mean")] == [(1, 0.1), (2, 0.2), (3, 0.9)]


def test_unavailable_trackers_are_refused_before_the_run_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="unknown tracker 'comet': known are tensorboard, wandb, mlflow"):
        RunLog.create(tmp_path / "run", CONFIG, trackers=("comet",))
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'agentgym-rl\[tensorboard\]'"):
        RunLog.create(tmp_path / "run", CONFIG, trackers=("tensorboard",))
    assert not (tmp_path / "run").exists()


def test_horizon_stages_are_read_from_the_metrics() -> None:
    both = {"horizon/babyai": 2, "horizon/textcraft": 10, "success/mean": 0.9, "turns/mean": 7.0}
    rows = [
        {"step": 0, "eval/success": 0.1},
        {"step": 1, **both, "horizon/babyai": 2, "babyai/success/mean": 0.1, "babyai/turns/mean": 2.0},
        {"step": 2, **both, "horizon/babyai": 2, "babyai/success/mean": 0.3, "textcraft/success/mean": 0.8},
        {"step": 2, "eval/success": 0.2},
        {"step": 3, **both, "horizon/babyai": 4, "babyai/success/mean": 0.5, "babyai/turns/mean": 3.0},
    ]
    stages = horizon_stages(rows)
    assert [(s["env"], s["turns"], s["first_step"], s["last_step"]) for s in stages] == [
        ("babyai", 2, 1, 2),
        ("textcraft", 10, 1, 3),
        ("babyai", 4, 3, 3),
    ]
    assert stages[0]["success"] == pytest.approx(0.2)
    assert stages[0]["turns_used"] == 2.0
    assert (stages[1]["success"], stages[1]["turns_used"]) == (0.8, None), "of the steps that played it"
    (alone,) = horizon_stages([{"step": 1, "horizon/babyai": 5, "success/mean": 0.5, "turns/mean": 4.0}])
    assert (alone["success"], alone["turns_used"]) == (0.5, 4.0)
    assert horizon_stages([{"step": 1, "horizon": 5}])[0] == {
        "env": "",
        "turns": 5,
        "first_step": 1,
        "last_step": 1,
        "success": None,
        "turns_used": None,
    }
