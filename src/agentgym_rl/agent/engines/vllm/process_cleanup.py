"""Ends vLLM's processes with the process that started them, even if that one is killed.

Otherwise they would remain with all their memory: vLLM's workers watch its scheduler, but nothing watches the owner.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

OWNER = "AGENTGYM_RL_VLLM_OWNER"
"""Environment variable with the pid of the owner, with which vLLM's processes end."""
POLL_INTERVAL_S = 1.0


@contextlib.contextmanager
def owning_processes() -> Iterator[None]:
    """Make this process the owner of vLLM processes started meanwhile. They inherit a blocked SIGINT, because a
    terminal sends Ctrl-C to all of them and the owner ends them."""
    os.environ[OWNER] = str(os.getpid())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        del os.environ[OWNER]


def end_with_owner() -> None:
    """Watch the owner from a vLLM worker. Call it as early as possible. Does nothing outside of `owned`."""
    if OWNER not in os.environ or not Path("/proc/self/stat").exists():  # only Linux shows a process's parent
        return
    owner = int(os.environ[OWNER])
    scheduler, parent = os.getpid(), os.getppid()
    while parent != owner:
        if parent <= 1:
            os._exit(1)  # the owner was gone before this process was ready; the scheduler ends next
        scheduler = parent
        parent = _parent(parent)
    threading.Thread(target=_watch, args=(scheduler, owner), daemon=True, name="agentgym-owner").start()


def _watch(scheduler: int, owner: int) -> None:
    """Kill the scheduler when the owner is gone. It then gets another parent."""
    try:
        while _parent(scheduler) == owner:
            time.sleep(POLL_INTERVAL_S)
        os.kill(scheduler, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        pass  # gone too
    os._exit(1)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
