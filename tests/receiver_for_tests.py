"""A separate process that receives weights on command and reports its tensors."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from processes_for_tests import beside

from agentgym_rl.agent.engines.native.adapter import load_tensors
from agentgym_rl.errors import EngineError
from agentgym_rl.transport.device import DeviceWeights, Endpoint, open_endpoint

ANSWER_TIMEOUT_S = 120.0


class Receiver:
    """Acts as an engine: it has zero tensors like those of `state` on its own device."""

    def __init__(self, connection: Any, process: Any, state: dict[str, torch.Tensor]) -> None:
        self._connection, self.process = connection, process
        connection.send({name: (tensor.dtype, tensor.shape) for name, tensor in state.items()})

    def open_endpoint(self) -> Endpoint:
        self._connection.send(None)
        return self._answer()

    def begin(self, endpoint: Endpoint, version: int, dies_at: str = "") -> None:
        """Load the version. The process kills itself at the tensor named `dies_at`."""
        self._connection.send((DeviceWeights(endpoint, version), dies_at))

    def result(self) -> Any:
        """Return {name: bytes of the tensor}, or the error."""
        return self._answer()

    def _answer(self) -> Any:
        assert self._connection.poll(ANSWER_TIMEOUT_S)
        return self._connection.recv()


@contextmanager
def receiver(state: dict[str, torch.Tensor], device: str = "cpu") -> Iterator[Receiver]:
    with beside(_serve, device) as (connection, process):
        yield Receiver(connection, process, state)


class _Deadly(dict[str, torch.Tensor]):
    dies_at = ""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(name)


def _serve(connection: Any, device: str) -> None:
    torch.zeros(1, device=device)
    shapes = connection.recv().items()
    own = _Deadly({name: torch.zeros(shape, dtype=dtype, device=device) for name, (dtype, shape) in shapes})
    while True:
        try:
            command = connection.recv()
        except EOFError:
            return
        if command is None:
            connection.send(open_endpoint())
            continue
        weights, own.dies_at = command
        try:
            load_tensors(own, weights.tensors())
        except EngineError as error:
            connection.send(str(error))
            continue
        # Sent by value, because torch would share memory that ends with this process.
        connection.send({name: t.cpu().contiguous().view(-1).view(torch.uint8).numpy() for name, t in own.items()})
