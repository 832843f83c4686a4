"""Shared state of a run's actors: the current weights and worker failures."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from agentgym_rl.transport.buckets import WeightSource
from agentgym_rl.transport.device import DeviceWeights, Endpoint
from agentgym_rl.transport.host_memory import HostWeights

MAX_FAILED_LOADS = 3
"""Times in a row that an engine may die while loading weights."""


@dataclass(frozen=True, slots=True)
class Published:
    """A version of the weights and where to read it: at most one of `host`, `refs` and `on_device`."""

    version: int
    node: str
    """Ray's id of the first rank's node."""
    host: HostWeights | None
    """Host memory, if every engine is on that node."""
    refs: list[Any]
    """References to buckets in Ray's object store."""
    probe: Any
    """The learner's log-probabilities of some tokens, to check engines against."""
    on_device: DeviceWeights | None = None
    """A transfer to one engine from a rank on its device."""

    @property
    def pending(self) -> bool:
        """Whether engines that got no transfer on a device must wait until the weights are written."""
        return self.host is None and not self.refs and self.on_device is None

    def is_for(self, endpoint: Endpoint | None) -> bool:
        """Return whether an engine whose last endpoint is this one can load it."""
        return self.on_device is None or self.on_device.endpoint == endpoint

    @property
    def route(self) -> str:
        if self.host is None:
            return f"in {len(self.refs)} buckets through Ray's object store"
        return f"through {self.host.size / 1e9:.3g} GB of host memory that all engines map"

    @contextlib.asynccontextmanager
    async def source(self, node: str) -> AsyncIterator[WeightSource | None]:
        """Open the weights for an engine on `node`. Yields None if a newer version has replaced them."""
        with contextlib.ExitStack() as stack:
            if self.on_device is not None:
                yield self.on_device
                return
            if self.host is None:
                yield [await ref for ref in self.refs]
                return
            try:
                source: WeightSource | None = [stack.enter_context(self.host.locked())] if node == self.node else None
            except FileNotFoundError:
                source = None
            yield source


class SharedState:
    """An actor that lives as long as the run."""

    def __init__(self) -> None:
        self._published: Published | None = None
        self._events: list[dict[str, Any]] = []
        self._last_kinds: dict[str, str] = {}
        self._started_loads: dict[str, int] = {}
        self._failures: dict[str, str] = {}

    def pid(self) -> int:
        return os.getpid()

    def publish(self, published: Published) -> None:
        self._published = published
        if published.host is not None and published.host.page_lock_error:
            self.report("the first learner", "weights_slow", published.host.page_lock_error)

    def published(self) -> Published | None:
        """Return the current weights, or None if there are none yet."""
        return self._published

    def start_load(self, worker: str) -> str:
        """Record that an engine starts to load weights. Return a fatal error if it died of it too often."""
        count = self._started_loads.get(worker, 0)
        if count >= MAX_FAILED_LOADS:
            reason = self._failures.get(worker, "its process ended without an error message")
            return f"gave up: it died {count} times in a row while loading weights, last error: {reason}"
        self._started_loads[worker] = count + 1
        return ""

    def loaded(self, worker: str) -> None:
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
