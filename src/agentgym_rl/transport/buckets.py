"""Buckets of weights, and how an engine loads them: the part that both ways to send weights share.

A bucket is a flat byte array with consecutive tensors of a state dict, at most as large as a setting says, or as one
larger tensor. An engine copies each tensor in place as it arrives (transport/device.py, transport/broadcast.py). If a
transfer fails, the engine has no version until it has loaded a complete one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Iterable, Iterator, Mapping
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


class EngineAdapter(Protocol):
    """An engine that receives weights."""

    engine: Any
    """An agent.engines.base.Engine."""

    @property
    def version(self) -> int: ...

    @property
    def died(self) -> bool:
        """Whether the engine cannot go on, because its own processes died, and must be restarted."""

    async def start(self) -> None:
        """Start the engine's own processes, if it has any. Called before every transfer."""

    async def load(self, source: WeightSource, version: int, probe: Any = None) -> None:
        """Load these weights; no token is sampled until they are complete. A `probe` holds the learner's
        log-probabilities to check the engine against. Raises WeightsInterrupted if the transfer can be tried again."""

    async def open_endpoint(self) -> Any:
        """Wake the engine if needed and prepare to `load` weights from a learner on the same device."""

    async def sleep(self) -> None:
        """Free device memory that is not needed until `wake` or `load`."""

    async def wake(self) -> None:
        """Prepare to sample again after `sleep`."""


class NativeAdapter:
    """A native engine and its model, loaded in place."""

    def __init__(self, engine: Any, model: Any) -> None:
        self.engine, self._model = engine, model

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def died(self) -> bool:
        return False

    async def start(self) -> None:
        """Do nothing: the engine is in this process."""

    async def load(self, source: WeightSource, version: int, probe: Any = None) -> None:
        await asyncio.to_thread(source.connect)  # replies continue meanwhile
        # No await between the first copy and the new version: no token is sampled from a mixture.
        self.engine.version = -1
        try:
            load_tensors(self._model.state_dict(), source.tensors())
        except WeightsInterrupted as error:
            self.engine.abort(f"weights {version} are incomplete: {error}")
            raise
        await self.engine.update_weights(None, version)

    async def open_endpoint(self) -> Any:
        from agentgym_rl.transport.device import open_endpoint

        return open_endpoint()

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake(self) -> None:
        """Do nothing: the KV cache grows as needed."""


@torch.no_grad()
def load_tensors(own: Mapping[str, Tensor], arriving: Generator[tuple[str, Tensor]]) -> None:
    """Copy tensors in place as they arrive. Checks each before it is written, and for missing ones at the end. A name
    may be missing only if its tensor is tied to one that is present."""
    shapes: dict[str, tuple[int, ...]] = {}
    with contextlib.closing(arriving) as named:
        for name, tensor in named:
            shapes[name] = tuple(tensor.shape)
            _require_fit(own, {name: shapes[name]}, whole=False)
            own[name].copy_(tensor, non_blocking=True)
            del tensor  # the sender reuses the memory after this engine's acknowledgement
    _require_fit(own, shapes, whole=True)


def _require_fit(own: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, whole: bool) -> None:
    problems = [f"unexpected {name}" for name in shapes if name not in own]
    problems += [
        f"{name} has shape {shape}, needed {tuple(own[name].shape)}"
        for name, shape in shapes.items()
        if name in own and shape != tuple(own[name].shape)
    ]
    if whole:
        loaded = {own[name].data_ptr() for name in shapes if name in own}
        problems += [f"missing {n}" for n, tensor in own.items() if n not in shapes and tensor.data_ptr() not in loaded]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise EngineError(f"the weights do not fit the engine's model: {'; '.join(problems[:3])}{more}")


def place_in_buckets(named: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[tuple[Entry, Tensor, bool]]:
    """Yield (entry, tensor, whether it begins a new bucket). A bucket has at most `max_bytes`, or one larger tensor."""
    end: int | None = None
    for name, tensor in named:
        begins = end is None or end + padded_bytes(tensor) > max_bytes
        start = 0 if end is None or begins else end
        yield (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start), tensor, begins
        end = start + padded_bytes(tensor)


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
