"""Activations kept on the host between the forward and the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MIN_ELEMENTS = 4096
"""Smaller tensors stay: a copy would take longer than it saves."""


class HostActivations(torch.autograd.graph.saved_tensors_hooks):
    """Like torch's `save_on_cpu`, but weights, which autograd saves too, stay where they are."""

    def __init__(self) -> None:
        super().__init__(_to_host, _to_device)


def _to_host(tensor: Tensor) -> Any:
    weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
    if weight or tensor.numel() < MIN_ELEMENTS or not tensor.is_floating_point():
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return tensor.device, host.copy_(tensor, non_blocking=True)


def _to_device(saved: Any) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    device, host = saved
    return host.to(device, non_blocking=True)
