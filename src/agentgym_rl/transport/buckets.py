"""Weights from the learner to engines: a state dict cut into buckets, each one flat array of bytes.

A bucket travels as one message through an object store, whatever types its tensors have, and is copied into an engine's
tensors in place. An engine takes all buckets of a version or none. Where all are on one machine the tensors are in
memory that engines map instead (HostWeights), which is read the same way. From a learner on its own device an engine
is lent them there (LentWeights); if that breaks off it has no version until it has taken a whole one.
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
from agentgym_rl.transport.device import Door, LentWeights, expect
from agentgym_rl.transport.host_memory import Entry, HostWeights, copies_done, cut, padded, part, refused


@dataclass(slots=True)
class Bucket:
    """Some tensors of a state dict, end to end."""

    entries: list[tuple[str, str, tuple[int, ...], int]]
    """(name, dtype such as "bfloat16", shape, first byte) of each tensor."""
    data: numpy.ndarray
    """Bytes, uint8."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """One after the other, to be read: they are that memory itself."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # memory shared with other processes may not be written to, and is not
            whole = torch.from_numpy(self.data)
        for name, dtype, shape, start in self.entries:
            kind = getattr(torch, dtype)
            yield name, whole[start : start + math.prod(shape) * kind.itemsize].view(kind).view(shape)


Arrived = Sequence[Bucket | HostWeights] | LentWeights
"""All buckets of a version, or all of it in memory of the machine, or as a learner is about to lend it."""


class Receiver(Protocol):
    """An engine that can be given weights."""

    engine: Any
    """An agent.engines.base.Engine."""

    @property
    def version(self) -> int: ...

    @property
    def died(self) -> bool:
        """Whether processes of its own are gone: it can do nothing any more and has to be made again."""
        ...

    async def load(self, arrived: Arrived, version: int, probe: Any = None) -> str:
        """Use these weights from now on; nothing is sampled while they are half there. A `probe` is what the learner
        says of some tokens, for engines that are to be checked. Returns why it takes longer than it should, if so."""
        ...

    async def expect(self) -> Door:
        """Be ready, awake if it rests, to `load` weights that a learner on the same device lends."""
        ...

    async def rest(self) -> None:
        """Give back what memory of the device it can do without until `wake` or `load`."""
        ...

    async def wake(self) -> None:
        """Be ready to sample again, if it rests."""
        ...


class Staging:
    """Memory of the host that buckets are made in, one after the other; page-locked where CUDA is in use."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def room(self, size: int) -> Tensor:
        if len(self._bytes) < size:
            self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())
        return self._bytes[:size]


def buckets(
    named: Iterable[tuple[str, Tensor]], max_bytes: int, *, keep: bool = True, staging: Staging | None = None
) -> Iterator[Bucket]:
    """Tensors in order, at most `max_bytes` in a bucket, or one tensor if it is larger. Without `keep` there are none,
    but all tensors are asked for: gathering them takes every rank. With `staging` each lasts until the next."""
    held: list[tuple[Entry, Tensor]] = []
    for entry, tensor, begins in cut(named, max_bytes):
        if not keep:
            continue
        if begins and held:
            yield _bucket(held, staging or Staging())
            held = []
        held.append((entry, tensor))
    if held:
        yield _bucket(held, staging or Staging())


@torch.no_grad()
def load_buckets(own: Mapping[str, Tensor], arrived: Iterable[Bucket | HostWeights]) -> None:
    """Copy buckets into tensors in place. Names and shapes are checked before anything is written; a name may be
    missing only where its tensor is tied to one that is there."""
    arrived = list(arrived)
    shapes = {name: shape for bucket in arrived for name, _, shape, _ in bucket.entries}
    _require_fit(own, shapes, whole=True)
    for bucket in arrived:
        for name, tensor in bucket.tensors():
            own[name].copy_(tensor, non_blocking=True)
    copies_done()


@torch.no_grad()
def load_lent(own: Mapping[str, Tensor], lent: LentWeights) -> None:
    """Likewise, as a learner lends them: each is checked before it is written, that all were there afterwards."""
    shapes: dict[str, tuple[int, ...]] = {}
    with contextlib.closing(lent.tensors()) as named:
        for name, tensor in named:
            shapes[name] = tuple(tensor.shape)
            _require_fit(own, {name: shapes[name]}, whole=False)
            own[name].copy_(tensor, non_blocking=True)
            del tensor  # the lender frees it when it is told that all is taken
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


class InPlace:
    """A native engine and the model it samples from."""

    def __init__(self, engine: Any, model: Any) -> None:
        self.engine, self._model = engine, model

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def died(self) -> bool:
        return False

    async def load(self, arrived: Arrived, version: int, probe: Any = None) -> str:
        # No await between the first copy and the new version: no token is sampled from a mixture.
        if isinstance(arrived, LentWeights):
            self.engine.version = -1  # should it break off
            load_lent(self._model.state_dict(), arrived)
        else:
            load_buckets(self._model.state_dict(), arrived)
        await self.engine.update_weights(None, version)
        return refused()

    async def expect(self) -> Door:
        return expect()

    async def rest(self) -> None:
        await self.engine.rest()

    async def wake(self) -> None:
        """Nothing: keys and values are made room for as they come."""


def _bucket(held: list[tuple[Entry, Tensor]], staging: Staging) -> Bucket:
    (*_, start), last = held[-1]
    data = staging.room(start + padded(last))
    for entry, tensor in held:
        part(data, entry).copy_(tensor.detach(), non_blocking=True)
    copies_done()
    return Bucket([entry for entry, _ in held], data.numpy())
