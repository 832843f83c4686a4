"""AdamW for float32 parameters, and for half-precision ones AdamW on a float32 master that costs two bytes.

A bf16 weight is the upper half of a float32. The lower half is kept beside it: both together are the master, exactly,
and the weights that the engine reads are rounded from it in place. Moments are kept in bf16, rounded up or down by
chance in proportion, so that what is too small to be seen in one update still adds up over many. That is 8 bytes a
parameter in all, where float32 moments and a float32 copy would make it 14.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agentgym_rl.training.device.head import HAS_TRITON
from agentgym_rl.training.device.master_weights import EPSILON, join, update_one
from agentgym_rl.training.settings import OptimizerSettings

SMALL = 500_000_000
"""Parameters of a model whose gradients may be held twice for a moment: a gigabyte."""


def make_optimizer(parameters: list[Any], settings: OptimizerSettings) -> torch.optim.AdamW | MasterAdamW:
    """By the type of the parameters; with some in bf16, a MasterAdamW for all."""
    if any(p.dtype is torch.bfloat16 for p in parameters):
        return MasterAdamW(parameters, settings)
    return _plain(parameters, settings)


def _plain(parameters: list[Any], settings: OptimizerSettings) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=settings.lr,
        betas=settings.betas,
        eps=EPSILON,
        weight_decay=settings.weight_decay,
        fused=all(p.device.type in ("cpu", "cuda") for p in parameters),
    )


@contextmanager
def collecting(optimizer: torch.optim.AdamW | MasterAdamW, *, several: bool) -> Iterator[Callable[[], None]]:
    """While several backward passes add up: in bf16 their sum would lose what is small beside it, so it is float32.

    What is yielded is to be called after each pass. Large models' gradients are moved into the sums as they are made,
    so that no second set of them is held; small ones' all at once after a pass, which is less work for the host.
    """
    if not several or not isinstance(optimizer, MasterAdamW):
        yield lambda: None
    elif optimizer.is_small:
        yield optimizer.add_up
    else:
        handles = optimizer.collect()
        try:
            yield lambda: None
        finally:
            for handle in handles:
                handle.remove()


def gradients(optimizer: torch.optim.AdamW | MasterAdamW, parameters: list[Any]) -> Iterator[Tensor]:
    """Yield each parameter's gradient as `step` will use it, to be changed in place; zeros if no pass made one.

    Those of bf16 parameters are float32: a sum over ranks loses as little as one over passes.
    """
    if isinstance(optimizer, MasterAdamW):
        yield from optimizer.sums()
        parameters = [p for p in parameters if p.dtype is not torch.bfloat16]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        yield parameter.grad


def clip(optimizer: torch.optim.AdamW | MasterAdamW, parameters: list[Any], max_norm: float) -> Tensor:
    """The norm of all gradients, which are scaled down to `max_norm` by the time they are used."""
    if not isinstance(optimizer, MasterAdamW):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    norm = _whole(optimizer.norm())
    optimizer.scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm


class MasterAdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) that writes bf16 parameters in place. Others go to torch's."""

    def __init__(self, parameters: list[Any], settings: OptimizerSettings) -> None:
        self._half = [p for p in parameters if p.dtype is torch.bfloat16]
        rest = [p for p in parameters if p.dtype is not torch.bfloat16]
        self._rest = _plain(rest, settings) if rest else None
        self._settings = settings
        self.param_groups: list[dict[str, Any]] = [{"params": parameters, "lr": settings.lr}]
        self.updates = 0
        self.scale: Tensor | None = None
        """Of the next step's gradients."""
        self._sums: list[Tensor | None] = [None] * len(self._half)
        self._low: list[Tensor] = []
        self._moments: list[tuple[Tensor, Tensor]] = []

    def collect(self) -> list[Any]:
        """Move gradients into float32 sums as backward passes make them, until the handles are removed."""

        def move(parameter: Any, place: int) -> None:
            total = self._sums[place]
            self._sums[place] = parameter.grad.float() if total is None else total.add_(parameter.grad)
            parameter.grad = None

        return [p.register_post_accumulate_grad_hook(partial(move, place=i)) for i, p in enumerate(self._half)]

    @property
    def is_small(self) -> bool:
        """Whole on this device, and not so large that a second set of gradients would matter."""
        whole = not any(hasattr(p, "to_local") for p in self._half)
        return whole and sum(p.numel() for p in self._half) <= SMALL

    @torch.no_grad()
    def add_up(self) -> None:
        """Move the gradients that a backward pass has left into float32 sums."""
        sums: list[Tensor] = []
        gradients: list[Tensor] = []
        for place, p in enumerate(self._half):
            total = self._sums[place]
            if p.grad is not None and total is not None:
                sums.append(total)
                gradients.append(p.grad)
            elif p.grad is not None:
                self._sums[place] = p.grad.float()
            p.grad = None
        if sums:
            torch._foreach_add_(sums, gradients)

    def sums(self) -> list[Tensor]:
        """Return the float32 gradients of all bf16 parameters, after moving there what the last pass has left."""
        self.add_up()
        for place, p in enumerate(self._half):
            if self._sums[place] is None:
                self._sums[place] = torch.zeros_like(p, dtype=torch.float32)
        return [total for total in self._sums if total is not None]

    def norm(self) -> Tensor:
        """Of all gradients, float32."""
        found = self._gradients()
        if self._rest is not None:
            found = found + [p.grad for p in self.param_groups[0]["params"] if p.dtype is not torch.bfloat16]
        known = [g for g in found if g is not None]
        if not known:
            return torch.zeros(())
        return torch.stack(torch._foreach_norm(known, 2.0, torch.float32)).norm()

    @torch.no_grad()
    def step(self) -> None:
        lr = self.param_groups[0]["lr"]
        gradients = self._gradients()
        if not self._low:
            self._low = [torch.zeros_like(p, dtype=torch.int16) for p in self._half]
            self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self._half]
        self.updates += 1
        scale = torch.ones((), device=self._half[0].device) if self.scale is None else self.scale
        numbers = self._numbers(lr)
        given = [i for i, gradient in enumerate(gradients) if gradient is not None]
        rows: list[Any] = [
            tuple(map(_local, (self._half[i], gradients[i], self._low[i], *self._moments[i]))) for i in given
        ]
        if self._half[0].is_cuda and HAS_TRITON:
            from agentgym_rl.training.device.optimizer_kernels import update_all

            update_all(rows, scale, numbers, self.updates)
        else:
            for place, row in zip(given, rows, strict=True):
                update_one(row, scale, numbers, self.updates, place)
        if self._rest is not None:
            for p in self._rest.param_groups[0]["params"]:
                if p.grad is not None:
                    p.grad.mul_(scale)
            self._rest.param_groups[0]["lr"] = lr
            self._rest.step()
        self.scale = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None
        self._sums = [None] * len(self._half)

    def state_dict(self) -> dict[str, Any]:
        rest = None if self._rest is None else self._rest.state_dict()
        return {"low": self._low, "moments": self._moments, "updates": self.updates, "rest": rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        device = self._half[0].device
        self._low = [tensor.to(device) for tensor in state["low"]]
        self._moments = [(first.to(device), second.to(device)) for first, second in state["moments"]]
        self.updates = state["updates"]
        if self._rest is not None:
            self._rest.load_state_dict(state["rest"])

    def master(self) -> list[Tensor]:
        """The bf16 parameters' float32 values."""
        low = self._low or [torch.zeros_like(p, dtype=torch.int16) for p in self._half]
        return [join(p.detach(), lower) for p, lower in zip(self._half, low, strict=True)]

    def _gradients(self) -> list[Any]:
        return [p.grad if total is None else total for p, total in zip(self._half, self._sums, strict=True)]

    def _numbers(self, lr: float) -> tuple[float, ...]:
        """(beta 1, beta 2, step size, root of the second bias correction, kept share of the weight)."""
        beta1, beta2 = self._settings.betas
        first, second = 1.0 - beta1**self.updates, math.sqrt(1.0 - beta2**self.updates)
        return beta1, beta2, lr / first, second, 1.0 - lr * self._settings.weight_decay


def _local(tensor: Any) -> Tensor:
    """This rank's part of a tensor that is spread over ranks, which shares its memory; else the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
