"""The environment `webarena-official`: WebArena's 812 tasks against sites that the user runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from agentgym_rl.environment.envs.webarena.browser import shared_chromium
from agentgym_rl.environment.envs.webarena.env import BrowserEnv
from agentgym_rl.environment.envs.webarena.observation import View
from agentgym_rl.environment.envs.webarena.tasks.config import SITES, TaskConfig, read, subsets_of
from agentgym_rl.environment.envs.webarena.tasks.official import SPLITS, official_tasks
from agentgym_rl.errors import ConfigError


class WebArenaOfficial(BrowserEnv):
    """The published benchmark. Its sites keep what episodes change: resetting them is up to who runs them."""

    name: ClassVar[str] = "webarena-official"
    splits: ClassVar[Mapping[str, range]] = SPLITS

    def __init__(self) -> None:
        super().__init__()
        official_tasks()  # so that a missing list is known before anything is played
        self._chromium = shared_chromium()
        self._addresses = {site: os.environ.get(site, "").rstrip("/") for site in SITES}
        if not any(self._addresses.values()):
            raise ConfigError(
                f"webarena-official needs the addresses of its sites in the environment variables {', '.join(SITES)}; "
                "the environment 'webarena' needs none"
            )

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        if not any(item in split for split in cls.splits.values()):
            raise IndexError(f"webarena-official has items 0 to 811, got {item}")
        return subsets_of(official_tasks()[item])

    def _load(self, item: int) -> TaskConfig:
        return read(official_tasks()[item], self._addresses)

    def _context_options(self) -> dict[str, Any]:
        if self._task.storage_state is None:
            return {}
        folder = Path(os.environ.get("WEBARENA_AUTH", ".auth"))
        state = folder / Path(self._task.storage_state).name
        if not state.is_file():
            raise ConfigError(
                f"task {self._task.task_id} needs to be signed in and {state} does not exist: sign in to the sites "
                "with a browser, save Playwright's storage state there, and set WEBARENA_AUTH to its folder"
            )
        return {"storage_state": str(state)}

    def _taken(self, action: str, view: View) -> None:
        """The published tasks come without solutions, so there is nothing to follow."""
