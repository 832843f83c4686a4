"""What processes a run wants and what each of them needs, before anybody starts one. Standard library only."""

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
    """auto: to be decided by what the cluster has, which need not be what the driver's machine has."""
    learner_cpus: float
    engine_cpus: float
    env_host_cpus: float
    episodes_per_host: int
    """That a host plays at once."""
    address: str | None
    object_store_mb: int | None
    bucket_mb: int
    worker_timeout_s: float
    devices_per_engine: int = 1
    """Where it shares none with a learner."""

    def decided(self, there: Mapping[str, float]) -> Plan:
        """The plan for a cluster with these resources."""
        if self.device != "auto":
            return self
        return replace(self, device="cuda" if there.get("GPU") else "cpu")

    def placement(self) -> list[tuple[dict[str, list[Needs]], str]]:
        """Placement groups: ({role: needs of each}, strategy). Roles of one group share its n-th bundle."""
        gpu = 1.0 if self.device == "cuda" else 0.0
        colocated = self.layout == "colocated"
        learners = [{"CPU": self.learner_cpus, "GPU": gpu / 2 if colocated else gpu}] * self.learners
        devices = gpu / 2 if colocated else gpu * self.devices_per_engine
        engines = [{"CPU": self.engine_cpus, "GPU": devices}] * self.engines
        hosts = [{"CPU": self.env_host_cpus}] * self.env_hosts
        # Ranks talk most, so they sit together; what can be lost one at a time is spread.
        if colocated:
            return [({"learner": learners, "engine": engines}, "PACK"), ({"env_host": hosts}, "SPREAD")]
        return [({"learner": learners}, "PACK"), ({"engine": engines}, "SPREAD"), ({"env_host": hosts}, "SPREAD")]

    def cpus_in_all(self) -> int:
        return math.ceil(self._in_all("CPU"))

    def lacking(self, there: Mapping[str, float]) -> str | None:
        """What `there` has too little of, in words; None where there is enough."""
        for kind in ("GPU", "CPU"):
            needed, found = self._in_all(kind), there.get(kind, 0.0)
            if needed > found:
                share = ", a learner and an engine on each" if kind == "GPU" and self.layout == "colocated" else ""
                return (
                    f"{self.learners} learners, {self.engines} engines and {self.env_hosts} environment hosts "
                    f"({self.layout}) need {needed:g} {kind}s{share}; there are {found:g}"
                )
        return None

    def _in_all(self, kind: str) -> float:
        return sum(n.get(kind, 0.0) for roles, _ in self.placement() for some in roles.values() for n in some)


def bundles(roles: Mapping[str, list[Needs]]) -> list[Needs]:
    """Of one placement group: what the n-th of all roles need together."""
    found: list[Needs] = []
    for together in zip(*roles.values(), strict=True):
        sums = {kind: sum(needs.get(kind, 0.0) for needs in together) for kind in ("CPU", "GPU")}
        found.append({kind: total for kind, total in sums.items() if total})
    return found
