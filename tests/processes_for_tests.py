"""Processes forked from one server with all imports done, because importing takes longer than most tests."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PRELOADED = [
    "agentgym_rl.cli",
    "agentgym_rl.run.rl",
    "agentgym_rl.run.memory_demand",
    "agentgym_rl.scale.process_group",
    "agentgym_rl.scale.shards",
    "agentgym_rl.environment.envs.babyai",
    "minigrid.envs.babyai",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "matplotlib.patheffects",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "hypothesis",
]
"""Installed modules only: the server has only the default import path and silently skips modules it cannot find."""

# Python has one such server for all contexts, and the last list set before it starts counts. Only this line sets it.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOADED)


@contextlib.contextmanager
def beside(serve: Callable[[Any, str], None], device: str) -> Iterator[tuple[Any, Any]]:
    """Run `serve(connection, device)` in a process and yield (our connection, process)."""
    context = CONTEXT if device == "cpu" else multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=serve, args=(child_end, device), daemon=True)
    process.start()
    child_end.close()
    try:
        yield parent_end, process
    finally:
        parent_end.close()
        process.join(10)
        process.kill()


def exit_code_if_preloaded() -> None:
    """Exit with the number of modules that are not preloaded. Call it in a freshly forked process."""
    sys.exit(sum(name not in sys.modules for name in PRELOADED))


class Forked:
    """A forked `agentgym-rl <arguments>` with the environment of this process and the interface of subprocess.Popen."""

    def __init__(self, arguments: list[str], output: Path) -> None:
        self._process = CONTEXT.Process(target=_command_line, args=(arguments, str(output), dict(os.environ)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("agentgym-rl", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _command_line(arguments: list[str], output: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)  # the fork has the environment of the server's start
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)  # for its child processes too
    sys.argv = ["agentgym-rl", *arguments]
    from agentgym_rl.cli import main

    main()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
