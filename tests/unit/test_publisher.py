"""Which engine gets weights by which way, and that nobody waits for ever when one of many fails. Processes are tasks
here; tests/e2e/test_ray_app.py has real ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentgym_rl.errors import ConfigError, EngineError, WorkerLost
from agentgym_rl.scale import publisher
from agentgym_rl.scale.plan import Plan
from agentgym_rl.scale.publisher import LEND_VARIABLE, EngineLost, Publisher, match_engines, shares_device_memory
from agentgym_rl.scale.shared_state import Published
from agentgym_rl.transport.device import DeviceWeights, Endpoint


def plan(**changes: Any) -> Plan:
    common: dict[str, Any] = {"learners": 2, "engines": 3, "env_hosts": 1, "layout": "colocated", "device": "cuda"}
    cpus = {"learner_cpus": 1.0, "engine_cpus": 1.0, "env_host_cpus": 1.0}
    rest = {"episodes_per_host": 1, "object_store_mb": 100, "bucket_mb": 1, "worker_timeout_s": 300.0, "address": None}
    return Plan(**(common | cpus | rest | changes))


def endpoint(device: str) -> Endpoint:
    return Endpoint(f"endpoint of {device}", "", device)


@pytest.mark.parametrize(
    ("said", "changes", "expected"),
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
    said: str, changes: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LEND_VARIABLE, said)
    assert shares_device_memory(plan(**changes)) is expected


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEND_VARIABLE, "sometimes")
    with pytest.raises(ConfigError, match="AGENTGYM_RL_LEND must be never, always or unset, got 'sometimes'"):
        shares_device_memory(plan())


def test_a_rank_serves_engines_on_its_own_device_in_any_order() -> None:
    endpoints = {0: endpoint("GPU-b"), 1: endpoint("GPU-a"), 3: endpoint("GPU-c")}
    assert match_engines(["GPU-a", "GPU-b"], endpoints) == {0: 1, 1: 0}
    assert match_engines(["one", "one"], dict.fromkeys(range(4), endpoint("one"))) == {0: 0, 1: 1, 2: 0, 3: 1}
    assert match_engines(["one", "two"], dict.fromkeys(range(2), endpoint("one"))) == {0: 0, 1: 0}


class Processes:
    """Two ranks and three engines that do as they are told: the third engine is on a device of its own."""

    plan = plan()

    def __init__(self) -> None:
        self.did: list[str] = []
        self.rank_waits = asyncio.Event()
        self.rank_error: Exception | None = None
        self.left_out: dict[str, str] = {}
        self.devices = ["GPU-a", "GPU-b", "GPU-c"]
        self.load_error: dict[int, Exception] = {}
        self.has: dict[int, int] = {}
        """Versions of engines that do not take what they are told to."""
        self.load_waits: set[int] = set()
        self.shared_state: list[Published] = []

    def start_on_ranks(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        self.did.append(f"{method} {arguments[0][0]}" if arguments[0] else method)
        return [(method, some) for some in arguments]

    async def results_of(self, asked: list[Any]) -> list[Any]:
        method, some = asked[0]
        if method == "send_weights":
            assert [[d.device for d in arguments[2]] for _, arguments in asked] == [["GPU-a"], ["GPU-b"]]
            await self.rank_waits.wait()
            if self.rank_error is not None:
                raise self.rank_error
            return [self.left_out, {}]
        if method == "put_weights":
            return [Published(some[0], "node", None, ["bucket"], some[3]), None]
        return {"device": self.devices[:2], "call": ["a probe", "a probe"]}[method]

    async def call_engine(self, index: int, method: str, *arguments: Any) -> Any:
        if method == "open_endpoint":
            return endpoint(self.devices[index])
        (published,) = arguments
        way = "sent" if published.on_device else "read"
        self.did.append(f"{way} {index}: {published.version} with {published.probe}")
        if index in self.load_waits:
            await asyncio.Event().wait()
        if index in self.load_error:
            raise self.load_error.pop(index)
        return self.has.pop(index, published.version)

    async def wait_for_engine(self, index: int) -> None:
        await asyncio.sleep(0)

    async def call_state(self, method: str, *arguments: Any) -> None:
        self.shared_state += arguments


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LEND_VARIABLE, raising=False)
    monkeypatch.setattr(publisher, "REPORT_TIMEOUT_S", 0.1)


async def test_an_engine_without_a_rank_on_its_device_reads_and_the_others_get_it_there() -> None:
    there = Processes()
    there.rank_waits.set()
    weights = Publisher(there)
    told = await weights.publish(4)
    assert told == "2 in 1 buckets through Ray's object store; 0, 1 on the device that each shares with a learner"
    read, sent = ["put_weights 4", "read 2: 4 with a probe"], ["sent 0: 4 with a probe", "sent 1: 4 with a probe"]
    assert there.did == ["device", "call probe", *read, "send_weights 4", *sent]
    assert [published.pending for published in there.shared_state] == [False]
    assert weights.version == 4


async def test_weights_sent_on_devices_are_also_written_and_pending_until_then() -> None:
    there = Processes()
    there.plan = plan(engines=2)
    there.rank_waits.set()
    weights = Publisher(there)
    there.load_error = {1: EngineLost()}
    assert await weights.publish(0) == "on the device that each shares with a learner"
    assert there.did[-1] == "put_weights 0", "asked before publishing is over"
    assert [published.pending for published in there.shared_state] == [True]
    await weights.outdated[1]
    assert [published.pending for published in there.shared_state] == [True, False]
    assert there.did[-1] == "read 1: 0 with a probe"
    await weights.publish(1)
    assert [published.version for published in there.shared_state] == [0, 0, 1]


async def test_an_engine_that_restarted_with_another_endpoint_reads_instead() -> None:
    there = Processes()
    there.plan = plan(engines=2)
    there.rank_waits.set()
    there.has = {1: -1}
    weights = Publisher(there)
    await weights.publish(0)
    await weights.outdated[1]
    assert there.did[-1] == "read 1: 0 with a probe"
    lent = Published(0, "", None, [], None, DeviceWeights(endpoint("GPU-a"), 0))
    assert lent.is_for(endpoint("GPU-a"))
    assert not lent.is_for(Endpoint("another endpoint", "", "GPU-a"))
    assert Published(0, "node", None, ["bucket"], None).is_for(None)


@pytest.mark.parametrize(("has", "refused"), [(3, True), (4, False), (5, False)])
async def test_an_engine_that_read_must_have_that_version_or_a_later_one(has: int, refused: bool) -> None:
    there = Processes()
    there.rank_waits.set()
    there.has = {2: has}
    publishing = Publisher(there).publish(4)
    if not refused:
        await publishing
        return
    with pytest.raises(EngineError, match="engine 2 needs version 4 of the weights, it has 3"):
        await publishing


async def test_a_dead_rank_is_the_reported_error_not_the_engine_that_waited_for_it() -> None:
    there = Processes()
    there.load_error = {0: EngineError("the learner is gone")}
    there.rank_error = WorkerLost("learner rank 0 of 2 died")
    asyncio.get_running_loop().call_later(0.05, there.rank_waits.set)
    with pytest.raises(WorkerLost, match="rank 0 of 2 died"):
        await Publisher(there).publish(0)


async def test_a_failed_engine_is_the_reported_error_while_a_rank_waits_for_it() -> None:
    there = Processes()
    there.load_error = {0: EngineError("engine 0: given up")}
    there.load_waits = {1}
    with pytest.raises(EngineError, match="engine 0: given up"):
        await asyncio.wait_for(Publisher(there).publish(0), 60)


async def test_an_engine_that_no_rank_reached_fails_the_update() -> None:
    there = Processes()
    there.rank_waits.set()
    there.load_waits, there.left_out = {0}, {"endpoint of GPU-a": "the connection failed"}
    with pytest.raises(EngineError, match="engine 0 did not get weights 0: the connection failed"):
        await asyncio.wait_for(Publisher(there).publish(0), 60)


async def test_one_task_waits_for_a_lost_engine_however_many_versions_it_misses() -> None:
    there = Processes()
    there.plan = plan(engines=3, layout="disaggregated")
    back = asyncio.Event()
    there.wait_for_engine = lambda _: back.wait()  # type: ignore[method-assign]
    weights = Publisher(there)
    before = asyncio.all_tasks()
    for version in range(4):
        there.load_error = {1: EngineLost()}
        await weights.publish(version)
        await asyncio.sleep(0)
    assert asyncio.all_tasks() - before == set(weights.tasks()) - {weights._full_copy} == {weights.outdated[1]}
    back.set()
    await weights.outdated[1]
    assert there.did[-1].startswith("read 1: 3 ")
    weights.outdated[1] = asyncio.create_task(_fail(EngineError("it cannot take them")))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="it cannot take them"):
        weights._load_when_back(1, 4)


async def _fail(error: Exception) -> None:
    raise error
