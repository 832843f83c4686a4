"""Writes gold_paths.json.xz, the gold paths that are stored with the code:

    python -m agentgym_rl.environment.envs.sciworld.snapshot [SUBSET ...]

The simulator computes each path. The path is then replayed from the start, and stored if it reaches a score of 100. An
item takes about a second on one core, or ten if plants have to grow. Paths in the file are not computed again, so a run
may be interrupted. Without a subset it covers all 7,207 items.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from agentgym_rl.environment.envs.sciworld import tasks
from agentgym_rl.environment.envs.sciworld.gold import STORE, Actions, Paths, read_paths, write_paths
from agentgym_rl.environment.envs.sciworld.jvm import POOL, max_processes
from agentgym_rl.environment.envs.sciworld.world import World
from agentgym_rl.errors import EnvError

SAVE_EVERY = 20


def main() -> None:
    parser = argparse.ArgumentParser(description="Compute the gold paths that are stored with the code.")
    parser.add_argument("subsets", nargs="*", help=f"one or more of {', '.join(tasks.SUBSETS)}")
    parser.add_argument("--out", type=Path, default=STORE)
    arguments = parser.parse_args()
    if unknown := set(arguments.subsets) - set(tasks.SUBSETS):
        parser.error(f"needs subsets among {', '.join(tasks.SUBSETS)}, got {', '.join(sorted(unknown))}")
    paths: Paths = read_paths(arguments.out) if arguments.out.exists() else {}
    selected = [tasks.locate(item) for item in _items(arguments.subsets)]
    missing = [(task.name, variation) for task, variation in selected if (task.name, variation) not in paths]
    _log(f"{len(selected) - len(missing)} of {len(selected)} paths are stored; using {max_processes()} processes")
    work = _Work(missing, paths, arguments.out)
    threads = [threading.Thread(target=work.run, daemon=True) for _ in range(max_processes())]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.5)
    finally:
        work.save()
        POOL.close()


class _Work:
    """Queue of the missing paths, shared by threads."""

    def __init__(self, missing: list[tuple[str, int]], paths: Paths, out: Path) -> None:
        self._queue = iter(missing)
        self._num_missing = len(missing)
        self._num_done = 0
        self._paths = paths
        self._out = out
        self._lock = threading.Lock()

    def run(self) -> None:
        world = World()
        while key := self._next():
            path, problem = None, "the simulator's path does not reach a score of 100"
            try:
                path = checked_path(world, *key)
            except EnvError as error:  # the simulator's search can end the whole process
                problem = str(error)
                world.close()
                world = World()
            with self._lock:
                self._num_done += 1
                if path:
                    self._paths[key] = path
                else:
                    _log(f"{key[0]} {key[1]}: {problem}")
                save = self._num_done % SAVE_EVERY == 0
            if save:
                self.save()
        world.close()

    def save(self) -> None:
        with self._lock:
            write_paths(self._out, self._paths)
            _log(f"{self._num_done} of {self._num_missing} done, {len(self._paths)} paths in {self._out}")

    def _next(self) -> tuple[str, int] | None:
        with self._lock:
            return next(self._queue, None)


def checked_path(world: World, task: str, variation: int) -> Actions | None:
    """Return the simulator's gold path up to the action that solves the task, or None if no action does."""
    path = world.gold_path(task, variation)
    for number, action in enumerate(path, start=1):
        answer = world.step(action)
        if answer.completed or answer.score < 0:
            return path[:number] if answer.score == 100 else None
    return None


def _items(subsets: list[str]) -> Iterator[int]:
    for items in tasks.SPLITS.values():
        for item in items:
            if not subsets or not set(subsets).isdisjoint(tasks.subsets_of(item)):
                yield item


def _log(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
