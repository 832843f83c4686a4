"""Sends versions of the weights from ranks to engines: the driver's side, and the two ends of a transfer.

    Publisher       decides which engines get a version how, and starts both ends
    LearnerRank     actor of a learner rank; `send_weights`
    EngineReplica   actor of an engine; `load`

An engine that shares a device with a rank gets them there (transport/device.py), because every rank gathers all tensors
anyway. The other engines get a broadcast from the ranks that own a shard (transport/broadcast.py). A broadcast needs
every engine of its group, so an engine that dies interrupts it: the others are sent the weights again, in a new group.
An engine that was restarted gets the weights that the ranks hold when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, cycle
from typing import Any, Literal, Protocol

from agentgym_rl.agent.engines.base import EngineAdapter
from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.scale.process_group import join
from agentgym_rl.scale.resource_plan import Plan
from agentgym_rl.scale.watch import Background
from agentgym_rl.transport import broadcast, device
from agentgym_rl.transport.broadcast import BroadcastWeights, Member, WeightsInterrupted, WeightSource
from agentgym_rl.transport.device import DEVICE_WEIGHTS_VARIABLE, DeviceWeights, Endpoint
from agentgym_rl.types import Completion, Sampling

OLD_DEVICE_WEIGHTS_VARIABLE = "AGENTGYM_RL_LEND"
"""Earlier name of the variable, still read."""
REPORT_TIMEOUT_S = 60.0
"""Seconds that a process has to report why another one failed."""
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
MAX_DEATHS = 3
"""Times in a row that an engine may die while it is sent weights."""
MAX_INTERRUPTIONS = 3
"""Broadcasts of one version that may be interrupted although no engine died."""


class EngineLost(Exception):
    """The engine died or cannot be reached. It will be restarted."""


class EngineLink(Protocol):
    """Calls to a run's ranks and engines."""

    plan: Plan
    store: str
    """host:port of the ranks' TCPStore."""
    submitting: contextlib.AbstractContextManager[Any]
    """Lock under which calls to ranks are started, so that all ranks run them in the same order."""
    learned: bool
    """Whether ranks have changed the weights, or were told to, since they were last published."""

    def start_on_ranks(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Start `method(*arguments[rank])` on every rank, after all earlier calls."""

    async def results_of(self, calls: list[Any]) -> list[Any]: ...

    def start_on_engine(self, index: int, method: str, *arguments: Any) -> Any:
        """Start a call. Calls of ranks among its arguments are replaced by their results."""

    async def engine_result(self, index: int, call: Any) -> Any:
        """Return the engine's answer. Raises EngineLost, or EngineError if the call failed."""

    async def wait_for_engine(self, index: int) -> None:
        """Return when the engine is alive."""

    async def wait_for_loss(self, index: int) -> None:
        """Return when the engine has died."""

    async def call_state(self, method: str, *arguments: Any) -> Any:
        """Call the run's SharedState."""

    async def abort_group(self, group: str) -> None:
        """Make every member of a broadcast's group fail."""


def shares_device_memory(plan: Plan) -> bool:
    """Return whether ranks send weights to engines on their own device."""
    setting = os.environ.get(DEVICE_WEIGHTS_VARIABLE, os.environ.get(OLD_DEVICE_WEIGHTS_VARIABLE, ""))
    if setting not in ("", "never", "always"):
        raise ConfigError(f"{DEVICE_WEIGHTS_VARIABLE} must be never, always or unset, got {setting!r}")
    return plan.layout == "colocated" and (setting == "always" or (setting == "" and plan.device == "cuda"))


Served = list[tuple[int, Endpoint]]
"""(rank, endpoint of an engine on its device)."""


def match_engines(rank_devices: Sequence[str], endpoints: Mapping[int, Sequence[Endpoint]]) -> dict[int, Served]:
    """Return {engine: its endpoints with the rank on the device of each}, of engines that have a rank on all devices.
    Ranks that share a device serve its engines in turn."""
    ranks = {device: cycle([r for r, own in enumerate(rank_devices) if own == device]) for device in rank_devices}
    return {
        index: [(next(ranks[endpoint.device]), endpoint) for endpoint in own]
        for index, own in sorted(endpoints.items())
        if all(endpoint.device in ranks for endpoint in own)
    }


class Publisher:
    """Publishes the weights of one run."""

    def __init__(self, link: EngineLink) -> None:
        self._link, self.background = link, Background()
        self.version = -1
        self.outdated: dict[int, asyncio.Task[None]] = {}
        """Engines that died, with the task that sends each the weights when it is back."""
        self._deaths: dict[int, int] = {}
        """Times in a row that each engine died while it was sent weights."""
        self._lock = asyncio.Lock()
        self._rank_devices: list[str] = []
        self._group: tuple[dict[int, str], list[Member]] | None = None
        """({engine: id of its process}, members) of the last broadcast, if its group can be used again."""

    async def publish(self, version: int) -> str:
        """Send the learner's weights to every engine that is up; the others get them when they return.
        Return a description of how the weights were sent."""
        self.background.require_none_failed()
        if not self.background.tasks:
            for index in range(self._link.plan.engines):
                self.background.start(self._watch(index))
        async with self._lock:
            engines = [i for i in range(self._link.plan.engines) if i not in self.outdated]
            ways, lost = await self._send(engines, version)
            self.version = version
        for index in lost:
            self._send_when_back(index)
        if len(ways) == 1:
            return next(iter(ways))
        return "; ".join(f"{', '.join(map(str, indices))} {way}" for way, indices in ways.items())

    async def _watch(self, index: int) -> None:
        """Notice when an engine dies, because a restarted one has no weights."""
        while True:
            await self._link.wait_for_loss(index)
            self._send_when_back(index)
            await self._link.wait_for_engine(index)

    def _send_when_back(self, index: int) -> None:
        self.background.require_none_failed()
        if index not in self.outdated:  # otherwise it still waits for the same engine
            self.outdated[index] = self.background.start(self._wait_and_send(index))

    async def _wait_and_send(self, index: int) -> None:
        while True:
            await self._link.wait_for_engine(index)
            async with self._lock:
                _, lost = await self._send([index])
                if not lost:
                    del self.outdated[index]
                    return

    async def _send(self, engines: Sequence[int], version: int | None = None) -> tuple[dict[str, list[int]], list[int]]:
        """Send a version, by default what the ranks hold. Return ({way: its engines}, engines that died)."""
        plan, ways = self._link.plan, dict[str, list[int]]()
        others, lost = await self._ask(engines, "start")
        if shares_device_memory(plan):
            if not self._rank_devices:
                calls = self._link.start_on_ranks("device", [()] * plan.learners)
                self._rank_devices = await self._link.results_of(calls)
            endpoints, died = await self._ask(list(others), "open_endpoints")
            matches = match_engines(self._rank_devices, endpoints)
            others = {i: process for i, process in others.items() if i not in (*matches, *died)}
            lost += died
            if matches:
                lost += await self._send_on_device(matches, version)
                ways["on the device that each shares with a learner"] = list(matches)
        if others:
            lost += await self._broadcast(others, version)
            senders = f"{plan.senders} learners" if plan.senders > 1 else "the first learner"
            ways[f"as a broadcast of {senders} over {_backend(plan)}"] = list(others)
        self._deaths = {i: count for i, count in self._deaths.items() if i not in engines or i in lost}
        for index in lost:
            count = self._deaths[index] = self._deaths.get(index, 0) + 1
            if count >= MAX_DEATHS:
                why = await self._link.call_state("failure", f"engine {index}")
                raise EngineError(f"engine {index} died {count} times in a row while loading weights: {why}")
        return ways, lost

    async def _ask(self, engines: Sequence[int], method: str) -> tuple[dict[int, Any], list[int]]:
        """Return ({engine: its answer}, engines that died)."""
        calls = [self._link.engine_result(i, self._link.start_on_engine(i, method)) for i in engines]
        answers = dict(zip(engines, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        lost = [i for i, answer in answers.items() if isinstance(answer, EngineLost)]
        for i, answer in answers.items():
            if isinstance(answer, BaseException) and i not in lost:
                raise answer
        return {i: answer for i, answer in answers.items() if i not in lost}, lost

    async def _send_on_device(self, engines: dict[int, Served], version: int | None) -> list[int]:
        """Return the engines that died or were restarted meanwhile. Ranks leave them out by themselves."""
        endpoints: list[list[Endpoint]] = [[] for _ in self._rank_devices]
        for rank, endpoint in chain(*engines.values()):
            endpoints[rank].append(endpoint)
        sources = {i: partial(DeviceWeights, served[0][1]) for i, served in engines.items()}
        names = {i: [endpoint.name for _, endpoint in served] for i, served in engines.items()}
        died, restarted, _ = await self._transfer(version, endpoints, sources, names)
        return died + restarted

    async def _broadcast(self, engines: dict[int, str], version: int | None) -> list[int]:
        """Send to engines, given with the ids of their processes, until all that are alive have the weights. Return
        the engines that died."""
        lost, interruptions, senders = list[int](), 0, self._link.plan.senders
        while engines:
            members = self._members_of(engines)
            targets = [*members[:senders], *[None] * (self._link.plan.learners - senders)]
            sources = {i: partial(BroadcastWeights, m) for i, m in zip(engines, members[senders:], strict=True)}
            group = members[0].group
            names = {i: [group] for i in engines}
            died, interrupted, reports = await self._transfer(version, targets, sources, names, group)
            if died or interrupted or reports:
                self._group = None
            if interrupted and not died:
                interruptions += 1
                if interruptions == MAX_INTERRUPTIONS:
                    raise EngineError(
                        f"engines {', '.join(map(str, interrupted))} did not get the weights in {interruptions} "
                        f"broadcasts, although every process is alive: {reports.get(group, 'the group failed')}"
                    )
            engines, gone = await self._ask(interrupted, "start")
            lost += died + gone
        return lost

    def _members_of(self, engines: dict[int, str]) -> list[Member]:
        """Return the senders and then the first worker of each engine, of the last group if it is the same."""
        plan = self._link.plan
        if self._group is not None and self._group[0] == engines:
            return [replace(member, is_new=False) for member in self._group[1]]
        size = plan.senders + len(engines) * plan.devices_per_engine
        ranks = (*range(plan.senders), *range(plan.senders, size, plan.devices_per_engine))
        name, common = f"weights-{uuid.uuid4().hex}", (size, plan.senders, _backend(plan), True)
        self._group = engines, [Member(name, self._link.store, rank, *common) for rank in ranks]
        return self._group[1]

    async def _transfer(
        self,
        version: int | None,
        targets: Sequence[list[Endpoint] | Member | None],
        sources: Mapping[int, Callable[[int], WeightSource]],
        names: Mapping[int, Sequence[str]],
        group: str = "",
    ) -> tuple[list[int], list[int], dict[str, str]]:
        """Start `send_weights` on ranks, to the target of each, and `load` on engines, and wait for both. Return
        (engines that died, engines that are alive and do not have the weights, why by name). `names`: those by which
        ranks report a failure. `group`: group to abort if an engine fails, because the others would wait for it."""
        link, learners = self._link, self._link.plan.learners
        with link.submitting:  # calls of the learner's thread come before all of these or after
            if version is None:
                version = self.version + link.learned
            else:
                link.learned = False
            probes = link.start_on_ranks("call", [("probe",)] * learners)
            common = (version, link.plan.bucket_mb << 20)
            sends = link.start_on_ranks("send_weights", [(*common, target) for target in targets])
            calls = {
                i: link.start_on_engine(i, "load", make(version), version, probes[0]) for i, make in sources.items()
            }
        ranks = asyncio.create_task(self._results(probes, sends))
        loads = {i: asyncio.create_task(self._loaded(i, call, version)) for i, call in calls.items()}
        pending: set[asyncio.Task[Any]] = {ranks, *loads.values()}
        reports, deadline = dict[str, str](), float("inf")
        try:
            while pending and not (ranks.done() and ranks.exception()):
                timeout_s = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
                done, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                errors = any(task.exception() for task in done)
                if ranks in done and not errors:
                    reports = {name: why for failed in ranks.result() for name, why in failed.items()}
                if errors or reports:
                    deadline = min(deadline, time.monotonic() + REPORT_TIMEOUT_S)
                if group and (errors or reports or any(load in done and not load.result() for load in loads.values())):
                    await link.abort_group(group)
            for task in (ranks, *loads.values()):  # a rank's error explains those of engines
                if task.done():
                    task.result()
            for i, load in loads.items():
                if not load.done():
                    reasons = (reports[name] for name in names[i] if name in reports)
                    why = next(reasons, "it did not finish after another engine had failed")
                    raise EngineError(f"engine {i} did not get weights {version}: {why}")
            died = [i for i, load in loads.items() if load.result() is None]
            return died, [i for i, load in loads.items() if load.result() is False], reports
        finally:
            for task in (ranks, *loads.values()):
                task.cancel()
            await asyncio.gather(ranks, *loads.values(), return_exceptions=True)

    async def _results(self, probes: list[Any], sends: list[Any]) -> list[dict[str, str]]:
        await self._link.results_of(probes)
        return await self._link.results_of(sends)

    async def _loaded(self, index: int, call: Any, version: int) -> bool | None:
        """Return whether the engine has exactly these weights, or None if it died."""
        try:
            return await self._link.engine_result(index, call) == version
        except EngineLost:
            return None


def _backend(plan: Plan) -> Literal["gloo", "nccl"]:
    """Return torch's backend for broadcasts. NCCL refuses two processes on one device."""
    return "nccl" if plan.device == "cuda" and plan.layout == "disaggregated" else "gloo"


class LearnerRank:
    """One learner rank. `make(rank, size)` returns an object with the methods that `call` names."""

    def __init__(self, make: Callable[[int, int], Any], rank: int, size: int) -> None:
        self._make, self._rank, self._size = make, rank, size
        self._work: Any = None

    def begin(self, address: str, device: str, fetch: Callable[[Any], Any]) -> None:
        """Meet the other ranks at `address`. `fetch` reads an object of the cluster's store."""
        if device == "cuda":
            device = "cuda:0"  # Ray shows this process only its own device
        # A long timeout is harmless, because Ray reports a dead rank.
        join(self._rank, self._size, f"tcp://{address}", device)
        self._work = self._make(self._rank, self._size)
        self._work.fetch = fetch

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._work, method)(*arguments)

    def device(self) -> str:
        return device.device_id()

    def send_weights(self, version: int, bucket_bytes: int, to: list[Endpoint] | Member | None) -> dict[str, str]:
        """Send the whole state to engines on this device, or as a member of a group. Returns {endpoint or group: why}
        of those that failed."""
        if isinstance(to, Member):
            return broadcast.send_weights(self._work.whole_state(), to, version, bucket_bytes)
        return {} if to is None else device.send_weights(self._work.whole_state(), version, to, bucket_bytes)


class EngineReplica:
    """An engine. `make()` returns its EngineAdapter, whose `engine` samples. `begin()` returns (the run's SharedState,
    whether this process replaces one that died)."""

    def __init__(self, make: Callable[[], EngineAdapter], begin: Any, index: int, visible_devices: str) -> None:
        if visible_devices:  # its learners', which reserve them
            os.environ[VISIBLE_DEVICES] = visible_devices
        self._adapter: Any = make()
        self._state, self._restarted = begin()
        self._name, self._process = f"engine {index}", uuid.uuid4().hex
        self._loading, self._loaded = asyncio.Lock(), asyncio.Condition()
        self._sleeping = False
        self._endpoints: list[Endpoint] = []
        self._adapter.engine.version = -1  # its first weights have not been published

    async def begin(self) -> int:
        """Return the maximum context in tokens."""
        return self._adapter.engine.max_context

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str, oldest: int = 0) -> Completion:
        """Sample with version `oldest` of the weights or a later one."""
        while True:
            await self.wait_for_weights(oldest)
            try:
                async with self._exit_if_died():
                    if self._sleeping:  # a step without an update publishes no weights
                        await self._wake()
                    return await self._adapter.engine.generate(prompt_ids, sampling, session)
            except EngineError:
                if self._adapter.version >= 0:
                    raise  # otherwise an interrupted update failed the reply: sample it with the next weights

    async def wait_for_weights(self, oldest: int = 0) -> None:
        async with self._loaded:
            await self._loaded.wait_for(lambda: self._adapter.version >= oldest)

    async def wait_for_death(self) -> None:
        """Never return: the call fails when this process dies."""
        await asyncio.Event().wait()

    async def release(self, session: str) -> None:
        await self._adapter.engine.release(session)

    async def start(self) -> str:
        """Prepare to load weights. Returns an id of this process."""
        async with self._loading, self._exit_if_died():
            await self._adapter.start()
        return self._process

    async def load(self, source: WeightSource, version: int, probe: Any = None) -> int:
        """Load a version. Returns the version it has: another one if the transfer was interrupted."""
        async with self._loading, self._exit_if_died():
            if isinstance(source, DeviceWeights) and source.endpoint not in self._endpoints:
                return self._adapter.version  # this process replaced the one that had opened the endpoint
            if self._restarted:  # no call may have noticed the death
                self._state.report.remote(self._name, "engine_lost", "died")
            try:
                await self._adapter.load(source, version, probe)
            except WeightsInterrupted:
                if self._adapter.died:
                    raise
                return self._adapter.version
            self._sleeping = False
            if self._restarted:
                message = f"was restarted and has version {version} of the weights"
                self._state.report.remote(self._name, "engine_started", message)
                self._restarted = False
        async with self._loaded:
            self._loaded.notify_all()
        return self._adapter.version

    async def open_endpoints(self) -> list[Endpoint]:
        """Prepare to load weights from the ranks on the same devices."""
        async with self._loading, self._exit_if_died():
            self._endpoints = await self._adapter.open_endpoints()
            self._sleeping = False
            return self._endpoints

    async def sleep(self) -> None:
        """Free device memory for the learner that shares it, until weights or a request arrive."""
        async with self._loading, self._exit_if_died():
            await self._adapter.sleep()
            self._sleeping = True

    async def _wake(self) -> None:
        async with self._loading:
            if self._sleeping:
                await self._adapter.wake()
                self._sleeping = False

    @contextlib.asynccontextmanager
    async def _exit_if_died(self) -> AsyncIterator[None]:
        """Exit if the engine's own processes (vLLM's) died, so that Ray restarts this actor like any dead engine."""
        try:
            yield
        except Exception as error:
            if self._adapter.died:
                message = f"lost its own processes and is restarted ({error})"
                await self._state.report.remote(self._name, "engine_lost", message)
                await self._state.failed.remote(self._name, str(error))
                os._exit(1)
            raise

    async def close(self) -> None:
        await self._adapter.engine.close()
