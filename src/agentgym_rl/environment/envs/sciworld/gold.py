"""Gold paths: stored with the code, or computed in a separate process for the other items.

The simulator finds a gold path by playing, with random numbers and a memory of earlier searches. That takes up to half
a minute, and the result may differ each time and may fail. The stored paths were replayed from the start and reached a
score of 100 (see snapshot.py).
"""

from __future__ import annotations

import json
import logging
import lzma
import os
import threading
from collections import defaultdict
from functools import cache
from importlib.metadata import version
from pathlib import Path

from agentgym_rl.environment.envs.sciworld.jvm import GOLD_POOL, MAX_GOLD_PROCESSES
from agentgym_rl.environment.envs.sciworld.world import World

logger = logging.getLogger(__name__)

STORE = Path(__file__).with_name("gold_paths.json.xz")
CACHE_VARIABLE = "AGENTGYM_SCIWORLD_CACHE"
Actions = tuple[str, ...]
"""Actions in order."""
Paths = dict[tuple[str, int], Actions]
"""Gold paths by task and variation."""

_computed: Paths = {}


class _Locks:
    """One lock per item, so that sessions of one item compute it once, and a limit of concurrent computations."""

    def __init__(self) -> None:
        self.processes = threading.Semaphore(MAX_GOLD_PROCESSES)
        self._items: defaultdict[tuple[str, int], threading.Lock] = defaultdict(threading.Lock)
        self._items_lock = threading.Lock()

    def of_item(self, key: tuple[str, int]) -> threading.Lock:
        with self._items_lock:
            return self._items[key]


_locks = _Locks()


def _reset_locks() -> None:
    """Replace the locks in a forked child, because a thread of the parent may have held one."""
    global _locks
    _locks = _Locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_locks)


def gold_path(task: str, variation: int) -> Actions:
    """Return the actions that solve a task. This is immediate for a stored path; otherwise the task is played first."""
    key = task, variation
    if path := stored_paths().get(key) or _computed.get(key):
        return path
    with _locks.of_item(key):
        if key not in _computed:
            _computed[key] = _cached(task, variation) or _compute(task, variation)
        return _computed[key]


@cache
def stored_paths() -> Paths:
    return read_paths(STORE)


def read_paths(file: Path) -> Paths:
    """Read a file of gold paths: a list of distinct actions, and each path as indices into it.

    Return no paths if the file is for another version of the simulator, because they may fail.
    """
    content = json.loads(lzma.decompress(file.read_bytes()))
    if content["scienceworld"] != _simulator_version():
        logger.warning(
            "sciworld: the gold paths in %s are for scienceworld %s and are not used with %s",
            *(file, content["scienceworld"], _simulator_version()),
        )
        return {}
    actions = content["actions"]
    return {
        (task, int(number)): tuple(actions[place] for place in places)
        for task, variations in content["paths"].items()
        for number, places in variations.items()
    }


def write_paths(file: Path, paths: Paths) -> None:
    """Write gold paths. Equal paths give equal bytes."""
    numbers: dict[str, int] = {}
    tasks: dict[str, dict[str, list[int]]] = {}
    for (task, number), path in sorted(paths.items()):
        tasks.setdefault(task, {})[str(number)] = [numbers.setdefault(action, len(numbers)) for action in path]
    content = {"scienceworld": _simulator_version(), "actions": list(numbers), "paths": tasks}
    text = json.dumps(content, separators=(",", ":"))
    _replace(file, lzma.compress(text.encode(), preset=9))


def cache_folder() -> Path:
    """Return the folder of computed paths, which other processes read. It belongs to one simulator version."""
    place = os.environ.get(CACHE_VARIABLE) or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "agentgym-rl"
    return Path(place).expanduser() / f"scienceworld-{_simulator_version()}"


def _simulator_version() -> str:
    return version("scienceworld")


def _cached(task: str, variation: int) -> Actions | None:
    file = _cache_file(task, variation)
    try:
        return tuple(json.loads(file.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("sciworld: the gold path in %s cannot be read and is computed again: %s", file, error)
        return None


def _compute(task: str, variation: int) -> Actions:
    with _locks.processes:  # one process each: in a shared one, waiting would count towards the deadline
        world = World(GOLD_POOL)
        try:
            path = world.gold_path(task, variation)
        finally:
            world.close()
    file = _cache_file(task, variation)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _replace(file, json.dumps(path).encode())
    except OSError as error:
        logger.warning("sciworld: a gold path cannot be cached, set %s: %s", CACHE_VARIABLE, error)
    return path


def _cache_file(task: str, variation: int) -> Path:
    return cache_folder() / f"{task}-{variation}.json"


def _replace(file: Path, data: bytes) -> None:
    """Replace a file atomically, because other processes may be reading it."""
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_bytes(data)
    os.replace(new, file)
