"""Waits until a Ray cluster that is still starting has the nodes and the resources of a plan."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agentgym_rl.errors import ConfigError, WorkerLost
from agentgym_rl.scale.resource_plan import Plan

CLUSTER_POLL_INTERVAL_S = 1.0
"""Seconds between polls of the cluster."""
Report = Callable[[str], None]


async def wait_for_head(plan: Plan, join: Callable[[], None], report: Report) -> None:
    """Call `join` until it succeeds. Only a plan that names its nodes waits; else the first failure is raised."""
    deadline = time.monotonic() + plan.worker_timeout_s
    waiting = False
    while True:
        try:
            return join()
        except ConfigError:
            if not plan.nodes or time.monotonic() >= deadline:
                raise
        if not waiting:
            report(f"waiting up to {plan.worker_timeout_s:g} s for the head of the Ray cluster at {plan.address}")
            waiting = True
        await asyncio.sleep(CLUSTER_POLL_INTERVAL_S)


async def wait_for_nodes(plan: Plan, list_nodes: Callable[[], Iterable[Mapping[str, Any]]], report: Report) -> Plan:
    """Return the plan for the cluster's resources, after all nodes of the plan are alive.

    `list_nodes` is `ray.nodes`. Raises WorkerLost at the timeout, and ConfigError if the nodes do not suffice. A plan
    that names no nodes waits for missing resources when it reserves them, so that an autoscaler can add nodes.
    """
    deadline = time.monotonic() + plan.worker_timeout_s
    reported = ""
    while True:
        alive = [node for node in list_nodes() if node["Alive"]]
        resources: Counter[str] = Counter()
        for node in alive:
            resources.update(node["Resources"])
        resolved = plan.resolved_for(resources)
        arrived = resolved.arrived(len(alive), resources)
        if len(alive) >= plan.nodes:
            break
        if time.monotonic() >= deadline:
            raise WorkerLost(
                f"the cluster at {plan.address} is not complete after {plan.worker_timeout_s:g} s: it has {arrived}; "
                "look at the output of `ray start` on the missing nodes, or set scale.nodes to those that there are"
            )
        if arrived != reported:
            report(f"waiting for the cluster: {arrived}")
            reported = arrived
        await asyncio.sleep(CLUSTER_POLL_INTERVAL_S)
    shortage = resolved.shortage(resources)
    if shortage and plan.nodes:
        raise ConfigError(f"{shortage} on {len(alive)} nodes: ask for fewer, or raise scale.nodes and add nodes")
    if shortage and plan.address is not None:
        report(f"waiting up to {plan.worker_timeout_s:g} s for more nodes: {arrived}")
    return resolved
