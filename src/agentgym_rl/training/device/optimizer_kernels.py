"""A Triton kernel for AdamW on all bf16 parameters in one launch. It does what `update_one` does for one parameter."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentgym_rl.training.device.master_weights import EPSILON, seed_of

BLOCK = 2048
COLUMNS = 7
"""Columns of the table: addresses of parameter, gradient, remainder and moments; number of elements; seed."""


@triton.jit
def _random(element, seed):
    x = (element.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)).to(tl.uint32)
    x = ((x ^ (x >> 16)) * 0x7FEB352D).to(tl.uint32)
    x = ((x ^ (x >> 15)) * 0x846CA68B).to(tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _round_stochastically(values, bits):
    return ((values.to(tl.int32, bitcast=True) + bits.to(tl.int32)) >> 16).to(tl.int16)


@triton.jit
def update_kernel(
    table,
    tensors,
    starts,
    scale,
    beta1,
    beta2,
    size,
    root,
    kept,
    eps,
    GRADIENT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROW: tl.constexpr,
    SIZE: tl.constexpr,
):
    program = tl.program_id(0)
    row = table + tl.load(tensors + program) * ROW
    offs = tl.multiple_of(tl.load(starts + program), SIZE) + tl.arange(0, SIZE)
    inside = offs < tl.load(row + 5)
    upper_at = tl.multiple_of(tl.load(row), ALIGNMENT).to(tl.pointer_type(tl.int16)) + offs
    gradient_at = tl.multiple_of(tl.load(row + 1), ALIGNMENT).to(tl.pointer_type(GRADIENT)) + offs
    low_at = tl.multiple_of(tl.load(row + 2), ALIGNMENT).to(tl.pointer_type(tl.int16)) + offs
    first_at = tl.multiple_of(tl.load(row + 3), ALIGNMENT).to(tl.pointer_type(tl.int16)) + offs
    second_at = tl.multiple_of(tl.load(row + 4), ALIGNMENT).to(tl.pointer_type(tl.int16)) + offs
    gradient = tl.load(gradient_at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    first = (tl.load(first_at, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    second = (tl.load(second_at, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    first = first * beta1 + gradient * (1.0 - beta1)
    second = second * beta2 + gradient * gradient * (1.0 - beta2)
    upper = tl.load(upper_at, mask=inside, other=0).to(tl.int32)
    bits = (upper << 16) + tl.load(low_at, mask=inside, other=0).to(tl.int32)
    master = bits.to(tl.float32, bitcast=True)
    master = master * kept - size * first / (tl.sqrt_rn(second) / root + eps)
    bits = master.to(tl.int32, bitcast=True)
    upper = (bits + 0x8000) >> 16
    tl.store(upper_at, upper.to(tl.int16), mask=inside)
    tl.store(low_at, (bits - (upper << 16)).to(tl.int16), mask=inside)
    noise = _random(offs, tl.load(row + 6))
    tl.store(first_at, _round_stochastically(first, noise & 0xFFFF), mask=inside)
    tl.store(second_at, _round_stochastically(second, noise >> 16), mask=inside)


def update_all(
    rows: list[tuple[Tensor, ...]], indices: list[int], scale: Tensor, numbers: tuple[float, ...], update: int
) -> None:
    """Update `rows` of (parameter, gradient, remainder, first moment, second moment), all contiguous.

    `indices` are those of the parameters, which the random numbers depend on.
    """
    for dtype in {row[1].dtype for row in rows}:
        same_dtype = [(index, row) for index, row in zip(indices, rows, strict=True) if row[1].dtype is dtype]
        for _, row in same_dtype:
            if not all(tensor.is_contiguous() for tensor in row):
                raise ValueError(f"an optimizer needs contiguous tensors, got strides {[t.stride() for t in row]}")
        table = [[*(t.data_ptr() for t in row), row[0].numel(), seed_of(update, index)] for index, row in same_dtype]
        device = rows[0][0].device
        tensors, starts = _blocks(tuple(row[0].numel() for _, row in same_dtype), device)
        aligned = all(address % 16 == 0 for line in table for address in line[:5])
        update_kernel[(len(tensors),)](
            torch.tensor(table, device=device),
            tensors,
            starts,
            scale,
            *numbers,
            EPSILON,
            GRADIENT=tl.bfloat16 if dtype is torch.bfloat16 else tl.float32,
            ALIGNMENT=16 if aligned else 2,
            ROW=COLUMNS,
            SIZE=BLOCK,
            num_warps=8,
        )


@lru_cache(maxsize=256)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tensor and the first element of every program."""
    counts = torch.tensor([triton.cdiv(size, BLOCK) for size in sizes])
    tensors = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    firsts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return tensors.to(device), ((torch.arange(len(tensors)) - firsts) * BLOCK).to(device)
