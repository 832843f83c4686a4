"""How each engine gets its weights, and that no wait is endless when a process fails. Processes are tasks here;
tests/e2e/test_ray_app.py has real ones."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pytest

from agentgym_rl.errors import ConfigError, EngineError, WorkerLost
from agentgym_rl.scale import publisher
from agentgym_rl.scale.publisher import (
    OLD_DEVICE_WEIGHTS_VARIABLE,
    EngineLost,
    Publisher,
    match_engines,
    shares_device_memory,
)
from agentgym_rl.scale.resource_plan import Plan
from agentgym_rl.transport.broadcast import BroadcastWeights, Member
from agentgym_rl.transport.device import DEVICE_WEIGHTS_VARIABLE, Endpoint


def plan(**changes: Any) -> Plan:
    common: dict[str, Any] = {"learners": 2, "engines": 3, "env_hosts": 1, "layout": "colocated", "device": "cuda"}
    cpus = {"learner_cpus": 1.0, "engine_cpus": 1.0, "env_host_cpus": 1.0}
    rest = {"episodes_per_host": 1, "object_store_mb": 100, "bucket_mb": 1, "worker_timeout_s": 300.0, "address": None}
    return Plan(**(common | cpus | rest | changes))


def endpoint(device: str) -> Endpoint:
    return Endpoint(f"endpoint of {device}", "", device)


@pytest.mark.parametrize(
    ("setting", "changes", "expected"),
    [
        ("", {}, True),
        ("", {"device": "cpu"}, False),
        ("", {"layout": "disaggregated"}, False),
        ("never", {}, False),
        ("always", {"device": "cpu"}, True),
        ("always", {"layout": "disaggregated"}, False),
    ],
)
def test_ranks_send_on_the_device_if_they_share_it(
    setting: str, changes: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (OLD_DEVICE_WEIGHTS_VARIABLE, DEVICE_WEIGHTS_VARIABLE):
        with monkeypatch.context() as patch:
            patch.setenv(variable, setting)
            assert shares_device_memory(plan(**changes)) is expected, variable


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_WEIGHTS_VARIABLE, "sometimes")
    with pytest.raises(ConfigError, match="AGENTGYM_RL_DEVICE_WEIGHTS must be never, always or unset, got 'sometimes'"):
        shares_device_memory(plan())


def test_a_rank_serves_engines_on_its_own_device_in_any_order() -> None:
    def ranks(rank_devices: list[str], engines: dict[int, str]) -> dict[int, list[int]]:
        endpoints = {i: [endpoint(device) for device in devices.split()] for i, devices in engines.items()}
        matches = match_engines(rank_devices, endpoints)
        assert all([e for _, e in served] == endpoints[i] for i, served in matches.items())
        return {i: [rank for rank, _ in served] for i, served in matches.items()}

    assert ranks(["a", "b"], {0: "b", 1: "a", 3: "c"}) == {0: [1], 1: [0]}
    assert ranks(["one", "one"], dict.fromkeys(range(4), "one")) == {0: [0], 1: [1], 2: [0], 3: [1]}
    assert ranks(["one", "two"], dict.fromkeys(range(2), "one")) == {0: [0], 1: [0]}
    assert ranks(["a", "b", "c", "d"], {0: "b a", 1: "c d"}) == {0: [1, 0], 1: [2, 3]}, "tensor parallelism"
    assert ranks(["a", "b"], {0: "a b", 1: "b c"}) == {0: [0, 1]}, "one without a rank on each device"


class Processes:
    """Two ranks and three engines with scripted behaviour. The third engine has its own device."""

    plan = plan(senders=2)
    store = "a store"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.submitting = threading.Lock()
        self.learned = False
        self.ranks_may_finish = asyncio.Event()
        self.ranks_may_finish.set()
        self.rank_error: Exception | None = None
        self.reports: list[dict[str, str]] = []
        """Failures that ranks report, for each transfer."""
        self.devices = ["GPU-a", "GPU-b", "GPU-c"]
        self.load_errors: dict[int, Exception] = {}
        self.versions: dict[int, int] = {}
        """Versions of engines whose transfer is interrupted."""
        self.hanging_loads: set[int] = set()
        self.groups: list[Member] = []
        self.aborted: list[str] = []
        self.restarts: dict[int, int] = {}
        self.back, self.lost = asyncio.Event(), [asyncio.Event() for _ in range(3)]
        self.back.set()

    def start_on_ranks(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        assert method == "device" or self.submitting.locked()
        self.calls.append(f"{method} {arguments[0][0]}" if arguments[0] else method)
        return [(method, values) for values in arguments]

    async def results_of(self, started: list[Any]) -> list[Any]:
        if started[0][0] == "device":
            return self.devices[:2]
        (method, _), (_, (*_, target)) = started
        if method == "call":
            return ["a probe", "a probe"]
        if isinstance(target, Member):
            assert target.rank == 1
        else:
            assert [[d.device for d in values[2]] for _, values in started] == [["GPU-a"], ["GPU-b"]]
        await self.ranks_may_finish.wait()
        if self.rank_error is not None:
            raise self.rank_error
        return [self.reports.pop() if self.reports else {}, {}]

    def start_on_engine(self, index: int, method: str, *arguments: Any) -> Any:
        return method, *arguments

    async def engine_result(self, index: int, call: Any) -> Any:
        method, *arguments = call
        if method == "start":
            return f"process {self.restarts.get(index, 0)}"
        if method == "open_endpoints":
            return [endpoint(self.devices[index])]
        source, version, (_, probe) = arguments
        assert (source.version, probe) == (version, ("probe",))
        if isinstance(source, BroadcastWeights):
            self.groups.append(source.member)
        self.calls.append(f"{type(source).__name__} {index}: {version}")
        if index in self.hanging_loads:
            await asyncio.Event().wait()
        if index in self.load_errors:
            raise self.load_errors.pop(index)
        return self.versions.pop(index, version)

    async def wait_for_engine(self, index: int) -> None:
        await self.back.wait()

    async def wait_for_loss(self, index: int) -> None:
        await self.lost[index].wait()
        self.lost[index].clear()

    async def abort_group(self, group: str) -> None:
        self.aborted.append(group)

    async def call_state(self, method: str, *arguments: Any) -> str:
        return f"{method} of {arguments[0]}"


def apart(**changes: Any) -> Plan:
    return plan(layout="disaggregated", senders=2, **changes)


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE_WEIGHTS_VARIABLE, raising=False)
    monkeypatch.setattr(publisher, "REPORT_TIMEOUT_S", 0.1)


async def test_an_engine_without_a_rank_on_its_device_gets_a_broadcast() -> None:
    processes = Processes()
    weights = Publisher(processes)
    route = await weights.publish(4)
    assert route == "0, 1 on the device that each shares with a learner; 2 as a broadcast of 2 learners over gloo"
    on_device = ["call probe", "send_weights 4", "DeviceWeights 0: 4", "DeviceWeights 1: 4"]
    assert processes.calls == ["device", *on_device, "call probe", "send_weights 4", "BroadcastWeights 2: 4"]
    assert weights.version == 4


async def test_a_group_has_a_member_for_every_worker_and_is_used_until_an_engine_is_replaced() -> None:
    processes = Processes()
    processes.plan = apart(devices_per_engine=2)
    weights = Publisher(processes)
    assert await weights.publish(0) == "as a broadcast of 2 learners over nccl"
    await weights.publish(1)
    processes.restarts = {1: 1}
    await weights.publish(2)
    first, second, third = processes.groups[:3], processes.groups[3:6], processes.groups[6:]
    assert [(m.rank, m.size, m.senders, m.backend) for m in first] == [(r, 8, 2, "nccl") for r in (2, 4, 6)]
    assert [m.group for m in second] == [m.group for m in first]
    assert {m.group for m in third}.isdisjoint(m.group for m in first)
    assert [m.is_new for m in processes.groups] == [True] * 3 + [False] * 3 + [True] * 3


async def test_an_interrupted_broadcast_is_repeated_without_the_engine_that_died() -> None:
    processes = Processes()
    processes.plan = apart()
    processes.back.clear()
    processes.load_errors, processes.versions = {1: EngineLost()}, {0: -1, 2: -1}
    processes.reports = [{"the group": "a member is gone"}]
    weights = Publisher(processes)
    await weights.publish(3)
    assert [int(call.split()[1][0]) for call in processes.calls if "Broadcast" in call] == [0, 1, 2, 0, 2]
    assert processes.groups[-1].size == 4
    assert set(processes.aborted) == {processes.groups[0].group}
    assert list(weights.outdated) == [1]
    await weights.publish(4)
    assert [m.is_new for m in processes.groups[-2:]] == [False, False], "the engines that are up keep their group"
    processes.back.set()
    await weights.outdated[1]
    assert processes.calls[-1] == "BroadcastWeights 1: 4"
    assert not weights.outdated


async def test_broadcasts_that_are_interrupted_without_a_death_end_with_the_reason() -> None:
    processes = Processes()
    processes.plan = apart(engines=1)
    weights = Publisher(processes)
    processes.engine_result = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineError, match=r"engines 0 did not get the weights in 3 broadcasts, although every process"):
        await weights.publish(0)


async def interrupted(index: int, call: Any) -> Any:
    return "process" if call[0] == "start" else -1


async def test_an_engine_that_dies_of_every_transfer_ends_the_run() -> None:
    processes = Processes()
    processes.plan = apart(engines=1)
    weights = Publisher(processes)
    processes.engine_result = partial(dying, processes)  # type: ignore[method-assign]
    await weights.publish(0)
    with pytest.raises(EngineError, match="engine 0 died 3 times in a row while loading weights: failure of engine 0"):
        await weights.outdated[0]
    assert sum("send_weights" in call for call in processes.calls) == 3


async def dying(processes: Processes, index: int, call: Any) -> Any:
    if call[0] == "start":
        return "process"
    raise EngineLost


async def test_a_restarted_engine_gets_what_the_ranks_hold_and_its_version() -> None:
    processes = Processes()
    processes.plan = apart()
    weights = Publisher(processes)
    await weights.publish(7)
    for learned, version in ((False, 7), (True, 8)):
        processes.learned = learned
        processes.lost[2].set()
        await asyncio.sleep(0.01)
        await asyncio.gather(*weights.outdated.values())
        assert processes.calls[-1] == f"BroadcastWeights 2: {version}"
        assert (weights.version, processes.learned) == (7, learned)
    await weights.publish(8)
    assert not processes.learned
    for task in weights.background.tasks:
        task.cancel()


async def test_an_engine_that_restarted_with_another_endpoint_is_sent_the_weights_again() -> None:
    processes = Processes()
    processes.plan = plan(engines=2)
    processes.versions = {1: -1}
    weights = Publisher(processes)
    match = {"GPU-a": 0, "GPU-b": 1}
    processes.results_of = partial(results, match)  # type: ignore[method-assign]
    await weights.publish(0)
    await weights.outdated[1]
    assert processes.calls[-1] == "DeviceWeights 1: 0"


async def results(match: dict[str, int], started: list[Any]) -> list[Any]:
    return list(match) if started[0][0] == "device" else [{}, {}]


async def test_a_dead_rank_is_the_reported_error_not_the_engine_that_waited_for_it() -> None:
    processes = Processes()
    processes.ranks_may_finish.clear()
    processes.load_errors = {0: EngineError("the learner is gone")}
    processes.rank_error = WorkerLost("learner rank 0 of 2 died")
    asyncio.get_running_loop().call_later(0.05, processes.ranks_may_finish.set)
    with pytest.raises(WorkerLost, match="rank 0 of 2 died"):
        await Publisher(processes).publish(0)


@pytest.mark.parametrize("layout", ["colocated", "disaggregated"])
async def test_a_failed_engine_is_the_reported_error_while_a_rank_waits_for_it(layout: str) -> None:
    processes = Processes()
    processes.plan = plan(layout=layout, senders=2)
    processes.ranks_may_finish.clear()
    processes.load_errors = {0: EngineError("engine 0: given up")}
    processes.hanging_loads = {1}
    with pytest.raises(EngineError, match="engine 0: given up"):
        await asyncio.wait_for(Publisher(processes).publish(0), 60)
    assert bool(processes.aborted) == (layout == "disaggregated")


async def test_an_engine_that_no_rank_reached_fails_the_update() -> None:
    processes = Processes()
    processes.hanging_loads, processes.reports = {0}, [{"endpoint of GPU-a": "the connection failed"}]
    with pytest.raises(EngineError, match="engine 0 did not get weights 0: the connection failed"):
        await asyncio.wait_for(Publisher(processes).publish(0), 60)


async def test_one_task_waits_for_a_lost_engine_however_many_versions_it_misses() -> None:
    processes = Processes()
    processes.plan = apart()
    processes.back.clear()
    weights = Publisher(processes)
    processes.load_errors = {1: EngineLost()}
    for version in range(4):
        await weights.publish(version)
        processes.lost[1].set()
        await asyncio.sleep(0)
    assert list(weights.outdated) == [1]
    assert len(weights.background.tasks) == 4
    processes.back.set()
    await weights.outdated[1]
    assert processes.calls[-1] == "BroadcastWeights 1: 3"
    await asyncio.wait([weights.background.start(_fail(EngineError("it cannot take them")))])
    with pytest.raises(EngineError, match="it cannot take them"):
        await weights.publish(4)


async def _fail(error: Exception) -> None:
    raise error
