"""How each engine gets its weights, and that no wait is endless when a process fails. Processes are tasks here;
tests/e2e/test_ray_app.py has real ones."""

from __future__ import annotations

import asyncio
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
from agentgym_rl.scale.shared_state import Published
from agentgym_rl.transport.device import DEVICE_WEIGHTS_VARIABLE, DeviceWeights, Endpoint


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
    endpoints = {0: endpoint("GPU-b"), 1: endpoint("GPU-a"), 3: endpoint("GPU-c")}
    assert match_engines(["GPU-a", "GPU-b"], endpoints) == {0: 1, 1: 0}
    assert match_engines(["one", "one"], dict.fromkeys(range(4), endpoint("one"))) == {0: 0, 1: 1, 2: 0, 3: 1}
    assert match_engines(["one", "two"], dict.fromkeys(range(2), endpoint("one"))) == {0: 0, 1: 0}


class Processes:
    """Two ranks and three engines with scripted behaviour. The third engine has its own device."""

    plan = plan()

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ranks_may_finish = asyncio.Event()
        self.rank_error: Exception | None = None
        self.skipped: dict[str, str] = {}
        self.devices = ["GPU-a", "GPU-b", "GPU-c"]
        self.load_errors: dict[int, Exception] = {}
        self.versions: dict[int, int] = {}
        """Versions of engines that ignore the published one."""
        self.hanging_loads: set[int] = set()
        self.shared_state: list[Published] = []

    def start_on_ranks(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        self.calls.append(f"{method} {arguments[0][0]}" if arguments[0] else method)
        return [(method, values) for values in arguments]

    async def results_of(self, started: list[Any]) -> list[Any]:
        method, values = started[0]
        if method == "send_weights":
            assert [[d.device for d in arguments[2]] for _, arguments in started] == [["GPU-a"], ["GPU-b"]]
            await self.ranks_may_finish.wait()
            if self.rank_error is not None:
                raise self.rank_error
            return [self.skipped, {}]
        if method == "put_weights":
            return [Published(values[0], "node", None, ["bucket"], values[3]), None]
        return {"device": self.devices[:2], "call": ["a probe", "a probe"]}[method]

    async def call_engine(self, index: int, method: str, *arguments: Any) -> Any:
        if method == "open_endpoint":
            return endpoint(self.devices[index])
        (published,) = arguments
        way = "sent" if published.on_device else "read"
        self.calls.append(f"{way} {index}: {published.version} with {published.probe}")
        if index in self.hanging_loads:
            await asyncio.Event().wait()
        if index in self.load_errors:
            raise self.load_errors.pop(index)
        return self.versions.pop(index, published.version)

    async def wait_for_engine(self, index: int) -> None:
        await asyncio.sleep(0)

    async def call_state(self, method: str, *arguments: Any) -> None:
        self.shared_state += arguments


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE_WEIGHTS_VARIABLE, raising=False)
    monkeypatch.setattr(publisher, "REPORT_TIMEOUT_S", 0.1)


async def test_an_engine_without_a_rank_on_its_device_reads_and_the_others_get_it_there() -> None:
    processes = Processes()
    processes.ranks_may_finish.set()
    weights = Publisher(processes)
    route = await weights.publish(4)
    assert route == "2 in 1 buckets through Ray's object store; 0, 1 on the device that each shares with a learner"
    read, sent = ["put_weights 4", "read 2: 4 with a probe"], ["sent 0: 4 with a probe", "sent 1: 4 with a probe"]
    assert processes.calls == ["device", "call probe", *read, "send_weights 4", *sent]
    assert [published.pending for published in processes.shared_state] == [False]
    assert weights.version == 4


async def test_weights_sent_on_devices_are_also_written_and_pending_until_then() -> None:
    processes = Processes()
    processes.plan = plan(engines=2)
    processes.ranks_may_finish.set()
    weights = Publisher(processes)
    processes.load_errors = {1: EngineLost()}
    assert await weights.publish(0) == "on the device that each shares with a learner"
    assert processes.calls[-1] == "put_weights 0", "started before publishing is over"
    assert [published.pending for published in processes.shared_state] == [True]
    await weights.outdated[1]
    assert [published.pending for published in processes.shared_state] == [True, False]
    assert processes.calls[-1] == "read 1: 0 with a probe"
    await weights.publish(1)
    assert [published.version for published in processes.shared_state] == [0, 0, 1]


async def test_an_engine_that_restarted_with_another_endpoint_reads_instead() -> None:
    processes = Processes()
    processes.plan = plan(engines=2)
    processes.ranks_may_finish.set()
    processes.versions = {1: -1}
    weights = Publisher(processes)
    await weights.publish(0)
    await weights.outdated[1]
    assert processes.calls[-1] == "read 1: 0 with a probe"
    on_device = Published(0, "", None, [], None, DeviceWeights(endpoint("GPU-a"), 0))
    assert on_device.is_for(endpoint("GPU-a"))
    assert not on_device.is_for(Endpoint("another endpoint", "", "GPU-a"))
    assert Published(0, "node", None, ["bucket"], None).is_for(None)


@pytest.mark.parametrize(("version", "refused"), [(3, True), (4, False), (5, False)])
async def test_an_engine_that_read_must_have_that_version_or_a_later_one(version: int, refused: bool) -> None:
    processes = Processes()
    processes.ranks_may_finish.set()
    processes.versions = {2: version}
    publishing = Publisher(processes).publish(4)
    if not refused:
        await publishing
        return
    with pytest.raises(EngineError, match="engine 2 needs version 4 of the weights, it has 3"):
        await publishing


async def test_a_dead_rank_is_the_reported_error_not_the_engine_that_waited_for_it() -> None:
    processes = Processes()
    processes.load_errors = {0: EngineError("the learner is gone")}
    processes.rank_error = WorkerLost("learner rank 0 of 2 died")
    asyncio.get_running_loop().call_later(0.05, processes.ranks_may_finish.set)
    with pytest.raises(WorkerLost, match="rank 0 of 2 died"):
        await Publisher(processes).publish(0)


async def test_a_failed_engine_is_the_reported_error_while_a_rank_waits_for_it() -> None:
    processes = Processes()
    processes.load_errors = {0: EngineError("engine 0: given up")}
    processes.hanging_loads = {1}
    with pytest.raises(EngineError, match="engine 0: given up"):
        await asyncio.wait_for(Publisher(processes).publish(0), 60)


async def test_an_engine_that_no_rank_reached_fails_the_update() -> None:
    processes = Processes()
    processes.ranks_may_finish.set()
    processes.hanging_loads, processes.skipped = {0}, {"endpoint of GPU-a": "the connection failed"}
    with pytest.raises(EngineError, match="engine 0 did not get weights 0: the connection failed"):
        await asyncio.wait_for(Publisher(processes).publish(0), 60)


async def test_one_task_waits_for_a_lost_engine_however_many_versions_it_misses() -> None:
    processes = Processes()
    processes.plan = plan(engines=3, layout="disaggregated")
    back = asyncio.Event()
    processes.wait_for_engine = lambda _: back.wait()  # type: ignore[method-assign]
    weights = Publisher(processes)
    before = asyncio.all_tasks()
    for version in range(4):
        processes.load_errors = {1: EngineLost()}
        await weights.publish(version)
        await asyncio.sleep(0)
    assert asyncio.all_tasks() - before == set(weights.tasks()) - {weights._full_copy} == {weights.outdated[1]}
    back.set()
    await weights.outdated[1]
    assert processes.calls[-1].startswith("read 1: 3 ")
    weights.outdated[1] = asyncio.create_task(_fail(EngineError("it cannot take them")))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="it cannot take them"):
        weights._load_when_back(1, 4)


async def _fail(error: Exception) -> None:
    raise error
