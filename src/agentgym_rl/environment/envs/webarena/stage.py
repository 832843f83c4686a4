"""Where a task is played: what the embedded and the published tasks do differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from agentgym_rl.environment.envs.webarena.browser import Chromium
from agentgym_rl.environment.envs.webarena.observation import View
from agentgym_rl.environment.envs.webarena.tasks.config import TaskConfig


class Stage(Protocol):
    """The sites of one episode."""

    chromium: Chromium
    addresses: Mapping[str, str]
    """Of the sites, by their names: SHOPPING, SHOPPING_ADMIN, ..."""

    def begin(self, item: int) -> tuple[TaskConfig, dict[str, Any]]:
        """The task, and what a fresh browser context needs for it (cookies, signed-in state)."""
        ...

    def taken(self, action: str, view: View) -> None:
        """Note an action that was carried out on the page that `view` showed."""
        ...

    def oracle(self, view: View) -> str: ...

    def data(self) -> bytes:
        """The sites' data as far as it is known: part of an episode's state."""
        ...

    def only_changed(self, wanted: list[Mapping[str, Any]]) -> bool:
        """Whether the episode changed the sites' data as the task's changed_data says, and in nothing else."""
        ...

    def end(self) -> None:
        """Give back what the episode held; may be called twice."""
        ...
