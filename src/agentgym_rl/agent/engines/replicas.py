"""Several engines with the same weights behind one: a trajectory's turns all go to the engine that has its cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from agentgym_rl.agent.engines.base import Engine
from agentgym_rl.errors import EngineError
from agentgym_rl.types import Completion, Sampling


class Replicas:
    """A session's first turn goes to the engine with the fewest sessions; later ones follow it until its release."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise EngineError("Replicas needs at least one engine, got none.")
        self.engines = list(engines)
        self.version = min(engine.version for engine in self.engines)
        self._places: dict[str, int] = {}
        self._loads = [0] * len(self.engines)

    @property
    def max_context(self) -> int:
        return min(engine.max_context for engine in self.engines)  # type: ignore[attr-defined]

    async def start(self) -> None:
        """One after the other: each start wants the whole machine for a while."""
        for engine in self.engines:
            await engine.start()  # type: ignore[attr-defined]

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        place = self._places.get(session)
        if place is None:
            place = min(range(len(self.engines)), key=self._loads.__getitem__)
            self._places[session] = place
            self._loads[place] += 1
        return await self.engines[place].generate(prompt_ids, sampling, session)

    async def release(self, session: str) -> None:
        place = self._places.pop(session, None)
        if place is not None:
            self._loads[place] -= 1
            await self.engines[place].release(session)

    async def update_weights(self, source: Any, version: int, probe: Any = None) -> None:
        extra = {} if probe is None else {"probe": probe}
        await asyncio.gather(*(engine.update_weights(source, version, **extra) for engine in self.engines))
        self.version = version

    async def close(self) -> None:
        results = await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
