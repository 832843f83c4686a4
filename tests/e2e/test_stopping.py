"""SIGTERM, Ctrl-C and a full disk: the run keeps its progress and reports the stop."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_for_tests import (
    PATIENT,
    Command,
    ForkedCommand,
    descendants,
    duplicates,
    events_of,
    steps_of,
    tokens,
    workers,
)
from envs_for_tests import Counting
from runs_for_tests import comparable_trajectories, counting_config, final_weights, quiet, train_counting

from agentgym_rl.agent.engines.vllm.process_cleanup import owning_processes
from agentgym_rl.commands.train import train
from agentgym_rl.config import CheckpointConfig, Config
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.backend import LocalBackend
from agentgym_rl.run.console import Console
from agentgym_rl.run.run import Run
from agentgym_rl.run.stopping import Stopped
from agentgym_rl.training.checkpoint import list_checkpoints


def sft_config() -> Config:
    changes = {"method": "sft", "data": {"play": "random", "episodes": 48}, "sft": {"batch_size": 16}}
    raw = counting_config().model_dump(exclude={"rl", "horizon", "warm_start", "dpo", "agentevol"})
    return Config.model_validate(raw | changes)


@pytest.mark.long
def test_sigterm_writes_a_checkpoint_and_the_resumed_run_is_the_same(tmp_path: Path) -> None:
    uninterrupted = ForkedCommand(tmp_path / "whole" / "run")
    stopped = Command(tmp_path / "cut" / "run", "checkpoint.every=100")  # in a fresh process, as a user starts it
    stopped.until_step(1)  # long before the last step
    assert stopped.stop() == 0, stopped.output.read_text()
    status = json.loads((stopped.folder / "status.json").read_text())
    assert status["state"] == "stopped"
    assert events_of(stopped.folder) == ["stopped"]
    (last,) = list_checkpoints(stopped.folder / "checkpoints")[-1:]
    assert last.name == f"step_{steps_of(stopped.folder)[-1]:06d}"
    assert steps_of(stopped.folder)[-1] < 4
    resumed = ForkedCommand(stopped.folder, "checkpoint.every=100", "--resume")
    assert resumed.wait() == 0, resumed.output.read_text()
    assert uninterrupted.wait() == 0, uninterrupted.output.read_text()
    assert steps_of(stopped.folder) == [1, 2, 3, 4]
    assert tokens(stopped.folder) == tokens(uninterrupted.folder)


async def test_sigterm_during_a_checkpoint_stops_the_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Run.save

    def save_during_sigterm(run: Run) -> None:
        if run.step == 1 and not run.stop.asked:
            os.kill(os.getpid(), signal.SIGTERM)
        save(run)

    monkeypatch.setattr(Run, "save", save_during_sigterm)
    with pytest.raises(Stopped, match="after step 1"):
        await train_counting(counting_config(), tmp_path / "run")
    assert events_of(tmp_path / "run") == ["stopped"]


@pytest.mark.long
async def test_a_stop_does_not_save_a_step_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, saved = LocalBackend.save, []

    def count_and_save(workers: LocalBackend, root: Path, step: int, *rest: Any) -> None:
        saved.append(step)
        save(workers, root, step, *rest)
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(LocalBackend, "save", count_and_save)
    with pytest.raises(Stopped, match="after step 1: continue with --resume"):
        await train_counting(counting_config(), tmp_path / "run")
    assert saved == [0, 1]


async def test_a_stop_does_not_wait_for_asynchronous_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow episode may take longer than a cluster gives a job to end."""
    collector, started = LocalBackend.collector, 0

    def stuck(backend: LocalBackend, prefix: str, *rest: Any, **options: Any) -> Any:
        collect = collector(backend, prefix, *rest, **options)

        async def collect_or_wait(*arguments: Any) -> Any:
            nonlocal started
            started += 1
            if started > 3 * groups:  # these start when the loop waits for the groups of its second step
                os.kill(os.getpid(), signal.SIGTERM)
            if started > groups:
                await asyncio.Event().wait()
            return await collect(*arguments)

        return collect_or_wait if prefix == "train-" else collect

    raw = counting_config().model_dump()
    config = Config.model_validate(raw | {"rl": {**raw["rl"], "max_staleness": 2, "steps": 6}})
    groups = config.rl.groups_per_step
    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "collector", stuck)
        with pytest.raises(Stopped, match="after step 1: continue with --resume"):
            async with asyncio.timeout(60):
                await train(config, tmp_path / "run", console=quiet(), pool=LocalPool({"counting": Counting}))
    await train_counting(config, tmp_path / "run", resume=True)
    assert steps_of(tmp_path / "run") == list(range(1, 7))
    assert duplicates(tmp_path / "run") == 0


@pytest.mark.parametrize("method", ["rl", pytest.param("sft", marks=pytest.mark.long)])
async def test_resuming_falls_back_to_the_newest_complete_checkpoint_and_says_so(method: str, tmp_path: Path) -> None:
    config = counting_config() if method == "rl" else sft_config()

    async def run(*, resume: bool = False) -> str:
        output = io.StringIO()
        await train_counting(config, tmp_path / "run", console=Console(output), resume=resume)
        return output.getvalue()

    await run()
    weights = final_weights(tmp_path / "run")
    first, last = list_checkpoints(tmp_path / "run" / "checkpoints")
    (last / "model" / "config.json").unlink()
    output = " ".join((await run(resume=True)).split())
    line = f"{last.name} is not complete (model/config.json is missing) and is kept as broken_{last.name}: using"
    assert f"{line} {first.name}" in output
    assert events_of(tmp_path / "run") == ["checkpoint_incomplete"]
    assert all(torch.equal(weights[name], value) for name, value in final_weights(tmp_path / "run").items())
    for folder in (first, last):
        (folder / "trainer.pt").unlink()
    with pytest.raises(ConfigError, match=r"no checkpoint in .* is complete \(step_\d+: trainer\.pt is missing; step_"):
        await run(resume=True)


@pytest.mark.parametrize("method", ["rl", "sft"])
async def test_a_stop_does_not_promise_resume_without_the_optimizer(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, run = Run.save, tmp_path / "run"
    config = counting_config() if method == "rl" else sft_config()
    config = config.model_copy(update={"checkpoint": CheckpointConfig(every=1, optimizer=False)})

    def sigterm_during_save(self: Run) -> None:
        save(self)
        if self.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Run, "save", sigterm_during_save)
    stop_at = 1
    folder = run / "checkpoints" / "step_000001" / "model"
    with pytest.raises(Stopped, match=rf"after step 1: checkpoint.optimizer = false .* model\.path={folder}$"):
        await train_counting(config, run)
    stop_at = -1
    with pytest.raises(ConfigError, match="cannot be resumed from"):
        await train_counting(config, run, resume=True)


async def test_a_stop_between_rounds_can_be_resumed_without_an_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, run = Run.evaluate, tmp_path / "run"
    config = sft_config().model_copy(update={"checkpoint": CheckpointConfig(optimizer=False)})

    async def sigterm_and_evaluate(self: Run) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await evaluate(self)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "evaluate", sigterm_and_evaluate)
        with pytest.raises(Stopped, match="after step 0: continue with --resume"):
            await train_counting(config, run)
    await train_counting(config, run, resume=True)
    assert steps_of(run)


async def test_a_run_whose_checkpoints_were_removed_starts_from_the_beginning(tmp_path: Path) -> None:
    run, longer = tmp_path / "run", counting_config(rl__steps=3)
    await train_counting(longer, run)
    first = comparable_trajectories(run)
    shutil.rmtree(run / "checkpoints")
    summary = await train_counting(counting_config(), run, resume=True)
    assert steps_of(run) == [1, 2]
    assert [stage["turns"] for stage in summary["stages"]] == [2, 4]
    again = comparable_trajectories(run)
    assert {int(name[-12:-6]) for name in again} == {0, 1, 2}, "step 3 is not played again"
    assert again["warmstart_000000.jsonl"] == first["warmstart_000000.jsonl"]


@pytest.mark.long
def test_a_run_stopped_before_rl_can_be_resumed(tmp_path: Path) -> None:
    """Stop in the warm start, which is not saved, and in the first evaluation, when the warm start is saved."""
    folder, short = tmp_path / "run", ("rl.steps=1", "warm_start.sft.epochs=60")
    run = ForkedCommand(folder, *short, "eval.episodes=5000")
    run.until(lambda: (folder / "trajectories" / "warmstart_000000.jsonl").exists())
    assert run.stop() == 0, run.output.read_text()
    assert (
        "stopped by SIGTERM before its first checkpoint: --resume starts from the beginning" in run.output.read_text()
    )
    assert json.loads((folder / "status.json").read_text())["state"] == "stopped"
    assert not list_checkpoints(folder / "checkpoints")
    run = ForkedCommand(folder, *short, "eval.episodes=5000", "--resume")
    run.until(lambda: "before RL" in run.output.read_text())
    assert run.stop() == 0, run.output.read_text()
    assert json.loads((folder / "status.json").read_text())["state"] == "stopped"
    assert events_of(folder) == ["stopped", "stopped"]
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["step_000000"]
    run = ForkedCommand(folder, *short, "eval.episodes=6", "--resume")
    assert run.wait() == 0, run.output.read_text()
    assert "Traceback" not in run.output.read_text()
    assert run.output.read_text().count("Warm start") == 2, "the checkpoint has the second warm start"
    summary = json.loads((folder / "summary.json").read_text())
    assert [(row["step"], row["episodes"]) for row in summary["evaluations"]] == [(0, 6), (1, 6)]


def test_the_first_ctrl_c_writes_a_checkpoint_and_names_resume(tmp_path: Path) -> None:
    run = ForkedCommand(tmp_path / "run", "checkpoint.every=100", "rl.steps=3000")
    run.until_step(1)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 0, run.output.read_text()
    output = run.output.read_text()
    assert "press Ctrl-C again to end at once" in output
    last = steps_of(run.folder)[-1]
    assert f"stopped by Ctrl-C after step {last}: continue with --resume" in output
    assert "Traceback" not in output
    assert json.loads((run.folder / "status.json").read_text())["state"] == "stopped"
    assert events_of(run.folder) == ["stopped"]
    assert list_checkpoints(run.folder / "checkpoints")[-1].name == f"step_{last:06d}"


def test_the_second_ctrl_c_ends_a_run_at_once(tmp_path: Path) -> None:
    run = ForkedCommand(tmp_path / "run", "rl.epochs=1000000")  # learning from the first step would take hours
    run.until((run.folder / "trajectories" / "step_000001.jsonl").exists)
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: "press Ctrl-C again" in run.output.read_text())
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == -signal.SIGINT
    output = run.output.read_text()
    assert "ended at once: --resume continues from the last checkpoint" in output
    assert "Traceback" not in output
    status = json.loads((run.folder / "status.json").read_text())
    assert (status["state"], status["error"]) == ("stopped", "ended at once by Ctrl-C")
    assert [path.name for path in list_checkpoints(run.folder / "checkpoints")] == ["step_000000"]


def test_processes_of_vllm_ignore_ctrl_c() -> None:
    with owning_processes():
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child.send_signal(signal.SIGINT)
    child.communicate(b"\n")
    assert child.returncode == 0
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def still_running(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.long
@pytest.mark.parametrize("moment", ["ranks imitate", pytest.param("engines are made", marks=pytest.mark.long)])
def test_sigterm_while_a_cluster_starts_leaves_no_process(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    for name, value in PATIENT.items():
        monkeypatch.setenv(name, value)
    scale = ("scale.learners=1", "scale.engines=1", "scale.env_hosts=1", "scale.object_store_mb=100")
    if moment == "ranks imitate":
        run = ForkedCommand(tmp_path / "run", *scale, "warm_start.sft.epochs=100000")
        run.until(lambda: "from scratch" in run.output.read_text())
        assert not workers("engine")
    else:
        run = ForkedCommand(tmp_path / "run", *scale)
        run.until(lambda: bool(workers("engine")))  # they take seconds
    started = descendants(run.process.pid)
    assert run.stop() == 0, run.output.read_text()
    assert "Traceback" not in run.output.read_text()
    assert json.loads((run.folder / "status.json").read_text())["state"] == "stopped"
    assert events_of(run.folder) == ["stopped"]
    deadline = time.monotonic() + 60
    while still_running(started) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not still_running(started)


def largest_file(folder: Path) -> int:
    while True:
        with contextlib.suppress(FileNotFoundError):  # the run deletes old checkpoints meanwhile
            return max(path.stat().st_size for path in folder.rglob("*.pt"))


def test_a_run_continues_after_a_checkpoint_failed_for_lack_of_space(tmp_path: Path) -> None:
    run = ForkedCommand(tmp_path / "run", "rl.steps=3000")
    try:
        run.until_step(1)
        run.until(lambda: bool(list_checkpoints(run.folder / "checkpoints")))
        largest = largest_file(run.folder / "checkpoints")
        resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (largest // 2, resource.RLIM_INFINITY))
        run.until(lambda: "checkpoint_failed" in events_of(run.folder))
        failed = json.loads((run.folder / "events.jsonl").read_text().splitlines()[0])
        assert "no space" in failed["message"]
        checkpoints = [path.name for path in list_checkpoints(run.folder / "checkpoints")]
        assert f"step_{failed['step']:06d}" not in checkpoints
        assert checkpoints[-1] in failed["message"]
        run.until(lambda: "no space" in run.output.read_text())  # printed after the event
        resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        run.until(lambda: list_checkpoints(run.folder / "checkpoints")[-1].name > f"step_{failed['step']:06d}")
        assert run.stop() == 0
    finally:
        run.end()
    assert steps_of(run.folder) == list(range(1, steps_of(run.folder)[-1] + 1))
    assert not list((run.folder / "checkpoints").glob(".*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small disk for a run directory."""
    folder = tmp_path / "run"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small disk takes root (tests/unit/test_disk.py needs none): {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    path = folder / "checkpoints" / "other_data"
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return path


@pytest.mark.long
def test_a_run_survives_a_full_disk_and_writes_its_data_later(small_disk: Path) -> None:
    run = ForkedCommand(small_disk, "rl.steps=3000", "agent.max_context=400")
    try:
        run.until_step(1)
        other_data = fill(small_disk)
        run.until(lambda: "waits in memory" in run.output.read_text())
        step = json.loads((small_disk / "status.json").read_text())["step"]
        run.until(lambda: json.loads((small_disk / "status.json").read_text() or "{}").get("step", 0) > step + 3)
        other_data.unlink()
        run.until(lambda: "disk_room" in events_of(small_disk))
        fill(small_disk)
        run.until(lambda: run.output.read_text().count("waits in memory") > 1)
        assert run.stop() == 0
    finally:
        run.end()
    assert "Traceback" not in run.output.read_text()
    assert json.loads((small_disk / "status.json").read_text())["state"] == "stopped"
    (small_disk / "checkpoints" / "other_data").unlink()
    last = list_checkpoints(small_disk / "checkpoints")[-1]
    steps = int(last.name[-6:]) + 2
    resumed = ForkedCommand(small_disk, f"rl.steps={steps}", "agent.max_context=400", "--resume")
    assert resumed.wait() == 0, resumed.output.read_text()
    assert steps_of(small_disk) == list(range(1, steps + 1))
    assert json.loads((small_disk / "status.json").read_text())["state"] == "finished"


@pytest.mark.long
def test_no_space_for_the_first_checkpoint_is_one_line(small_disk: Path) -> None:
    run = ForkedCommand(small_disk)
    run.until(lambda: (small_disk / "status.json").exists())
    fill(small_disk)
    assert run.wait() == 1
    assert "Traceback" not in run.output.read_text()
    assert run.output.read_text().splitlines()[-1].startswith("agentgym-rl: no space on the disk of")
    assert json.loads((small_disk / "status.json").read_text())["state"] == "failed"
