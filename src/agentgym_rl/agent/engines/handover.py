"""Weights from one process to others of the same machine, without a file.

Tensors of the host go into memory without a name, which other processes map through the process that has it open: it is
copied once however many read it, and is gone with the last of them, whatever ends them. Tensors on a CUDA device are
lent to vLLM's worker as they are (CUDA IPC): torch's pickler writes them as handles.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # teaches the pickler tensors

ALIGNMENT = 64
Entry = tuple[str, str, tuple[int, ...], int]
"""(name, dtype such as "bfloat16", shape, first byte)."""


@dataclass(frozen=True, slots=True)
class HostWeights:
    """Tensors in memory of this machine."""

    path: str
    """Of the memory, for as long as the process that it names has it open."""
    inode: int
    """Something else may be open there later."""
    size: int
    entries: list[Entry]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """One after the other, to be read: they are that memory itself."""
        if not self.entries:
            return
        with open(self.path, "rb") as file:
            memory = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)  # torch wants it writable
        for name, dtype, shape, start in self.entries:
            kind, count = getattr(torch, dtype), torch.Size(shape).numel()
            flat = torch.frombuffer(memory, dtype=kind, count=count, offset=start) if count else torch.empty(0).to(kind)
            yield name, flat.view(shape)

    @contextlib.contextmanager
    def held(self) -> Iterator[HostWeights]:
        """The same, open in this process too. FileNotFoundError where they are no longer lent."""
        with open(self.path, "rb") as file:
            if os.fstat(file.fileno()).st_ino != self.inode:
                raise FileNotFoundError(f"{self.path} is something else by now")
            yield replace(self, path=_path(file.fileno()))


class HostMemory:
    """What HostWeights refer to: takes tensors one after the other, so that nobody needs all of them at once."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("agentgym-rl-weights"), "wb")
        self._entries: list[Entry] = []
        self._size = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        self._entries.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), self._size))
        padding = -len(flat) % ALIGNMENT
        self._file.write(flat.data)
        self._file.write(bytes(padding))
        self._size += len(flat) + padding

    def weights(self) -> HostWeights:
        self._file.flush()
        file = self._file.fileno()
        return HostWeights(_path(file), os.fstat(file).st_ino, self._size, self._entries)

    def close(self) -> None:
        self._file.close()


def pack(state: Mapping[str, torch.Tensor] | HostWeights) -> tuple[bytes, Any]:
    """(message, what it refers to: keep that until it was read)."""
    if isinstance(state, HostWeights):
        return pickle.dumps((state, {})), None
    memory = HostMemory()
    lent = {}
    for name, tensor in state.items():
        if tensor.device.type == "cpu":
            memory.add(name, tensor)
        else:
            lent[name] = tensor.detach()
    return bytes(ForkingPickler.dumps((memory.weights(), lent))), (memory, lent)


def unpack(message: bytes) -> Iterable[tuple[str, torch.Tensor]]:
    """Only ever called on what `pack` of the parent process wrote."""
    loaded: Any = pickle.loads(message)
    weights, lent = loaded
    yield from weights.tensors()
    yield from lent.items()


def _path(file: int) -> str:
    return f"/proc/{os.getpid()}/fd/{file}"
