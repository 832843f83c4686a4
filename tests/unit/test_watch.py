"""The driver's monitoring: SIGTERM, threads, nodes and the connection."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from agentgym_rl.errors import ConfigError, WorkerLost
from agentgym_rl.scale.watch import Nodes, Threads, connecting, keep_sigterm_handler, unless_one_fails


def test_other_code_cannot_replace_the_sigterm_handler() -> None:
    def ours(number: int, frame: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, ours)
    other = signal.getsignal(signal.SIGUSR1)
    try:
        with keep_sigterm_handler():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is ours
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGUSR1, other)


async def test_closing_ends_a_thread_whose_task_was_cancelled() -> None:
    threads, begun, ended = Threads(), threading.Event(), threading.Event()

    def wait_for_ever() -> None:
        begun.set()
        try:
            threads.until(lambda seconds: False)
        finally:
            ended.set()

    task = asyncio.create_task(threads.run(wait_for_ever))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not ended.is_set()
    await threads.close()
    assert ended.is_set()
    with pytest.raises(WorkerLost, match="closed while it waited"):
        threads.require_open()


def test_waiting_ends_at_the_deadline_or_with_the_result() -> None:
    threads, asked = Threads(), []
    assert not threads.until(lambda seconds: bool(asked.append(seconds)), 0.0)
    assert asked == [0.0]
    assert threads.until(lambda seconds: 0 < seconds <= 0.5, 100.0)


async def test_a_pending_call_is_abandoned_when_a_task_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgym_rl.scale.watch.TASKS_POLL_INTERVAL_S", 0.05)
    tasks: list[asyncio.Future[Any]] = []

    async def fails_later() -> None:
        await asyncio.sleep(0.1)
        raise WorkerLost("a rank died")

    assert await unless_one_fails(asyncio.sleep(0.01, "an answer"), lambda: tasks) == "an answer"
    never = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.1, lambda: tasks.append(asyncio.ensure_future(fails_later())))
    with pytest.raises(WorkerLost, match="a rank died"):
        await asyncio.wait_for(unless_one_fails(never, lambda: tasks), 30)
    assert never.cancelled()


def test_nodes_that_come_and_go_are_events() -> None:
    def node(name: str, alive: bool = True) -> dict[str, Any]:
        return {"NodeID": name * 8, "NodeManagerAddress": f"10.0.0.{name}", "Alive": alive}

    nodes = Nodes()
    assert nodes.changes([node("1"), node("2")]) == []
    assert nodes.changes([node("1"), node("2")]) == []
    changes = nodes.changes([node("1"), node("2", alive=False), node("3")])
    assert [event["kind"] for event in changes] == ["node_lost", "node_added"]
    assert "22222222 (10.0.0.2) and its processes are gone" in changes[0]["message"]
    assert "33333333 (10.0.0.3) was added" in changes[1]["message"]


def test_a_failed_connection_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    why = r"^scale\.address = 'auto': no cluster \(`ray start` .* starts Ray for the run"
    with pytest.raises(ConfigError, match=rf"{why}\)$"), connecting("auto"):
        raise ConnectionError("no cluster\nand much more")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    with pytest.raises(ConfigError, match=rf"{why}; .*: try RAY_AUTH_MODE=token\)$"), connecting("auto"):
        raise ConnectionError("no cluster")
    with pytest.raises(ConfigError, match=r"^scale\.address = 'auto': RuntimeError \("), connecting("auto"):
        raise RuntimeError
    with pytest.raises(ConnectionError), connecting(None):
        raise ConnectionError("Ray was to be started here")
