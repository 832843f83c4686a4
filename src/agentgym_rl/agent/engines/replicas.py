"""Several engines with the same weights behind one: a trajectory's turns all go to the engine that has its cache."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from agentgym_rl.agent.engines.base import Engine
from agentgym_rl.errors import EngineError
from agentgym_rl.types import Completion, Sampling

FIRST_BACKOFF_S = 1.0
"""A replica that failed is given no request for this long; doubled with every further failure."""
LONGEST_BACKOFF_S = 60.0
MOST_ATTEMPTS = 3
"""Replicas that one request is sent to. More would let a request that kills its engine kill all of them."""


@dataclass(slots=True)
class _Replica:
    engine: Engine
    version: int | None
    """Weights that it is known to hold; None after an update that failed."""
    sessions: int = 0
    failures: int = 0
    """Failures in a row, counted once for each back-off."""
    retry_at: float = 0.0
    """When it may be tried again, on the monotonic clock; infinite while one request tries it."""


class Replicas:
    """A session's first turn goes to the healthy engine with the fewest sessions; later ones follow it until its
    release.

    An engine that fails gets no requests for a while (back-off), and its sessions continue on the others: every request
    has the whole conversation. Then one request at a time tries it again. An engine that failed to take new weights is
    left out until it takes newer ones.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise EngineError("Replicas needs at least one engine, got none.")
        self.engines = list(engines)
        self.version = min(engine.version for engine in self.engines)
        self._replicas = [_Replica(engine, self.version) for engine in self.engines]
        self._places: dict[str, int] = {}
        self._probe: Any = None
        self._events: list[dict[str, Any]] = []

    @property
    def max_context(self) -> int:
        return min(engine.max_context for engine in self.engines)  # type: ignore[attr-defined]

    async def start(self) -> None:
        """One after the other: each start wants the whole machine for a while."""
        for engine in self.engines:
            await engine.start()  # type: ignore[attr-defined]

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        failed: set[int] = set()
        while True:
            place = await self._place(session, failed)
            replica, on_trial = self._replicas[place], self._replicas[place].failures > 0
            if on_trial:
                replica.retry_at = math.inf
            try:
                if on_trial:
                    await self._verify(replica)
                completion = await replica.engine.generate(prompt_ids, sampling, session)
            except EngineError as error:
                self._failed(place, error)
                failed.add(place)
                if len(failed) >= min(MOST_ATTEMPTS, len(self._replicas)):
                    raise
            except BaseException:
                if on_trial:  # cancelled, which says nothing about the replica
                    replica.retry_at = 0.0
                raise
            else:
                self._answered(place)
                return completion

    async def release(self, session: str) -> None:
        place = self._places.pop(session, None)
        if place is not None:
            self._replicas[place].sessions -= 1
            await self.engines[place].release(session)

    async def update_weights(self, source: Any, version: int, probe: Any = None) -> None:
        """Give every engine new weights. Fails only if none of them takes them."""
        extra = {} if probe is None else {"probe": probe}
        results = await asyncio.gather(
            *(engine.update_weights(source, version, **extra) for engine in self.engines), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, EngineError) or len(errors) == len(results):
                raise error
        self.version, self._probe = version, probe
        for place, (replica, result) in enumerate(zip(self._replicas, results, strict=True)):
            if isinstance(result, EngineError):
                replica.version = None
                self._report("replica_lost", f"engine replica {place} did not take weights {version}: {result}")
            else:
                if replica.version is None:
                    self._report("replica_back", f"engine replica {place} took weights {version} and is used again")
                replica.version, replica.failures, replica.retry_at = version, 0, 0.0

    def drain_events(self) -> list[dict[str, Any]]:
        """Replicas that were lost or came back since the last call."""
        events, self._events = self._events, []
        return events

    async def close(self) -> None:
        results = await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _place(self, session: str, failed: Collection[int]) -> int:
        """The session's engine, or another one if that may not be used."""
        place = self._places.get(session)
        if place is not None and place not in failed and self._is_up(place):
            return place
        if place is not None:
            with contextlib.suppress(EngineError):
                await self.release(session)
        usable = [i for i, replica in enumerate(self._replicas) if replica.version is not None and i not in failed]
        if not usable:
            raise EngineError(
                f"none of {len(self._replicas)} engine replicas is left for this request: look at the events of the run"
            )
        # If all are in back-off, waiting is worse than trying.
        place = min([i for i in usable if self._is_up(i)] or usable, key=lambda i: self._replicas[i].sessions)
        self._places[session] = place
        self._replicas[place].sessions += 1
        return place

    def _is_up(self, place: int) -> bool:
        replica = self._replicas[place]
        return replica.version is not None and monotonic() >= replica.retry_at

    async def _verify(self, replica: _Replica) -> None:
        """A server that was started again answers, with weights of its own: EngineError."""
        verify = getattr(replica.engine, "verify", None)
        if self._probe is None or verify is None:
            return
        await verify(self._probe)

    def _failed(self, place: int, error: EngineError) -> None:
        replica = self._replicas[place]
        now = monotonic()
        if now < replica.retry_at < math.inf:  # many requests fail of one cause
            return
        if not replica.failures:
            self._report("replica_lost", f"engine replica {place} failed, its episodes continue on the others: {error}")
        # The exponent is bounded: a replica may stay away for days.
        replica.retry_at = now + min(FIRST_BACKOFF_S * 2.0 ** min(replica.failures, 16), LONGEST_BACKOFF_S)
        replica.failures += 1

    def _answered(self, place: int) -> None:
        replica = self._replicas[place]
        if replica.failures:
            self._report("replica_back", f"engine replica {place} answers again")
            replica.failures, replica.retry_at = 0, 0.0

    def _report(self, kind: str, message: str) -> None:
        self._events.append({"kind": kind, "message": message})
