"""Whole runs with `engine.kind = "vllm"`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from envs_for_tests import Counting
from runs_for_tests import counting_config, quiet
from vllm_for_tests import vllm_processes

from agentgym_rl.agent.styles import STYLES
from agentgym_rl.commands.train import train
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.run.log import read_metrics, read_trajectories
from agentgym_rl.types import StopReason


@pytest.mark.timeout(1800)
async def test_two_steps_of_reinforcement_learning(tmp_path: Path) -> None:
    config = counting_config(
        model__scratch__hidden_size=64,  # vLLM's attention on a CPU knows no head narrower than 32
        engine={"kind": "vllm", "eager": True, "kv_cache_gib": 0.25, "memory_share": 0.2},
    )
    pool = LocalPool({"counting": Counting}, action_format=STYLES[config.agent.style].action_format)
    summary = await train(config, tmp_path / "run", console=quiet(), pool=pool)
    await pool.close()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (summary["steps"], len(rows)) == (2, 2)
    # What vLLM says it sampled with is what the learner finds, in float32, before and after an update.
    assert all(row["mismatch/abs"] < 1e-4 for row in rows)
    for step in (1, 2):
        played = list(read_trajectories(tmp_path / "run" / "trajectories" / f"step_{step:06d}.jsonl"))
        assert played
        assert all(t.stop is not StopReason.ERROR for t in played)
        assert {m.version for t in played for m in t.messages if m.role == "assistant"} == {step - 1}
    assert list((tmp_path / "run" / "engine").iterdir()) == [], "weights went over in memory"
    assert vllm_processes(os.getpid()) == []
