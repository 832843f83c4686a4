"""A decoder's forward and backward passes captured in CUDA graphs: one launch each instead of hundreds.

A pass of a small model takes the device less time than the host needs to launch its kernels. Micro-batches are padded
to a few sizes, so that passes of one size can be replayed; the padding is samples of its own whose gradient is 0, which
changes no result. A size is captured when it comes for the second time. Embedding and head stay outside: they are few
launches, and the head's size depends on the actions.

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
"""Tokens, longest sample and samples of the smallest size."""
MOST_SIZES = 8
"""Each keeps a set of gradients; passes of further sizes are not captured."""

Layers = Callable[[Tensor, Tensor, MicroBatch], Tensor]
"""(hidden states before the first layer, positions, where samples begin and end) -> what the decoder makes of them."""


@dataclass(frozen=True, slots=True)
class Size:
    """What passes must have in common to be replayed."""

    tokens: int
    longest: int
    """At least as long as any sample: it decides the grid of the attention kernels."""
    samples: int
    """Padding and empty ones among them."""


def padded_lengths(lengths: list[int]) -> tuple[Size, list[int]]:
    """The size a micro-batch is padded to, and the lengths of its samples with those of the padding added.

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
    """Replays passes of a decoder's layers. Lives on the decoder, whose parameters must stay where they are; when one
    has moved, everything is captured anew."""

    def __init__(self, modules: list[nn.Module], layers: Layers) -> None:
        """`layers` computes with the parameters of `modules`."""
        self._modules = nn.ModuleList(modules)
        self._parameters = [p for p in self._modules.parameters() if p.requires_grad]
        self._layers = layers
        self._seen: Counter[Size] = Counter()
        self._graphs: dict[Size, _Pass] = {}
        self._failed: set[Size] = set()
        """Sizes that could not be captured, such as for lack of memory."""
        self._addresses: list[int] = []
        self._place: Any = None
        """CUDA: (memory pool, stream) of all captures, so that they can use the same memory one after the other."""
        self.replays = 0

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the model has parameters of its own and begins without graphs."""

    def states(self, hidden_TH: Tensor, micro: MicroBatch) -> Tensor | None:
        """TH, to be followed by its backward pass before the next one; None where this size is new."""
        addresses = [p.data_ptr() for p in self._parameters]
        if addresses != self._addresses:
            self._graphs.clear()
            self._failed.clear()
            self._addresses = addresses
            self._new_place(hidden_TH)
        size, lengths = padded_lengths(micro.lengths)
        self._seen[size] += 1
        if size not in self._graphs:
            if self._seen[size] < 2 or len(self._graphs) == MOST_SIZES or size in self._failed:
                return None
            try:
                self._graphs[size] = _Pass(size, hidden_TH, self._modules, self._layers, self._place)
            except RuntimeError as error:
                reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                warnings.warn(f"Passes of {size} are not captured, and run one by one: {reason}", stacklevel=2)
                self._failed.add(size)
                self._new_place(hidden_TH)
                return None
        self.replays += 1
        found: Tensor = _Replay.apply(self._graphs[size], micro, lengths, hidden_TH, *self._parameters)
        return found

    def _new_place(self, like: Tensor) -> None:
        if like.is_cuda:
            self._place = torch.cuda.graph_pool_handle(), torch.cuda.Stream(like.device)


@contextmanager
def own_leaves(module: nn.Module) -> Iterator[list[Tensor]]:
    """Within it, the module computes with parameters that share the memory of its own (their order is kept) and that
    autograd has never seen: a node that an earlier pass left on another stream would break a capture."""
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
    """Forward and backward of one size. Without CUDA both are computed each time, which is what tests compare."""

    def __init__(self, size: Size, like_TH: Tensor, modules: nn.Module, layers: Layers, place: Any) -> None:
        device = like_TH.device
        self._size, self._modules, self._layers = size, modules, layers
        self.hidden_PH = torch.zeros(size.tokens, like_TH.shape[1], dtype=like_TH.dtype, device=device)
        self.hidden_PH.requires_grad_()
        self.by_out_PH = torch.zeros(self.hidden_PH.shape, dtype=like_TH.dtype, device=device)
        self._positions_P = torch.zeros(size.tokens, dtype=torch.int64, device=device)
        bounds = torch.full((size.samples + 1,), size.tokens, dtype=torch.int32, device=device)
        bounds[0] = 0
        nothing = torch.empty(0, device=device)
        self._frame = MicroBatch([], [size.longest], [], self._positions_P, self._positions_P, bounds, *[nothing] * 10)
        self.turn = 0
        """Counts forward passes: a backward pass belongs to the last one."""
        self._leaves: list[Tensor]
        self._out: Tensor
        self._gradients: tuple[Tensor, ...]
        self._replay: tuple[Any, Any] | None = self._capture(*place) if like_TH.is_cuda else None

    @torch.no_grad()
    def fill(self, hidden_TH: Tensor, micro: MicroBatch, lengths: list[int]) -> None:
        """Put a micro-batch in. Padding is set to 0 each time: NaN that a diverged pass left there would spread."""
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
        self.turn += 1
        if self._replay is None:
            with torch.enable_grad():
                self._compute()
        else:
            self._replay[0].replay()
        return self._out.detach()

    def backward(self) -> tuple[Tensor, ...]:
        """Gradients by the hidden states that came in and by the parameters; they hold until the next pass."""
        if self._replay is None:
            self._gradients = self._differentiate()
        else:
            self._replay[1].replay()
        return self._gradients

    def _compute(self) -> None:
        with own_leaves(self._modules) as self._leaves:
            self._out = self._layers(self.hidden_PH, self._positions_P, self._frame)

    def _differentiate(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self._out, [self.hidden_PH, *self._leaves], self.by_out_PH)

    def _capture(self, pool: Any, stream: Any) -> tuple[Any, Any]:
        device = self.hidden_PH.device
        stream.wait_stream(torch.cuda.current_stream(device))

        def backward() -> None:
            self._gradients = self._differentiate()

        with torch.enable_grad(), torch.cuda.stream(stream):
            self._compute()  # compiles what is not compiled yet
            backward()
            del self._out, self._gradients
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # what that run took is of no use to the graphs' pool
            graphs = capture(self._compute, pool), capture(backward, pool)
        torch.cuda.current_stream(device).wait_stream(stream)
        return graphs


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, one: _Pass, micro: MicroBatch, lengths: list[int], hidden_TH: Tensor, *parameters: Tensor
    ) -> Tensor:
        one.fill(hidden_TH, micro, lengths)
        out = one.forward()[: len(hidden_TH)]
        ctx.one, ctx.turn = one, one.turn
        return out

    @staticmethod
    def backward(ctx: Any, by_out_TH: Tensor) -> tuple[Any, ...]:
        one, count = ctx.one, len(by_out_TH)
        if ctx.turn != one.turn:
            raise RuntimeError("a captured pass was followed by another before its gradient was taken: take it first")
        one.by_out_PH[:count] = by_out_TH
        one.by_out_PH[count:] = 0
        by_hidden, *by_parameters = one.backward()
        if by_hidden.dtype is not torch.bfloat16:
            # In bf16 what adds up over passes adds up in float32 tensors of its own (MasterAdamW.collect). Elsewhere
            # the first pass's gradient would be overwritten by the second's.
            by_parameters = [gradient.clone() for gradient in by_parameters]
        return None, None, None, by_hidden[:count], *by_parameters
