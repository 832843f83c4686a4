"""What the actors of a run tell each other by: the current weights, and what has befallen whom."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from agentgym_rl.transport.buckets import Arrived
from agentgym_rl.transport.device import Door, LentWeights
from agentgym_rl.transport.host_memory import HostWeights

MOST_LOADS = 3
"""That an engine may begin in a row and not live through."""


@dataclass(frozen=True, slots=True)
class Published:
    """A version of the weights and the way to it: at most one of three."""

    version: int
    node: str
    """The learner's, as Ray names it."""
    host: HostWeights | None
    """Where every engine is on that node."""
    refs: list[Any]
    """Or: to buckets in Ray's object store."""
    probe: Any
    """What the learner says of some tokens."""
    lent: LentWeights | None = None
    """Or: for one engine, as a rank on its device lends it."""

    @property
    def coming(self) -> bool:
        """Whether engines other than those that were lent it have to wait for a way."""
        return self.host is None and not self.refs and self.lent is None

    def is_for(self, door: Door | None) -> bool:
        """Whether an engine that opened this door last can take it."""
        return self.lent is None or self.lent.door == door

    @property
    def way(self) -> str:
        if self.host is None:
            return f"in {len(self.refs)} buckets through Ray's object store"
        return f"through {self.host.size / 1e9:.3g} GB of the node's memory, which all of them map"

    @contextlib.asynccontextmanager
    async def arrived(self, node: str) -> AsyncIterator[Arrived | None]:
        """What an engine on `node` reads; None if it is no longer there, since another version is."""
        with contextlib.ExitStack() as opened:
            if self.lent is not None:
                yield self.lent
                return
            if self.host is None:
                yield [await ref for ref in self.refs]
                return
            try:
                found: Arrived | None = [opened.enter_context(self.host.held())] if node == self.node else None
            except FileNotFoundError:
                found = None
            yield found


class Board:
    """An actor that lives as long as the run."""

    def __init__(self) -> None:
        self._published: Published | None = None
        self._events: list[dict[str, Any]] = []
        self._last: dict[str, str] = {}
        self._begun: dict[str, int] = {}
        self._why: dict[str, str] = {}

    def pid(self) -> int:
        return os.getpid()

    def publish(self, published: Published) -> None:
        self._published = published
        if published.host is not None and published.host.refused:
            self.report("the first learner", "weights_slow", published.host.refused)

    def published(self) -> Published | None:
        """The current weights; None means that there are none yet."""
        return self._published

    def loading(self, subject: str) -> str:
        """An engine is about to take weights. Why it should rather not, if so: it has died of it again and again."""
        count = self._begun.get(subject, 0)
        if count >= MOST_LOADS:
            why = self._why.get(subject, "its process ended without a word")
            return f"given up: {count} times in a row it did not live through taking weights, at last: {why}"
        self._begun[subject] = count + 1
        return ""

    def loaded(self, subject: str) -> None:
        self._begun.pop(subject, None)
        self._why.pop(subject, None)

    def failed(self, subject: str, why: str) -> None:
        self._why[subject] = why

    def report(self, subject: str, kind: str, message: str) -> None:
        """Several hosts notice one death: it is told once, until something else befalls the same worker."""
        if self._last.get(subject) != kind:
            self._last[subject] = kind
            self._events.append({"kind": kind, "message": f"{subject} {message}"})

    def drain(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events
