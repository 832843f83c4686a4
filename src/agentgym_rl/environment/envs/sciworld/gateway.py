"""The part of Py4J's text protocol that the simulator needs.

Py4J's own client has no deadlines, resends a command if an answer is lost, and frees Java objects from any thread that
collects garbage. The simulator needs a deadline for every answer, steps that are never repeated, and one connection
with one caller at a time.
"""

from __future__ import annotations

import contextlib
import re
import socket
from dataclasses import dataclass

from agentgym_rl.errors import EnvError


@dataclass(frozen=True, slots=True)
class Reference:
    """An object that lives in the Java process until it is released."""

    id: str


@dataclass(frozen=True, slots=True)
class Long:
    """An integer that is sent to Java as a 64-bit one."""

    value: int


Value = str | int | float | bool | None | Reference
Argument = Value | Long


class GatewayLost(EnvError):
    """The Java process is gone, or its next answer may belong to an earlier command."""


class JavaError(EnvError):
    """The Java process raised an exception."""


def call(target: Reference | str, method: str, *arguments: Argument) -> str:
    """Return the command that calls a method of an object, or a static method of the class named `target`."""
    owner = target.id if isinstance(target, Reference) else f"z:{target}"
    return f"c\n{owner}\n{method}\n{_parts(arguments)}e\n"


def create(class_name: str) -> str:
    """Return the command that creates an object."""
    return f"i\n{class_name}\ne\n"


def release(reference: Reference) -> str:
    """Return the command that releases an object."""
    return f"m\nd\n{reference.id}\ne\n"


class Gateway:
    """One connection to a Java process. Not thread-safe, and unusable after GatewayLost."""

    def __init__(self, port: int, token: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        try:
            self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        except OSError as error:
            raise GatewayLost(f"the simulator does not accept a connection: {error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")
        self.ask(f"A\n{token}\n")

    def ask(self, *commands: str) -> list[Value]:
        """Send commands one after the other and return their answers. Raise JavaError at the first that fails.

        Sending them together would be slower, because the answers would wait for delayed acknowledgements.
        """
        return [self._ask(command) for command in commands]

    def set_deadline(self, timeout_s: float) -> None:
        """Set the timeout of each further answer."""
        self._timeout_s = timeout_s
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        for part in (self._answers, self._socket):
            with contextlib.suppress(OSError):
                part.close()

    def _ask(self, command: str) -> Value:
        try:
            self._socket.sendall(command.encode())
            line = self._answers.readline()
        except TimeoutError:
            raise GatewayLost(f"the simulator did not answer within {self._timeout_s:g} s") from None
        except (OSError, ValueError) as error:
            raise GatewayLost(f"the connection to the simulator broke: {error}") from error
        if not line.endswith(b"\n"):
            raise GatewayLost("the simulator closed its connection")
        return self._value(line.decode().rstrip("\n"))

    def _value(self, line: str) -> Value:
        if not line.startswith("!y"):
            raise JavaError(f"the simulator raised {self._read_error(line)}")
        kind, text = line[2:3], line[3:]
        if kind in ("v", "n", ""):
            return None
        if kind == "s":
            return _unescape(text)
        if kind in ("i", "L"):
            return int(text)
        if kind == "d":
            return float(text)
        if kind == "b":
            return text == "true"
        if kind in ("r", "l", "t"):  # object, list, array: all remain in the Java process
            return Reference(text)
        raise GatewayLost(f"the simulator gave an answer of the unknown kind {line[:40]!r}")

    def _read_error(self, line: str) -> str:
        if not line.startswith("!xr"):
            return _unescape(line[2:])[:300] or "an unnamed error"
        thrown = Reference(line[3:])
        with contextlib.suppress(JavaError):
            text, _ = self.ask(call(thrown, "toString"), release(thrown))
            return str(text)[:300]
        return "an error that has no description"


def _parts(arguments: tuple[Argument, ...]) -> str:
    return "".join(f"{_encode(argument)}\n" for argument in arguments)


def _encode(argument: Argument) -> str:
    match argument:
        case None:
            return "n"
        case bool():
            return f"b{str(argument).lower()}"
        case int():
            return f"i{argument}"
        case Long(value):
            return f"L{value}"
        case float():
            return f"d{argument!r}"
        case Reference(id):
            return f"r{id}"
        case str():
            return "s" + argument.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: {"n": "\n", "r": "\r"}.get(match[1], match[1]), text)
