"""Weights shared between processes of one machine, without a file.

Host tensors go into anonymous memory that other processes map through the owner's open file. They are copied once,
however many processes read them, and disappear with the last process that has them open. Both sides reuse the memory
for later versions of the same tensors, because touching new pages takes most of a copy's time. If CUDA is in use the
memory is page-locked, so that the device accesses it directly.

Tensors on a CUDA device are shared with vLLM's worker through CUDA IPC: torch's pickler writes them as handles.
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
import torch.multiprocessing  # registers tensors with the pickler

ALIGNMENT = 64
HEADER = 64
"""Bytes before the first tensor. They hold the memory's generation."""
MAX_MAPPED = 2
"""Memories that a reader keeps mapped: the two that a writer alternates between."""
Entry = tuple[str, str, tuple[int, ...], int]
"""(name, dtype such as "bfloat16", shape, first byte)."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostWeights:
    """Tensors in this machine's memory."""

    path: str
    """Path of the memory, valid while the process in it keeps the file open."""
    inode: int
    """Inode of the memory, because the path may lead to another file later."""
    generation: int
    """Generation of the contents, because the memory may be overwritten later."""
    size: int
    entries: list[Entry]
    page_lock_error: str
    """Why CUDA did not page-lock the memory for its writer. Empty if it did or is not in use."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor as a read-only view of the memory."""
        if not self.entries:
            return
        mapping = _map_memory(self)
        for entry in self.entries:
            yield entry[0], mapping.tensor(entry)

    @contextlib.contextmanager
    def locked(self) -> Iterator[HostWeights]:
        """Open these weights in this process and protect them from being overwritten.
        Raises FileNotFoundError if they are no longer shared."""
        self._require_same(os.stat(self.path))  # checked before opening: the path may lead to a socket by now
        with open(self.path, "r+b", buffering=0) as file:
            self._require_same(os.fstat(file.fileno()))
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FileNotFoundError(f"{self.path} is being overwritten") from None
            try:
                if _generation(file.fileno()) != self.generation:
                    raise FileNotFoundError(f"{self.path} holds other weights now")
                yield replace(self, path=_path(file.fileno()))
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # explicit, because a child forked meanwhile may keep the file open

    def _require_same(self, status: os.stat_result) -> None:
        if status.st_ino != self.inode:
            raise FileNotFoundError(f"{self.path} is another file now")


class HostMemory:
    """The memory behind HostWeights. Filling it with the same tensors again writes in place.

    The first fill appends tensors as they come, because their total size is unknown. With `like`, a memory that was
    filled before, the same size is reserved at once.
    """

    def __init__(self, like: HostMemory | None = None) -> None:
        self._file = os.fdopen(os.memfd_create("agentgym-rl-weights"), "r+b", buffering=0)
        self._entries: list[Entry] = []
        self._size = HEADER
        self._mapping: MappedMemory | None = None
        if like is not None:
            self._entries, self._size = like._entries, like._size
        self._file.truncate(self._size)

    def fill(self, named: Iterable[tuple[str, torch.Tensor]]) -> HostWeights:
        """Copy one tensor after the other, so that they need not exist all at once. Raises BlockingIOError while a
        process has the contents locked."""
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no effect after try_lock
        try:
            generation = _generation(self._file.fileno()) + 1
            os.pwrite(self._file.fileno(), generation.to_bytes(8, "little"), 0)
            self._fill(named)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        page_lock_error = "" if self._mapping is None else self._mapping.page_lock_error
        inode = os.fstat(self._file.fileno()).st_ino
        return HostWeights(_path(self._file.fileno()), inode, generation, self._size, self._entries, page_lock_error)

    def try_lock(self) -> bool:
        """Lock the memory until it is filled. Return False if a process is reading it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._close_mapping()
        self._file.close()

    def _fill(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._mapping is None and self._entries:
            self._mapping = MappedMemory(self._file.fileno(), self._size)
        before, entries, start = self._entries, list[Entry](), HEADER
        for (name, tensor), expected in zip(named, itertools.chain(before, itertools.repeat(None)), strict=False):
            entry = make_entry(name, tensor, start)
            if entry != expected:
                self._close_mapping()  # from here on the tensors differ from the last fill
            if self._mapping is None:
                self._write(tensor, start)
            else:
                self._mapping.tensor(entry).copy_(tensor.detach(), non_blocking=True)
            entries.append(entry)
            start += padded_bytes(tensor)
        wait_for_copies()
        if start != self._size:
            self._close_mapping()
            self._file.truncate(start)
        self._entries, self._size = entries, start

    def _write(self, tensor: torch.Tensor, start: int) -> None:
        remaining = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
        while remaining:
            count = os.pwrite(self._file.fileno(), remaining, start)  # writes at most 2 GiB
            remaining, start = remaining[count:], start + count

    def _close_mapping(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
        self._mapping = None


class HostMemories:
    """Two alternating memories: the last version can be read while the next one is written."""

    def __init__(self) -> None:
        self._current: HostMemory | None = None
        self._spare: HostMemory | None = None

    def fill(self, named: Iterable[tuple[str, torch.Tensor]]) -> HostWeights:
        memory, self._spare = self._spare, None
        if memory is not None and not memory.try_lock():
            memory.close()  # a process still reads it, such as a slow engine start; that process keeps it alive
            memory = None
        memory = memory or HostMemory(self._current)
        try:
            weights = memory.fill(named)
        except BaseException:
            memory.close()
            raise
        self._current, self._spare = memory, self._current
        return weights

    def close(self) -> None:
        for memory in (self._current, self._spare):
            if memory is not None:
                memory.close()


class MappedMemory:
    """A memory mapped into this process with all pages present, page-locked if CUDA is in use and allows it."""

    def __init__(self, file: int, size: int) -> None:
        self.size = size
        self.page_lock_error = ""
        flags, protection = mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE
        self._bytes = torch.frombuffer(mmap.mmap(file, size, flags=flags, prot=protection), dtype=torch.uint8)
        self._unlock: weakref.finalize[..., MappedMemory] | None = None
        self.lock()

    def lock(self) -> None:
        """Page-lock the memory. Does nothing if it is locked already or CUDA is not in use."""
        if self._unlock is not None or self.page_lock_error or not torch.cuda.is_initialized():
            return
        code = int(torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self.size, 0))
        if not code:
            # Also without close(): CUDA would treat the address as locked when other memory is mapped there.
            self._unlock = weakref.finalize(self, _unlock, self._bytes.data_ptr())
            self._unlock.atexit = False
        else:
            self.page_lock_error = f"CUDA does not page-lock the memory for weights ({torch.cuda.CudaError(code)})"
            logger.warning("%s: copies go through staging buffers and are slower", self.page_lock_error)
            with contextlib.suppress(RuntimeError):  # CUDA reports the error once more, at the next call
                torch.zeros(1, device="cuda").add_(1)

    def tensor(self, entry: Entry) -> torch.Tensor:
        return tensor_view(self._bytes, entry)

    def close(self) -> None:
        """Unlock the memory. It is unmapped when its last tensor is freed."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None


def _unlock(address: int) -> None:
    with contextlib.suppress(RuntimeError):  # a failed device raises, and has no copies left
        wait_for_copies()  # an interrupted write may have left copies unfinished
    torch.cuda.cudart().cudaHostUnregister(address)


def pack(state: Mapping[str, torch.Tensor] | HostWeights, memory: HostMemory | None = None) -> tuple[bytes, Any]:
    """Return (message, objects to keep alive until the message was read). Host tensors go into `memory`; tensors that
    share storage (a tied head) go there once, under the first name."""
    if isinstance(state, HostWeights):
        return pickle.dumps((state, {})), None
    on_device = {name: tensor.detach() for name, tensor in state.items() if tensor.device.type != "cpu"}
    memory = memory or HostMemory()
    weights = memory.fill(_without_ties((name, tensor) for name, tensor in state.items() if name not in on_device))
    return bytes(ForkingPickler.dumps((weights, on_device))), (memory, on_device)


def unpack(message: bytes) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a message. Call it only on messages that `pack` wrote in the parent process."""
    loaded: Any = pickle.loads(message)
    weights, on_device = loaded
    yield from weights.tensors()
    yield from on_device.items()


def tensor_view(memory: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Return the entry's tensor as a view of these bytes, or an empty tensor."""
    _, dtype_name, shape, start = entry
    dtype = getattr(torch, dtype_name)
    count = torch.Size(shape).numel() * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype, device=memory.device)
    return memory[start : start + count].view(dtype).view(shape)


def make_entry(name: str, tensor: torch.Tensor, start: int) -> Entry:
    return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start


def place_in_buckets(
    named: Iterable[tuple[str, torch.Tensor]], max_bytes: int
) -> Iterator[tuple[Entry, torch.Tensor, bool]]:
    """Yield (entry, tensor, whether it begins a new bucket). A bucket has at most `max_bytes`, or one larger tensor."""
    end: int | None = None
    for name, tensor in named:
        begins = end is None or end + padded_bytes(tensor) > max_bytes
        start = 0 if end is None or begins else end
        yield make_entry(name, tensor, start), tensor, begins
        end = start + padded_bytes(tensor)


def wait_for_copies() -> None:
    """Wait until asynchronous copies to and from the device are done."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def padded_bytes(tensor: torch.Tensor) -> int:
    """Return the tensor's size, rounded up to the alignment of the next one."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


_mappings: dict[int, MappedMemory] = {}
"""Mapped memories that this process reads, by inode, the latest last."""


def page_lock_error() -> str:
    """Return why CUDA did not page-lock memory that this process reads, or an empty string."""
    return next((mapping.page_lock_error for mapping in _mappings.values() if mapping.page_lock_error), "")


def _map_memory(weights: HostWeights) -> MappedMemory:
    with open(weights.path, "r+b", buffering=0) as file:
        inode = os.fstat(file.fileno()).st_ino
        mapping = _mappings.pop(inode, None)
        if mapping is None or mapping.size != weights.size:
            if mapping is not None:
                mapping.close()
            while len(_mappings) >= MAX_MAPPED:
                _mappings.pop(next(iter(_mappings))).close()
            mapping = MappedMemory(file.fileno(), weights.size)
    mapping.lock()
    _mappings[inode] = mapping
    return mapping


def _without_ties(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
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
