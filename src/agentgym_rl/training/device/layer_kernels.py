"""Triton kernels for the operations between the matrix products of a decoder layer, forward and backward.

Shapes: T tokens, H hidden size, I intermediate size, D head width. Arithmetic is float32, rounded where modules round.
Tokens are on the grid's first axis, because the others are limited to 65,535.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 264
"""Programs of the norm's backward pass: two per multiprocessor of the largest chips. Each sums over its own rows."""
_NUMBERS_PER_BLOCK = 4096
"""Numbers that such a program loads at once, as whole rows."""


@triton.jit
def norm_kernel(x, weight, out, scales, eps, STRIDE, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    inside = offs < SIZE
    values = tl.load(x + row // HEADS * STRIDE + row % HEADS * SIZE + offs, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    # Round between the two products, as the modules do.
    normal = (values * scale).to(out.dtype.element_ty)
    tl.store(out + row * SIZE + offs, normal * tl.load(weight + offs, mask=inside, other=0.0), mask=inside)
    tl.store(scales + row, scale)


def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (contiguous RMS norm over the last dimension, scale of each row). `x` is TH, or part of a wider TND."""
    size, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.shape[0] * heads
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    norm_kernel[(rows,)](
        x, weight, out, scales, eps, x.stride(0), HEADS=heads, SIZE=size, BLOCK=block, num_warps=_warps(block)
    )
    return out, scales


@triton.jit
def norm_backward_kernel(
    grad_out,
    x,
    weight,
    scales,
    residual,
    grad_x,
    grad_weight,
    num_rows,
    STRIDE,
    GRAD_STRIDE,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """dx = residual + s (g w - n mean(g w n)) with n = s x; the weight's gradient is the sum of g n over rows."""
    offs = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + offs, mask=offs < SIZE, other=0.0).to(tl.float32)
    total = tl.zeros([1, BLOCK], dtype=tl.float32)
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)[:, None]
        inside = (row < num_rows) & (offs < SIZE)
        scale = tl.load(scales + row, mask=row < num_rows, other=0.0)
        place = row // HEADS * STRIDE + row % HEADS * SIZE + offs
        normal = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * scale
        gradient = tl.load(grad_out + row * SIZE + offs, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(gradient * normal, 0)[None, :]
        gradient *= w
        gradient = scale * (gradient - normal * (tl.sum(gradient * normal, 1)[:, None] / SIZE))
        if HAS_RESIDUAL:
            gradient += tl.load(residual + row * SIZE + offs, mask=inside, other=0.0).to(tl.float32)
        target = grad_x + row // HEADS * GRAD_STRIDE + row % HEADS * SIZE + offs
        tl.store(target, gradient.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_weight + tl.program_id(0) * SIZE + offs, total, mask=offs < SIZE)


def norm_backward(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    residual: Tensor | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (gradient of x plus `residual`, gradient of the weight). The first is written to `into`, if given."""
    size, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * heads
    grad_x = torch.empty_like(x) if into is None else into
    block = triton.next_power_of_2(size)
    block_rows = max(1, _NUMBERS_PER_BLOCK // block)
    programs = min(_PROGRAMS, triton.cdiv(rows, block_rows))
    partial = torch.empty((programs, size), dtype=torch.float32, device=x.device)
    norm_backward_kernel[(programs,)](
        grad_out,
        x,
        weight,
        scales,
        x if residual is None else residual,
        grad_x,
        partial,
        rows,
        x.stride(0),
        grad_x.stride(0),
        HEADS=heads,
        SIZE=size,
        BLOCK=block,
        ROWS=block_rows,
        HAS_RESIDUAL=residual is not None,
        num_warps=8,
    )
    return grad_x, partial.sum(0).to(weight.dtype)


@triton.jit
def rotate_kernel(
    source,
    target,
    cos,
    sin,
    SOURCE_STRIDE,
    TARGET_STRIDE,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BACK: tl.constexpr,
):
    """Rotate all heads of one token, in two halves because rotation pairs them."""
    HALF: tl.constexpr = WIDTH // 2
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.arange(0, BLOCK_HEADS)
    offs_d = tl.arange(0, BLOCK_HALF)
    inside = (offs_h < HEADS)[:, None] & (offs_d < HALF)[None, :]
    place = offs_h[:, None] * WIDTH + offs_d[None, :]
    low = tl.load(source + token * SOURCE_STRIDE + place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + token * SOURCE_STRIDE + place + HALF, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * WIDTH + offs_d, mask=offs_d < HALF, other=0.0)[None, :].to(tl.float32)
    s = tl.load(sin + token * WIDTH + offs_d, mask=offs_d < HALF, other=0.0)[None, :].to(tl.float32)
    if BACK:
        s = -s
    out = target + token * TARGET_STRIDE + place
    tl.store(out, (low * c - high * s).to(target.dtype.element_ty), mask=inside)
    tl.store(out + HALF, (high * c + low * s).to(target.dtype.element_ty), mask=inside)


def rotate(source_TND: Tensor, target_TND: Tensor, cos_TD: Tensor, sin_TD: Tensor, *, back: bool) -> None:
    """Write the rotary embedding of all heads of every token, or its inverse. `source` may be `target`."""
    tokens, heads, width = source_TND.shape
    rotate_kernel[(tokens,)](
        source_TND,
        target_TND,
        cos_TD,
        sin_TD,
        source_TND.stride(0),
        target_TND.stride(0),
        HEADS=heads,
        BLOCK_HEADS=triton.next_power_of_2(heads),
        WIDTH=width,
        BLOCK_HALF=triton.next_power_of_2(width // 2),
        BACK=back,
        num_warps=4,
    )


@triton.jit
def gate_kernel(gate_up, out, SIZE, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + offs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + offs, mask=inside, other=0.0)
    active = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty)
    tl.store(out + row * SIZE + offs, active * up, mask=inside)


@triton.jit
def gate_backward_kernel(gate_up, grad_out, grad_gate_up, SIZE, BLOCK: tl.constexpr):
    """Overwrite `grad_out` with the forward result, which the next product needs."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + offs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + offs, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(grad_out + row * SIZE + offs, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    active = gate * sigmoid
    rounded = active.to(grad_out.dtype.element_ty).to(tl.float32)
    grad_gate = gradient * up * (sigmoid + active * (1.0 - sigmoid))
    target = grad_gate_up + row * 2 * SIZE + offs
    tl.store(target, grad_gate.to(grad_out.dtype.element_ty), mask=inside)
    tl.store(target + SIZE, (gradient * rounded).to(grad_out.dtype.element_ty), mask=inside)
    tl.store(grad_out + row * SIZE + offs, (rounded * up).to(grad_out.dtype.element_ty), mask=inside)


def gate(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, TI, from the concatenated gate and up."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    gate_kernel[(tokens, triton.cdiv(size, 1024))](gate_up, out, size, BLOCK=1024, num_warps=4)
    return out


def gate_backward(gate_up: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """Return (gradient of the concatenated gate and up, silu(gate) * up in the memory of `grad_out`)."""
    tokens, size = grad_out.shape
    grad_gate_up = torch.empty_like(gate_up)
    gate_backward_kernel[(tokens, triton.cdiv(size, 1024))](
        gate_up, grad_out, grad_gate_up, size, BLOCK=1024, num_warps=4
    )
    return grad_gate_up, grad_out


def _warps(block: int) -> Any:
    return 1 if block <= 256 else 4 if block <= 2048 else 8
