"""A process that starts the program of every episode and ends with the run. Needs the standard library only.

`python -m agentgym_rl.agent.proxy.host [my_module:play]` reads orders from stdin, one JSON object a line, and writes
reports to stdout. `{"id", "variables", "output", "command"}` starts a command with these environment variables and this
file for its output; without a command, the function runs in a fork of this process, which imports it once. Reports are
`{"id", "pid"}` and `{"id", "code"}`. At the end of stdin, which comes with the run's end however it ends, every episode
is killed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import select
import signal
import sys
import threading
import traceback
from typing import Any, NoReturn

from agentgym_rl.agent.proxy.client import Function, load_function, run_function


class Host:
    """The loop of the process. It has one thread, because a fork copies only the thread that calls it."""

    def __init__(self, function: Function | None, orders: int, reports: int) -> None:
        self._function = function
        self._orders, self._reports = orders, reports
        self._wakeup = os.pipe()
        self._episodes: dict[int, str] = {}
        """Ids of the running episodes by process id."""

    def serve(self) -> None:
        """Start an episode for every order, until stdin ends."""
        for descriptor in self._wakeup:
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the wake-up pipe is written
        pending = b""
        while True:
            ready, _, _ = select.select([self._orders, self._wakeup[0]], [], [])
            if self._wakeup[0] in ready:
                os.read(self._wakeup[0], 4096)
                self._reap()
            if self._orders in ready:
                received = os.read(self._orders, 1 << 16)
                if not received:
                    break
                *lines, pending = (pending + received).split(b"\n")
                for line in lines:
                    self._start(json.loads(line))
        for pid in self._episodes:
            kill_group(pid)

    def _start(self, order: dict[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_episode(order)
        with contextlib.suppress(OSError):  # the child does the same; the group must exist for both
            os.setpgid(pid, pid)
        self._episodes[pid] = order["id"]
        self._report({"id": order["id"], "pid": pid})

    def _reap(self) -> None:
        while self._episodes:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if (episode := self._episodes.pop(pid, None)) is not None:  # not a process that an import started
                kill_group(pid)  # with the processes that the episode left behind
                self._report({"id": episode, "code": os.waitstatus_to_exitcode(status)})

    def _report(self, report: dict[str, Any]) -> None:
        os.write(self._reports, json.dumps(report).encode() + b"\n")

    def _become_episode(self, order: dict[str, Any]) -> NoReturn:
        code = 1
        try:
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (self._orders, self._reports, *self._wakeup):
                os.close(descriptor)
            output = os.open(order["output"], os.O_WRONLY | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            if command := order["command"]:
                _execute(command, order["variables"])
            assert self._function is not None
            os.environ.clear()
            os.environ.update(order["variables"])
            _seed()
            run_function(self._function)
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
            code = 0
        except SystemExit as ending:
            code = _exit_code(ending)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)  # the host's own exit handlers are not the episode's


def kill_group(pid: int) -> None:
    """Kill a process and those that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses to signal a group of zombies
        os.killpg(pid, signal.SIGKILL)


def _execute(command: list[str], variables: dict[str, str]) -> NoReturn:
    try:
        os.execvpe(command[0], command, variables)
    except OSError as error:
        sys.exit(f"{command[0]!r} cannot be started: {error.strerror}")


def _seed() -> None:
    """Give this process random numbers of its own: forks share the state of their generators."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _exit_code(ending: SystemExit) -> int:
    if ending.code is None or isinstance(ending.code, int):
        return ending.code or 0
    print(ending.code, file=sys.stderr)  # noqa: T201, as Python does
    return 1


def main() -> None:
    """Import the function that the command line names, if it names one, and serve orders."""
    # What the function's module prints must not be read as a report.
    orders, reports = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    function = load_function(sys.argv[1]) if sys.argv[1:] else None
    gc.collect()
    gc.freeze()  # so that forks share the memory of what was imported
    Host(function, orders, reports).serve()


if __name__ == "__main__":
    main()
