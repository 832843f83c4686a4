"""Engine actors on Ray that are vLLM: weights come through Ray's object store, replies through its calls."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cluster_for_tests import PATIENT
from runs_for_tests import counting_config, quiet
from vllm_for_tests import vllm_processes

from agentgym_rl.runlog import read_metrics, read_trajectories
from agentgym_rl.train import train
from agentgym_rl.types import StopReason

pytest.importorskip("ray")


@pytest.mark.timeout(1800)
async def test_two_steps_of_reinforcement_learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PATIENT.items():
        monkeypatch.setenv(name, value)
    config = counting_config(
        model__scratch__hidden_size=64,
        environments=[{"name": "keydoor", "subsets": ["near"]}],
        engine={"kind": "vllm", "eager": True, "kv_cache_gib": 0.25, "memory_share": 0.2},
        scale={"layout": "colocated", "object_store_mb": 100, "worker_timeout_s": 1500},
        rl__entropy_coef=0.01,
        rl__zero_variance="keep",
    )
    await train(config, tmp_path / "run", console=quiet())
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["mismatch/abs"] < 1e-4 for row in rows)
    for step in (1, 2):
        played = list(read_trajectories(tmp_path / "run" / "trajectories" / f"step_{step:06d}.jsonl"))
        assert all(t.stop is not StopReason.ERROR for t in played)
        assert {m.version for t in played for m in t.messages if m.role == "assistant"} == {step - 1}
    assert vllm_processes(os.getpid()) == []
