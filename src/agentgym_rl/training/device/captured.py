"""A decoder's forward and backward passes captured in CUDA graphs: one launch each instead of hundreds.

A pass of a small model takes the device less time than the host needs to launch its kernels. Micro-batches are padded
to a few sizes, so that passes of one size can be replayed. The padding consists of separate samples with gradient 0, so
results do not change. A size is captured when it occurs for the second time. Embedding and head are not captured: they
are few launches, and the head's size depends on the actions.

Shapes: T tokens of a micro-batch, P of its padded size, H hidden size.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from agentgym_rl.common.cuda_graphs import capture
from agentgym_rl.training.microbatch import MicroBatch

SMALLEST = (256, 128, 16)
"""Tokens, longest sample and number of samples of the smallest size."""
MAX_SIZES = 8
"""Largest number of captured sizes, because each keeps a set of gradients."""

Layers = Callable[[Tensor, Tensor, MicroBatch], Tensor]
"""(hidden states before the first layer, positions, bounds of the samples) -> the decoder's output."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a padded micro-batch. Passes of equal size share a graph."""

    tokens: int
    longest: int
    """Upper bound of the sample lengths, which sets the grid of the attention kernels."""
    samples: int
    """Number of samples, padding and empty ones included."""


def padded_lengths(lengths: list[int]) -> tuple[Size, list[int]]:
    """Return the padded size of a micro-batch, and the lengths of its samples and its padding.

    Tokens are rounded up to an eighth of the next power of two, the others to powers of two.
    """
    longest = max(SMALLEST[1], _power_of_two(max(lengths)))
    total = sum(lengths)
    eighth = max(SMALLEST[0], _power_of_two(total) // 8)
    tokens = -(-total // eighth) * eighth
    left, padding = tokens - total, []
    while left:
        padding.append(min(left, longest))
        left -= padding[-1]
    samples = max(SMALLEST[2], _power_of_two(len(lengths) + len(padding)))
    return Size(tokens, longest, samples), [*lengths, *padding]


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


class CapturedPasses:
    """Replays passes of a decoder's layers. It is an attribute of the decoder.

    The graphs hold the addresses of the parameters. If one has moved, everything is captured again.
    """

    def __init__(self, modules: list[nn.Module], layers: Layers) -> None:
        """`layers` computes with the parameters of `modules`."""
        self._modules = nn.ModuleList(modules)
        self._parameters = [p for p in self._modules.parameters() if p.requires_grad]
        self._layers = layers
        self._seen: Counter[Size] = Counter()
        self._graphs: dict[Size, _Pass] = {}
        self._failed: set[Size] = set()
        """Sizes whose capture failed, for example because memory ran out."""
        self._addresses: list[int] = []
        self._pool_and_stream: Any = None
        """On CUDA: memory pool and stream of all captures, so that they reuse the same memory."""
        self.replays = 0

    def __deepcopy__(self, memo: Any) -> None:
        """Return None: a copy of the model has its own parameters and starts without graphs."""

    def states(self, hidden_TH: Tensor, micro: MicroBatch) -> Tensor | None:
        """Return the output TH, or None if this size is not captured. Run backward before the next call."""
        addresses = [p.data_ptr() for p in self._parameters]
        if addresses != self._addresses:
            self._graphs.clear()
            self._failed.clear()
            self._addresses = addresses
            self._new_pool(hidden_TH)
        size, lengths = padded_lengths(micro.lengths)
        self._seen[size] += 1
        if size not in self._graphs:
            if self._seen[size] < 2 or len(self._graphs) == MAX_SIZES or size in self._failed:
                return None
            try:
                self._graphs[size] = _Pass(size, hidden_TH, self._modules, self._layers, self._pool_and_stream)
            except RuntimeError as error:
                reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                warnings.warn(f"Passes of {size} could not be captured and run without a graph: {reason}", stacklevel=2)
                self._failed.add(size)
                self._new_pool(hidden_TH)
                return None
        self.replays += 1
        states: Tensor = _Replay.apply(self._graphs[size], micro, lengths, hidden_TH, *self._parameters)
        return states

    def _new_pool(self, like: Tensor) -> None:
        if like.is_cuda:
            self._pool_and_stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(like.device)


@contextmanager
def own_leaves(module: nn.Module) -> Iterator[list[Tensor]]:
    """Replace the module's parameters, while the context is open, by new leaves that share their memory.

    Autograd has not used the new leaves. A node that an earlier pass left on another stream would break a capture.
    """
    leaves = {p: nn.Parameter(p.detach()) for p in module.parameters() if p.requires_grad}
    places = [(m, name, p) for m in module.modules() for name, p in m._parameters.items() if p in leaves]
    for owner, name, parameter in places:
        owner._parameters[name] = leaves[parameter]
    try:
        yield list(leaves.values())
    finally:
        for owner, name, parameter in places:
            owner._parameters[name] = parameter


class _Pass:
    """Forward and backward pass of one size. Without CUDA both are computed each time, for tests."""

    def __init__(self, size: Size, like_TH: Tensor, modules: nn.Module, layers: Layers, pool_and_stream: Any) -> None:
        device = like_TH.device
        self._size, self._modules, self._layers = size, modules, layers
        self.hidden_PH = torch.zeros(size.tokens, like_TH.shape[1], dtype=like_TH.dtype, device=device)
        self.hidden_PH.requires_grad_()
        self.grad_out_PH = torch.zeros(self.hidden_PH.shape, dtype=like_TH.dtype, device=device)
        self._positions_P = torch.zeros(size.tokens, dtype=torch.int64, device=device)
        bounds = torch.full((size.samples + 1,), size.tokens, dtype=torch.int32, device=device)
        bounds[0] = 0
        empty = torch.empty(0, device=device)
        self._frame = MicroBatch([], [size.longest], [], self._positions_P, self._positions_P, bounds, *[empty] * 10)
        self.forwards = 0
        """Number of forward passes. A backward pass belongs to the last one."""
        self._leaves: list[Tensor]
        self._out: Tensor
        self._gradients: tuple[Tensor, ...]
        self._replay: tuple[Any, Any] | None = self._capture(*pool_and_stream) if like_TH.is_cuda else None

    @torch.no_grad()
    def fill(self, hidden_TH: Tensor, micro: MicroBatch, lengths: list[int]) -> None:
        """Copy a micro-batch in. Padding is set to 0 each time, because NaN of a diverged pass would spread."""
        count = len(hidden_TH)
        self.hidden_PH[:count] = hidden_TH
        self.hidden_PH[count:] = 0
        self._positions_P[:count] = micro.positions_T
        self._positions_P[count:] = 0
        bounds = numpy.full(self._size.samples + 1, self._size.tokens, dtype=numpy.int32)
        bounds[0], bounds[1 : len(lengths) + 1] = 0, numpy.cumsum(lengths)
        self._frame.bounds_B1.copy_(torch.from_numpy(bounds))
        if self._replay is None:
            self._frame.lengths = lengths

    def forward(self) -> Tensor:
        self.forwards += 1
        if self._replay is None:
            with torch.enable_grad():
                self._compute()
        else:
            self._replay[0].replay()
        return self._out.detach()

    def backward(self) -> tuple[Tensor, ...]:
        """Return gradients of the input hidden states and of the parameters. They are valid until the next pass."""
        if self._replay is None:
            self._gradients = self._differentiate()
        else:
            self._replay[1].replay()
        return self._gradients

    def _compute(self) -> None:
        with own_leaves(self._modules) as self._leaves:
            self._out = self._layers(self.hidden_PH, self._positions_P, self._frame)

    def _differentiate(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self._out, [self.hidden_PH, *self._leaves], self.grad_out_PH)

    def _capture(self, pool: Any, stream: Any) -> tuple[Any, Any]:
        device = self.hidden_PH.device
        stream.wait_stream(torch.cuda.current_stream(device))

        def backward() -> None:
            self._gradients = self._differentiate()

        with torch.enable_grad(), torch.cuda.stream(stream):
            self._compute()  # compiles kernels
            backward()
            del self._out, self._gradients
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # the graphs' pool cannot use the memory of that run
            graphs = capture(self._compute, pool), capture(backward, pool)
        torch.cuda.current_stream(device).wait_stream(stream)
        return graphs


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, captured: _Pass, micro: MicroBatch, lengths: list[int], hidden_TH: Tensor, *parameters: Tensor
    ) -> Tensor:
        captured.fill(hidden_TH, micro, lengths)
        out = captured.forward()[: len(hidden_TH)]
        ctx.captured, ctx.number = captured, captured.forwards
        return out

    @staticmethod
    def backward(ctx: Any, grad_out_TH: Tensor) -> tuple[Any, ...]:
        captured, count = ctx.captured, len(grad_out_TH)
        if ctx.number != captured.forwards:
            raise RuntimeError("a captured pass ran again before its backward pass: call backward first")
        captured.grad_out_PH[:count] = grad_out_TH
        captured.grad_out_PH[count:] = 0
        grad_hidden, *grad_parameters = captured.backward()
        if grad_hidden.dtype is not torch.bfloat16:
            # bf16 gradients are summed in separate float32 tensors (MasterAdamW.collect). For other types the second
            # pass would overwrite the gradient of the first.
            grad_parameters = [gradient.clone() for gradient in grad_parameters]
        return None, None, None, grad_hidden[:count], *grad_parameters
