"""Load and memory of the machine as metrics."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentgym_rl.run import system
from agentgym_rl.run.backend_ray import system_metrics
from agentgym_rl.run.system import SystemMonitor, devices_of, join_metrics, metrics_of_process

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


def test_processes_report_the_mean_of_busy_shares_and_the_most_of_everything_else() -> None:
    ranks = [
        {"system/gpu_busy": 0.5, "system/gpu_memory_gib": 3.0, "system/cpu_busy": 0.2, "loss": 1.0},
        {"system/gpu_busy": 1.0, "system/cpu_busy": 0.4},
        {},
    ]
    assert join_metrics(ranks) == {"system/gpu_busy": 0.75, "system/gpu_memory_gib": 3.0, "system/cpu_busy": 0.4}
    assert join_metrics([{"loss": 1.0}]) == {}


class Cluster:
    """Engines that answer with the load of their machine."""

    def __init__(self, layout: str) -> None:
        self.plan = SimpleNamespace(layout=layout)

    def ask_engines(self, method: str, function: Any, timeout_s: float) -> list[dict[str, float]]:
        assert (method, function) == ("__ray_call__", metrics_of_process)
        return [{"system/gpu_busy": 0.1, "system/cpu_busy": 0.9}, {"system/gpu_busy": 0.3}]


def test_engines_with_their_own_gpus_have_their_own_metrics() -> None:
    ranks = [{"system/gpu_busy": 0.5, "system/cpu_busy": 0.2}]
    shared = {"system/gpu_busy": 0.5, "system/cpu_busy": 0.2}
    assert system_metrics(Cluster("colocated"), ranks) == shared
    apart = system_metrics(Cluster("disaggregated"), ranks)
    assert apart == pytest.approx({"system/gpu_busy": 0.5, "system/cpu_busy": 0.9, "system/engine_gpu_busy": 0.2})


def test_a_process_reports_its_host_from_the_first_call() -> None:
    assert {"system/load", "system/memory_share"} <= metrics_of_process(None).keys()


@pytest.mark.parametrize(("device", "expected"), [("cuda", (0,)), ("cuda:1", (1,)), ("cpu", ())])
def test_the_device_of_the_run_is_the_one_that_is_sampled(device: str, expected: tuple[int, ...]) -> None:
    assert devices_of(device) == expected


class Nvml:
    """NVML of a machine whose GPU number n has n GiB in use and is busy for a tenth of n. Number 9 has failed."""

    NVMLError = ZeroDivisionError

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 9:
            raise RuntimeError("GPU is lost\nand more")
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=handle << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle == 5:
            raise ZeroDivisionError
        return SimpleNamespace(gpu=10 * handle)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose GPUs this process sees as CUDA_VISIBLE_DEVICES says."""
    monkeypatch.setattr(system, "SAMPLE_INTERVAL_S", 0.001)
    monkeypatch.setattr(system, "_load_nvml", Nvml)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


def sampled(*devices: int) -> dict[str, float]:
    """Return the first metrics of GPUs. The thread that samples them ends with its monitor."""
    before = set(threading.enumerate())
    monitor = SystemMonitor(devices)
    (thread,) = set(threading.enumerate()) - before
    while not (metrics := monitor.gpu()):
        time.sleep(0.001)
    del monitor
    thread.join(60)
    assert not thread.is_alive()
    return metrics


def test_the_sampled_gpu_is_the_one_that_the_process_sees(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2,5")
    assert sampled(1) == pytest.approx({"system/gpu_busy": 0.2, "system/gpu_memory_gib": 2.0})
    assert sampled(0, 1) == pytest.approx({"system/gpu_busy": 0.25, "system/gpu_memory_gib": 3.0})
    assert sampled(2) == {"system/gpu_memory_gib": 5.0}, "it does not report how busy it is"


def test_a_failing_gpu_ends_the_sampling_with_one_line_in_the_log(
    gpus: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    before = set(threading.enumerate())
    monitor = SystemMonitor([0])
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert [record.getMessage() for record in caplog.records] == [
        "GPUs are no longer sampled for system/gpu_*: RuntimeError: GPU is lost"
    ]
    assert (monitor.gpu(), failures) == ({}, [])


def test_system_metrics_are_documented_and_drawn_under_their_names() -> None:
    names = set(re.findall(r'"(system/\w+)"', (ROOT / "src/agentgym_rl/run/system.py").read_text()))
    assert len(names) == 8
    described = (ROOT / "docs/reference/run-directory.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in described] == []
    drawn = set(re.findall(r'"(system/\w+)"', (ROOT / "src/agentgym_rl/viewer/static/curves.js").read_text()))
    assert drawn == names - {"system/memory_gib"}, "its share is drawn"
