"""SIGTERM and a full disk: what was learned is kept, and said."""

from __future__ import annotations

import contextlib
import json
import resource
from pathlib import Path

from cluster_for_tests import Command, events_of, steps_of, tokens

from agentgym_rl.training.checkpoint import list_checkpoints


def test_sigterm_writes_a_checkpoint_and_the_resumed_run_is_the_same(tmp_path: Path) -> None:
    whole = Command(tmp_path / "whole" / "run")
    cut = Command(tmp_path / "cut" / "run", "checkpoint.every=100")
    cut.until_step(1)  # and not after three more
    assert cut.stop() == 0, cut.output.read_text()
    status = json.loads((cut.folder / "status.json").read_text())
    assert status["state"] == "stopped"
    assert events_of(cut.folder) == ["stopped"]
    (last,) = list_checkpoints(cut.folder / "checkpoints")[-1:]
    assert last.name == f"step_{steps_of(cut.folder)[-1]:06d}"
    assert steps_of(cut.folder)[-1] < 4
    again = Command(cut.folder, "checkpoint.every=100", "--resume")
    assert again.wait() == 0, again.output.read_text()
    assert whole.wait() == 0, whole.output.read_text()
    assert steps_of(cut.folder) == [1, 2, 3, 4]
    assert tokens(cut.folder) == tokens(whole.folder)


def largest_file(folder: Path) -> int:
    while True:
        with contextlib.suppress(FileNotFoundError):  # the run goes on: old checkpoints are deleted meanwhile
            return max(path.stat().st_size for path in folder.rglob("*.pt"))


def test_no_room_for_a_checkpoint_keeps_the_old_one_and_the_run_goes_on(tmp_path: Path) -> None:
    run = Command(tmp_path / "run", "rl.steps=3000")
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
