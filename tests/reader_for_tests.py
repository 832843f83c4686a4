"""A process of its own that reads weights of the machine when it is told to, and says what it found."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from agentgym_rl.agent.engines import handover


@contextmanager
def reader(device: str = "cpu") -> Iterator[Any]:
    """Gives a connection: HostWeights in; ({name: tensor}, how many memories it has mapped, remark) out."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, device), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(60)


def _serve(connection: Any, device: str) -> None:
    """Tensors go to the device and back: what was read there is what counts."""
    torch.zeros(1, device=device)
    while True:
        try:
            weights = connection.recv()
        except EOFError:
            return
        with weights.held() as held:
            found = {name: torch.empty_like(tensor, device=device) for name, tensor in held.tensors()}
            for name, tensor in held.tensors():
                found[name].copy_(tensor, non_blocking=True)
            handover.copies_done()
        read = {name: (str(t.dtype), t.cpu().float().numpy()) for name, t in found.items()}
        connection.send((read, len(handover._windows), handover.refused()))
