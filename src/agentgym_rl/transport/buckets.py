"""Weights sent from the learner to engines in buckets: flat byte arrays that hold parts of a state dict.

A bucket is one message in an object store and is copied into an engine's tensors in place. An engine loads all buckets
of a version or none. On one machine the tensors are in host memory that engines map (HostWeights), read the same way.
A learner on the engine's own device shares device memory (DeviceWeights). If that transfer fails, the engine has no
version until it has loaded a complete one.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from agentgym_rl.errors import EngineError
from agentgym_rl.transport import host_memory
from agentgym_rl.transport.device import DeviceWeights, Endpoint, open_endpoint
from agentgym_rl.transport.host_memory import Entry, HostWeights, padded_bytes, tensor_view, wait_for_copies


@dataclass(slots=True)
class Bucket:
    """Consecutive tensors of a state dict."""

    entries: list[tuple[str, str, tuple[int, ...], int]]
    """(name, dtype such as "bfloat16", shape, first byte) of each tensor."""
    data: numpy.ndarray
    """Bytes, uint8."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor as a read-only view of the bytes."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that this shared memory is read-only
            whole = torch.from_numpy(self.data)
        for name, dtype_name, shape, start in self.entries:
            dtype = getattr(torch, dtype_name)
            yield name, whole[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


WeightSource = Sequence[Bucket | HostWeights] | DeviceWeights
"""A version's weights: all its buckets, host memory, or a transfer on the device."""


class EngineAdapter(Protocol):
    """An engine that receives weights."""

    engine: Any
    """An agent.engines.base.Engine."""

    @property
    def version(self) -> int: ...

    @property
    def died(self) -> bool:
        """Whether the engine's own processes died, so that it must be restarted."""

    async def load(self, source: WeightSource, version: int, probe: Any = None) -> str:
        """Load these weights; no token is sampled until they are complete. A `probe` holds the learner's
        log-probabilities to check the engine against. Returns a warning if loading is slow, or an empty string."""

    async def open_endpoint(self) -> Endpoint:
        """Wake the engine if needed and prepare to `load` weights from a learner on the same device."""

    async def sleep(self) -> None:
        """Free device memory that is not needed until `wake` or `load`."""

    async def wake(self) -> None:
        """Prepare to sample again after `sleep`."""


class Staging:
    """Host memory in which buckets are built one after the other, page-locked if CUDA is in use."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int) -> Tensor:
        if len(self._bytes) < size:
            self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())
        return self._bytes[:size]


def buckets(
    named: Iterable[tuple[str, Tensor]], max_bytes: int, *, keep: bool = True, staging: Staging | None = None
) -> Iterator[Bucket]:
    """Yield buckets of at most `max_bytes`, or of one larger tensor, in order. Without `keep` yield none but still
    gather all tensors, because that takes every rank. With `staging` a bucket is valid until the next one."""
    pending: list[tuple[Entry, Tensor]] = []
    for entry, tensor, begins in host_memory.place_in_buckets(named, max_bytes):
        if not keep:
            continue
        if begins and pending:
            yield _make_bucket(pending, staging or Staging())
            pending = []
        pending.append((entry, tensor))
    if pending:
        yield _make_bucket(pending, staging or Staging())


@torch.no_grad()
def load_buckets(own: Mapping[str, Tensor], source: Iterable[Bucket | HostWeights]) -> None:
    """Copy buckets into tensors in place. Names and shapes are checked before anything is written. A name may be
    missing only if its tensor is tied to one that is present."""
    source = list(source)
    shapes = {name: shape for bucket in source for name, _, shape, _ in bucket.entries}
    _require_fit(own, shapes, whole=True)
    for bucket in source:
        for name, tensor in bucket.tensors():
            own[name].copy_(tensor, non_blocking=True)
    wait_for_copies()


@torch.no_grad()
def load_device_weights(own: Mapping[str, Tensor], weights: DeviceWeights) -> None:
    """Copy weights shared on the device in place. Checks each before it is written, and for missing ones at the end."""
    shapes: dict[str, tuple[int, ...]] = {}
    with contextlib.closing(weights.tensors()) as named:
        for name, tensor in named:
            shapes[name] = tuple(tensor.shape)
            _require_fit(own, {name: shapes[name]}, whole=False)
            own[name].copy_(tensor, non_blocking=True)
            del tensor  # the learner reuses the memory after this engine's acknowledgement
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

    async def load(self, source: WeightSource, version: int, probe: Any = None) -> str:
        # No await between the first copy and the new version: no token is sampled from a mixture.
        if isinstance(source, DeviceWeights):
            self.engine.version = -1  # in case the transfer fails
            load_device_weights(self._model.state_dict(), source)
        else:
            load_buckets(self._model.state_dict(), source)
        await self.engine.update_weights(None, version)
        return host_memory.page_lock_error()

    async def open_endpoint(self) -> Endpoint:
        return open_endpoint()

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake(self) -> None:
        """Do nothing: the KV cache grows as needed."""


def _make_bucket(pending: list[tuple[Entry, Tensor]], staging: Staging) -> Bucket:
    (*_, start), last = pending[-1]
    data = staging.reserve(start + padded_bytes(last))
    for entry, tensor in pending:
        tensor_view(data, entry).copy_(tensor.detach(), non_blocking=True)
    wait_for_copies()
    return Bucket([entry for entry, _ in pending], data.numpy())
