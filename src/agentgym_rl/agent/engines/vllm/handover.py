"""Weights from the learner's process to vLLM's worker on the same machine, without a file.

vLLM's own channel carries bytes, not tensors; torch's pickler writes a tensor as a handle to shared memory (CPU) or to
memory of the device (CUDA IPC). Tensors on the CPU are copied into one shared buffer a type, so that a model takes few
open files and the learner's own memory stays where it is; those on a CUDA device are lent as they are.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # teaches the pickler tensors

Layout = list[tuple[str, int, int, tuple[int, ...]]]
"""(name, which buffer, first element, shape)."""


def pack(state: Mapping[str, torch.Tensor]) -> tuple[bytes, list[torch.Tensor]]:
    """(message, the tensors it refers to: keep them until it was read)."""
    buffers: list[torch.Tensor] = []
    layout: Layout = []
    sizes: dict[torch.dtype, int] = {}
    for tensor in state.values():
        if tensor.device.type == "cpu":
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    places = {}
    for dtype, size in sizes.items():
        places[dtype] = (len(buffers), 0)
        buffers.append(torch.empty(size, dtype=dtype).share_memory_())
    for name, tensor in state.items():
        if tensor.device.type == "cpu":
            buffer, start = places[tensor.dtype]
            buffers[buffer][start : start + tensor.numel()].copy_(tensor.detach().reshape(-1))
            places[tensor.dtype] = (buffer, start + tensor.numel())
        else:
            buffer, start = len(buffers), 0
            buffers.append(tensor.detach().contiguous().view(-1))
        layout.append((name, buffer, start, tuple(tensor.shape)))
    return bytes(ForkingPickler.dumps((buffers, layout))), buffers


def unpack(message: bytes) -> Iterator[tuple[str, torch.Tensor]]:
    """Only ever called on what `pack` of the parent process wrote."""
    loaded: Any = pickle.loads(message)
    buffers, layout = loaded
    for name, buffer, start, shape in layout:
        yield name, buffers[buffer][start : start + torch.Size(shape).numel()].view(shape)
