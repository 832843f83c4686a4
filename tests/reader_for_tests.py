"""A separate process that reads host weights on command and reports their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from processes_for_tests import beside

from agentgym_rl.transport import host_memory


def on_device(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of several types and shapes, one of them empty and one not contiguous."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return {
        "a": torch.randn(4096, 2049, device="cuda", generator=generator).to(torch.bfloat16),
        "b": torch.randn(7, device="cuda", generator=generator),
        "c": torch.empty(0, 2, device="cuda"),
        "d": torch.randn(33, 5, device="cuda", generator=generator).t(),
    }


@contextmanager
def reader(device: str = "cpu") -> Iterator[Any]:
    """Yield a connection: HostWeights in; ({name: tensor}, number of mapped memories, page-lock error) out."""
    with beside(_serve, device) as (connection, _):
        yield connection


def _serve(connection: Any, device: str) -> None:
    """Copy tensors to the device and back, so that the device's copy is compared."""
    torch.zeros(1, device=device)
    while True:
        try:
            weights = connection.recv()
        except EOFError:
            return
        with weights.locked() as locked:
            copies = {name: torch.empty_like(tensor, device=device) for name, tensor in locked.tensors()}
            for name, tensor in locked.tensors():
                copies[name].copy_(tensor, non_blocking=True)
            host_memory.wait_for_copies()
        result = {name: (str(t.dtype), t.cpu().float().numpy()) for name, t in copies.items()}
        connection.send((result, len(host_memory._mappings), host_memory.page_lock_error()))
