"""Several engines behind one: who gets which trajectory."""

from __future__ import annotations

import asyncio

import pytest

from agentgym_rl.agent.engines.replicas import Replicas
from agentgym_rl.agent.engines.scripted import ScriptedEngine
from agentgym_rl.errors import EngineError
from agentgym_rl.types import Completion, Sampling


class Counting(ScriptedEngine):
    """A scripted engine that remembers whom it served."""

    def __init__(self) -> None:
        super().__init__([])
        self.served: list[str] = []
        self.released: list[str] = []
        self.closed = False

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        self.served.append(session)
        return Completion([1], [0.0], "stop", self.version)

    async def release(self, session: str) -> None:
        self.released.append(session)

    async def close(self) -> None:
        self.closed = True


async def test_a_trajectory_stays_with_its_engine_and_new_ones_go_where_there_are_fewest() -> None:
    engines = [Counting(), Counting()]
    replicas = Replicas(engines)
    sessions = [f"s{n}" for n in range(6)]
    for _ in range(3):
        await asyncio.gather(*(replicas.generate([1], Sampling(1), s) for s in sessions))
    assert [len(set(e.served)) for e in engines] == [3, 3]
    assert not set(engines[0].served) & set(engines[1].served)
    for session in set(engines[0].served):
        await replicas.release(session)
    assert sorted(engines[0].released) == sorted(set(engines[0].served))
    assert engines[1].released == []
    engines[0].served.clear()
    for n in range(3):
        await replicas.generate([1], Sampling(1), f"new{n}")
    assert engines[0].served == ["new0", "new1", "new2"]
    await replicas.release("never seen")


async def test_every_replica_gets_new_weights_and_is_closed() -> None:
    engines = [Counting(), Counting()]
    replicas = Replicas(engines)
    await replicas.update_weights(None, 3)
    assert [replicas.version, *(e.version for e in engines)] == [3, 3, 3]
    await replicas.close()
    assert all(e.closed for e in engines)
    with pytest.raises(EngineError, match="at least one"):
        Replicas([])
