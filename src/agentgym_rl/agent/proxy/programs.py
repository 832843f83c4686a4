"""The user's program: a new process for every episode, or a fork of a process that has imported the function. A process
of its own (host.py) starts them, so that none outlives the run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import IO, Any, Literal

from agentgym_rl.agent.proxy.client import SESSION_URL
from agentgym_rl.agent.proxy.host import kill_group

KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "SYSTEMROOT")
"""Environment variables that every program gets. Others, such as keys, only if the recipe names them."""
OUTPUT_SHOWN = 2000
"""Last characters of a failed program's output in the episode's error."""
KILL_TIMEOUT_S = 10.0
"""Seconds until a killed program must be gone. The episode does not wait longer for a host that does not answer."""
KILLED = -9
"""Exit code of a program whose host died."""

ProgramStart = Literal["fork", "process"]


class Program:
    """The user's program, started once for every episode. `close` ends the process that starts it."""

    def __init__(self, command: Sequence[str], variables: Sequence[str] = (), start: ProgramStart = "process") -> None:
        self.command = tuple(command)
        """Command and arguments, or a Python function as `my_module:play`. Empty: a client claims the episode."""
        self._variables = tuple(variables)
        self._forks = start == "fork" and self._is_function
        self._host = ProgramHost(self.command[0] if self._forks else None, self._environment() | _importable())

    @property
    def _is_function(self) -> bool:
        return len(self.command) == 1 and ":" in self.command[0]

    def _environment(self) -> dict[str, str]:
        """Return the environment variables of the run that the program gets."""
        kept = {name: os.environ[name] for name in (*KEPT_VARIABLES, *self._variables) if name in os.environ}
        return kept | _importable() if self._is_function else kept

    async def start(self, links: dict[str, str]) -> RunningProgram:
        """Start the program for the session with these addresses."""
        session = {"OPENAI_BASE_URL": links["base_url"], "OPENAI_API_KEY": links["api_key"], SESSION_URL: links["url"]}
        command = list(self.command)
        if self._is_function:
            command = [sys.executable, "-m", "agentgym_rl.agent.proxy.client", *command]
        return await self._host.start([] if self._forks else command, self._environment() | session)

    async def close(self) -> None:
        """End the host, with every program that it runs."""
        await self._host.close()


def _importable() -> dict[str, str]:
    """Return the variable by which another process can import what this one can."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class RunningProgram:
    """A program that plays an episode, with the output that it has written."""

    def __init__(self, exited: asyncio.Future[int], output: IO[bytes], kill: Callable[[], None]) -> None:
        self.exited = exited
        """Its exit code."""
        self.output = output
        self._kill = kill

    def tail(self) -> str:
        """Return the end of the output."""
        size = self.output.seek(0, os.SEEK_END)
        self.output.seek(max(0, size - 4 * OUTPUT_SHOWN))
        return self.output.read().decode(errors="replace").strip()[-OUTPUT_SHOWN:]

    async def stop(self, timeout_s: float) -> None:
        """Wait for the program to exit, then kill it and every process that it left behind."""
        try:
            if timeout_s:
                await asyncio.wait([self.exited], timeout=timeout_s)
        finally:
            self._kill()
            await asyncio.wait([self.exited], timeout=KILL_TIMEOUT_S)
            self.output.close()


class _Started:
    """An episode's process, which the host starts and reports on."""

    def __init__(self, output: IO[bytes]) -> None:
        self.output = output
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pid: int | None = None
        self._killed = False

    def started(self, pid: int) -> None:
        self._pid = pid
        if self._killed:
            kill_group(pid)

    def kill(self) -> None:
        """Kill the process, as soon as its id is known if it is not. The host kills what an exited one leaves."""
        self._killed = True
        if self._pid is not None and not self.exited.done():
            kill_group(self._pid)


class ProgramHost:
    """The run's side of host.py: the process that starts every program, by a fork if it has a function to import.

    It is started with the first episode, and again if it died.
    """

    def __init__(self, function: str | None, variables: dict[str, str]) -> None:
        self._function, self._variables = function, variables
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._running: dict[str, _Started] = {}
        self._num_started = 0

    async def start(self, command: list[str], variables: dict[str, str]) -> RunningProgram:
        """Order an episode's process. Without a command it runs the function."""
        async with self._starting:
            if self._reading is None or self._reading.done():
                await self._start_host()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        started = _Started(tempfile.NamedTemporaryFile())  # noqa: SIM115, closed with the program
        self._num_started += 1
        name = str(self._num_started)
        self._running[name] = started
        order = {"id": name, "command": command, "variables": variables, "output": started.output.name}
        process.stdin.write(json.dumps(order).encode() + b"\n")
        return RunningProgram(started.exited, started.output, started.kill)

    async def close(self) -> None:
        """End the host and everything that it runs."""
        if self._process is None or self._reading is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._reading
        self._process = self._reading = None

    async def _start_host(self) -> None:
        output = tempfile.TemporaryFile()  # noqa: SIM115, closed when the host has ended
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agentgym_rl.agent.proxy.host", *filter(None, [self._function])),
            env=self._variables,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            start_new_session=True,
        )
        self._reading = asyncio.create_task(self._read(self._process, output))

    async def _read(self, process: asyncio.subprocess.Process, output: IO[bytes]) -> None:
        """Pass on the host's reports, until it ends and every episode with it."""
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                self._note(json.loads(line))
            code = await process.wait()
            output.seek(0)
            work = f"imports {self._function} and forks" if self._function else "starts programs"
            reason = f"the process that {work} ended with code {code}: " + (
                output.read().decode(errors="replace").strip()[-OUTPUT_SHOWN:] or "it wrote nothing"
            )
        finally:
            output.close()
        for started in self._running.values():
            started.kill()
            if not started.output.closed:
                started.output.write(reason.encode())
            started.exited.set_result(KILLED)
        self._running.clear()

    def _note(self, report: dict[str, Any]) -> None:
        if "pid" in report:
            self._running[report["id"]].started(report["pid"])
        else:
            self._running.pop(report["id"]).exited.set_result(report["code"])
