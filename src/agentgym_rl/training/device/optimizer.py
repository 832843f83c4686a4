"""AdamW for float32 parameters, and for bf16 ones AdamW on float32 master weights that cost two extra bytes.

A bf16 weight is the upper half of a float32. The lower half is stored separately; both together are the exact master
weight, and the weights that the engine reads are rounded from it in place. Moments are bf16 with stochastic rounding,
so that changes too small for one update still add up over many. Together this takes 8 bytes per parameter, where
float32 moments and a float32 copy would take 14.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agentgym_rl.training.device.head import HAS_TRITON
from agentgym_rl.training.device.master_weights import EPSILON, join, split, update_one
from agentgym_rl.training.settings import OptimizerSettings

SMALL_MODEL_PARAMETERS = 500_000_000
"""Largest model whose gradients may be held twice for a short time (1 GB)."""
PART_PARAMETERS = 128 * 1024 * 1024
"""With `offload_moments` a step copies the moments of about so many parameters to the device at a time, those of at
least one tensor."""


def make_optimizer(parameters: list[Any], settings: OptimizerSettings) -> torch.optim.AdamW | MasterAdamW:
    """Return a MasterAdamW if any parameter is bf16, else torch's AdamW."""
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


def step(optimizer: torch.optim.AdamW | MasterAdamW, settings: OptimizerSettings) -> None:
    """Make a step. With `offload_moments`, moments are on the host and pass through the device in parts."""
    if isinstance(optimizer, MasterAdamW) or not settings.offload_moments:
        optimizer.step()
    else:
        _step_in_parts(optimizer)


def load_state(optimizer: torch.optim.AdamW | MasterAdamW, state: dict[str, Any], settings: OptimizerSettings) -> None:
    """Load a state. With `offload_moments`, moments are moved to the host."""
    optimizer.load_state_dict(state)
    if settings.offload_moments and not isinstance(optimizer, MasterAdamW):
        for moments in optimizer.state.values():
            _move_moments(moments, "cpu")


def _step_in_parts(optimizer: torch.optim.AdamW) -> None:
    parameters = [p for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    gradients = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None  # such parameters take no part in a step
    for part in _parts(parameters):
        for index in part:
            p = parameters[index]
            p.grad = gradients[index]
            _move_moments(optimizer.state[p], p.device)
        optimizer.step()
        for index in part:
            _move_moments(optimizer.state[parameters[index]], "cpu")
            parameters[index].grad = None


def _move_moments(state: dict[str, Any], device: torch.device | str) -> None:
    for name in ("exp_avg", "exp_avg_sq"):
        if name in state:
            state[name] = state[name].to(device)


def _parts(parameters: Sequence[Any]) -> Iterator[list[int]]:
    """Yield the indices of parameters in parts of about PART_PARAMETERS."""
    part: list[int] = []
    size = 0
    for index, parameter in enumerate(parameters):
        count = _local(parameter).numel()
        if part and size + count > PART_PARAMETERS:
            yield part
            part, size = [], 0
        part.append(index)
        size += count
    if part:
        yield part


def _on_host(tensor: Any) -> Any:
    """Return the tensor on the host, page-locked for copies to and from a GPU unless it is sharded.

    `pin_memory()` would round the size up to a power of two.
    """
    if not tensor.is_cuda or hasattr(tensor, "to_local"):
        return tensor.to("cpu")
    memory = mmap.mmap(-1, tensor.nbytes)
    host = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(host.data_ptr(), tensor.nbytes, 0)))
    weakref.finalize(memory, runtime.cudaHostUnregister, host.data_ptr())
    return host.copy_(tensor)


@contextmanager
def collecting(optimizer: torch.optim.AdamW | MasterAdamW, *, several: bool) -> Iterator[Callable[[], None]]:
    """Sum bf16 gradients of several backward passes in float32, because a bf16 sum would lose small terms.

    Call the yielded function after each pass. Gradients of large models are moved into the sums as they are made, so
    that no second set is held. Those of small models are moved after a pass, which is less work for the host.
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
    """Yield each parameter's gradient as `step` will use it, for changes in place; zeros if there is none.

    Gradients of bf16 parameters are float32, so that a sum over ranks loses no small terms.
    """
    if isinstance(optimizer, MasterAdamW):
        yield from optimizer.sums()
        parameters = [p for p in parameters if p.dtype is not torch.bfloat16]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        yield parameter.grad


def clip(optimizer: torch.optim.AdamW | MasterAdamW, parameters: list[Any], max_norm: float) -> Tensor:
    """Return the norm of all gradients and scale them down to `max_norm` (MasterAdamW: in the next step)."""
    if not isinstance(optimizer, MasterAdamW):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    norm = _whole(optimizer.norm())
    optimizer.scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm


class MasterAdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) for bf16 parameters, in place. Others use torch's AdamW."""

    def __init__(self, parameters: list[Any], settings: OptimizerSettings) -> None:
        self._half = [p for p in parameters if p.dtype is torch.bfloat16]
        rest = [p for p in parameters if p.dtype is not torch.bfloat16]
        self._rest = _plain(rest, settings) if rest else None
        self._settings = settings
        self.param_groups: list[dict[str, Any]] = [{"params": parameters, "lr": settings.lr}]
        self.updates = 0
        self.scale: Tensor | None = None
        """Factor of the next step's gradients."""
        self._sums: list[Tensor | None] = [None] * len(self._half)
        self._low: list[Tensor] = []
        self._moments: list[tuple[Tensor, Tensor]] = []

    def collect(self) -> list[Any]:
        """Move gradients into float32 sums during backward passes, until the returned handles are removed."""

        def move(parameter: Any, index: int) -> None:
            total = self._sums[index]
            self._sums[index] = parameter.grad.float() if total is None else total.add_(parameter.grad)
            parameter.grad = None

        return [p.register_post_accumulate_grad_hook(partial(move, index=i)) for i, p in enumerate(self._half)]

    @property
    def is_small(self) -> bool:
        """True if the model is not sharded and a second set of gradients fits."""
        whole = not any(hasattr(p, "to_local") for p in self._half)
        return whole and sum(p.numel() for p in self._half) <= SMALL_MODEL_PARAMETERS

    @torch.no_grad()
    def add_up(self) -> None:
        """Move the gradients of a backward pass into float32 sums."""
        sums: list[Tensor] = []
        gradients: list[Tensor] = []
        for i, p in enumerate(self._half):
            total = self._sums[i]
            if p.grad is not None and total is not None:
                sums.append(total)
                gradients.append(p.grad)
            elif p.grad is not None:
                self._sums[i] = p.grad.float()
            p.grad = None
        if sums:
            torch._foreach_add_(sums, gradients)

    def sums(self) -> list[Tensor]:
        """Return the float32 gradients of all bf16 parameters, those of the last pass included."""
        self.add_up()
        for i, p in enumerate(self._half):
            if self._sums[i] is None:
                self._sums[i] = torch.zeros_like(p, dtype=torch.float32)
        return [total for total in self._sums if total is not None]

    def norm(self) -> Tensor:
        """Return the norm of all gradients, float32."""
        gradients = self._gradients()
        if self._rest is not None:
            gradients = gradients + [p.grad for p in self.param_groups[0]["params"] if p.dtype is not torch.bfloat16]
        existing = [g for g in gradients if g is not None]
        if not existing:
            return torch.zeros(())
        return torch.stack(torch._foreach_norm(existing, 2.0, torch.float32)).norm()

    @torch.no_grad()
    def step(self) -> None:
        lr = self.param_groups[0]["lr"]
        gradients = self._gradients()
        if not self._low:
            kept = self._kept
            self._low = [kept(torch.zeros_like(p, dtype=torch.int16)) for p in self._half]
            self._moments = [(kept(torch.zeros_like(p)), kept(torch.zeros_like(p))) for p in self._half]
        self.updates += 1
        scale = torch.ones((), device=self._half[0].device) if self.scale is None else self.scale
        numbers = self._numbers(lr)
        indices = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if self._settings.offload_moments:
            for part in _parts([self._half[i] for i in indices]):
                self._update_from_host([indices[n] for n in part], gradients, scale, numbers)
        else:
            self._update(indices, gradients, [(self._low[i], *self._moments[i]) for i in indices], scale, numbers)
        if self._rest is not None:
            for p in self._rest.param_groups[0]["params"]:
                if p.grad is not None:
                    p.grad.mul_(scale)
            self._rest.param_groups[0]["lr"] = lr
            step(self._rest, self._settings)
        self.scale = None

    def _update(
        self, indices: list[int], gradients: list[Any], states: list[Any], scale: Tensor, numbers: tuple[float, ...]
    ) -> None:
        """Update parameters in place, each with its state of (lower half, first moment, second moment)."""
        rows: list[Any] = [
            tuple(map(_local, (self._half[i], gradients[i], *state))) for i, state in zip(indices, states, strict=True)
        ]
        if self._half[0].is_cuda and HAS_TRITON:
            from agentgym_rl.training.device.optimizer_kernels import update_all

            update_all(rows, indices, scale, numbers, self.updates)
        else:
            for index, row in zip(indices, rows, strict=True):
                update_one(row, scale, numbers, self.updates, index)

    def _update_from_host(
        self, indices: list[int], gradients: list[Any], scale: Tensor, numbers: tuple[float, ...]
    ) -> None:
        device = self._half[0].device
        hosted = [tuple(map(_local, (self._low[i], *self._moments[i]))) for i in indices]
        states = [tuple(tensor.to(device, non_blocking=True) for tensor in state) for state in hosted]
        self._update(indices, gradients, states, scale, numbers)
        for kept, state in zip(hosted, states, strict=True):
            for target, source in zip(kept, state, strict=True):
                target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def _kept(self, tensor: Any) -> Any:
        """Return the tensor where it is kept between steps."""
        return _on_host(tensor) if self._settings.offload_moments else tensor

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None
        self._sums = [None] * len(self._half)

    def state_dict(self) -> dict[str, Any]:
        rest = None if self._rest is None else self._rest.state_dict()
        return {"low": self._low, "moments": self._moments, "updates": self.updates, "rest": rest}

    @torch.no_grad()
    def from_masters(self, plain: dict[str, Any], masters: list[Tensor]) -> dict[str, Any]:
        """Return torch's AdamW state with float32 master weights as a state of this class.

        Ranks wrote such checkpoints in earlier versions. The bf16 parameters become the upper halves of the masters.
        """
        parameters = self.param_groups[0]["params"]
        half = [i for i, p in enumerate(parameters) if p.dtype is torch.bfloat16]
        low = []
        for i in half:
            upper, lower = split(_local(masters[i]).contiguous())
            _local(parameters[i]).copy_(upper)
            low.append(torch.zeros_like(parameters[i], dtype=torch.int16))
            _local(low[-1]).copy_(lower)
        kept = plain["state"]
        moments = [tuple(kept[i][name].to(torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")) for i in half]
        rest = None
        if self._rest is not None:
            others = [i for i in range(len(parameters)) if i not in set(half)]
            groups = [plain["param_groups"][0] | {"params": list(range(len(others)))}]
            rest = {"state": {n: kept[i] for n, i in enumerate(others)}, "param_groups": groups}
        return {"low": low, "moments": moments, "updates": int(kept[half[0]]["step"]), "rest": rest}

    @property
    def tensors_of_state(self) -> dict[str, list[Any]]:
        """Parameters whose shapes and shards the state's tensors have, by key of `state_dict`."""
        rest = [p for p in self.param_groups[0]["params"] if p.dtype is not torch.bfloat16]
        return {"low": self._half, "moments": self._half, "rest": rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        device, kept = self._half[0].device, self._kept
        self._low = [kept(tensor.to(device)) for tensor in state["low"]]
        self._moments = [(kept(first.to(device)), kept(second.to(device))) for first, second in state["moments"]]
        self.updates = state["updates"]
        if self._rest is not None:
            load_state(self._rest, state["rest"], self._settings)

    def master(self) -> list[Tensor]:
        """Return the float32 values of the bf16 parameters."""
        low = self._low or [torch.zeros_like(p, dtype=torch.int16) for p in self._half]
        return [join(p.detach(), lower.to(p.device)) for p, lower in zip(self._half, low, strict=True)]

    def _gradients(self) -> list[Any]:
        return [p.grad if total is None else total for p, total in zip(self._half, self._sums, strict=True)]

    def _numbers(self, lr: float) -> tuple[float, ...]:
        """Return (beta 1, beta 2, step size, root of the second bias correction, kept share of the weight)."""
        beta1, beta2 = self._settings.betas
        first, second = 1.0 - beta1**self.updates, math.sqrt(1.0 - beta2**self.updates)
        return beta1, beta2, lr / first, second, 1.0 - lr * self._settings.weight_decay


def _local(tensor: Any) -> Tensor:
    """Return this rank's shard of a sharded tensor, which shares its memory; else the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
