"""Several engines behind one: who gets which trajectory."""

from __future__ import annotations

import asyncio

import pytest
from scripted_engine_for_tests import ScriptedEngine

from agentgym_rl.agent.engines.replicas import MIN_BACKOFF_S, Replicas
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


async def test_a_trajectory_keeps_its_engine_and_new_ones_go_to_the_least_busy() -> None:
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


class Mortal(Counting):
    """Fails while it is `dead`, for requests and for weights."""

    dead = False

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        await asyncio.sleep(0)
        if self.dead:
            self.served.append(session)
            raise EngineError("connection refused")
        return await super().generate(prompt_ids, sampling, session)

    async def update_weights(self, source: object, version: int) -> None:
        if self.dead:
            raise EngineError("connection refused")
        await super().update_weights(source, version)


async def play(replicas: Replicas, session: str, turns: int = 3) -> bool:
    """Return whether all turns of an episode are answered."""
    try:
        for _ in range(turns):
            await replicas.generate([1], Sampling(1), session)
    except EngineError:
        return False
    finally:
        await replicas.release(session)
    return True


async def test_no_episode_is_lost_to_one_dead_replica_of_four() -> None:
    engines = [Mortal() for _ in range(4)]
    replicas = Replicas(engines)
    engines[2].dead = True
    places = asyncio.Semaphore(32)

    async def episode(number: int) -> bool:
        async with places:
            return await play(replicas, f"s{number}")

    assert all(await asyncio.gather(*(episode(n) for n in range(256))))
    assert len(engines[2].served) <= 32 / 4  # those that were under way when it was first heard of
    (event,) = replicas.drain_events()
    assert event == {
        "kind": "replica_lost",
        "message": "engine replica 2 failed, its episodes continue on the others: connection refused",
    }


async def test_a_replica_that_died_is_tried_by_one_request_after_its_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("agentgym_rl.agent.engines.replicas.monotonic", lambda: now)
    engines = [Mortal(), Mortal()]
    replicas = Replicas(engines)
    engines[0].dead = True
    assert await play(replicas, "first")
    assert await play(replicas, "second")
    assert engines[0].served == ["first"]
    now += MIN_BACKOFF_S
    assert all(await asyncio.gather(*(play(replicas, f"again{n}") for n in range(8))))
    assert len(engines[0].served) == 2, "one request tries it"
    now += MIN_BACKOFF_S
    assert await play(replicas, "not yet")
    assert len(engines[0].served) == 2, "the back-off is longer now"
    now += MIN_BACKOFF_S
    engines[0].dead = False
    replicas.drain_events()
    assert await play(replicas, "back")
    assert engines[0].served[2:] == ["back"] * 3
    assert [event["kind"] for event in replicas.drain_events()] == ["replica_back"]


async def test_a_turn_moves_when_its_replica_dies_and_a_fatal_request_fails() -> None:
    engines = [Mortal(), Mortal()]
    replicas = Replicas(engines)
    await replicas.generate([1], Sampling(1), "s")
    engines[0].dead = True
    await replicas.generate([1, 1], Sampling(1), "s")
    assert engines[1].served == ["s"]
    assert engines[0].released == ["s"]
    engines[1].dead = True
    with pytest.raises(EngineError, match="connection refused"):
        await replicas.generate([1, 1, 1], Sampling(1), "s")


async def test_a_replica_without_the_new_weights_is_left_out_until_it_loads_newer_ones() -> None:
    engines = [Mortal(), Mortal()]
    replicas = Replicas(engines)
    engines[0].dead = True
    await replicas.update_weights(None, 1)
    assert replicas.version == 1
    engines[0].dead = False
    assert all([await play(replicas, f"s{n}") for n in range(4)])
    assert engines[0].served == []
    await replicas.update_weights(None, 2)
    assert [event["kind"] for event in replicas.drain_events()] == ["replica_lost", "replica_back"]
    assert await play(replicas, "back")
    assert engines[0].served == ["back"] * 3
    engines[0].dead = engines[1].dead = True
    with pytest.raises(EngineError, match="connection refused"):
        await replicas.update_weights(None, 3)
