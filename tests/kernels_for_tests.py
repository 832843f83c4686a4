"""Helpers for tests of kernels and engines with and without a CUDA device."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.types import Sampling

VOCABULARY = 61
"""Vocabulary of the tiny models that `prompt` and `play` are for."""


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(VOCABULARY), k=length)


async def play(engine: NativeEngine, name: str, turns: int, seed: int, sampling: Sampling) -> list[list[int]]:
    """Play a session of several turns with random observations between them; return the replies."""
    rng = random.Random(seed)
    ids, replies = prompt(rng.randint(3, 40), seed), []
    for _ in range(turns):
        completion = await engine.generate(ids, sampling, name)
        replies.append(completion.token_ids)
        ids = ids + completion.token_ids + prompt(rng.randint(1, 15), rng.randint(0, 99))
        for _ in range(rng.randint(0, 4)):
            await asyncio.sleep(0)
    await engine.release(name)
    return replies


def without_memory_once(cache: Any) -> Callable[[int, int], torch.Tensor]:
    """Return a replacement of `cache._zeros` that runs out of memory in its second call only."""
    real, calls = cache._zeros, 0

    def zeros(slots: int, length: int) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("no memory")
        return real(slots, length)

    return zeros


class LimitedMemory:
    """Replacement of `cache._zeros` for a device with `limit` bytes for the cache."""

    def __init__(self, cache: Any, limit: float = float("inf")) -> None:
        self._real, self._limit, self._in_use = cache._zeros, limit, 0
        self.peak = 0

    def __call__(self, slots: int, length: int) -> torch.Tensor:
        tensor: torch.Tensor = self._real(slots, length)
        if self._in_use + tensor.nbytes > self._limit:
            raise torch.OutOfMemoryError("no memory")
        self._in_use += tensor.nbytes
        self.peak = max(self.peak, self._in_use)
        weakref.finalize(tensor, self._release, tensor.nbytes)
        return tensor

    def _release(self, size: int) -> None:
        self._in_use -= size


@torch.no_grad()
def near_the_largest_float16(model: Any) -> Any:
    """Set weights whose hidden states would overflow float16 if the norm's weight were applied before the norm."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(9.0)
        elif "proj" in name or "lm_head" in name:
            parameter.mul_(0.3)
    model.model.embed_tokens.weight.normal_(std=4000)
    return model.half()


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def gate_error(tokens: int, size: int, device: str) -> float:
    """Return the largest error of the gate's kernels, forward and backward, against torch."""
    from agentgym_rl.training.device import layer_kernels

    both = torch.randn(tokens, 2 * size, device=device, requires_grad=True)
    gate, up = both.chunk(2, 1)
    expected = F.silu(gate) * up
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    by_both, again = layer_kernels.gate_backward(both.detach(), gradient.clone())
    assert both.grad is not None
    actual = layer_kernels.gate(both.detach())
    return max(error(actual, expected), error(by_both, both.grad), error(again, expected))
