"""Versions of the weights from ranks to engines, over three ways.

An engine that shares a device with a rank is lent them there (transport/device.py): every rank gathers all tensors
anyway. The others read memory of the node, where all of them are on that of the first rank, or buckets from Ray's
object store. Those two last, a version that was lent is nowhere but in engines: so while these play the first rank
writes it too, for whichever engine dies and is started again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.scale.plan import Plan
from agentgym_rl.scale.shared_state import Published
from agentgym_rl.scale.watch import require_none_failed
from agentgym_rl.transport.device import Door, LentWeights

LEND = "AGENTGYM_RL_LEND"
"""Environment variable of the driver: `never`, or `always`: on CPUs too, which is there for tests."""
POLITE_S = 60.0
"""Granted to a process to say why another one failed."""


class EngineGone(Exception):
    """It died, or cannot be reached, and will be back."""


class Reach(Protocol):
    """What can be asked of a run's processes."""

    plan: Plan

    def ask_ranks(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Begin `method(*arguments[rank])` on every rank, after all that was asked of them before."""
        ...

    async def answers_of(self, asked: list[Any]) -> list[Any]: ...

    async def ask_engine(self, index: int, method: str, *arguments: Any) -> Any:
        """EngineGone, or EngineError if it cannot do it."""
        ...

    async def engine_back(self, index: int) -> None: ...

    async def on_board(self, method: str, *arguments: Any) -> Any: ...


def lends(plan: Plan) -> bool:
    """Whether ranks and engines are to look for each other on devices."""
    said = os.environ.get(LEND, "")
    if said not in ("", "never", "always"):
        raise ConfigError(f"{LEND} = {said!r}: set it to never or always, or not at all")
    return plan.layout == "colocated" and (said == "always" or (said == "" and plan.device == "cuda"))


def pairs(ranks: Sequence[str], doors: Mapping[int, Door]) -> dict[int, int]:
    """{engine: rank on its device}. Where several ranks are on one they take turns."""
    found: dict[int, int] = {}
    for index, door in sorted(doors.items()):
        there = [rank for rank, device in enumerate(ranks) if device == door.device]
        if there:
            found[index] = min(there, key=lambda rank: list(found.values()).count(rank))
    return found


class Publisher:
    """Of one run."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self.version = -1
        self.behind: dict[int, asyncio.Task[None]] = {}
        """Engines that missed an update, and who waits for each to be back."""
        self.one_node = False
        """Whether engines and the first rank are on one."""
        self._devices: list[str] = []
        """Of ranks."""
        self._whole: asyncio.Future[Published] | None = None
        """The last version, for engines that were not lent it."""

    def tasks(self) -> Iterator[asyncio.Future[Any]]:
        yield from self.behind.values()
        if self._whole is not None:
            yield self._whole

    async def publish(self, version: int) -> str:
        """When this returns every engine samples with the learner's weights; one that is down asks for them later.
        Says how they went."""
        require_none_failed(self.behind.values())
        if self._whole is not None:
            await self._whole
        doors, gone = await self._expecting(version) if lends(self._reach.plan) else ({}, [])
        lenders = {i: (rank, doors[i]) for i, rank in pairs(self._devices, doors).items()}
        rest = [i for i in range(self._reach.plan.engines) if i not in lenders and i not in gone]
        probe = (await self._on_ranks("call", ("probe",)))[0] if lenders else None
        ways = {}
        if rest or not lenders:
            published = await self._write(version, self._ask_to_write(version, probe))
            self._whole = asyncio.get_running_loop().create_future()
            self._whole.set_result(published)
            await asyncio.gather(*(self._load(i, published) for i in rest))
            ways[published.way] = rest
        else:
            await self._reach.on_board("publish", Published(version, "", None, [], probe))
        if lenders:
            gone += await self._lend(version, probe, lenders)
            ways["on the device that each shares with a learner"] = list(lenders)
        if lenders and not rest:
            # Asked now, so that ranks do it before they learn on.
            self._whole = asyncio.create_task(self._write(version, self._ask_to_write(version, probe)))
        for index in gone:
            self._load_later(index, version)
        self.version = version
        return _told(ways)

    async def _expecting(self, version: int) -> tuple[dict[int, Door], list[int]]:
        """({engine: its door}, engines that are gone)."""
        if not self._devices:
            self._devices = await self._on_ranks("device")
        engines = range(self._reach.plan.engines)
        asked = [self._reach.ask_engine(i, "expect", version) for i in engines]
        found = await asyncio.gather(*asked, return_exceptions=True)
        gone = [i for i, door in enumerate(found) if isinstance(door, EngineGone)]
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, EngineGone):
                raise error
        return {i: door for i, door in enumerate(found) if isinstance(door, Door)}, gone

    async def _lend(self, version: int, probe: Any, lenders: dict[int, tuple[int, Door]]) -> list[int]:
        """Returns which engines died meanwhile."""
        size = self._reach.plan.bucket_mb << 20
        doors: list[list[Door]] = [[] for _ in self._devices]
        for rank, door in lenders.values():
            doors[rank].append(door)
        asked = self._reach.ask_ranks("lend", [(version, size, some) for some in doors])
        ranks = asyncio.create_task(self._reach.answers_of(asked))
        loads = {
            i: asyncio.create_task(self._taken(i, Published(version, "", None, [], probe, LentWeights(door, version))))
            for i, (_, door) in lenders.items()
        }
        taken = asyncio.gather(*loads.values())
        try:
            await asyncio.wait({ranks, taken}, return_when=asyncio.FIRST_COMPLETED)
            # An engine may fail because its rank died, or while its rank waits for it.
            failed = taken.done() and taken.exception() is not None
            await asyncio.wait({ranks}, timeout=POLITE_S if failed else None)
            left_out = {name: why for some in (ranks.result() if ranks.done() else []) for name, why in some.items()}
            await asyncio.wait({taken}, timeout=POLITE_S if left_out else None)
            if not taken.done():
                (index, *_) = (i for i, load in loads.items() if not load.done())
                why = left_out.get(lenders[index][1].name, "it takes longer than an engine that was not served")
                raise EngineError(f"engine {index} was not lent weights {version}: {why}")
            return [i for i, alive in zip(loads, taken.result(), strict=True) if not alive]
        finally:
            for task in (ranks, *loads.values()):
                task.cancel()
            await asyncio.gather(ranks, *loads.values(), taken, return_exceptions=True)

    async def _taken(self, index: int, published: Published) -> bool:
        """Whether the engine is alive, and then has these weights or later ones."""
        try:
            found = await self._reach.ask_engine(index, "load", published)
        except EngineGone:
            return False
        if found < published.version and published.lent is not None:
            return False  # it died since it opened its door, and is back already
        if found < published.version:
            raise EngineError(
                f"engine {index} should have taken version {published.version} of the weights, it has {found}"
            )
        return True

    async def _load(self, index: int, published: Published) -> None:
        if not await self._taken(index, published):
            self._load_later(index, published.version)

    def _load_later(self, index: int, version: int) -> None:
        """Started again it asks the board; if it was only out of reach, it has to be told."""
        if (earlier := self.behind.get(index)) is not None:
            require_none_failed([earlier])
            earlier.cancel()  # it would wait for the same engine, with weights that are old
        self.behind[index] = asyncio.create_task(self._loaded_when_back(index, version))

    async def _loaded_when_back(self, index: int, version: int) -> None:
        await self._reach.engine_back(index)
        if version >= self.version:  # greater while other engines still take it
            assert self._whole is not None
            await self._load(index, await asyncio.shield(self._whole))

    def _ask_to_write(self, version: int, probe: Any) -> list[Any]:
        arguments = (version, self._reach.plan.bucket_mb << 20, self.one_node, probe)
        return self._reach.ask_ranks("put_weights", [arguments] * self._reach.plan.learners)

    async def _write(self, version: int, asked: list[Any]) -> Published:
        """Where every engine can read it, and the board says so."""
        published = (await self._reach.answers_of(asked))[0]
        await self._reach.on_board("publish", published)
        return published

    async def _on_ranks(self, method: str, arguments: tuple[Any, ...] = ()) -> list[Any]:
        return await self._reach.answers_of(self._reach.ask_ranks(method, [arguments] * self._reach.plan.learners))


def _told(ways: Mapping[str, list[int]]) -> str:
    """Of which engines, where there are several ways."""
    if len(ways) == 1:
        return next(iter(ways))
    return "; ".join(f"{', '.join(map(str, indices))} {way}" for way, indices in ways.items())
