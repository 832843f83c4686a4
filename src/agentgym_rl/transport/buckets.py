"""Buckets of weights: what both ways to send them share.

A bucket is a flat byte array with consecutive tensors of a state dict, at most as large as a setting says, or as one
larger tensor. An engine copies each tensor in place as it arrives (transport/device.py, transport/broadcast.py). If a
transfer fails, the engine has no version until it has loaded a complete one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from agentgym_rl.errors import EngineError

ALIGNMENT = 64
Entry = tuple[str, str, tuple[int, ...], int]
"""(name, dtype such as "bfloat16", shape, first byte)."""


class WeightsInterrupted(EngineError):
    """A transfer ended early because another of its processes is gone. It can be tried again."""


class WeightSource(Protocol):
    """A version of the weights that is being sent to this process."""

    def connect(self) -> None:
        """Wait until the senders are there. May block."""

    def tensors(self) -> Generator[tuple[str, Tensor]]:
        """Yield each tensor. Copy and drop it before asking for the next one."""


def place_in_buckets(named: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[tuple[Entry, Tensor, bool]]:
    """Yield (entry, tensor, whether it begins a new bucket). A bucket has at most `max_bytes`, or one larger tensor."""
    end: int | None = None
    for name, tensor in named:
        begins = end is None or end + padded_bytes(tensor) > max_bytes
        start = 0 if end is None or begins else end
        yield (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start), tensor, begins
        end = start + padded_bytes(tensor)


def send_in_buckets(named: Iterable[tuple[str, Tensor]], bucket_bytes: int, sender: Any) -> None:
    """Send all tensors through the buffer of a `sender`, of `bucket_bytes` or of the largest tensor's size."""
    for entry, tensor, begins in place_in_buckets(named, bucket_bytes):
        if begins:
            sender.flush()
            sender.reserve(max(bucket_bytes, padded_bytes(tensor)))
        sender.write(tensor, entry)
    sender.flush()
    sender.end()


def tensor_view(memory: Tensor, entry: Entry) -> Tensor:
    """Return the entry's tensor as a view of these bytes, or an empty tensor."""
    _, dtype_name, shape, start = entry
    dtype = getattr(torch, dtype_name)
    count = torch.Size(shape).numel() * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype, device=memory.device)
    return memory[start : start + count].view(dtype).view(shape)


def padded_bytes(tensor: Tensor) -> int:
    """Return the tensor's size, rounded up to the alignment of the next one."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def wait_for_copies() -> None:
    """Wait until asynchronous copies to and from the device are done."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
