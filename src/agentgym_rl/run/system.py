"""Load and memory of the machine a process runs on, logged with each step as `system/...`."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch

SAMPLE_INTERVAL_S = 1.0
"""Seconds between samples of the GPU."""
GIB = 1 << 30


class SystemMonitor:
    """Measures the host, and the GPU of this process if it has one, from one call of `metrics` to the next.

    Values that a system does not report are left out: a GPU's busy share needs the package nvidia-ml-py.
    """

    def __init__(self) -> None:
        self._cpu_times = _cpu_times()
        self._busy: list[float] = []
        self._gpu_bytes = 0
        self._lock = threading.Lock()
        if torch.cuda.is_available():
            threading.Thread(target=self._sample_gpu, daemon=True).start()

    def metrics(self) -> dict[str, float]:
        return self.host() | self.gpu()

    def host(self) -> dict[str, float]:
        """Return the busy share of all cores since the last call, the load average and the used memory."""
        found: dict[str, float] = {}
        before, self._cpu_times = self._cpu_times, _cpu_times()
        if before and self._cpu_times and self._cpu_times[1] > before[1]:
            found["system/cpu_busy"] = (self._cpu_times[0] - before[0]) / (self._cpu_times[1] - before[1])
        if hasattr(os, "getloadavg"):
            found["system/load"] = os.getloadavg()[0]
        memory = _memory()
        if memory:
            found["system/memory_gib"] = (memory["MemTotal"] - memory["MemAvailable"]) / GIB
            found["system/memory_share"] = 1.0 - memory["MemAvailable"] / memory["MemTotal"]
        return found

    def gpu(self) -> dict[str, float]:
        """Return the mean busy share of the GPU and the most memory in use on it, by all processes."""
        with self._lock:
            busy, used = self._busy, self._gpu_bytes
            self._busy, self._gpu_bytes = [], 0
        found = {"system/gpu_busy": sum(busy) / len(busy)} if busy else {}
        return found | ({"system/gpu_memory_gib": used / GIB} if used else {})

    def _sample_gpu(self) -> None:
        pause, has_nvml = threading.Event(), True
        while not pause.wait(SAMPLE_INTERVAL_S):
            if not torch.cuda.is_initialized():
                continue  # asking would take memory on the device
            free, total = torch.cuda.mem_get_info()
            busy = None
            if has_nvml:
                try:
                    busy = torch.cuda.utilization() / 100.0
                except (ModuleNotFoundError, RuntimeError):  # no nvidia-ml-py, or a device that does not say
                    has_nvml = False
            with self._lock:
                self._gpu_bytes = max(self._gpu_bytes, total - free)
                self._busy += [] if busy is None else [busy]


def over_ranks(results: list[dict[str, float]]) -> dict[str, float]:
    """Return GPU metrics of several ranks as one: the mean of busy shares, the maximum of memory."""
    joined: dict[str, float] = {}
    for name in ("system/gpu_busy", "system/gpu_memory_gib"):
        values = [metrics[name] for metrics in results if name in metrics]
        if values:
            joined[name] = sum(values) / len(values) if name.endswith("busy") else max(values)
    return joined


def _cpu_times() -> tuple[float, float] | None:
    """Return (busy, total) jiffies of all cores since the machine started, if the system reports them."""
    try:
        numbers = [float(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return None
    idle = numbers[3] + numbers[4]  # also waiting for a disk
    return sum(numbers) - idle, sum(numbers)


def _memory() -> dict[str, int]:
    """Return MemTotal and MemAvailable in bytes, if the system reports them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    found = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if len(line.split()) > 1}
    return {name: found[name] for name in ("MemTotal", "MemAvailable")} if "MemAvailable" in found else {}
