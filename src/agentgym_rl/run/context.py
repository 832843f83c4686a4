"""State that the parts of a run share."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from agentgym_rl.config import Config
from agentgym_rl.run.console import Console
from agentgym_rl.run.items import Items
from agentgym_rl.run.log import RunLog
from agentgym_rl.run.stopping import Stop
from agentgym_rl.types import EnvPool


@dataclass(slots=True, kw_only=True)
class RunContext:
    """The recipe of a run, its environments, where it is recorded and shown, and how it is asked to stop."""

    config: Config
    pool: EnvPool
    items: Items
    log: RunLog
    console: Console
    stop: Stop
    started: float
    """Time at which this process started, on the monotonic clock."""
    seconds_before: float = 0.0
    """Wall time of the earlier processes of a resumed run, until the checkpoint it resumes from."""

    def seconds(self) -> float:
        """Return the wall time of the run, over all its processes."""
        return self.seconds_before + time.monotonic() - self.started

    def warn(self, kind: str, message: str, *, step: int, **detail: Any) -> None:
        """Record an event of the run and show it."""
        self.log.log_event(kind, message, step=step, **detail)
        self.console.warn(message)
