"""Killed processes: vLLM's end with their owner, and pending calls fail when vLLM's die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes_for_tests import alive
from vllm_for_tests import SMALL, vllm_processes

from agentgym_rl.agent.engines.vllm import VllmEngine
from agentgym_rl.errors import EngineError
from agentgym_rl.run.backend_vllm import VllmAdapter
from agentgym_rl.types import Sampling


@pytest.mark.timeout(900)
def test_vllm_ends_with_the_process_that_started_it(folders: dict[str, Path]) -> None:
    paths = os.pathsep.join(str(Path(__file__).parents[i]) for i in (0, 1))
    owner = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("owner_for_tests.py"), folders["A"]],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    assert "started\n" in owner.stdout
    processes = vllm_processes(owner.pid)
    assert processes
    owner.kill()
    owner.wait()
    give_up_at = time.monotonic() + 60
    while left := [pid for pid in processes if alive(pid)]:
        assert time.monotonic() < give_up_at, f"still there: {left}"
        time.sleep(0.2)


@pytest.mark.timeout(900)
async def test_pending_calls_fail_when_vllm_dies(folders: dict[str, Path]) -> None:
    engine = VllmEngine(folders["A"], **SMALL)
    adapter = VllmAdapter(engine)
    await engine.start()
    try:
        reply = asyncio.create_task(engine.generate([5, 6, 7], Sampling(400), "a"))
        await asyncio.sleep(0.1)
        update = asyncio.create_task(engine.update_weights(folders["B"], 1))  # waits for the reply
        await asyncio.sleep(0.1)
        assert not any((reply.done(), update.done(), adapter.died))
        os.kill(vllm_processes(os.getpid())[0], signal.SIGKILL)
        told = await asyncio.wait_for(asyncio.gather(reply, update, return_exceptions=True), 120)
        assert [type(error) for error in told] == [EngineError, EngineError], told
        assert adapter.died
    finally:
        await engine.close()
    assert vllm_processes(os.getpid()) == []


async def test_an_engine_that_was_not_started_ignores_sleep(folders: dict[str, Path]) -> None:
    """Like an engine that was restarted just before the learner on its device works."""
    engine = VllmEngine(folders["A"], options={"enable_sleep_mode": True}, **SMALL)
    assert engine.can_sleep
    await VllmAdapter(engine).sleep()
    assert not engine.started
