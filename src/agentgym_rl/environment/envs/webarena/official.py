"""Playing the published tasks on sites that the user runs, which keep what episodes change until he resets them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentgym_rl.environment.envs.webarena.browser import shared_chromium
from agentgym_rl.environment.envs.webarena.observation import View
from agentgym_rl.environment.envs.webarena.tasks.config import SITES, TaskConfig, read
from agentgym_rl.environment.envs.webarena.tasks.official import OFFICIAL, official_tasks
from agentgym_rl.errors import ConfigError, EnvError


class OfficialStage:
    """WebArena's sites at the addresses that the usual environment variables give. Implements Stage."""

    def __init__(self) -> None:
        self.chromium = shared_chromium()
        self.addresses: Mapping[str, str] = {site: os.environ.get(site, "").rstrip("/") for site in SITES}

    def begin(self, item: int) -> tuple[TaskConfig, dict[str, Any]]:
        task = read(official_tasks()[item - OFFICIAL.start], self.addresses)
        return task, self._signed_in(task)

    def _signed_in(self, task: TaskConfig) -> dict[str, Any]:
        if task.storage_state is None:
            return {}
        folder = Path(os.environ.get("WEBARENA_AUTH", ".auth"))
        state = folder / Path(task.storage_state).name
        if not state.is_file():
            raise ConfigError(
                f"task {task.task_id} needs to be signed in and {state} does not exist: sign in to the sites with a "
                "browser, save Playwright's storage state there, and set WEBARENA_AUTH to its folder"
            )
        return {"storage_state": str(state)}

    def taken(self, action: str, view: View) -> None:
        """There is no solution to follow."""

    def oracle(self, view: View) -> str:
        raise EnvError("the published WebArena tasks come without solutions: the other splits have an oracle")

    def data(self) -> bytes:
        return b""

    def only_changed(self, wanted: list[Mapping[str, Any]]) -> bool:
        raise ConfigError("the data of published sites cannot be looked into: changed_data is for embedded tasks")

    def end(self) -> None:
        """The sites stay as they are."""
