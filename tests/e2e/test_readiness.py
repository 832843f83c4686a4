"""A run that starts before its Ray cluster waits for the head and the nodes, and says what is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from cluster_for_tests import PATIENT
from servers_for_tests import free_port

from agentgym_rl.errors import ConfigError, WorkerLost
from agentgym_rl.scale.readiness import wait_for_head, wait_for_nodes
from agentgym_rl.scale.resource_plan import Plan

ray = pytest.importorskip("ray")


def plan(**changes: Any) -> Plan:
    cpus = {"learner_cpus": 1.0, "engine_cpus": 1.0, "env_host_cpus": 1.0}
    rest = {"episodes_per_host": 1, "object_store_mb": None, "bucket_mb": 1, "worker_timeout_s": 500.0, "nodes": 2}
    roles = {"learners": 2, "engines": 2, "env_hosts": 1, "layout": "disaggregated", "device": "auto"}
    return Plan(**({"address": "head:6379"} | roles | cpus | rest | changes))


def node(alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "Resources": resources}


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.05)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_run_waits_for_a_head_and_a_node_that_start_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PATIENT.items():
        monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    from agentgym_rl.scale.ray_app import RayApp

    port, reports = free_port(), []
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    app = RayApp(plan(address="auto"))
    connecting = asyncio.create_task(app.connect(reports.append))
    await until(lambda: len(reports) == 1)
    assert reports == ["waiting up to 500 s for the head of the Ray cluster at auto"]
    options = {"object_store_memory": 100 << 20, "include_dashboard": False}
    monkeypatch.delenv("RAY_ADDRESS")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 5, "gcs_server_port": port, **options})
    try:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        await until(lambda: len(reports) == 2 or connecting.done())
        assert reports[1:] == ["waiting for the cluster: 1 of 2 nodes, 5 of 5 CPUs"]
        cluster.add_node(num_cpus=1, num_gpus=4, object_store_memory=100 << 20)
        await connecting
        assert app.plan.device == "cuda", "the device is chosen after the node with GPUs has joined"
    finally:
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        await app.close()
        cluster.shutdown()


async def test_a_cluster_that_stays_incomplete_is_an_error_that_names_what_is_missing() -> None:
    def refuse() -> None:
        raise ConfigError("no Ray cluster answers there")

    with pytest.raises(ConfigError, match="no Ray cluster answers"):
        await wait_for_head(plan(nodes=0), refuse, print)
    with pytest.raises(ConfigError, match="no Ray cluster answers"):
        await wait_for_head(plan(worker_timeout_s=0.01), refuse, print)
    nodes = [node(CPU=8.0, GPU=2.0), node(alive=False, CPU=8.0, GPU=2.0)]
    needed = r"is not complete after 0\.01 s: it has 1 of 2 nodes, 2 of 4 GPUs, 8 of 5 CPUs; look at"
    with pytest.raises(WorkerLost, match=needed):
        await wait_for_nodes(plan(worker_timeout_s=0.01), lambda: nodes, print)


async def test_complete_nodes_with_too_few_gpus_are_refused_at_once() -> None:
    nodes = [node(CPU=8.0, GPU=1.0), node(CPU=8.0, GPU=2.0)]
    with pytest.raises(ConfigError, match=r"need 4 GPUs; there are 3 on 2 nodes: ask for fewer, or raise scale\.nodes"):
        await wait_for_nodes(plan(), lambda: nodes, print)
    reports: list[str] = []
    ready = await wait_for_nodes(plan(nodes=0), lambda: nodes, reports.append)
    assert ready.device == "cuda"
    assert reports == ["waiting up to 500 s for more nodes: 3 of 4 GPUs, 16 of 5 CPUs"], "an autoscaler may add them"
