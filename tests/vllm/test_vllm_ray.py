"""Ray engine actors with vLLM: weights are sent by the rank on the same device or broadcast, also after a restart, and
replies come through Ray's calls."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from cluster_for_tests import PATIENT, events_of, steps_of, workers
from runs_for_tests import counting_config, quiet
from vllm_for_tests import make_model, save, vllm_processes

from agentgym_rl.commands.train import train
from agentgym_rl.run.log import read_metrics, read_trajectories
from agentgym_rl.transport.device import DEVICE_WEIGHTS_VARIABLE
from agentgym_rl.types import StopReason

pytest.importorskip("ray")

STEPS = 12
"""Steps of less than half a second, enough for another process to poll and kill meanwhile."""


def kill_the_scheduler(folder: Path) -> None:
    """Kill vLLM's EngineCore after the first step. The engine's actor survives it."""
    give_up_at = time.monotonic() + 1500
    while not steps_of(folder):
        assert time.monotonic() < give_up_at, "there was no first step"
        time.sleep(0.05)
    (actor,) = workers("engine")
    os.kill(vllm_processes(actor)[0], signal.SIGKILL)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", ["disaggregated", "colocated"])
async def test_adapters_of_two_ranks_reach_a_vllm_of_two_workers(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without their frozen weights: broadcast, or to each worker from the rank that shares its device."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # else each worker wants a NUMA node of its own
    monkeypatch.setenv(DEVICE_WEIGHTS_VARIABLE, "always")
    config = counting_config(
        model={"path": str(save(make_model(0), tmp_path / "base")), "lora": {"rank": 4}},
        warm_start=None,
        engine={"kind": "vllm", "tensor_parallel": 2, "eager": True, "kv_cache_gib": 0.25, "memory_share": 0.2},
        scale={"learners": 2, "layout": layout, "object_store_mb": 100, "worker_timeout_s": 1500},
        rl={
            "steps": 3,
            "groups_per_step": 2,
            "group_size": 4,
            "kl_coef": 0.0,
            "entropy_coef": 0.1,
            "zero_variance": "keep",
            "optimizer": {"lr": 0.05},
        },
        horizon={"kind": "fixed", "turns": [2]},
        environments=[{"name": "keydoor", "subsets": ["near"]}],
        eval={"episodes": 4, "max_turns": 2},
    )
    await train(config, tmp_path / "run", console=quiet())
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["mismatch/abs"] < 1e-4 for row in rows)
    assert all(row["grad/norm"] > 0 for row in rows)


@pytest.mark.timeout(1800)
async def test_a_run_continues_when_vllm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PATIENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(DEVICE_WEIGHTS_VARIABLE, "always")
    config = counting_config(
        model__scratch__hidden_size=64,
        environments=[{"name": "keydoor", "subsets": ["near"]}],
        engine={"kind": "vllm", "eager": True, "kv_cache_gib": 0.25, "memory_share": 0.2},
        scale={"layout": "colocated", "object_store_mb": 100, "worker_timeout_s": 1500},
        rl__entropy_coef=0.01,
        rl__zero_variance="keep",
        rl__steps=STEPS,
    )
    folder = tmp_path / "run"
    before = vllm_processes(os.getpid())  # of other tests
    killed = asyncio.create_task(asyncio.to_thread(kill_the_scheduler, folder))
    await train(config, folder, console=quiet())
    await killed
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert events_of(folder) == ["engine_lost", "engine_started"]
    assert all(row["mismatch/abs"] < 1e-4 for row in rows)
    for step in range(1, STEPS + 1):
        played = list(read_trajectories(folder / "trajectories" / f"step_{step:06d}.jsonl"))
        assert all(t.stop is not StopReason.ERROR for t in played)
        assert {m.version for t in played for m in t.messages if m.role == "assistant"} == {step - 1}
    assert vllm_processes(os.getpid()) == before
