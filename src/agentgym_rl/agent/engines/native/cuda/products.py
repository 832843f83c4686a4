"""Matrix products of narrow models that do their neighbours' work on the way in and out, in Triton.

A product of a few hundred rows by a few hundred columns is over in microseconds: what counts is the number of launches.
Norm weights and biases are the model's own. A norm costs nothing here: rows are scaled by the norm's weight before the
product and by their root mean square after it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def norm_qkv_kernel(
    hidden,
    norm_weight,
    weight,
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
    eps,
    norm_eps,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Norm, one head of the qkv product, its norm and rotation, and the write to the queries or into the cache."""
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = rows < num_rows
    offs_d = tl.arange(0, HALF)
    offs_k = tl.arange(0, BLOCK_K)
    columns = head * HEAD_DIM + offs_d
    low = tl.zeros([BLOCK_ROWS, HALF], tl.float32)
    high = tl.zeros([BLOCK_ROWS, HALF], tl.float32)
    squares = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        k = start + offs_k
        x = tl.load(hidden + rows[:, None] * SIZE + k[None, :], mask=real[:, None] & (k < SIZE)[None, :], other=0.0)
        scale = tl.load(norm_weight + k, mask=k < SIZE, other=0.0)
        w = weight + columns[None, :] * SIZE + k[:, None]
        w_low = tl.load(w, mask=(k < SIZE)[:, None], other=0.0)
        w_high = tl.load(w + HALF * SIZE, mask=(k < SIZE)[:, None], other=0.0)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        x = (wide * scale.to(tl.float32)[None, :]).to(x.dtype)
        low = tl.dot(x, w_low, low, input_precision="ieee")
        high = tl.dot(x, w_high, high, input_precision="ieee")
    root = tl.rsqrt(squares / SIZE + eps)[:, None]
    low *= root
    high *= root
    if HAS_BIAS:
        low += tl.load(bias + columns).to(tl.float32)[None, :]
        high += tl.load(bias + columns + HALF).to(tl.float32)[None, :]
    position = tl.load(positions + rows, mask=real, other=0)
    if head < HEADS + KV_HEADS:
        if HAS_NORM:
            inner = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + norm_eps)[:, None]
            is_query = head < HEADS
            w_low = tl.where(is_query, tl.load(q_norm + offs_d), tl.load(k_norm + offs_d))
            w_high = tl.where(is_query, tl.load(q_norm + HALF + offs_d), tl.load(k_norm + HALF + offs_d))
            low = low * inner * w_low.to(tl.float32)[None, :]
            high = high * inner * w_high.to(tl.float32)[None, :]
        angle = position[:, None] * HALF + offs_d[None, :]
        c = tl.load(cos + angle, mask=real[:, None], other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=real[:, None], other=0.0).to(tl.float32)
        turned = low * c - high * s
        high = high * c + low * s
        low = turned
    low_out = low.to(query.dtype.element_ty)
    high_out = high.to(query.dtype.element_ty)
    if head < HEADS:
        target = query + rows[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + offs_d[None, :]
        tl.store(target, low_out, mask=real[:, None])
        tl.store(target + HALF, high_out, mask=real[:, None])
    else:
        written = tl.where(tl.load(done + rows, mask=real, other=1) != 0, spare, position)
        base = tl.load(slots + rows, mask=real, other=0) * slot_stride + written * HEAD_DIM
        if head < HEADS + KV_HEADS:
            target = keys + (base + (head - HEADS) * head_stride)[:, None] + offs_d[None, :]
            tl.store(target, low_out, mask=real[:, None])
            tl.store(target + HALF, high_out, mask=real[:, None])
        else:
            target = values + (base + (head - HEADS - KV_HEADS) * head_stride)[:, None] + offs_d[None, :]
            tl.store(target, low_out, mask=real[:, None])
            tl.store(target + HALF, high_out, mask=real[:, None])


@triton.jit
def norm_gate_up_kernel(
    hidden,
    norm_weight,
    weight,
    out,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Norm, the gate and up products, SiLU and their product."""
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = rows < num_rows
    inside = columns < INNER
    offs_k = tl.arange(0, BLOCK_K)
    gate = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    up = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    squares = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        k = start + offs_k
        x = tl.load(hidden + rows[:, None] * SIZE + k[None, :], mask=real[:, None] & (k < SIZE)[None, :], other=0.0)
        scale = tl.load(norm_weight + k, mask=k < SIZE, other=0.0)
        w = weight + columns[None, :] * SIZE + k[:, None]
        known = inside[None, :] & (k < SIZE)[:, None]
        w_gate = tl.load(w, mask=known, other=0.0)
        w_up = tl.load(w + INNER * SIZE, mask=known, other=0.0)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        x = (wide * scale.to(tl.float32)[None, :]).to(x.dtype)
        gate = tl.dot(x, w_gate, gate, input_precision="ieee")
        up = tl.dot(x, w_up, up, input_precision="ieee")
    root = tl.rsqrt(squares / SIZE + eps)[:, None]
    gate *= root
    mixed = gate * tl.sigmoid(gate) * (up * root)
    target = out + rows[:, None] * INNER + columns[None, :]
    tl.store(target, mixed.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def add_product_kernel(
    x,
    weight,
    bias,
    hidden,
    num_rows,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """hidden += x @ weight.T + bias."""
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = rows < num_rows
    inside = columns < SIZE
    offs_k = tl.arange(0, BLOCK_K)
    product = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, INNER, BLOCK_K):
        k = start + offs_k
        a = tl.load(x + rows[:, None] * INNER + k[None, :], mask=real[:, None] & (k < INNER)[None, :], other=0.0)
        w = tl.load(
            weight + columns[None, :] * INNER + k[:, None], mask=inside[None, :] & (k < INNER)[:, None], other=0.0
        )
        product = tl.dot(a, w, product, input_precision="ieee")
    if HAS_BIAS:
        product += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    target = hidden + rows[:, None] * SIZE + columns[None, :]
    mask = real[:, None] & inside[None, :]
    product += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, product.to(hidden.dtype.element_ty), mask=mask)


def _block_k(size: int, dtype: torch.dtype) -> int:
    """Columns of one step of a product: as wide as divides the size, so that masks cost nothing."""
    most = 32 if dtype.itemsize == 4 else 64
    return min(most, max(16, size & -size))


def _block_rows(num_rows: int, num_columns: int, num_processors: int) -> int:
    """Rows of one program: as few as let one wave of programs cover the matrix, to spread it over all processors."""
    rows = 16
    while rows < 64 and num_columns * triton.cdiv(num_rows, rows) > num_processors:
        rows *= 2
    return rows


def norm_qkv(
    hidden: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    done: torch.Tensor,
    num_processors: int,
) -> torch.Tensor:
    """Queries [B, H * D], rotated; keys and values go into the cache [slots, K, L, D]."""
    num_rows, size = hidden.shape
    _, num_kv, length, head_dim = keys.shape
    heads = weight.shape[0] // head_dim
    num_heads = heads - 2 * num_kv
    query = torch.empty((num_rows, num_heads * head_dim), dtype=hidden.dtype, device=hidden.device)
    q_norm, k_norm, norm_eps = norms if norms is not None else (cos, cos, 0.0)
    block_rows = _block_rows(num_rows, heads, num_processors)
    norm_qkv_kernel[(heads, triton.cdiv(num_rows, block_rows))](
        hidden,
        norm[0],
        weight,
        weight if bias is None else bias,
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
        length - 1,
        keys.stride(0),
        keys.stride(1),
        norm[1],
        norm_eps,
        SIZE=size,
        HEADS=num_heads,
        KV_HEADS=num_kv,
        HEAD_DIM=head_dim,
        HAS_BIAS=bias is not None,
        HAS_NORM=norms is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_K=_block_k(size, hidden.dtype),
        num_warps=4,
        num_stages=4,
    )
    return query


def norm_gate_up(
    hidden: torch.Tensor, norm: tuple[torch.Tensor, float], weight: torch.Tensor, num_processors: int
) -> torch.Tensor:
    """silu(gate) * up of the normalised rows: [B, C] to [B, I]; weight is [2 I, C]."""
    num_rows, size = hidden.shape
    inner = weight.shape[0] // 2
    out = torch.empty((num_rows, inner), dtype=hidden.dtype, device=hidden.device)
    block_columns = 32 if hidden.dtype.itemsize == 4 else 64
    columns = triton.cdiv(inner, block_columns)
    block_rows = _block_rows(num_rows, columns, num_processors)
    norm_gate_up_kernel[(columns, triton.cdiv(num_rows, block_rows))](
        hidden,
        norm[0],
        weight,
        out,
        num_rows,
        norm[1],
        SIZE=size,
        INNER=inner,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        BLOCK_K=_block_k(size, hidden.dtype),
        num_warps=4,
        num_stages=4,
    )
    return out


def add_product(
    hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_processors: int
) -> None:
    """hidden += x @ weight.T + bias, in place."""
    num_rows, inner = x.shape
    size = weight.shape[0]
    block_columns = 32 if hidden.dtype.itemsize == 4 else 64
    columns = triton.cdiv(size, block_columns)
    block_rows = _block_rows(num_rows, columns, num_processors)
    add_product_kernel[(columns, triton.cdiv(num_rows, block_rows))](
        x,
        weight,
        weight if bias is None else bias,
        hidden,
        num_rows,
        INNER=inner,
        SIZE=size,
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        BLOCK_K=_block_k(inner, hidden.dtype),
        num_warps=4,
        num_stages=4,
    )
