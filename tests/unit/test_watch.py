"""The driver's monitoring: SIGTERM, threads, nodes and the connection."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from agentgym_rl.errors import ConfigError, WorkerLost
from agentgym_rl.scale.watch import Background, Nodes, Threads, connecting, keep_sigterm_handler


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


async def test_a_pending_call_is_abandoned_when_a_task_fails() -> None:
    background, loop = Background(), asyncio.get_running_loop()

    async def ends_later(error: Exception | None) -> None:
        await asyncio.sleep(0.01)
        if error is not None:
            raise error

    def call() -> asyncio.Future[Any]:
        return loop.create_future()

    answer = call()
    loop.call_later(0.05, answer.set_result, "an answer")
    await background.start(ends_later(None))
    background.start(ends_later(None)).cancel()
    assert await background.unless_one_fails(answer) == "an answer"
    cancelled = asyncio.create_task(background.unless_one_fails(call()))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    pending = [call(), call()]
    waiting = asyncio.gather(*map(background.unless_one_fails, pending), return_exceptions=True)
    background.start(ends_later(WorkerLost("a rank died")))
    assert [str(error) for error in await asyncio.wait_for(waiting, 30)] == ["a rank died"] * 2
    assert all(future.cancelled() for future in pending)
    with pytest.raises(WorkerLost, match="a rank died"):
        await background.unless_one_fails(call())


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
