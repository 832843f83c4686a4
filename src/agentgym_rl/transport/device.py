"""Weights sent from a learner's process to engines on the same device, without leaving the device.

    engine      `open_endpoint()`: a socket that accepts one connection with the right key
    learner     `send_weights(tensors, version, endpoints, ...)`: connects, copies tensors into a shared buffer as they
                are gathered, announces a full buffer and continues after every engine has acknowledged it
    engine      `DeviceWeights(endpoint, version).tensors()`: yields the buffer's tensors, to be copied in place

The buffer is CUDA memory that other processes open through CUDA IPC, or mapped host memory on a CPU. The protocol is
the same, so tests need no GPU. There is one buffer, as large as a bucket or as the largest tensor. A process that dies
closes its connection. The learner skips a dead engine and keeps gathering, because gathering takes every rank. An
engine whose learner died has an incomplete version and raises.
"""

from __future__ import annotations

import contextlib
import hmac
import inspect
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from agentgym_rl.errors import EngineError
from agentgym_rl.transport.broadcast import Entry, send_in_buckets, tensor_view, wait_for_copies

DEVICE_WEIGHTS_VARIABLE = "AGENTGYM_RL_DEVICE_WEIGHTS"
"""Environment variable of the driver: `never`, or `always`, which includes CPUs and is meant for tests."""
ACK = b"ack"
"""An engine's answer to each message."""
CONNECTION_ERRORS = (OSError, EOFError)
"""Errors of a connection whose other process is gone or does not answer before the deadline."""
ANSWER_TIMEOUT_S = 600.0
"""Seconds an engine waits for its learner, which may serve others first, and a learner for an engine's answer."""
AUTH_TIMEOUT_S = 5.0
"""Seconds a connecting process has to send the key."""
IPC_FIELDS = {name: index for index, name in enumerate(inspect.signature(rebuild_cuda_tensor).parameters)}
"""Positions of the values from which torch rebuilds a CUDA tensor. Some are read or changed here."""


class Endpoint(NamedTuple):
    """The address on which an engine waits for a learner."""

    name: str
    """Name of an abstract Unix socket, which disappears with its process."""
    key: str
    device: str
    """The engine's device as `device_id` names it. Only a learner on the same device can send."""


def device_id() -> str:
    """Return an id that all processes on this device share, however they number it, and no others."""
    if torch.cuda.is_initialized():
        return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    return f"CPU-{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


_listening: tuple[Endpoint, socket.socket] | None = None
"""This process's endpoint. A new one replaces it."""


def open_endpoint() -> Endpoint:
    """Listen for one version of the weights."""
    global _listening
    _close_endpoint()
    endpoint = Endpoint(f"\0agentgym-rl-{secrets.token_hex(16)}", secrets.token_hex(32), device_id())
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(endpoint.name)
    listener.listen()
    _listening = (endpoint, listener)
    return endpoint


def _accept(endpoint: Endpoint, listener: socket.socket) -> Connection:
    """Return the first connection that sends the key. Every process of the machine can see the socket's name."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        listener.settimeout(max(0.001, deadline - time.monotonic()))
        client, _ = listener.accept()
        with client:
            if not _is_authorized(client, endpoint.key.encode()):
                continue
            connection = Connection(client.detach())
        connection.send_bytes(ACK)
        return connection


def _is_authorized(client: socket.socket, key: bytes) -> bool:
    if _peer_user(client) != os.geteuid():
        return False
    deadline, received = time.monotonic() + AUTH_TIMEOUT_S, b""
    with contextlib.suppress(OSError):
        while len(received) < len(key):
            client.settimeout(max(0.001, deadline - time.monotonic()))
            if not (more := client.recv(len(key) - len(received))):
                return False
            received += more
        client.settimeout(None)
    return hmac.compare_digest(received, key)


def _peer_user(peer: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return user


def _connect(endpoint: Endpoint) -> Connection:
    """Connect and send the key, but only to a process of the same user."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(endpoint.name)
        if _peer_user(server) != os.geteuid():
            raise PermissionError(f"it belongs to user {_peer_user(server)}")
        server.sendall(endpoint.key.encode())
        return Connection(server.detach())


def _wait_for_ack(connection: Connection) -> None:
    if not connection.poll(ANSWER_TIMEOUT_S):
        raise TimeoutError(f"no answer for {ANSWER_TIMEOUT_S:.0f} s")
    connection.recv_bytes()


def _close_endpoint() -> None:
    global _listening
    if _listening is not None:
        _listening[1].close()
    _listening = None


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """A version of the weights that a learner on this device will send to this process."""

    endpoint: Endpoint
    version: int

    def connect(self) -> None:
        """Do nothing: the learner connects while the tensors are read."""

    def tensors(self) -> Generator[tuple[str, torch.Tensor]]:
        """Yield each tensor. Copy and drop it before asking for the next one, because the learner reuses its memory.
        Raises EngineError if the learner is gone."""
        if _listening is None or _listening[0].name != self.endpoint.name:
            raise EngineError(
                f"this process does not listen for weights {self.version}: call open_endpoint() first, once per version"
            )
        listening = _listening
        try:
            with _accept(*listening) as connection:
                yield from self._received(connection)
        except CONNECTION_ERRORS as error:
            raise EngineError(
                f"the learner with weights {self.version} did not connect within {ANSWER_TIMEOUT_S:.0f} s"
                if isinstance(error, TimeoutError)
                else f"the learner was gone before it had sent all of weights {self.version} ({error!r})"
            ) from error
        finally:
            if _listening is listening:
                _close_endpoint()

    def _received(self, connection: Any) -> Iterator[tuple[str, torch.Tensor]]:
        buffer: torch.Tensor | None = None
        while True:
            kind, value = connection.recv()
            if kind == "version" and value != self.version:
                raise EngineError(f"needed weights {self.version}, the learner sends weights {value}")
            if kind == "buffer":
                buffer = None  # closed before the next one is opened, so that the learner can free it
                buffer = None if value is None else _open_buffer(value)
            if kind == "copy":
                assert buffer is not None
                for entry in value:
                    yield entry[0], tensor_view(buffer, entry)
                wait_for_copies()
            connection.send_bytes(ACK)
            if kind == "end":
                return


class DeviceBuffer:
    """CUDA memory of this process. Torch counts the processes that have it open and frees it after the last."""

    def __init__(self, size: int) -> None:
        with _fixed_segments():
            self.bytes = torch.empty(size, dtype=torch.uint8, device="cuda")

    def share(self) -> Any:
        """Return a handle for one other process to open the buffer with. Call once per process."""
        try:
            return reduce_tensor(self.bytes)[1]
        except RuntimeError as error:
            message = f"cannot share memory of this device ({error}): set {DEVICE_WEIGHTS_VARIABLE}=never to do without"
            raise EngineError(message) from error

    def revoke(self, handle: Any) -> None:
        """Release the handle of a process that died or may never close it."""
        counter, offset, device = (
            handle[IPC_FIELDS[name]] for name in ("ref_counter_handle", "ref_counter_offset", "storage_device")
        )
        torch.UntypedStorage._release_ipc_counter(counter, offset, device=device)

    def close(self) -> None:
        del self.bytes
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()  # an engine needs it more than torch's cache does


class HostBuffer:
    """Anonymous host memory. It disappears with the last process that maps it."""

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("agentgym-rl-shared")
        os.truncate(self._file, size)
        self.bytes = _map(self._file, size)

    def share(self) -> Any:
        return f"/proc/{os.getpid()}/fd/{self._file}", len(self.bytes)

    def revoke(self, handle: Any) -> None:
        """Do nothing: the kernel unmaps the memory of a dead process."""

    def close(self) -> None:
        del self.bytes
        os.close(self._file)


def _map(file: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def _open_buffer(handle: Any) -> torch.Tensor:
    if isinstance(handle[0], str):
        with open(handle[0], "r+b", buffering=0) as file:
            return _map(file.fileno(), handle[1])
    # The device is the same (checked before), but the learner may number it differently. There is no need to wait for
    # the learner's event: it announces a buffer only after writing it.
    arguments = [*handle]
    arguments[IPC_FIELDS["storage_device"]] = torch.cuda.current_device()
    arguments[IPC_FIELDS["event_sync_required"]] = False
    try:
        return cast(torch.Tensor, rebuild_cuda_tensor(*arguments))
    except RuntimeError as error:
        message = (
            f"cannot open the learner's device memory ({error}): set {DEVICE_WEIGHTS_VARIABLE}=never to do without"
        )
        raise EngineError(message) from error


@contextlib.contextmanager
def _fixed_segments() -> Iterator[None]:
    """Allocate without expandable segments, which only processes with ptrace rights on each other can share."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if "expandable_segments:true" not in settings.lower():
        yield
        return
    # If a setting is named twice, the last one counts. A setting that is not named is reset.
    torch.cuda.memory._set_allocator_settings(f"{settings},expandable_segments:False")
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings(settings)


class WeightSender:
    """Connections to engines and their shared buffer. `failed`: {endpoint's name: why} of skipped engines."""

    def __init__(self, endpoints: Sequence[Endpoint], version: int) -> None:
        self.failed: dict[str, str] = {}
        self._connections: dict[str, Connection] = {}
        self._buffer: DeviceBuffer | HostBuffer | None = None
        self._handles: dict[str, Any] = {}
        self._entries: list[Entry] = []
        for endpoint in endpoints:
            self._try(endpoint.name, partial(self._connect, endpoint))
        self._send(dict.fromkeys(self._connections, ("version", version)))

    def reserve(self, size: int) -> None:
        """Grow the shared buffer. Call only after every engine has copied it."""
        if self._connections and (self._buffer is None or len(self._buffer.bytes) < size):
            self._release_buffer()
            buffer = self._buffer = DeviceBuffer(size) if torch.cuda.is_initialized() else HostBuffer(size)
            self._handles = {name: buffer.share() for name in self._connections}
            self._send({name: ("buffer", handle) for name, handle in self._handles.items()})

    def write(self, tensor: torch.Tensor, entry: Entry) -> None:
        if self._connections:
            assert self._buffer is not None
            tensor_view(self._buffer.bytes, entry).copy_(tensor.detach(), non_blocking=True)
            self._entries.append(entry)

    def flush(self) -> None:
        """Return after every engine has copied the tensors in the buffer."""
        if self._entries:
            wait_for_copies()
            self._send(dict.fromkeys(self._connections, ("copy", self._entries)))
            self._entries = []

    def end(self) -> None:
        """Tell the engines that they have all tensors."""
        self._release_buffer()
        self._send(dict.fromkeys(self._connections, ("end", None)))

    def close(self) -> None:
        """Always called. An engine that received no `end` treats the transfer as incomplete."""
        for name in list(self._connections):
            self._drop(name)
        if self._buffer is not None:
            self._buffer.close()
        self._buffer = None

    def _release_buffer(self) -> None:
        self._send(dict.fromkeys(self._connections, ("buffer", None)))
        self._handles = {}
        if self._buffer is not None:
            self._buffer.close()
        self._buffer = None

    def _connect(self, endpoint: Endpoint) -> None:
        self._connections[endpoint.name] = _connect(endpoint)
        _wait_for_ack(self._connections[endpoint.name])

    def _send(self, messages: dict[str, Any]) -> None:
        """Send every message, then wait for every answer."""
        for name, message in messages.items():
            self._try(name, partial(self._connections[name].send, message))
        for name in messages:
            if name in self._connections:
                self._try(name, partial(_wait_for_ack, self._connections[name]))

    def _try(self, name: str, act: Callable[[], Any]) -> None:
        """Call `act` and drop the engine if its connection fails. This is no context manager: from Python 3.12 on, its
        error would keep the callers' frames, and with them a tensor, until garbage is collected."""
        try:
            act()
        except CONNECTION_ERRORS as error:
            self.failed[name] = f"the connection failed ({error!r})"
            self._drop(name)

    def _drop(self, name: str) -> None:
        connection = self._connections.pop(name, None)
        if connection is not None:
            connection.close()
        if name in self._handles and self._buffer is not None:
            self._buffer.revoke(self._handles.pop(name))


@torch.no_grad()
def send_weights(
    named: Iterable[tuple[str, torch.Tensor]], version: int, endpoints: Sequence[Endpoint], bucket_bytes: int
) -> dict[str, str]:
    """Send all tensors in buckets. Every tensor is gathered even if no engine is left. Returns {endpoint's name: why}
    of the engines that did not get them."""
    sender = WeightSender(endpoints, version)
    try:
        send_in_buckets(named, bucket_bytes, sender)
    finally:
        sender.close()
    return sender.failed
