"""Load and memory of the machine as metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentgym_rl.run.system import SystemMonitor, over_ranks

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not Path("/proc/meminfo").is_file(), reason="needs Linux")
def test_the_host_is_measured_between_two_calls() -> None:
    monitor = SystemMonitor()
    while not (metrics := monitor.metrics()).get("system/cpu_busy"):  # the kernel's clock has a coarse tick
        sum(range(1_000_000))
    assert metrics["system/cpu_busy"] <= 1.0
    assert 0.0 < metrics["system/memory_share"] < 1.0
    assert metrics["system/memory_gib"] > 0.01
    assert metrics["system/load"] >= 0.0


def test_ranks_report_the_mean_of_busy_shares_and_the_most_memory() -> None:
    ranks = [{"system/gpu_busy": 0.5, "system/gpu_memory_gib": 3.0, "loss": 1.0}, {"system/gpu_busy": 1.0}, {}]
    assert over_ranks(ranks) == {"system/gpu_busy": 0.75, "system/gpu_memory_gib": 3.0}
    assert over_ranks([{"loss": 1.0}]) == {}


def test_system_metrics_are_documented_and_drawn_under_their_names() -> None:
    names = set(re.findall(r'"(system/\w+)"', (ROOT / "src/agentgym_rl/run/system.py").read_text()))
    assert len(names) == 6
    described = (ROOT / "docs/reference/run-directory.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in described] == []
    drawn = set(re.findall(r'"(system/\w+)"', (ROOT / "src/agentgym_rl/viewer/static/curves.js").read_text()))
    assert drawn == names - {"system/memory_gib"}, "its share is drawn"
