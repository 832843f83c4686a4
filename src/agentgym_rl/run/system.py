"""Load and memory of the machines of a run, logged with each step as `system/...`."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

SAMPLE_INTERVAL_S = 1.0
"""Seconds between samples of the GPUs."""
GIB = 1 << 30
ENGINE_NAMES = {
    "system/gpu_busy": "system/engine_gpu_busy",
    "system/gpu_memory_gib": "system/engine_gpu_memory_gib",
}
"""Names under which the GPUs of engines are logged, if these have GPUs of their own."""
_log = logging.getLogger(__name__)


class SystemMonitor:
    """Measures the host, and the GPUs that this process uses, from one call of `metrics` to the next.

    `devices`: numbers of the GPUs among those that CUDA_VISIBLE_DEVICES shows. Values that a system does not report are
    left out. Without the package nvidia-ml-py (NVML) there is no busy share, and no memory until CUDA is in use here.
    """

    def __init__(self, devices: Sequence[int] = ()) -> None:
        self._devices = devices
        self._cpu_times = _cpu_times()
        self._busy: list[float] = []
        self._gpu_bytes = 0
        self._lock = threading.Lock()
        if devices and torch.cuda.is_available():
            threading.Thread(target=_sample_gpus, args=(weakref.ref(self),), daemon=True).start()

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
        """Return the mean busy share of the GPUs and the most memory in use on one of them, by all processes."""
        with self._lock:
            busy, used = self._busy, self._gpu_bytes
            self._busy, self._gpu_bytes = [], 0
        found = {"system/gpu_busy": sum(busy) / len(busy)} if busy else {}
        return found | ({"system/gpu_memory_gib": used / GIB} if used else {})

    def sample(self, nvml: Any) -> None:
        samples = [_sample_gpu(device, nvml) for device in self._devices]
        with self._lock:
            self._gpu_bytes = max(self._gpu_bytes, *(used for _, used in samples))
            self._busy += [busy for busy, _ in samples if busy is not None]


def _sample_gpus(reference: weakref.ref[SystemMonitor]) -> None:
    """Sample until the monitor is no longer referenced or a device fails. A pass on a failed device reports it."""
    pause, nvml = threading.Event(), _load_nvml()
    try:
        while not pause.wait(SAMPLE_INTERVAL_S) and (monitor := reference()) is not None:
            monitor.sample(nvml)
            del monitor
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        _log.warning("GPUs are no longer sampled for system/gpu_*: %s: %s", type(error).__name__, reason)


def devices_of(device: str) -> tuple[int, ...]:
    """Return the numbers of the GPUs that a torch device names: that of `cuda:1`, the first for `cuda`."""
    return (torch.device(device).index or 0,) if device.startswith("cuda") else ()


def _load_nvml() -> Any:
    """Return the module of NVML, or None if it is not installed or finds no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    return pynvml


def _sample_gpu(device: int, nvml: Any) -> tuple[float | None, int]:
    """Return (busy share, bytes in use by all processes) of a GPU. NVML takes no memory on it; CUDA would."""
    if nvml is not None:
        # NVML numbers all GPUs of the machine; torch knows which of them this process sees.
        handle = nvml.nvmlDeviceGetHandleByIndex(torch.cuda._get_nvml_device_index(device))
        used = nvml.nvmlDeviceGetMemoryInfo(handle).used
        try:
            return nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0, used
        except nvml.NVMLError:  # a part of a GPU (MIG) does not report it
            return None, used
    if not torch.cuda.is_initialized():
        return None, 0
    free, total = torch.cuda.mem_get_info(device)
    return None, total - free


_process_monitor: SystemMonitor | None = None


def metrics_of_process(_: Any) -> dict[str, float]:
    """Return the metrics of this process and all GPUs that it sees, since the last call. For actors of a cluster."""
    global _process_monitor
    if _process_monitor is None:
        _process_monitor = SystemMonitor(range(torch.cuda.device_count()))
    return _process_monitor.metrics()


def join_metrics(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the `system/` metrics of several processes as one: the mean of busy GPUs, the maximum of all others."""
    joined: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in results for name in metrics if name.startswith("system/")):
        values = [metrics[name] for metrics in results if name in metrics]
        joined[name] = sum(values) / len(values) if name.endswith("gpu_busy") else max(values)
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
