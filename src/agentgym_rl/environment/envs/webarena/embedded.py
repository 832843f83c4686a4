"""The environment `webarena`: tasks on the embedded sites, with nothing outside this process but the browser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from agentgym_rl.environment.envs.webarena.browser import shared_chromium
from agentgym_rl.environment.envs.webarena.env import BrowserEnv
from agentgym_rl.environment.envs.webarena.observation import View
from agentgym_rl.environment.envs.webarena.oracle import Guide
from agentgym_rl.environment.envs.webarena.sites.server import HOSTS, site_server
from agentgym_rl.environment.envs.webarena.sites.visit import COOKIE
from agentgym_rl.environment.envs.webarena.tasks import embedded
from agentgym_rl.environment.envs.webarena.tasks.config import TaskConfig, read, subsets_of


class WebArena(BrowserEnv):
    """Tasks on five embedded sites; every episode has its own copy of their data. Implements TextEnv."""

    name: ClassVar[str] = "webarena"
    splits: ClassVar[Mapping[str, range]] = embedded.splits()

    def __init__(self) -> None:
        super().__init__()
        self._server = site_server()
        self._chromium = shared_chromium(*self._server.resolver_flags)
        self._addresses = {site: f"http://{host}" for site, host in HOSTS.items()}
        self._token = ""
        self._guide: Guide

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        if not any(item in split for split in cls.splits.values()):
            raise IndexError(f"webarena has items 0 to {len(embedded.problems()) - 1}, got {item}")
        return subsets_of(embedded.problems()[item].config)

    def close(self) -> None:
        super().close()
        self._server.episodes.close(self._token)
        self._token = ""

    def oracle(self) -> str:
        self._require_playing()
        return self._guide.next(self._view)

    def state_key(self) -> str:
        """The item and a digest of tabs, page, scrolling and the episode's data."""
        store = self._server.episodes.get(self._token)
        return self._digest(store.db.serialize() if store else b"")

    def _load(self, item: int) -> TaskConfig:
        problem = embedded.problems()[item]
        task = read(problem.config, self._addresses)
        self._guide = Guide(problem.script, task.start_urls[0])
        return task

    def _context_options(self) -> dict[str, Any]:
        self._token = self._server.episodes.open()
        cookies = [{"name": COOKIE, "value": self._token, "url": url} for url in self._addresses.values()]
        return {"cookies": cookies}

    def _taken(self, action: str, view: View) -> None:
        self._guide.taken(action, view)
