"""The user's program: a new process for every episode, or a fork of a process that has imported the function."""

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
from agentgym_rl.errors import ProgramError

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
    """The user's program, started once for every episode. `close` frees the process that forks."""

    def __init__(self, command: Sequence[str], variables: Sequence[str] = (), start: ProgramStart = "process") -> None:
        self.command = tuple(command)
        """Command and arguments, or a Python function as `my_module:play`. Empty: a client claims the episode."""
        self._variables = tuple(variables)
        self._host = ForkHost(self.command[0], self._environment()) if start == "fork" and self._is_function else None

    @property
    def _is_function(self) -> bool:
        return len(self.command) == 1 and ":" in self.command[0]

    def _environment(self) -> dict[str, str]:
        """Return the environment variables of the run that the program gets."""
        kept = {name: os.environ[name] for name in (*KEPT_VARIABLES, *self._variables) if name in os.environ}
        if self._is_function:  # what this process can import, the function's process can, too
            kept["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        return kept

    async def start(self, links: dict[str, str]) -> RunningProgram:
        """Start the program for the session with these addresses."""
        session = {"OPENAI_BASE_URL": links["base_url"], "OPENAI_API_KEY": links["api_key"], SESSION_URL: links["url"]}
        variables = self._environment() | session
        if self._host is not None:
            return await self._host.start(variables)
        argv = list(self.command)
        if self._is_function:
            argv = [sys.executable, "-m", "agentgym_rl.agent.proxy.client", *argv]
        return await _start_process(argv, variables)

    async def close(self) -> None:
        """End the process that forks, with every program that it runs."""
        if self._host is not None:
            await self._host.close()


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


async def _start_process(argv: list[str], variables: dict[str, str]) -> RunningProgram:
    output = tempfile.TemporaryFile()  # noqa: SIM115, closed with the program
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    except OSError as error:
        output.close()
        raise ProgramError(f"the program {argv[0]!r} cannot be started: {error.strerror}") from error
    return RunningProgram(asyncio.create_task(process.wait()), output, lambda: kill_group(process.pid))


class _Fork:
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


class ForkHost:
    """The run's side of host.py: a process that imports the function once and forks for every episode.

    It is started with the first episode, and again if it died.
    """

    def __init__(self, function: str, variables: dict[str, str]) -> None:
        self._function, self._variables = function, variables
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._forks: dict[str, _Fork] = {}
        self._num_started = 0

    async def start(self, variables: dict[str, str]) -> RunningProgram:
        """Order an episode's process."""
        async with self._starting:
            if self._reading is None or self._reading.done():
                await self._start_host()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        fork = _Fork(tempfile.NamedTemporaryFile())  # noqa: SIM115, closed with the program
        self._num_started += 1
        self._forks[str(self._num_started)] = fork
        order = {"id": str(self._num_started), "variables": variables, "output": fork.output.name}
        process.stdin.write(json.dumps(order).encode() + b"\n")
        return RunningProgram(fork.exited, fork.output, fork.kill)

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
            *(sys.executable, "-m", "agentgym_rl.agent.proxy.host", self._function),
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
            reason = f"the process that imports {self._function} and forks ended with code {code}: " + (
                output.read().decode(errors="replace").strip()[-OUTPUT_SHOWN:] or "it wrote nothing"
            )
        finally:
            output.close()
        for fork in self._forks.values():
            fork.kill()
            if not fork.output.closed:
                fork.output.write(reason.encode())
            fork.exited.set_result(KILLED)
        self._forks.clear()

    def _note(self, report: dict[str, Any]) -> None:
        if "pid" in report:
            self._forks[report["id"]].started(report["pid"])
        else:
            self._forks.pop(report["id"]).exited.set_result(report["code"])
