"""Weights from a learner's process to an engine's on the same device, without leaving it.

    engine      `expect()`: a door, which opens to who has its key
    learner     `lend(tensors, version, doors, ...)`: knocks, writes tensors into a room as they are gathered, and when
                it is full says so; writes on when every engine said that it has taken what is there
    engine      `LentWeights(door, version).tensors()`: the room's tensors, one after the other, to be copied in place

A room is memory of the CUDA device, which other processes open through CUDA IPC, or on a CPU memory that they map: the
same protocol, so that it is tested where there is no device. There is one, of a bucket's size or that of the largest
tensor. Whoever dies closes its end of the line: an engine that is gone is left out, since gathering takes every rank;
one whose learner is gone has half of a version and raises.
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
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from agentgym_rl.errors import EngineError
from agentgym_rl.transport.host_memory import Entry, copies_done, cut, padded, part

TAKEN = b"taken"
"""What an engine answers to each message."""
BROKEN = (OSError, EOFError)
"""What a line fails with when the process at its other end is gone, or does not answer in time."""
PATIENCE_S = 600.0
"""Granted to a learner to come: it may have much to gather for others first. And to an engine to answer."""
KNOCK_S = 5.0
"""Granted to who knocks to show the key."""
PLACES = {name: place for place, name in enumerate(inspect.signature(rebuild_cuda_tensor).parameters)}
"""Of what torch rebuilds a CUDA tensor from; the device's number, and a counter of who has it open, are read here."""


class Door(NamedTuple):
    """Where an engine waits for a learner."""

    name: str
    """Of a Unix socket without a file, which is gone with its process."""
    key: str
    device: str
    """As `device_id` names it: only who works on the same one may lend."""


def device_id() -> str:
    """The same in all processes that work on one device, however each of them numbers it, and in no other."""
    if torch.cuda.is_initialized():
        return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    return f"CPU-{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


_door: tuple[Door, socket.socket] | None = None
"""Of this process: a new one replaces it."""


def expect() -> Door:
    """Open the door for one version of the weights."""
    global _door
    _shut()
    door = Door(f"\0agentgym-rl-{secrets.token_hex(16)}", secrets.token_hex(32), device_id())
    entrance = socket.socket(socket.AF_UNIX)
    entrance.bind(door.name)
    entrance.listen()
    _door = (door, entrance)
    return door


def _opened_to(door: Door, entrance: socket.socket) -> Connection:
    """A line to the first who comes with the key. Anybody on the machine can read the name, so others may come."""
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        entrance.settimeout(max(0.001, give_up_at - time.monotonic()))
        knocking, _ = entrance.accept()
        with knocking:
            if not _has_the_key(knocking, door.key.encode()):
                continue
            line = Connection(knocking.detach())
        line.send_bytes(TAKEN)
        return line


def _has_the_key(knocking: socket.socket, key: bytes) -> bool:
    if _user_of(knocking) != os.geteuid():
        return False
    give_up_at, shown = time.monotonic() + KNOCK_S, b""
    with contextlib.suppress(OSError):
        while len(shown) < len(key):
            knocking.settimeout(max(0.001, give_up_at - time.monotonic()))
            if not (more := knocking.recv(len(key) - len(shown))):
                return False
            shown += more
        knocking.settimeout(None)
    return hmac.compare_digest(shown, key)


def _user_of(peer: socket.socket) -> int:
    """Who is at the other end."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return user


def _knock(door: Door) -> Connection:
    """The other end of it; the key is shown to a process of the same user alone."""
    with socket.socket(socket.AF_UNIX) as found:
        found.connect(door.name)
        if _user_of(found) != os.geteuid():
            raise PermissionError(f"it belongs to user {_user_of(found)}")
        found.sendall(door.key.encode())
        return Connection(found.detach())


def _answered(line: Connection) -> None:
    if not line.poll(PATIENCE_S):
        raise TimeoutError(f"no answer for {PATIENCE_S:.0f} s")
    line.recv_bytes()


def _shut() -> None:
    global _door
    if _door is not None:
        _door[1].close()
    _door = None


@dataclass(frozen=True, slots=True)
class LentWeights:
    """A version of the weights that a learner on this device is about to lend, in the process that expects it."""

    door: Door
    version: int

    def tensors(self) -> Generator[tuple[str, torch.Tensor]]:
        """One after the other, each to be copied and let go of before the next is asked for: it is the lender's memory,
        which is written anew. EngineError where the lender is gone."""
        if _door is None or _door[0].name != self.door.name:
            raise EngineError(f"weights {self.version} are not expected here: call expect() first, once for a version")
        mine = _door
        try:
            with _opened_to(*mine) as line:
                yield from self._taken(line)
        except BROKEN as error:
            raise EngineError(
                f"the learner that lends weights {self.version} did not come within {PATIENCE_S:.0f} s"
                if isinstance(error, TimeoutError)
                else f"the learner that lent weights {self.version} is gone before all of them were there ({error!r})"
            ) from error
        finally:
            if _door is mine:
                _shut()

    def copies(self) -> Generator[tuple[str, torch.Tensor]]:
        """Likewise, for who keeps them longer."""
        for name, tensor in self.tensors():
            copy = tensor.clone()
            del tensor
            yield name, copy
            del copy

    def _taken(self, line: Any) -> Iterator[tuple[str, torch.Tensor]]:
        room: torch.Tensor | None = None
        while True:
            kind, what = line.recv()
            if kind == "version" and what != self.version:
                raise EngineError(f"weights {self.version} were expected, the learner lends {what}")
            if kind == "room":
                room = None  # closed before the next is opened, or the lender frees it
                room = None if what is None else _opened(what)
            if kind == "take":
                assert room is not None
                for entry in what:
                    yield entry[0], part(room, entry)
                copies_done()
            line.send_bytes(TAKEN)
            if kind == "end":
                return


class Room(Protocol):
    """Memory that a lender writes and others read."""

    bytes: torch.Tensor

    def lent(self) -> Any:
        """What another process opens it by; asked for once for each."""
        ...

    def take_back(self, lent: Any) -> None:
        """From a process that died, or might never say that it is done."""
        ...

    def close(self) -> None: ...


class DeviceRoom:
    """Of this process's CUDA device. Torch counts who has it open, and frees it when nobody has."""

    def __init__(self, size: int) -> None:
        with _plain_segments():
            self.bytes = torch.empty(size, dtype=torch.uint8, device="cuda")

    def lent(self) -> Any:
        try:
            return reduce_tensor(self.bytes)[1]
        except RuntimeError as error:
            message = f"memory of this device cannot be lent ({error}); AGENTGYM_RL_LEND=never does without"
            raise EngineError(message) from error

    def take_back(self, lent: Any) -> None:
        counter, offset, device = (
            lent[PLACES[name]] for name in ("ref_counter_handle", "ref_counter_offset", "storage_device")
        )
        torch.UntypedStorage._release_ipc_counter(counter, offset, device=device)

    def close(self) -> None:
        del self.bytes
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()  # an engine needs it more than torch's cache does


class HostRoom:
    """Of the machine, without a name. It is gone with the last process that maps it."""

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("agentgym-rl-lent")
        os.truncate(self._file, size)
        self.bytes = _mapped(self._file, size)

    def lent(self) -> Any:
        return f"/proc/{os.getpid()}/fd/{self._file}", len(self.bytes)

    def take_back(self, lent: Any) -> None:
        """Nothing: the machine knows who died."""

    def close(self) -> None:
        del self.bytes
        os.close(self._file)


def _mapped(file: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def _opened(lent: Any) -> torch.Tensor:
    if isinstance(lent[0], str):
        with open(lent[0], "r+b", buffering=0) as file:
            return _mapped(file.fileno(), lent[1])
    # The lender's number of the device need not be ours; that it is the same device was found out before. Its event is
    # not waited for, since it says when all is written.
    parts = [*lent]
    parts[PLACES["storage_device"]] = torch.cuda.current_device()
    parts[PLACES["event_sync_required"]] = False
    try:
        return cast(torch.Tensor, rebuild_cuda_tensor(*parts))
    except RuntimeError as error:
        message = (
            f"memory of the learner on this device could not be opened ({error}); AGENTGYM_RL_LEND=never does without"
        )
        raise EngineError(message) from error


@contextlib.contextmanager
def _plain_segments() -> Iterator[None]:
    """Of torch's memory. Segments that can grow are opened by other processes only where these may trace each other."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if "expandable_segments:true" not in settings.lower():
        yield
        return
    # Of a setting that is named twice the latter counts; one that is not named is lost.
    torch.cuda.memory._set_allocator_settings(f"{settings},expandable_segments:False")
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings(settings)


class Lender:
    """Lines to engines and the room between them. `failed`: {door's name: why} of engines that are left out."""

    def __init__(self, doors: Sequence[Door], version: int) -> None:
        self.failed: dict[str, str] = {}
        self._lines: dict[str, Connection] = {}
        self._room: Room | None = None
        self._lent: dict[str, Any] = {}
        for door in doors:
            self._or_without(door.name, partial(self._reach, door))
        self._say(dict.fromkeys(self._lines, ("version", version)))

    def need(self, size: int) -> None:
        """Of the room, when nothing is in it that anybody still has to take."""
        if self._room is None or len(self._room.bytes) < size:
            self._clear()
            room = self._room = DeviceRoom(size) if torch.cuda.is_initialized() else HostRoom(size)
            self._lent = {name: room.lent() for name in self._lines}
            self._say({name: ("room", lent) for name, lent in self._lent.items()})

    def write(self, tensor: torch.Tensor, entry: Entry) -> None:
        assert self._room is not None
        part(self._room.bytes, entry).copy_(tensor.detach(), non_blocking=True)

    def hand_over(self, entries: list[Entry]) -> None:
        """Returns when every engine has taken these tensors of the room."""
        copies_done()
        self._say(dict.fromkeys(self._lines, ("take", entries)))

    def end(self) -> None:
        """When there is no more."""
        self._clear()
        self._say(dict.fromkeys(self._lines, ("end", None)))

    def close(self) -> None:
        """Whatever came to pass; engines that were told of no end know that there is more."""
        for name in list(self._lines):
            self._leave(name)
        if self._room is not None:
            self._room.close()
        self._room = None

    def __bool__(self) -> bool:
        """Whether there is anybody to lend to."""
        return bool(self._lines)

    def _clear(self) -> None:
        self._say(dict.fromkeys(self._lines, ("room", None)))
        self._lent = {}
        if self._room is not None:
            self._room.close()
        self._room = None

    def _reach(self, door: Door) -> None:
        self._lines[door.name] = _knock(door)
        _answered(self._lines[door.name])

    def _say(self, messages: dict[str, Any]) -> None:
        """To all, before the first is waited for."""
        for name, message in messages.items():
            self._or_without(name, partial(self._lines[name].send, message))
        for name in messages:
            if name in self._lines:
                self._or_without(name, partial(_answered, self._lines[name]))

    def _or_without(self, name: str, act: Callable[[], Any]) -> None:
        """Not a context manager: from Python 3.12 on its error would keep the callers' frames, and with them a tensor,
        until garbage is collected."""
        try:
            act()
        except BROKEN as error:
            self.failed[name] = f"it could not be reached, or broke off ({error!r})"
            self._leave(name)

    def _leave(self, name: str) -> None:
        line = self._lines.pop(name, None)
        if line is not None:
            line.close()
        if name in self._lent and self._room is not None:
            self._room.take_back(self._lent.pop(name))


@torch.no_grad()
def lend(
    named: Iterable[tuple[str, torch.Tensor]], version: int, doors: Sequence[Door], bucket_bytes: int
) -> dict[str, str]:
    """All tensors to the engines behind these doors, in rooms of `bucket_bytes` or of the largest tensor's size. Every
    tensor is asked for even where nobody takes it. Returns which doors were not served, and why."""
    lender = Lender(doors, version)
    try:
        entries: list[Entry] = []
        for entry, tensor, begins in cut(named, bucket_bytes):
            if not lender:
                continue
            if begins:
                if entries:
                    lender.hand_over(entries)
                entries = []
                lender.need(max(bucket_bytes, padded(tensor)))
            lender.write(tensor, entry)
            entries.append(entry)
        if entries:
            lender.hand_over(entries)
        lender.end()
    finally:
        lender.close()
    return lender.failed
