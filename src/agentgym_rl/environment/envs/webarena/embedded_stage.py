"""Stage for the embedded sites. It needs nothing outside this process except the browser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentgym_rl.environment.envs.webarena.browser import shared_chromium
from agentgym_rl.environment.envs.webarena.evaluators.data import only_changed
from agentgym_rl.environment.envs.webarena.observation import View
from agentgym_rl.environment.envs.webarena.oracle import ScriptedOracle
from agentgym_rl.environment.envs.webarena.sites.server import HOSTS, site_server
from agentgym_rl.environment.envs.webarena.sites.store import fresh_database
from agentgym_rl.environment.envs.webarena.sites.visit import COOKIE
from agentgym_rl.environment.envs.webarena.tasks.embedded import problems
from agentgym_rl.environment.envs.webarena.tasks.task_config import TaskConfig, read_task


class EmbeddedStage:
    """Embedded sites with a private copy of their data, selected by a cookie. Implements Stage."""

    addresses: Mapping[str, str] = {site: f"http://{host}" for site, host in HOSTS.items()}

    def __init__(self) -> None:
        self._episodes = site_server().episodes
        self.chromium = shared_chromium(*site_server().resolver_flags)
        self._token = ""
        self._oracle: ScriptedOracle

    def begin(self, item: int) -> tuple[TaskConfig, dict[str, Any]]:
        problem = problems()[item]
        task = read_task(problem.config, self.addresses)
        self._oracle = ScriptedOracle(problem.script, task.start_urls[0])
        self._token = self._episodes.open()
        cookies = [{"name": COOKIE, "value": self._token, "url": url} for url in self.addresses.values()]
        return task, {"cookies": cookies}

    def record_action(self, action: str, view: View) -> None:
        self._oracle.record_action(action, view)

    def oracle(self, view: View) -> str:
        return self._oracle.next(view)

    def data(self) -> bytes:
        store = self._episodes.get(self._token)
        return store.db.serialize() if store else b""

    def only_changed(self, wanted: list[Mapping[str, Any]]) -> bool:
        before, after = fresh_database(), fresh_database()
        after.deserialize(self.data())  # a copy: the server may still be using the original
        try:
            return only_changed(wanted, before, after)
        finally:
            before.close()
            after.close()

    def end(self) -> None:
        self._episodes.close(self._token)
