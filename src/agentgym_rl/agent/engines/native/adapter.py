"""Loads weights that learners send into a native engine, in place."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor

from agentgym_rl.errors import EngineError
from agentgym_rl.transport.broadcast import WeightsInterrupted, WeightSource
from agentgym_rl.transport.device import Endpoint, open_endpoint


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

    async def open_endpoints(self) -> list[Endpoint]:
        return [open_endpoint()]

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
