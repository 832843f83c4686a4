"""Shared state of a run's actors: events, and why workers ended."""

from __future__ import annotations

from typing import Any


class SharedState:
    """An actor that lives as long as the run."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._last_kinds: dict[str, str] = {}
        self._failures: dict[str, str] = {}

    def failed(self, worker: str, reason: str) -> None:
        self._failures[worker] = reason

    def failure(self, worker: str) -> str:
        """Return why the worker ended last."""
        return self._failures.pop(worker, "its process ended without an error message")

    def report(self, worker: str, kind: str, message: str) -> None:
        """Record an event. Repeated events of one kind are recorded once, because several hosts notice one death."""
        if self._last_kinds.get(worker) != kind:
            self._last_kinds[worker] = kind
            self._events.append({"kind": kind, "message": f"{worker} {message}"})

    def drain(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events
