"""Sends versions of the weights from ranks to engines, in one of three ways.

An engine that shares a device with a rank gets them there (transport/device.py), because every rank gathers all tensors
anyway. The other engines map host memory, if all of them are on the first rank's node, or read buckets from Ray's
object store. Weights sent on a device exist only in the engines. So the first rank also writes them to one of the other
two places while episodes are played, for an engine that dies and restarts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.scale.resource_plan import Plan
from agentgym_rl.scale.shared_state import Published
from agentgym_rl.scale.watch import require_none_failed
from agentgym_rl.transport.device import DEVICE_WEIGHTS_VARIABLE, DeviceWeights, Endpoint

OLD_DEVICE_WEIGHTS_VARIABLE = "AGENTGYM_RL_LEND"
"""Earlier name of the variable, still read."""
REPORT_TIMEOUT_S = 60.0
"""Seconds that a process has to report why another one failed."""


class EngineLost(Exception):
    """The engine died or cannot be reached. It will be restarted."""


class EngineLink(Protocol):
    """Calls to a run's ranks, engines and shared state."""

    plan: Plan

    def start_on_ranks(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Start `method(*arguments[rank])` on every rank, after all earlier calls."""

    async def results_of(self, calls: list[Any]) -> list[Any]: ...

    async def call_engine(self, index: int, method: str, *arguments: Any) -> Any:
        """Return the engine's answer. Raises EngineLost, or EngineError if the call failed."""

    async def wait_for_engine(self, index: int) -> None: ...

    async def call_state(self, method: str, *arguments: Any) -> Any: ...


def shares_device_memory(plan: Plan) -> bool:
    """Return whether ranks send weights to engines on their own device."""
    setting = os.environ.get(DEVICE_WEIGHTS_VARIABLE, os.environ.get(OLD_DEVICE_WEIGHTS_VARIABLE, ""))
    if setting not in ("", "never", "always"):
        raise ConfigError(f"{DEVICE_WEIGHTS_VARIABLE} must be never, always or unset, got {setting!r}")
    return plan.layout == "colocated" and (setting == "always" or (setting == "" and plan.device == "cuda"))


def match_engines(rank_devices: Sequence[str], endpoints: Mapping[int, Endpoint]) -> dict[int, int]:
    """Return {engine: rank on its device}. Ranks that share a device serve its engines in turn."""
    matches: dict[int, int] = {}
    for index, endpoint in sorted(endpoints.items()):
        ranks = [rank for rank, device in enumerate(rank_devices) if device == endpoint.device]
        if ranks:
            matches[index] = min(ranks, key=lambda rank: list(matches.values()).count(rank))
    return matches


class Publisher:
    """Publishes the weights of one run."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self.version = -1
        self.outdated: dict[int, asyncio.Task[None]] = {}
        """Engines that missed an update, with the task that waits for each to return."""
        self.one_node = False
        """Whether all engines are on the first rank's node."""
        self._rank_devices: list[str] = []
        self._full_copy: asyncio.Future[Published] | None = None
        """The last version outside of engines."""

    def tasks(self) -> Iterator[asyncio.Future[Any]]:
        yield from self.outdated.values()
        if self._full_copy is not None:
            yield self._full_copy

    async def publish(self, version: int) -> str:
        """Load the learner's weights into every engine that is up; the others load them when they return.
        Return a description of how the weights were sent."""
        require_none_failed(self.outdated.values())
        if self._full_copy is not None:
            await self._full_copy
        endpoints, lost = await self._open_endpoints(version) if shares_device_memory(self._link.plan) else ({}, [])
        on_device = {i: (rank, endpoints[i]) for i, rank in match_engines(self._rank_devices, endpoints).items()}
        others = [i for i in range(self._link.plan.engines) if i not in on_device and i not in lost]
        probe = (await self._on_ranks("call", ("probe",)))[0] if on_device else None
        routes = {}
        if others or not on_device:
            published = await self._write(version, self._start_writing(version, probe))
            self._full_copy = asyncio.get_running_loop().create_future()
            self._full_copy.set_result(published)
            await asyncio.gather(*(self._load(i, published) for i in others))
            routes[published.route] = others
        else:
            await self._link.call_state("publish", Published(version, "", None, [], probe))
        if on_device:
            lost += await self._send_on_device(version, probe, on_device)
            routes["on the device that each shares with a learner"] = list(on_device)
        if on_device and not others:
            # Started now, so that ranks write the weights before they change them.
            self._full_copy = asyncio.create_task(self._write(version, self._start_writing(version, probe)))
        for index in lost:
            self._load_when_back(index, version)
        self.version = version
        return _describe(routes)

    async def _open_endpoints(self, version: int) -> tuple[dict[int, Endpoint], list[int]]:
        """Return ({engine: its endpoint}, lost engines)."""
        if not self._rank_devices:
            self._rank_devices = await self._on_ranks("device")
        engines = range(self._link.plan.engines)
        calls = [self._link.call_engine(i, "open_endpoint", version) for i in engines]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        lost = [i for i, answer in enumerate(answers) if isinstance(answer, EngineLost)]
        for error in answers:
            if isinstance(error, BaseException) and not isinstance(error, EngineLost):
                raise error
        return {i: answer for i, answer in enumerate(answers) if isinstance(answer, Endpoint)}, lost

    async def _send_on_device(self, version: int, probe: Any, engines: dict[int, tuple[int, Endpoint]]) -> list[int]:
        """Return the engines that died meanwhile."""
        bucket_bytes = self._link.plan.bucket_mb << 20
        endpoints: list[list[Endpoint]] = [[] for _ in self._rank_devices]
        for rank, endpoint in engines.values():
            endpoints[rank].append(endpoint)
        calls = self._link.start_on_ranks("send_weights", [(version, bucket_bytes, served) for served in endpoints])
        ranks = asyncio.create_task(self._link.results_of(calls))
        loads = {}
        for i, (_, endpoint) in engines.items():
            published = Published(version, "", None, [], probe, DeviceWeights(endpoint, version))
            loads[i] = asyncio.create_task(self._loaded(i, published))
        loaded = asyncio.gather(*loads.values())
        try:
            await asyncio.wait({ranks, loaded}, return_when=asyncio.FIRST_COMPLETED)
            # An engine may fail because its rank died, or while its rank waits for it.
            failed = loaded.done() and loaded.exception() is not None
            await asyncio.wait({ranks}, timeout=REPORT_TIMEOUT_S if failed else None)
            skipped = {name: why for result in (ranks.result() if ranks.done() else []) for name, why in result.items()}
            await asyncio.wait({loaded}, timeout=REPORT_TIMEOUT_S if skipped else None)
            if not loaded.done():
                (index, *_) = (i for i, load in loads.items() if not load.done())
                why = skipped.get(engines[index][1].name, "it did not finish after another engine was skipped")
                raise EngineError(f"engine {index} did not get weights {version}: {why}")
            return [i for i, alive in zip(loads, loaded.result(), strict=True) if not alive]
        finally:
            for task in (ranks, *loads.values()):
                task.cancel()
            await asyncio.gather(ranks, *loads.values(), loaded, return_exceptions=True)

    async def _loaded(self, index: int, published: Published) -> bool:
        """Return whether the engine is alive and has these weights or later ones."""
        try:
            version = await self._link.call_engine(index, "load", published)
        except EngineLost:
            return False
        if version < published.version and published.on_device is not None:
            return False  # it restarted after it had opened its endpoint
        if version < published.version:
            raise EngineError(f"engine {index} needs version {published.version} of the weights, it has {version}")
        return True

    async def _load(self, index: int, published: Published) -> None:
        if not await self._loaded(index, published):
            self._load_when_back(index, published.version)

    def _load_when_back(self, index: int, version: int) -> None:
        """Load the weights later. A restarted engine fetches them itself, one that was only unreachable does not."""
        if (earlier := self.outdated.get(index)) is not None:
            require_none_failed([earlier])
            earlier.cancel()  # it waits for the same engine, with older weights
        self.outdated[index] = asyncio.create_task(self._wait_and_load(index, version))

    async def _wait_and_load(self, index: int, version: int) -> None:
        await self._link.wait_for_engine(index)
        if version >= self.version:  # greater while other engines still load it
            assert self._full_copy is not None
            await self._load(index, await asyncio.shield(self._full_copy))

    def _start_writing(self, version: int, probe: Any) -> list[Any]:
        arguments = (version, self._link.plan.bucket_mb << 20, self.one_node, probe)
        return self._link.start_on_ranks("put_weights", [arguments] * self._link.plan.learners)

    async def _write(self, version: int, calls: list[Any]) -> Published:
        """Wait until every engine can read the weights, and publish where they are."""
        published = (await self._link.results_of(calls))[0]
        await self._link.call_state("publish", published)
        return published

    async def _on_ranks(self, method: str, arguments: tuple[Any, ...] = ()) -> list[Any]:
        return await self._link.results_of(self._link.start_on_ranks(method, [arguments] * self._link.plan.learners))


def _describe(routes: Mapping[str, list[int]]) -> str:
    """Return the route, with its engines if there are several routes."""
    if len(routes) == 1:
        return next(iter(routes))
    return "; ".join(f"{', '.join(map(str, indices))} {route}" for route, indices in routes.items())
