"""The processes of a run and the resources that each needs. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Needs = dict[str, float]
"""CPU and GPU of one process."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Processes of a run."""

    learners: int
    engines: int
    env_hosts: int
    layout: Literal["colocated", "disaggregated"]
    device: Literal["cpu", "cuda", "auto"]
    """auto: decided by the cluster's resources, which may differ from the driver's machine."""
    learner_cpus: float
    engine_cpus: float
    env_host_cpus: float
    episodes_per_host: int
    """Episodes that a host plays at once."""
    address: str | None
    object_store_mb: int | None
    bucket_mb: int
    worker_timeout_s: float
    devices_per_engine: int = 1
    """Devices of an engine. If it shares them, each is a learner's."""
    senders: int = 1
    """Learners that broadcast weights: those that own a shard of one copy, from the first on."""
    sessions_per_engine: int = 0
    """Episodes that an engine holds at once. Up to these, the episodes of a group go to one engine; 0: they do not."""
    nodes: int = 0
    """Nodes to wait for at `address`; 0: the cluster has started already."""

    def resolved_for(self, resources: Mapping[str, float]) -> Plan:
        """Return the plan for a cluster with these resources."""
        if self.device != "auto":
            return self
        return replace(self, device="cuda" if resources.get("GPU") else "cpu")

    def placement(self) -> list[tuple[dict[str, list[Needs]], str]]:
        """Return placement groups: ({role: needs of each}, strategy). Roles of one group share its bundles: an engine
        and the learners on its devices. Ray divides only single devices, so learners reserve several of an engine."""
        gpu = 1.0 if self.device == "cuda" else 0.0
        colocated, devices = self.layout == "colocated", self.devices_per_engine
        learners_gpu = gpu / 2 if colocated and devices == 1 else gpu
        engines_gpu = gpu * devices if not colocated else gpu - learners_gpu
        learners = [{"CPU": self.learner_cpus, "GPU": learners_gpu}] * self.learners
        engines = [{"CPU": self.engine_cpus, "GPU": engines_gpu}] * self.engines
        hosts = [{"CPU": self.env_host_cpus}] * self.env_hosts
        # Ranks communicate most, so they are packed. Workers that can be lost one at a time are spread.
        if colocated:
            return [({"learner": learners, "engine": engines}, "PACK"), ({"env_host": hosts}, "SPREAD")]
        return [({"learner": learners}, "PACK"), ({"engine": engines}, "SPREAD"), ({"env_host": hosts}, "SPREAD")]

    def routing_of(self, host: int) -> tuple[int, int]:
        """Return (first engine, most sessions of an engine) for a host's SessionRouter."""
        return host * self.engines // self.env_hosts, self.sessions_per_engine

    def total_cpus(self) -> int:
        return math.ceil(self._total("CPU"))

    def shortage(self, resources: Mapping[str, float]) -> str | None:
        """Return a message about the resource that is too small, or None if there is enough."""
        for kind in ("GPU", "CPU"):
            needed, available = self._total(kind), resources.get(kind, 0.0)
            if needed > available:
                share = ", a learner and an engine on each" if kind == "GPU" and self.layout == "colocated" else ""
                return (
                    f"{self.learners} learners, {self.engines} engines and {self.env_hosts} environment hosts "
                    f"({self.layout}) need {needed:g} {kind}s{share}; there are {available:g}"
                )
        return None

    def arrived(self, nodes: int, resources: Mapping[str, float]) -> str:
        """Return the nodes, GPUs and CPUs of the cluster out of those that are needed: `1 of 2 nodes, 8 of 16 GPUs`."""
        parts = [f"{nodes} of {self.nodes} nodes"] if self.nodes else []
        needed = {kind: self._total(kind) for kind in ("GPU", "CPU")}
        parts += [f"{resources.get(kind, 0.0):g} of {total:g} {kind}s" for kind, total in needed.items() if total]
        return ", ".join(parts)

    def _total(self, kind: str) -> float:
        return sum(need.get(kind, 0.0) for roles, _ in self.placement() for needs in roles.values() for need in needs)


def bundles(roles: Mapping[str, list[Needs]]) -> list[Needs]:
    """Return the bundles of a placement group, one per process of its smallest role. The others divide themselves
    evenly over them, in order."""
    count = min(map(len, roles.values()))
    result: list[Needs] = [{} for _ in range(count)]
    for needs in roles.values():
        for i, need in enumerate(needs):
            bundle = result[i * count // len(needs)]
            bundle.update({kind: bundle.get(kind, 0.0) + amount for kind, amount in need.items() if amount})
    return result
