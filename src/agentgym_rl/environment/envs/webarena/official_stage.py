"""Stage for the published tasks, on sites that the user runs. Changes remain until the user resets the sites."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentgym_rl.environment.envs.webarena.browser import shared_chromium
from agentgym_rl.environment.envs.webarena.observation import View
from agentgym_rl.environment.envs.webarena.tasks.official import OFFICIAL, official_tasks
from agentgym_rl.environment.envs.webarena.tasks.task_config import SITES, TaskConfig, read_task
from agentgym_rl.errors import ConfigError, EnvError


class OfficialStage:
    """WebArena's sites at the addresses in the environment variables (SHOPPING, ...). Implements Stage."""

    def __init__(self) -> None:
        self.chromium = shared_chromium()
        self.addresses: Mapping[str, str] = {site: os.environ.get(site, "").rstrip("/") for site in SITES}

    def begin(self, item: int) -> tuple[TaskConfig, dict[str, Any]]:
        task = read_task(official_tasks()[item - OFFICIAL.start], self.addresses)
        return task, self._context_options(task)

    def _context_options(self, task: TaskConfig) -> dict[str, Any]:
        if task.storage_state is None:
            return {}
        folder = Path(os.environ.get("WEBARENA_AUTH", ".auth"))
        state = folder / Path(task.storage_state).name
        if not state.is_file():
            raise ConfigError(
                f"task {task.task_id} needs a signed-in browser and {state} does not exist: sign in to the sites, "
                "save Playwright's storage state there, and set WEBARENA_AUTH to its folder"
            )
        return {"storage_state": str(state)}

    def record_action(self, action: str, view: View) -> None:
        """Do nothing: there is no scripted solution to follow."""

    def oracle(self, view: View) -> str:
        raise EnvError("the published WebArena tasks come without solutions: the other splits have an oracle")

    def data(self) -> bytes:
        return b""

    def only_changed(self, wanted: list[Mapping[str, Any]]) -> bool:
        raise ConfigError("changed_data needs the embedded sites: the data of published sites cannot be read")

    def end(self) -> None:
        """Do nothing: the sites remain as they are."""
