"""Interface to the sites of an episode, with one implementation for embedded and one for published tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from agentgym_rl.environment.envs.webarena.browser import Chromium
from agentgym_rl.environment.envs.webarena.observation import View
from agentgym_rl.environment.envs.webarena.tasks.task_config import TaskConfig


class Stage(Protocol):
    """The sites of one episode."""

    chromium: Chromium
    addresses: Mapping[str, str]
    """Address of each site by its name: SHOPPING, SHOPPING_ADMIN, ..."""

    def begin(self, item: int) -> tuple[TaskConfig, dict[str, Any]]:
        """Return the task and the options of its browser context (cookies, signed-in state)."""

    def record_action(self, action: str, view: View) -> None:
        """Record an action that was carried out on the page in `view`."""

    def oracle(self, view: View) -> str: ...

    def data(self) -> bytes:
        """Return the sites' data as far as it is known. It is part of an episode's state."""

    def only_changed(self, wanted: list[Mapping[str, Any]]) -> bool:
        """Return whether the episode made the changes of the task's changed_data and no others."""

    def end(self) -> None:
        """Release the episode's resources. May be called twice."""
