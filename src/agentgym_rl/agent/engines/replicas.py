"""Several engines with the same weights as one. All turns of a trajectory go to the engine with its cache."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from agentgym_rl.agent.engines.base import Engine
from agentgym_rl.agent.engines.routing import SessionRouter
from agentgym_rl.errors import EngineError
from agentgym_rl.types import Completion, Sampling

MIN_BACKOFF_S = 1.0
"""Seconds without requests for a replica that failed. Doubled with every further failure."""
MAX_BACKOFF_S = 60.0
MAX_ATTEMPTS = 3
"""Maximum replicas that one request is sent to, so that a request that crashes engines cannot crash all."""


@dataclass(slots=True)
class _Replica:
    engine: Engine
    version: int | None
    """Version of its weights; None after a failed update."""
    failures: int = 0
    """Failures in a row, counted once for each back-off."""
    retry_at: float = 0.0
    """Monotonic time from which it may be retried; infinite while one request retries it."""


class Replicas:
    """Routes a session to a healthy engine (routing.py), and keeps it there until its release.

    An engine that fails gets no requests for a while (back-off), and its sessions continue on the others: every request
    has the whole conversation. Then one request at a time retries it. An engine that failed to load new weights is left
    out until it loads newer ones.
    """

    def __init__(self, engines: Sequence[Engine], max_sessions: int | None = None) -> None:
        """`max_sessions`: sessions of an engine up to which episodes with the same first prompt go to it."""
        if not engines:
            raise EngineError("Replicas needs at least one engine, got none.")
        self.engines = list(engines)
        self.version = min(engine.version for engine in self.engines)
        self._replicas = [_Replica(engine, self.version) for engine in self.engines]
        self._router = SessionRouter(len(self.engines), max_sessions=max_sessions)
        self._probe: Any = None
        self._events: list[dict[str, Any]] = []

    @property
    def max_context(self) -> int:
        return min(engine.max_context for engine in self.engines)  # type: ignore[attr-defined]

    async def start(self) -> None:
        """Start the engines one after the other, because each start needs the whole machine for a while."""
        for engine in self.engines:
            await engine.start()  # type: ignore[attr-defined]

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        failed: set[int] = set()
        while True:
            index = await self._assign(session, prompt_ids, failed)
            replica, is_retry = self._replicas[index], self._replicas[index].failures > 0
            if is_retry:
                replica.retry_at = math.inf
            try:
                if is_retry:
                    await self._verify(replica)
                completion = await replica.engine.generate(prompt_ids, sampling, session)
            except EngineError as error:
                self._failed(index, error)
                failed.add(index)
                if len(failed) >= min(MAX_ATTEMPTS, len(self._replicas)):
                    raise
            except BaseException:
                if is_retry:  # a cancelled request does not show whether the replica works
                    replica.retry_at = 0.0
                raise
            else:
                self._answered(index)
                return completion

    async def release(self, session: str) -> None:
        index = self._router.remove(session)
        if index is not None:
            await self.engines[index].release(session)

    async def update_weights(self, source: Any, version: int, probe: Any = None) -> None:
        """Load new weights into every engine. Fails only if all of them fail."""
        extra = {} if probe is None else {"probe": probe}
        results = await asyncio.gather(
            *(engine.update_weights(source, version, **extra) for engine in self.engines), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, EngineError) or len(errors) == len(results):
                raise error
        self.version, self._probe = version, probe
        for index, (replica, result) in enumerate(zip(self._replicas, results, strict=True)):
            if isinstance(result, EngineError):
                replica.version = None
                self._report("replica_lost", f"engine replica {index} did not load weights {version}: {result}")
            else:
                if replica.version is None:
                    self._report("replica_back", f"engine replica {index} loaded weights {version} and is used again")
                replica.version, replica.failures, replica.retry_at = version, 0, 0.0

    def drain_events(self) -> list[dict[str, Any]]:
        """Return events of lost and recovered replicas since the last call."""
        events, self._events = self._events, []
        return events

    async def close(self) -> None:
        results = await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _assign(self, session: str, prompt_ids: list[int], failed: Collection[int]) -> int:
        """Return the session's engine, or assign another one if that cannot be used."""
        index = self._router.assigned(session)
        if index is not None and index not in failed and self._is_up(index):
            return index
        if index is not None:
            with contextlib.suppress(EngineError):
                await self.release(session)
        usable = {i for i, replica in enumerate(self._replicas) if replica.version is not None and i not in failed}
        if not usable:
            raise EngineError(
                f"none of {len(self._replicas)} engine replicas is left for this request: see the events of the run"
            )
        # If all are in back-off, try one instead of waiting.
        up = {i for i in usable if self._is_up(i)} or usable
        return self._router.engine_of(session, prompt_ids, set(range(len(self._replicas))) - up)

    def _is_up(self, index: int) -> bool:
        replica = self._replicas[index]
        return replica.version is not None and monotonic() >= replica.retry_at

    async def _verify(self, replica: _Replica) -> None:
        """Raise EngineError if the replica restarted with other weights."""
        verify = getattr(replica.engine, "verify", None)
        if self._probe is None or verify is None:
            return
        await verify(self._probe)

    def _failed(self, index: int, error: EngineError) -> None:
        replica = self._replicas[index]
        now = monotonic()
        if now < replica.retry_at < math.inf:  # one cause can fail many requests
            return
        if not replica.failures:
            self._report("replica_lost", f"engine replica {index} failed, its episodes continue on the others: {error}")
        # The exponent is bounded, because a replica may be down for days.
        replica.retry_at = now + min(MIN_BACKOFF_S * 2.0 ** min(replica.failures, 16), MAX_BACKOFF_S)
        replica.failures += 1

    def _answered(self, index: int) -> None:
        replica = self._replicas[index]
        if replica.failures:
            self._report("replica_back", f"engine replica {index} answers again")
            replica.failures, replica.retry_at = 0, 0.0

    def _report(self, kind: str, message: str) -> None:
        self._events.append({"kind": kind, "message": message})
