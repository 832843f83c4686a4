"""Weights from one process to others of the same machine, without a file.

Tensors of the host go into memory without a name, which other processes map through the process that has it open: it is
copied once however many read it, and is gone with the last of them, whatever ends them. Memory that was made and mapped
serves every later version of the same tensors, on both sides: most of a copy's time would go into pages that nobody has
touched before. Where CUDA is in use it is page-locked, so that the device reads and writes it by itself.

Tensors on a CUDA device are lent to vLLM's worker as they are (CUDA IPC): torch's pickler writes them as handles.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import mmap
import os
import pickle
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # teaches the pickler tensors

ALIGNMENT = 64
HEADER = 64
"""Bytes before the first tensor: the memory's generation, then nothing."""
KEPT = 2
"""Memories that a reader keeps mapped: those that a writer of whole versions takes in turns."""
Entry = tuple[str, str, tuple[int, ...], int]
"""(name, dtype such as "bfloat16", shape, first byte)."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostWeights:
    """Tensors in memory of this machine."""

    path: str
    """Of the memory, for as long as the process that it names has it open."""
    inode: int
    """Something else may be open there later."""
    generation: int
    """Something else may be in it later."""
    size: int
    entries: list[Entry]
    refused: str
    """Why CUDA did not page-lock it for its writer; nothing if it did, or is not in use."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """One after the other, to be read: they are that memory itself."""
        if not self.entries:
            return
        window = _window(self)
        for entry in self.entries:
            yield entry[0], window.tensor(entry)

    @contextlib.contextmanager
    def held(self) -> Iterator[HostWeights]:
        """The same, open in this process too, and not written to meanwhile. FileNotFoundError where they are no longer
        lent."""
        self._require_same(os.stat(self.path))  # before it is opened, which a socket would not let
        with open(self.path, "r+b", buffering=0) as file:
            self._require_same(os.fstat(file.fileno()))
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FileNotFoundError(f"{self.path} is being written anew") from None
            try:
                if _generation(file.fileno()) != self.generation:
                    raise FileNotFoundError(f"{self.path} has other weights by now")
                yield replace(self, path=_path(file.fileno()))
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # also where a process that was forked meanwhile has it open

    def _require_same(self, found: os.stat_result) -> None:
        if found.st_ino != self.inode:
            raise FileNotFoundError(f"{self.path} is something else by now")


class HostMemory:
    """What HostWeights refer to. Filled again with the same tensors it is written to in place.

    The first time tensors are written as they come, since nobody knows how large they are together. With `like`, a
    memory that was filled before, there is room for the same at once.
    """

    def __init__(self, like: HostMemory | None = None) -> None:
        self._file = os.fdopen(os.memfd_create("agentgym-rl-weights"), "r+b", buffering=0)
        self._entries: list[Entry] = []
        self._size = HEADER
        self._window: Window | None = None
        if like is not None:
            self._entries, self._size = like._entries, like._size
        self._file.truncate(self._size)

    def fill(self, named: Iterable[tuple[str, torch.Tensor]]) -> HostWeights:
        """One tensor after the other, so that nobody needs all of them at once. BlockingIOError while somebody holds
        what is in it."""
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # changes nothing where it was claimed
        try:
            generation = _generation(self._file.fileno()) + 1
            os.pwrite(self._file.fileno(), generation.to_bytes(8, "little"), 0)
            self._fill(named)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        refused = "" if self._window is None else self._window.refused
        inode = os.fstat(self._file.fileno()).st_ino
        return HostWeights(_path(self._file.fileno()), inode, generation, self._size, self._entries, refused)

    def claim(self) -> bool:
        """Whether nobody holds what is in it; then nobody can until it is filled."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._forget_window()
        self._file.close()

    def _fill(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._window is None and self._entries:
            self._window = Window(self._file.fileno(), self._size)
        before, entries, start = self._entries, list[Entry](), HEADER
        for (name, tensor), expected in zip(named, itertools.chain(before, itertools.repeat(None)), strict=False):
            entry = entry_of(name, tensor, start)
            if entry != expected:
                self._forget_window()  # other tensors than last time, from here on
            if self._window is None:
                self._write(tensor, start)
            else:
                self._window.tensor(entry).copy_(tensor.detach(), non_blocking=True)
            entries.append(entry)
            start += padded(tensor)
        copies_done()
        if start != self._size:
            self._forget_window()
            self._file.truncate(start)
        self._entries, self._size = entries, start

    def _write(self, tensor: torch.Tensor, start: int) -> None:
        left = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
        while left:
            count = os.pwrite(self._file.fileno(), left, start)  # at most 2 GiB of them
            left, start = left[count:], start + count

    def _forget_window(self) -> None:
        if self._window is not None:
            self._window.close()
        self._window = None


class HostMemories:
    """Two, in turns: the version that was lent last can be read while the next one is written."""

    def __init__(self) -> None:
        self._lent: HostMemory | None = None
        self._spare: HostMemory | None = None

    def fill(self, named: Iterable[tuple[str, torch.Tensor]]) -> HostWeights:
        memory, self._spare = self._spare, None
        if memory is not None and not memory.claim():
            memory.close()  # somebody still reads it, as one that takes long to start: it is theirs now
            memory = None
        memory = memory or HostMemory(self._lent)
        try:
            weights = memory.fill(named)
        except BaseException:
            memory.close()
            raise
        self._lent, self._spare = memory, self._lent
        return weights

    def close(self) -> None:
        for memory in (self._lent, self._spare):
            if memory is not None:
                memory.close()


class Window:
    """A memory as this process sees it, with all pages there, and page-locked where CUDA is in use and allows it."""

    def __init__(self, file: int, size: int) -> None:
        self.size = size
        self.refused = ""
        flags, rights = mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE
        self._bytes = torch.frombuffer(mmap.mmap(file, size, flags=flags, prot=rights), dtype=torch.uint8)
        self._unlock: weakref.finalize[..., Window] | None = None
        self.lock()

    def lock(self) -> None:
        """Does nothing a second time, or as long as CUDA is not in use."""
        if self._unlock is not None or self.refused or not torch.cuda.is_initialized():
            return
        code = int(torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self.size, 0))
        if not code:
            # Also where nobody closes it: CUDA would take the address for locked when something else is there.
            self._unlock = weakref.finalize(self, _unlock, self._bytes.data_ptr())
            self._unlock.atexit = False
        else:
            self.refused = f"CUDA does not page-lock the memory that weights go through ({torch.cuda.CudaError(code)})"
            logger.warning("%s: it is copied through buffers, more slowly", self.refused)
            with contextlib.suppress(RuntimeError):  # CUDA tells it once more, to whoever comes next
                torch.zeros(1, device="cuda").add_(1)

    def tensor(self, entry: Entry) -> torch.Tensor:
        return part(self._bytes, entry)

    def close(self) -> None:
        """The memory is unmapped when nobody has a tensor of it any more."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None


def _unlock(address: int) -> None:
    with contextlib.suppress(RuntimeError):  # of a device that failed, which does nothing any more
        copies_done()  # what was not waited for, where writing was broken off
    torch.cuda.cudart().cudaHostUnregister(address)


def pack(state: Mapping[str, torch.Tensor] | HostWeights, memory: HostMemory | None = None) -> tuple[bytes, Any]:
    """(message, what it refers to: keep that until it was read). What is on the host goes into `memory`, tensors that
    are one and the same (a tied head) once, under the first name."""
    if isinstance(state, HostWeights):
        return pickle.dumps((state, {})), None
    lent = {name: tensor.detach() for name, tensor in state.items() if tensor.device.type != "cpu"}
    memory = memory or HostMemory()
    weights = memory.fill(_each_once((name, tensor) for name, tensor in state.items() if name not in lent))
    return bytes(ForkingPickler.dumps((weights, lent))), (memory, lent)


def unpack(message: bytes) -> Iterator[tuple[str, torch.Tensor]]:
    """Only ever called on what `pack` of the parent process wrote."""
    loaded: Any = pickle.loads(message)
    weights, lent = loaded
    yield from weights.tensors()
    yield from lent.items()


def part(memory: torch.Tensor, entry: Entry) -> torch.Tensor:
    """A tensor in these bytes: they themselves, unless it is empty."""
    _, dtype, shape, start = entry
    kind = getattr(torch, dtype)
    count = torch.Size(shape).numel() * kind.itemsize
    if not count:
        return torch.empty(shape, dtype=kind, device=memory.device)
    return memory[start : start + count].view(kind).view(shape)


def entry_of(name: str, tensor: torch.Tensor, start: int) -> Entry:
    return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start


def cut(named: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[tuple[Entry, torch.Tensor, bool]]:
    """Each tensor with its place in a bucket of at most `max_bytes`, or of its own size if that is larger; and whether
    a bucket begins with it."""
    end: int | None = None
    for name, tensor in named:
        begins = end is None or end + padded(tensor) > max_bytes
        start = 0 if end is None or begins else end
        yield entry_of(name, tensor, start), tensor, begins
        end = start + padded(tensor)


def copies_done() -> None:
    """Waits for copies to and from a device that were only asked for."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def padded(tensor: torch.Tensor) -> int:
    """Bytes up to where the next tensor may begin."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


_windows: dict[int, Window] = {}
"""By inode: what this process reads, the latest last."""


def refused() -> str:
    """Why CUDA did not page-lock what this process reads; nothing if it did, or is not in use."""
    return next((window.refused for window in _windows.values() if window.refused), "")


def _window(weights: HostWeights) -> Window:
    with open(weights.path, "r+b", buffering=0) as file:
        inode = os.fstat(file.fileno()).st_ino
        window = _windows.pop(inode, None)
        if window is None or window.size != weights.size:
            if window is not None:
                window.close()
            while len(_windows) >= KEPT:
                _windows.pop(next(iter(_windows))).close()
            window = Window(file.fileno(), weights.size)
    window.lock()
    _windows[inode] = window
    return window


def _each_once(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    seen = set()
    for name, tensor in named:
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in seen or not tensor.numel():
            seen.add(place)
            yield name, tensor


def _generation(file: int) -> int:
    return int.from_bytes(os.pread(file, 8, 0), "little")


def _path(file: int) -> str:
    return f"/proc/{os.getpid()}/fd/{file}"
