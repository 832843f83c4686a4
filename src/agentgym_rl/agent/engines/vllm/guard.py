"""vLLM's processes end with the one that started them, also when that is killed and can end nothing itself.

They would stay, with all the memory they hold: vLLM's workers watch its scheduler, and the scheduler watches nobody.
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
"""Environment variable with the pid of the process that vLLM's are to end with."""
LOOK_S = 1.0


@contextlib.contextmanager
def owned() -> Iterator[None]:
    """vLLM's processes that are started meanwhile belong to this one, which ends them: they inherit a blocked SIGINT,
    because a terminal sends Ctrl-C to all of them."""
    os.environ[OWNER] = str(os.getpid())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        del os.environ[OWNER]


def end_with_owner() -> None:
    """For a worker of vLLM, as early as possible. Does nothing in one that was not started under `owned`."""
    if OWNER not in os.environ or not Path("/proc/self/stat").exists():  # only Linux tells whose child one is
        return
    owner = int(os.environ[OWNER])
    below, parent = [os.getpid()], os.getppid()
    while parent != owner:
        if parent <= 1:
            os._exit(1)  # it was gone before this process was ready; the scheduler follows
        below.append(parent)
        parent = _parent(parent)
    threading.Thread(target=_watch, args=(below[-1], owner), daemon=True, name="agentgym-owner").start()


def _watch(scheduler: int, owner: int) -> None:
    """The scheduler is the owner's child, and somebody else's as soon as the owner is gone."""
    try:
        while _parent(scheduler) == owner:
            time.sleep(LOOK_S)
        os.kill(scheduler, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        pass  # gone too
    os._exit(1)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
