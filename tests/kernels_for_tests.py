"""What kernels and engines are tried with both on a CUDA device and without one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F


def without_memory_once(cache: Any) -> Callable[[int, int], torch.Tensor]:
    """In place of `cache._zeros`: there is memory for the first longer layer, then none, then enough again."""
    real, calls = cache._zeros, 0

    def zeros(slots: int, length: int) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("no memory")
        return real(slots, length)

    return zeros


class LimitedMemory:
    """In place of `cache._zeros`: the memory of a device that has `limit` bytes for the cache."""

    def __init__(self, cache: Any, limit: float = float("inf")) -> None:
        self._real, self._limit, self._in_use = cache._zeros, limit, 0
        self.peak = 0

    def __call__(self, slots: int, length: int) -> torch.Tensor:
        made: torch.Tensor = self._real(slots, length)
        if self._in_use + made.nbytes > self._limit:
            raise torch.OutOfMemoryError("no memory")
        self._in_use += made.nbytes
        self.peak = max(self.peak, self._in_use)
        weakref.finalize(made, self._give_back, made.nbytes)
        return made

    def _give_back(self, size: int) -> None:
        self._in_use -= size


@torch.no_grad()
def near_the_largest_float16(model: Any) -> Any:
    """Hidden states that a norm's weight would lift over the largest float16, were they not normalised first."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(9.0)
        elif "proj" in name or "lm_head" in name:
            parameter.mul_(0.3)
    model.model.embed_tokens.weight.normal_(std=4000)
    return model.half()


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm())


def gate_error(tokens: int, size: int, device: str) -> float:
    """The largest of the gate's kernels, forward and backward, against torch."""
    from agentgym_rl.training.device import layer_kernels

    both = torch.randn(tokens, 2 * size, device=device, requires_grad=True)
    gate, up = both.chunk(2, 1)
    right = F.silu(gate) * up
    gradient = torch.randn_like(right)
    right.backward(gradient)
    by_both, again = layer_kernels.gate_backward(both.detach(), gradient.clone())
    assert both.grad is not None
    found = layer_kernels.gate(both.detach())
    return max(error(found, right), error(by_both, both.grad), error(again, right))
