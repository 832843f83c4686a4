"""SIGTERM, Ctrl-C and a full disk: what was learned is kept, and said."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_for_tests import PATIENT, Command, ForkedCommand, descendants, events_of, steps_of, tokens, workers
from envs_for_tests import Counting
from runs_for_tests import counting_config, final_weights, quiet

from agentgym_rl.agent.engines.vllm.guard import owned
from agentgym_rl.commands.train import train
from agentgym_rl.config import Config
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.backend import LocalBackend
from agentgym_rl.run.console import Console
from agentgym_rl.run.run import Run
from agentgym_rl.run.stopping import Stopped
from agentgym_rl.training.checkpoint import list_checkpoints


def test_sigterm_writes_a_checkpoint_and_the_resumed_run_is_the_same(tmp_path: Path) -> None:
    whole = ForkedCommand(tmp_path / "whole" / "run")
    cut = Command(tmp_path / "cut" / "run", "checkpoint.every=100")  # as a person starts it
    cut.until_step(1)  # and not after three more
    assert cut.stop() == 0, cut.output.read_text()
    status = json.loads((cut.folder / "status.json").read_text())
    assert status["state"] == "stopped"
    assert events_of(cut.folder) == ["stopped"]
    (last,) = list_checkpoints(cut.folder / "checkpoints")[-1:]
    assert last.name == f"step_{steps_of(cut.folder)[-1]:06d}"
    assert steps_of(cut.folder)[-1] < 4
    again = ForkedCommand(cut.folder, "checkpoint.every=100", "--resume")
    assert again.wait() == 0, again.output.read_text()
    assert whole.wait() == 0, whole.output.read_text()
    assert steps_of(cut.folder) == [1, 2, 3, 4]
    assert tokens(cut.folder) == tokens(whole.folder)


async def test_sigterm_while_a_checkpoint_is_written_stops_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Run.save

    def asked_meanwhile(run: Run) -> None:
        if run.step == 1 and not run.stop.asked:
            os.kill(os.getpid(), signal.SIGTERM)
        save(run)

    monkeypatch.setattr(Run, "save", asked_meanwhile)
    with pytest.raises(Stopped, match="after step 1"):
        await train(counting_config(), tmp_path / "run", console=quiet(), pool=LocalPool({"counting": Counting}))
    assert events_of(tmp_path / "run") == ["stopped"]


async def test_a_step_that_has_a_checkpoint_is_not_saved_again_when_the_run_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, saved = LocalBackend.save, []

    def counted(workers: LocalBackend, root: Path, step: int, *rest: Any) -> None:
        saved.append(step)
        save(workers, root, step, *rest)
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(LocalBackend, "save", counted)
    with pytest.raises(Stopped, match="after step 1: go on with --resume"):
        await train(counting_config(), tmp_path / "run", console=quiet(), pool=LocalPool({"counting": Counting}))
    assert saved == [0, 1]


@pytest.mark.parametrize("method", ["rl", "sft"])
async def test_resuming_falls_back_to_the_newest_complete_checkpoint_and_says_so(method: str, tmp_path: Path) -> None:
    def config() -> Config:
        if method == "rl":
            return counting_config()
        changes = {"method": "sft", "data": {"play": "random", "episodes": 48}, "sft": {"batch_size": 16}}
        raw = counting_config().model_dump(exclude={"rl", "horizon", "warm_start", "dpo", "agentevol"})
        return Config.model_validate(raw | changes)

    async def run(*, resume: bool = False) -> str:
        said = io.StringIO()
        pool = LocalPool({"counting": Counting})
        await train(config(), tmp_path / "run", console=Console(said), pool=pool, resume=resume)
        return said.getvalue()

    await run()
    weights = final_weights(tmp_path / "run")
    first, last = list_checkpoints(tmp_path / "run" / "checkpoints")
    (last / "model" / "config.json").unlink()
    said = " ".join((await run(resume=True)).split())
    line = f"{last.name} is not complete (model/config.json is missing) and is kept as broken_{last.name}: using"
    assert f"{line} {first.name}" in said
    assert events_of(tmp_path / "run") == ["checkpoint_incomplete"]
    assert all(torch.equal(weights[name], value) for name, value in final_weights(tmp_path / "run").items())
    for folder in (first, last):
        (folder / "trainer.pt").unlink()
    with pytest.raises(ConfigError, match=r"no checkpoint in .* is complete \(step_\d+: trainer\.pt is missing; step_"):
        await run(resume=True)


def test_sigterm_before_rl_is_a_stop_too_and_resuming_makes_up_for_it(tmp_path: Path) -> None:
    """In the warm start, of which nothing is kept, and in the first evaluation, before which it is."""
    folder, few = tmp_path / "run", ("rl.steps=1", "warm_start.sft.epochs=60")
    run = ForkedCommand(folder, *few, "eval.episodes=5000")
    run.until(lambda: (folder / "trajectories" / "warmstart_000000.jsonl").exists())
    assert run.stop() == 0, run.output.read_text()
    assert (
        "stopped by SIGTERM before its first checkpoint: --resume starts from the beginning" in run.output.read_text()
    )
    assert json.loads((folder / "status.json").read_text())["state"] == "stopped"
    assert not list_checkpoints(folder / "checkpoints")
    run = ForkedCommand(folder, *few, "eval.episodes=5000", "--resume")
    run.until(lambda: "before RL" in run.output.read_text())
    assert run.stop() == 0, run.output.read_text()
    assert json.loads((folder / "status.json").read_text())["state"] == "stopped"
    assert events_of(folder) == ["stopped", "stopped"]
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["step_000000"]
    run = ForkedCommand(folder, *few, "eval.episodes=6", "--resume")
    assert run.wait() == 0, run.output.read_text()
    assert "Traceback" not in run.output.read_text()
    assert run.output.read_text().count("Warm start") == 2, "the second one is kept"
    summary = json.loads((folder / "summary.json").read_text())
    assert [(one["step"], one["episodes"]) for one in summary["evaluations"]] == [(0, 6), (1, 6)]


def test_the_first_ctrl_c_writes_a_checkpoint_and_says_how_to_go_on(tmp_path: Path) -> None:
    run = ForkedCommand(tmp_path / "run", "checkpoint.every=100", "rl.steps=3000")
    run.until_step(1)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 0, run.output.read_text()
    said = run.output.read_text()
    assert "press Ctrl-C again to end at once" in said
    last = steps_of(run.folder)[-1]
    assert f"stopped by Ctrl-C after step {last}: go on with --resume" in said
    assert "Traceback" not in said
    assert json.loads((run.folder / "status.json").read_text())["state"] == "stopped"
    assert events_of(run.folder) == ["stopped"]
    assert list_checkpoints(run.folder / "checkpoints")[-1].name == f"step_{last:06d}"


def test_the_second_ctrl_c_ends_a_run_at_once(tmp_path: Path) -> None:
    run = ForkedCommand(tmp_path / "run", "rl.epochs=1000000")  # its first step would take hours to learn from
    run.until((run.folder / "trajectories" / "step_000001.jsonl").exists)
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: "press Ctrl-C again" in run.output.read_text())
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == -signal.SIGINT
    said = run.output.read_text()
    assert "ended at once: --resume goes on from the last checkpoint" in said
    assert "Traceback" not in said
    status = json.loads((run.folder / "status.json").read_text())
    assert (status["state"], status["error"]) == ("stopped", "ended at once by Ctrl-C")
    assert [path.name for path in list_checkpoints(run.folder / "checkpoints")] == ["step_000000"]


def test_processes_of_vllm_do_not_hear_of_ctrl_c() -> None:
    with owned():
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child.send_signal(signal.SIGINT)
    child.communicate(b"\n")
    assert child.returncode == 0
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def alive(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("moment", ["ranks imitate", pytest.param("engines are made", marks=pytest.mark.long)])
def test_sigterm_while_a_cluster_starts_leaves_nothing_running(
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
    give_up_at = time.monotonic() + 60
    while alive(started) and time.monotonic() < give_up_at:
        time.sleep(0.1)
    assert not alive(started)


def largest_file(folder: Path) -> int:
    while True:
        with contextlib.suppress(FileNotFoundError):  # the run goes on: old checkpoints are deleted meanwhile
            return max(path.stat().st_size for path in folder.rglob("*.pt"))


def test_no_room_for_a_checkpoint_keeps_the_old_one_and_the_run_goes_on(tmp_path: Path) -> None:
    run = ForkedCommand(tmp_path / "run", "rl.steps=3000")
    try:
        run.until_step(1)
        run.until(lambda: bool(list_checkpoints(run.folder / "checkpoints")))
        largest = largest_file(run.folder / "checkpoints")
        resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (largest // 2, resource.RLIM_INFINITY))
        run.until(lambda: "checkpoint_failed" in events_of(run.folder))
        failed = json.loads((run.folder / "events.jsonl").read_text().splitlines()[0])
        assert "no room" in failed["message"]
        there = [path.name for path in list_checkpoints(run.folder / "checkpoints")]
        assert f"step_{failed['step']:06d}" not in there
        assert there[-1] in failed["message"]
        assert "no room" in run.output.read_text()
        resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        run.until(lambda: list_checkpoints(run.folder / "checkpoints")[-1].name > f"step_{failed['step']:06d}")
        assert run.stop() == 0
    finally:
        run.end()
    assert steps_of(run.folder) == list(range(1, steps_of(run.folder)[-1] + 1))
    assert not list((run.folder / "checkpoints").glob(".*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own for a run directory."""
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
    path = folder / "checkpoints" / "somebody_elses"
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return path


def test_a_full_disk_does_not_end_a_run_and_is_made_up_for(small_disk: Path) -> None:
    run = ForkedCommand(small_disk, "rl.steps=3000", "agent.max_context=400")
    try:
        run.until_step(1)
        theirs = fill(small_disk)
        run.until(lambda: "waits in memory" in run.output.read_text())
        step = json.loads((small_disk / "status.json").read_text())["step"]
        run.until(lambda: json.loads((small_disk / "status.json").read_text() or "{}").get("step", 0) > step + 3)
        theirs.unlink()
        run.until(lambda: "disk_room" in events_of(small_disk))
        fill(small_disk)
        run.until(lambda: run.output.read_text().count("waits in memory") > 1)
        assert run.stop() == 0
    finally:
        run.end()
    assert "Traceback" not in run.output.read_text()
    assert json.loads((small_disk / "status.json").read_text())["state"] == "stopped"
    (small_disk / "checkpoints" / "somebody_elses").unlink()
    last = list_checkpoints(small_disk / "checkpoints")[-1]
    steps = int(last.name[-6:]) + 2
    again = ForkedCommand(small_disk, f"rl.steps={steps}", "agent.max_context=400", "--resume")
    assert again.wait() == 0, again.output.read_text()
    assert steps_of(small_disk) == list(range(1, steps + 1))
    assert json.loads((small_disk / "status.json").read_text())["state"] == "finished"


def test_no_room_for_the_first_checkpoint_is_one_line(small_disk: Path) -> None:
    run = ForkedCommand(small_disk)
    run.until(lambda: (small_disk / "status.json").exists())
    fill(small_disk)
    assert run.wait() == 1
    assert "Traceback" not in run.output.read_text()
    assert run.output.read_text().splitlines()[-1].startswith("agentgym-rl: no room on the disk of")
    assert json.loads((small_disk / "status.json").read_text())["state"] == "failed"
