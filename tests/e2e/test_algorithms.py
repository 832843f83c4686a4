"""Every algorithm really learns: KeyDoor's short layouts on the CPU, from a model that has only seen random play."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import algorithms

STEPS = {
    "PPO": 30,
    "GRPO": 60,
    "RLOO": 60,
    "REINFORCE++": 60,
    "GiGPO": 60,
    "AgentEvol": 30,
    "DPO": 62,
}
"""Of 128 episodes each; offline methods play as many in rounds of their own."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All of them from one starting model, two processes at a time."""
    folder = tmp_path_factory.mktemp("algorithms")
    jobs = [(arm, 0, folder, True, steps, 128) for arm, steps in STEPS.items()]
    return {result["arm"]: result for result in algorithms.play_all([0], jobs, processes=2)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("arm", STEPS)
def test_it_reaches_nine_tenths_of_the_optimum(results: dict[str, dict[str, Any]], arm: str) -> None:
    before, after = results[arm]["before"], results[arm]["after"]
    assert before["success"] < 0.3
    assert after["episodes"] == before["episodes"] == 40
    assert after["success"] >= 0.9, f"{arm}: {[(e['step'], e['success']) for e in results[arm]['evaluations']]}"
