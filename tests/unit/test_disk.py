"""A full disk: no file is damaged, the run writes its data later, and it reports the problem.

A limit on file sizes, which any user may set, simulates the full disk. tests/e2e/test_stopping.py fills a real one.
"""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgym_rl.errors import DiskFull
from agentgym_rl.run import disk
from agentgym_rl.run.log import RunLog, read_metrics, read_trajectories
from agentgym_rl.run.stopping import disk_space_or_error, last_checkpoint
from agentgym_rl.types import Message, Task, Trajectory

LONG = {f"metric/{i:030}": 0.5 for i in range(40)}
"""Metrics whose line is longer than LIMIT."""
LIMIT = 1000


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def episode(identifier: str) -> Trajectory:
    return Trajectory(id=identifier, task=Task("babyai", 1), messages=[Message("user", "x" * LIMIT)])


def state_of(root: Path) -> str:
    return json.loads((root / "status.json").read_text())["state"]


def event_kinds(root: Path) -> list[str]:
    return [row["kind"] for row in read_metrics(root / "events.jsonl")]


def test_a_line_is_appended_completely_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    disk.append(path, b"first\n")
    with file_size_limit(8), pytest.raises(OSError, match="No space left"):
        disk.append(path, b"second\n")  # the system accepts two bytes of it
    assert path.read_bytes() == b"first\n"
    with file_size_limit(6), pytest.raises(OSError, match="File too large"):
        disk.append(path, b"second\n")
    disk.append(path, b"second\n")
    assert path.read_bytes() == b"first\nsecond\n"


def test_a_small_file_is_overwritten_in_place(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.write_bytes(b'{"state": "running"}')
    disk.write_in_place(path, b'{"state": "done"}')
    assert json.loads(path.read_bytes()) == {"state": "done"}
    with file_size_limit(25):
        disk.write_in_place(path, b'{"state": "longer than there is space for"}')
    assert json.loads(path.read_bytes()) == {"state": "done"}, "a partial write would not be valid JSON"


def test_refused_lines_wait_and_are_written_in_order(tmp_path: Path) -> None:
    messages: list[str] = []
    with RunLog.create(tmp_path, {"seed": 0}, say=messages.append) as log:
        log.log(1, LONG)
        log.write_trajectory(2, episode("before"))
        with file_size_limit(LIMIT):
            for step in (2, 3):
                log.write_trajectory(step, episode(f"a{step}"))
                log.write_trajectory(step, episode(f"b{step}"))
                log.log(step, LONG)
            log.log_event("small", "fits", step=3)
            assert [row["step"] for row in read_metrics(log.metrics_path)] == [1]
            assert [row["step"] for row in log.metrics()] == [1, 2, 3]
            assert json.loads(log.status_path.read_text())["step"] == 3
            assert len(messages) == 1, "one message, not one per line"
            assert "free): what the run writes waits in memory" in messages[0]
        log.log(4, LONG)
        assert [row["step"] for row in read_metrics(log.metrics_path)] == [1, 2, 3, 4]
        assert [t.id for t in read_trajectories(log.trajectories_path(2))] == ["before", "a2", "b2"]
        assert [t.id for t in read_trajectories(log.trajectories_path(3))] == ["a3", "b3"]
    assert event_kinds(tmp_path) == ["disk_full", "small", "disk_room"]
    assert "there is space on the disk again" in messages[1]
    assert not list(tmp_path.glob(".*.tmp"))


def test_the_last_episodes_wait_and_dropped_ones_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MAX_PENDING_BYTES", 3 * LIMIT)
    with RunLog.create(tmp_path, {"seed": 0}) as log:
        with file_size_limit(LIMIT):
            for step in range(1, 7):
                log.write_trajectory(step, episode(str(step)))
                log.log(step, LONG)
        log.log(7, LONG)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 7]
    steps = sorted(int(path.stem[-6:]) for path in (tmp_path / "trajectories").iterdir())
    assert steps == [5, 6]
    assert read_metrics(tmp_path / "events.jsonl")[-1]["lines_not_written"] == 4


def test_the_status_is_correct_and_lost_lines_are_named_if_the_disk_stays_full(tmp_path: Path) -> None:
    messages: list[str] = []

    def run() -> None:
        with RunLog.create(tmp_path, {}, say=messages.append) as log:
            log.log(1, LONG)
            raise KeyboardInterrupt

    with file_size_limit(LIMIT), pytest.raises(KeyboardInterrupt):
        run()
    assert state_of(tmp_path) == "stopped"
    assert messages[-1].endswith("lost are the last lines of metrics.jsonl")
    with RunLog.create(tmp_path, {}, resume=True) as log:
        log.log(1, LONG)
    assert state_of(tmp_path) == "finished"


def test_a_file_that_the_run_needs_fails_with_one_line(tmp_path: Path) -> None:
    line = r"no space on the disk of .*free some space and run the same command with --resume"
    with file_size_limit(2), pytest.raises(DiskFull, match=line), disk_space_or_error(tmp_path / "run"):
        RunLog.create(tmp_path / "run", {"seed": 0})
    with pytest.raises(ZeroDivisionError), disk_space_or_error(tmp_path):
        raise ZeroDivisionError


async def test_the_last_checkpoint_waits_for_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runs_for_tests import context_of, counting_config

    monkeypatch.setattr("agentgym_rl.run.stopping.POLL_INTERVAL_S", 0.01)
    tries: list[int] = []

    def write() -> None:
        tries.append(1)
        size = LIMIT if len(tries) < 3 else 2 * LIMIT
        with file_size_limit(size):
            (tmp_path / "model").write_bytes(b"x" * 2 * LIMIT)

    with context_of(counting_config(), tmp_path / "run") as context:
        await last_checkpoint(write, 7, context)
        assert len(tries) == 3
        tries.clear()
        context.stop.asked = True
        await last_checkpoint(write, 7, context)
        assert len(tries) == 1, "a stopping run does not wait"
        context.stop.asked = False
        monkeypatch.setattr("agentgym_rl.run.stopping.DISK_TIMEOUT_S", -1.0)
        tries.clear()
        with pytest.raises(OSError, match="too large"):
            await last_checkpoint(write, 7, context)
    assert event_kinds(tmp_path / "run") == ["checkpoint_failed"] * 3
