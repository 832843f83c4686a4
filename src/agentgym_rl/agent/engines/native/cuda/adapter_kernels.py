"""Triton kernels after the library's product with a joint matrix that has rows of adapters.

The first N columns of such a product are outputs, the others are the inputs of B. Each kernel adds their product with B
and does what follows: rotary embedding with the cache write, SiLU times up, or the residual sum.

Shapes: T tokens, N outputs of a product, G projections in it, R rank, C hidden size, H and K query and key/value heads,
D head width, I intermediate size.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from agentgym_rl.agent.engines.native.cuda.chaining import CHAINED, follow
from agentgym_rl.agent.engines.native.cuda.matmul_kernels import (
    add_low_rank,
    block_rows_for,
    finish_head,
    projection_of,
    rows_of_b,
)

BLOCK_COLUMNS = 64


@triton.jit
def _tile(product, rows, real, columns, inside, WIDTH: tl.constexpr):
    mask = real[:, None] & inside[None, :]
    return tl.load(product + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)


@triton.jit
def adapted_heads_kernel(
    product,
    adapter_b,
    bias,
    q_norm,
    k_norm,
    cos,
    sin,
    query,
    keys,
    values,
    slots,
    positions,
    done,
    num_rows,
    spare,
    slot_stride,
    head_stride,
    norm_eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RANK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_DONE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHAIN: tl.constexpr,
):
    follow(CHAIN)
    OUTPUTS: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = rows < num_rows
    position = tl.load(positions + rows, mask=real, other=0)
    columns = head * HEAD_DIM + tl.arange(0, HEAD_DIM)
    ranks = OUTPUTS + projection_of(head, HEADS, KV_HEADS) * RANK + tl.arange(0, RANK)
    total = _tile(product, rows, real, columns, columns >= 0, OUTPUTS + 3 * RANK).to(tl.float32)
    inner = _tile(product, rows, real, ranks, ranks >= 0, OUTPUTS + 3 * RANK)
    total = add_low_rank(total, inner, rows_of_b(adapter_b, columns, columns >= 0, RANK))
    if HAS_BIAS:
        total += tl.load(bias + columns).to(tl.float32)[None, :]
    finish_head(
        total,
        head,
        rows,
        real,
        position,
        q_norm,
        k_norm,
        cos,
        sin,
        query,
        keys,
        values,
        slots,
        done,
        spare,
        slot_stride,
        head_stride,
        norm_eps,
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        HAS_NORM,
        HAS_DONE,
        BLOCK_ROWS,
    )


@triton.jit
def adapted_silu_kernel(
    product,
    adapter_b,
    out,
    num_rows,
    INNER: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    CHAIN: tl.constexpr,
):
    follow(CHAIN)
    WIDTH: tl.constexpr = 2 * INNER + 2 * RANK
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    real, inside = rows < num_rows, columns < INNER
    ranks = 2 * INNER + tl.arange(0, RANK)
    gate = _tile(product, rows, real, columns, inside, WIDTH).to(tl.float32)
    inner = _tile(product, rows, real, ranks, ranks >= 0, WIDTH)
    gate = add_low_rank(gate, inner, rows_of_b(adapter_b, columns, inside, RANK))
    up = _tile(product, rows, real, INNER + columns, inside, WIDTH).to(tl.float32)
    inner = _tile(product, rows, real, RANK + ranks, ranks >= 0, WIDTH)
    up = add_low_rank(up, inner, rows_of_b(adapter_b + INNER * RANK, columns, inside, RANK))
    target = out + rows.to(tl.int64)[:, None] * INNER + columns[None, :]
    mixed = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    tl.store(target, mixed, mask=real[:, None] & inside[None, :])


@triton.jit
def add_adapted_kernel(
    product,
    adapter_b,
    bias,
    hidden,
    num_rows,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    CHAIN: tl.constexpr,
):
    follow(CHAIN)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    real, inside = rows < num_rows, columns < SIZE
    ranks = SIZE + tl.arange(0, RANK)
    total = _tile(product, rows, real, columns, inside, SIZE + RANK).to(tl.float32)
    inner = _tile(product, rows, real, ranks, ranks >= 0, SIZE + RANK)
    total = add_low_rank(total, inner, rows_of_b(adapter_b, columns, inside, RANK))
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    target = hidden + rows.to(tl.int64)[:, None] * SIZE + columns[None, :]
    mask = real[:, None] & inside[None, :]
    total += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, total.to(hidden.dtype.element_ty), mask=mask)


def adapted_heads(
    product: torch.Tensor,
    adapter_b: torch.Tensor,
    bias: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    done: torch.Tensor | None,
) -> torch.Tensor:
    """Return rotated queries [T, H * D] of a product [T, N + 3 R]. Keys and values go into the cache [slots, K, L, D];
    those of finished rows go to its spare position."""
    _, num_kv, length, head_dim = keys.shape
    heads = len(adapter_b) // head_dim
    num_rows, num_heads = len(product), heads - 2 * num_kv
    query = torch.empty((num_rows, num_heads * head_dim), dtype=product.dtype, device=product.device)
    q_norm, k_norm, norm_eps = norms if norms is not None else (cos, cos, 0.0)
    block_rows = block_rows_for(product.dtype)
    adapted_heads_kernel[(triton.cdiv(num_rows, block_rows), heads)](
        product,
        adapter_b,
        adapter_b if bias is None else bias,
        q_norm,
        k_norm,
        cos,
        sin,
        query,
        keys,
        values,
        slots,
        positions,
        positions if done is None else done,
        num_rows,
        length - 1,
        keys.stride(0),
        keys.stride(1),
        norm_eps,
        HEADS=num_heads,
        KV_HEADS=num_kv,
        HEAD_DIM=head_dim,
        RANK=adapter_b.shape[1],
        HAS_BIAS=bias is not None,
        HAS_NORM=norms is not None,
        HAS_DONE=done is not None,
        BLOCK_ROWS=block_rows,
        num_warps=4,
        **CHAINED,
    )
    return query


def adapted_silu(product: torch.Tensor, adapter_b: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of a product [T, 2 I + 2 R]: [T, I]."""
    num_rows, inner = len(product), len(adapter_b) // 2
    out = torch.empty((num_rows, inner), dtype=product.dtype, device=product.device)
    block_rows = block_rows_for(product.dtype)
    adapted_silu_kernel[(triton.cdiv(num_rows, block_rows), triton.cdiv(inner, BLOCK_COLUMNS))](
        product,
        adapter_b,
        out,
        num_rows,
        INNER=inner,
        RANK=adapter_b.shape[1],
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        num_warps=4,
        **CHAINED,
    )
    return out


def add_adapted(
    hidden: torch.Tensor, product: torch.Tensor, adapter_b: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Add a product [T, C + R] and a bias to `hidden` [T, C]."""
    num_rows, size = hidden.shape
    block_rows = block_rows_for(hidden.dtype)
    add_adapted_kernel[(triton.cdiv(num_rows, block_rows), triton.cdiv(size, BLOCK_COLUMNS))](
        product,
        adapter_b,
        adapter_b if bias is None else bias,
        hidden,
        num_rows,
        SIZE=size,
        RANK=adapter_b.shape[1],
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        num_warps=4,
        **CHAINED,
    )
