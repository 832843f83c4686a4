"""Gold paths: kept with the code, and for the items that are not among them worked out where nobody waits.

The simulator finds a gold path by playing, with random numbers and a memory of earlier searches: it takes up to half a
minute, and what comes out need not be the same next time, nor work. The kept ones were played once more from the start
and reached a score of 100 (see snapshot.py).
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
"""In the order they are taken."""
Paths = dict[tuple[str, int], Actions]
"""By task and variation."""

_worked_out: Paths = {}


class _Working:
    """A lock an item, so that eight sessions of one do it once, and room for as many items at once as processes."""

    def __init__(self) -> None:
        self.room = threading.Semaphore(MAX_GOLD_PROCESSES)
        self._items: defaultdict[tuple[str, int], threading.Lock] = defaultdict(threading.Lock)
        self._finding = threading.Lock()

    def on(self, key: tuple[str, int]) -> threading.Lock:
        with self._finding:
            return self._items[key]


_working = _Working()


def _forget_locks() -> None:
    """In a forked child: a lock may have been held by a thread that is gone."""
    global _working
    _working = _Working()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def gold_path(task: str, variation: int) -> Actions:
    """Actions that solve a task: at once when they are kept, otherwise after the time it takes to play it."""
    key = task, variation
    if found := kept_paths().get(key) or _worked_out.get(key):
        return found
    with _working.on(key):
        if key not in _worked_out:
            _worked_out[key] = _cached(task, variation) or _work_out(task, variation)
        return _worked_out[key]


@cache
def kept_paths() -> Paths:
    return read_paths(STORE)


def read_paths(file: Path) -> Paths:
    """A file of gold paths: the different actions once, and each path as their numbers.

    Those of another version of the simulator may not work, and are as good as none.
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
    """The same bytes for the same paths."""
    numbers: dict[str, int] = {}
    tasks: dict[str, dict[str, list[int]]] = {}
    for (task, number), path in sorted(paths.items()):
        tasks.setdefault(task, {})[str(number)] = [numbers.setdefault(action, len(numbers)) for action in path]
    content = {"scienceworld": _simulator_version(), "actions": list(numbers), "paths": tasks}
    text = json.dumps(content, separators=(",", ":"))
    _replace(file, lzma.compress(text.encode(), preset=9))


def cache_folder() -> Path:
    """Where worked out paths are kept for the next process: they hold for one version of the simulator."""
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
        logger.warning("sciworld: the gold path in %s cannot be read and is worked out anew: %s", file, error)
        return None


def _work_out(task: str, variation: int) -> Actions:
    with _working.room:  # each in a process of its own: in one they would wait for each other with a deadline running
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
        logger.warning("sciworld: a gold path cannot be kept for next time, set %s: %s", CACHE_VARIABLE, error)
    return path


def _cache_file(task: str, variation: int) -> Path:
    return cache_folder() / f"{task}-{variation}.json"


def _replace(file: Path, data: bytes) -> None:
    """Whole or not at all: other processes may be reading."""
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_bytes(data)
    os.replace(new, file)
