"""Shared state of a run's actors: events and engines that die while they load weights."""

from __future__ import annotations

import os
from typing import Any

MAX_FAILED_LOADS = 3
"""Times in a row that an engine may die while loading weights."""


class SharedState:
    """An actor that lives as long as the run."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._last_kinds: dict[str, str] = {}
        self._started_loads: dict[str, int] = {}
        self._failures: dict[str, str] = {}

    def pid(self) -> int:
        return os.getpid()

    def start_load(self, worker: str) -> str:
        """Record that an engine starts to load weights. Return a fatal error if it died of it too often."""
        count = self._started_loads.get(worker, 0)
        if count >= MAX_FAILED_LOADS:
            reason = self._failures.get(worker, "its process ended without an error message")
            return f"gave up: it died {count} times in a row while loading weights, last error: {reason}"
        self._started_loads[worker] = count + 1
        return ""

    def end_load(self, worker: str) -> None:
        """Record that the engine did not die of loading weights, although another process may have interrupted it."""
        self._started_loads.pop(worker, None)
        self._failures.pop(worker, None)

    def failed(self, worker: str, reason: str) -> None:
        self._failures[worker] = reason

    def report(self, worker: str, kind: str, message: str) -> None:
        """Record an event. Repeated events of one kind are recorded once, because several hosts notice one death."""
        if self._last_kinds.get(worker) != kind:
            self._last_kinds[worker] = kind
            self._events.append({"kind": kind, "message": f"{worker} {message}"})

    def drain(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events
