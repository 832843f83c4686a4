"""A process of its own that is lent weights when it is told to, and says what it has then."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from processes_for_tests import beside

from agentgym_rl.errors import EngineError
from agentgym_rl.transport.buckets import load_device_weights
from agentgym_rl.transport.device import DeviceWeights, Endpoint, open_endpoint

PATIENCE_S = 120.0


class Receiver:
    """As an engine: it has tensors like those of `state`, all zeros, on its own device."""

    def __init__(self, connection: Any, process: Any, state: dict[str, torch.Tensor]) -> None:
        self._connection, self.process = connection, process
        connection.send({name: (tensor.dtype, tensor.shape) for name, tensor in state.items()})

    def open_endpoint(self) -> Endpoint:
        self._connection.send(None)
        return self._answer()

    def begin(self, endpoint: Endpoint, version: int, dies_of: str = "") -> None:
        """Take the version; a tensor's name makes it kill itself when it has that one."""
        self._connection.send((DeviceWeights(endpoint, version), dies_of))

    def result(self) -> Any:
        """{name: tensor} as it has them, or why it has not."""
        return self._answer()

    def _answer(self) -> Any:
        assert self._connection.poll(PATIENCE_S)
        return self._connection.recv()


@contextmanager
def receiver(state: dict[str, torch.Tensor], device: str = "cpu") -> Iterator[Receiver]:
    with beside(_serve, device) as (connection, process):
        yield Receiver(connection, process, state)


class _Deadly(dict[str, torch.Tensor]):
    dies_of = ""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == self.dies_of:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(name)


def _serve(connection: Any, device: str) -> None:
    torch.zeros(1, device=device)
    made = connection.recv().items()
    own = _Deadly({name: torch.zeros(shape, dtype=dtype, device=device) for name, (dtype, shape) in made})
    while True:
        try:
            told = connection.recv()
        except EOFError:
            return
        if told is None:
            connection.send(open_endpoint())
            continue
        lent, own.dies_of = told
        try:
            load_device_weights(own, lent)
        except EngineError as error:
            connection.send(str(error))
            continue
        # By value: torch would hand tensors over as memory that ends with this process.
        connection.send({name: t.cpu().contiguous().view(-1).view(torch.uint8).numpy() for name, t in own.items()})
