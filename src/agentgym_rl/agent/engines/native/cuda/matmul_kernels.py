"""Triton matrix products fused with the operations before and after them.

A product of a few hundred rows by a few hundred columns takes microseconds, so the number of launches dominates. A norm
between two products is free here: the first also writes its sum scaled by the norm's weight, and each row's sum of
squares in parts; the second multiplies the scaled rows and divides by the root mean square at the end. With adapters
every program also multiplies its rows by A: they are few columns, and another launch would take longer.

Shapes: B rows, C hidden size, H and K query and key/value heads, D head width, I intermediate size, P parts.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from agentgym_rl.agent.engines.native.cuda.adapters import JointAdapter
from agentgym_rl.agent.engines.native.cuda.chaining import CHAINED, follow
from agentgym_rl.agent.engines.native.cuda.joint_weights import shared_memory

PARTS_BLOCK = 32
"""Columns whose squares one program of `add_product` sums."""


@dataclass(slots=True)
class Residual:
    """The hidden states between layers, and the inputs of the next norm."""

    hidden: torch.Tensor
    """[B, C]."""
    scaled: torch.Tensor
    """[B, C]: hidden times the next norm's weight."""
    squares: torch.Tensor
    """[P, B] float32: sums of squares of the parts of each row."""


@triton.jit
def embed_kernel(
    tokens,
    table,
    norm_weight,
    hidden,
    scaled,
    squares,
    num_rows,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    CHAIN: tl.constexpr,
):
    follow(CHAIN)
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    inside = offs < SIZE
    x = tl.load(table + tl.load(tokens + row) * SIZE + offs, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    tl.store(hidden + row * SIZE + offs, x, mask=inside)
    weight = tl.load(norm_weight + offs, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled + row * SIZE + offs, (wide * weight).to(scaled.dtype.element_ty), mask=inside)
    parts = tl.arange(0, triton.next_power_of_2(PARTS))
    total = tl.sum(wide * wide, 0)
    tl.store(squares + parts * num_rows + row, tl.where(parts == 0, total, 0.0), mask=parts < PARTS)


@triton.jit
def _roots(squares, rows, real, num_rows, eps, SIZE: tl.constexpr, PARTS: tl.constexpr):
    """Return one over the root mean square of each row."""
    parts = tl.arange(0, triton.next_power_of_2(PARTS))
    known = (parts < PARTS)[:, None] & real[None, :]
    sums = tl.load(squares + parts[:, None] * num_rows + rows[None, :], mask=known, other=0.0)
    return tl.rsqrt(tl.sum(sums, 0) / SIZE + eps)


@triton.jit
def rows_of_b(adapter_b, columns, inside, RANK: tl.constexpr):
    """Return B for some outputs: [RANK, outputs]. Loaded before a loop, it is there when the loop ends."""
    place = columns[None, :] * RANK + tl.arange(0, RANK)[:, None]
    return tl.load(adapter_b + place, mask=inside[None, :], other=0.0)


@triton.jit
def add_low_rank(product, inner, b):
    return tl.dot(inner.to(b.dtype), b, product, input_precision="ieee")


@triton.jit
def _store_halves(target, low, high, real, HALF: tl.constexpr):
    tl.store(target, low, mask=real[:, None])
    tl.store(target + HALF, high, mask=real[:, None])


@triton.jit
def _rotated(low, high, cos, sin, angle, real):
    """Apply the rotary embedding: rotate both halves of a head by the angle of its position."""
    c = tl.load(cos + angle, mask=real[:, None], other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=real[:, None], other=0.0).to(tl.float32)
    return low * c - high * s, high * c + low * s


@triton.jit
def finish_head(
    product,
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
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_DONE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Normalize and rotate one head of the qkv product, and write it to the queries or the cache."""
    HALF: tl.constexpr = HEAD_DIM // 2
    low, high = tl.split(tl.permute(tl.reshape(product, (BLOCK_ROWS, 2, HALF)), (0, 2, 1)))
    offs_d = tl.arange(0, HALF)
    if head < HEADS + KV_HEADS:
        if HAS_NORM:
            inner = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + norm_eps)[:, None]
            is_query = head < HEADS
            w_low = tl.where(is_query, tl.load(q_norm + offs_d), tl.load(k_norm + offs_d))
            w_high = tl.where(is_query, tl.load(q_norm + HALF + offs_d), tl.load(k_norm + HALF + offs_d))
            low = low * inner * w_low.to(tl.float32)[None, :]
            high = high * inner * w_high.to(tl.float32)[None, :]
        low, high = _rotated(low, high, cos, sin, position[:, None] * HALF + offs_d[None, :], real)
    low_out = low.to(query.dtype.element_ty)
    high_out = high.to(query.dtype.element_ty)
    if head < HEADS:
        target = query + rows[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + offs_d[None, :]
        _store_halves(target, low_out, high_out, real, HALF)
    else:
        written = position
        if HAS_DONE:
            written = tl.where(tl.load(done + rows, mask=real, other=1) != 0, spare, position)
        base = tl.load(slots + rows, mask=real, other=0) * slot_stride + written * HEAD_DIM
        if head < HEADS + KV_HEADS:
            target = keys + (base + (head - HEADS) * head_stride)[:, None] + offs_d[None, :]
            _store_halves(target, low_out, high_out, real, HALF)
        else:
            target = values + (base + (head - HEADS - KV_HEADS) * head_stride)[:, None] + offs_d[None, :]
            _store_halves(target, low_out, high_out, real, HALF)


@triton.jit
def projection_of(head, HEADS: tl.constexpr, KV_HEADS: tl.constexpr):
    """Return 0 for a query, 1 for a key and 2 for a value."""
    return (head >= HEADS).to(tl.int32) + (head >= HEADS + KV_HEADS).to(tl.int32)


@triton.jit
def _products(
    scaled,
    weight,
    adapter_a,
    rows,
    real,
    columns,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the products of rows with some rows of the weight and, if RANK is not 0, with A."""
    offs_k = tl.arange(0, BLOCK_K)
    product = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    inner = product
    if RANK > 0:
        ranks = tl.arange(0, RANK)
        inner = tl.zeros([BLOCK_ROWS, RANK], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        k = start + offs_k
        x = tl.load(scaled + rows[:, None] * SIZE + k[None, :], mask=real[:, None] & (k < SIZE)[None, :], other=0.0)
        w = tl.load(weight + columns[None, :] * SIZE + k[:, None], mask=(k < SIZE)[:, None], other=0.0)
        product = tl.dot(x, w, product, input_precision="ieee")
        if RANK > 0:
            a = tl.load(adapter_a + ranks[None, :] * SIZE + k[:, None], mask=(k < SIZE)[:, None], other=0.0)
            inner = tl.dot(x, a, inner, input_precision="ieee")
    return product, inner


@triton.jit
def qkv_kernel(
    scaled,
    squares,
    weight,
    bias,
    adapter_a,
    adapter_b,
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
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RANK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Compute one head of the qkv product, its norm and rotation, and write it to the queries or the cache."""
    follow(CHAIN)
    head = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = rows < num_rows
    columns = head * HEAD_DIM + tl.arange(0, HEAD_DIM)
    position = tl.load(positions + rows, mask=real, other=0)
    if RANK > 0:
        b = rows_of_b(adapter_b, columns, columns >= 0, RANK)
    a_rows = adapter_a + projection_of(head, HEADS, KV_HEADS) * RANK * SIZE
    product, inner = _products(scaled, weight, a_rows, rows, real, columns, SIZE, RANK, BLOCK_ROWS, HEAD_DIM, BLOCK_K)
    roots = _roots(squares, rows, real, num_rows, eps, SIZE, PARTS)[:, None]
    product *= roots
    if RANK > 0:
        product = add_low_rank(product, inner * roots, b)
    if HAS_BIAS:
        product += tl.load(bias + columns).to(tl.float32)[None, :]
    finish_head(
        product,
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
        True,
        BLOCK_ROWS,
    )


@triton.jit
def gate_up_kernel(
    scaled,
    squares,
    weight,
    adapter_a,
    adapter_b,
    out,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    INNER: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Compute silu(gate) * up. The columns of both products are one tile: the gate's, then the up's."""
    follow(CHAIN)
    first = tl.program_id(0) * BLOCK_COLUMNS
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = rows < num_rows
    offs_k = tl.arange(0, BLOCK_K)
    columns = first + tl.arange(0, BLOCK_COLUMNS)
    both = tl.arange(0, 2 * BLOCK_COLUMNS)
    column = first + both % BLOCK_COLUMNS
    weight_row = column + (both // BLOCK_COLUMNS) * INNER
    product = tl.zeros([BLOCK_ROWS, 2 * BLOCK_COLUMNS], tl.float32)
    if RANK > 0:
        b_gate = rows_of_b(adapter_b, columns, columns < INNER, RANK)
        b_up = rows_of_b(adapter_b + INNER * RANK, columns, columns < INNER, RANK)
        ranks = tl.arange(0, 2 * RANK)
        inner = tl.zeros([BLOCK_ROWS, 2 * RANK], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        k = start + offs_k
        x = tl.load(scaled + rows[:, None] * SIZE + k[None, :], mask=real[:, None] & (k < SIZE)[None, :], other=0.0)
        known = (column < INNER)[None, :] & (k < SIZE)[:, None]
        w = tl.load(weight + weight_row[None, :] * SIZE + k[:, None], mask=known, other=0.0)
        product = tl.dot(x, w, product, input_precision="ieee")
        if RANK > 0:
            a = tl.load(adapter_a + ranks[None, :] * SIZE + k[:, None], mask=(k < SIZE)[:, None], other=0.0)
            inner = tl.dot(x, a, inner, input_precision="ieee")
    roots = _roots(squares, rows, real, num_rows, eps, SIZE, PARTS)[:, None]
    product *= roots
    gate, up = tl.split(tl.permute(tl.reshape(product, (BLOCK_ROWS, 2, BLOCK_COLUMNS)), (0, 2, 1)))
    if RANK > 0:
        inner *= roots
        of_gate, of_up = tl.split(tl.permute(tl.reshape(inner, (BLOCK_ROWS, 2, RANK)), (0, 2, 1)))
        gate, up = add_low_rank(gate, of_gate, b_gate), add_low_rank(up, of_up, b_up)
    target = out + rows[:, None] * INNER + columns[None, :]
    mixed = gate * tl.sigmoid(gate) * up
    tl.store(target, mixed.to(out.dtype.element_ty), mask=real[:, None] & (columns < INNER)[None, :])


@triton.jit
def add_product_kernel(
    x,
    weight,
    bias,
    adapter_a,
    adapter_b,
    hidden,
    norm_weight,
    scaled,
    squares,
    num_rows,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Compute hidden += x @ weight.T + bias, and the inputs of the next norm."""
    follow(CHAIN)
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = rows < num_rows
    inside = columns < SIZE
    offs_k = tl.arange(0, BLOCK_K)
    product = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    if RANK > 0:
        b = rows_of_b(adapter_b, columns, inside, RANK)
        ranks = tl.arange(0, RANK)
        inner = tl.zeros([BLOCK_ROWS, RANK], tl.float32)
    for start in range(0, INNER, BLOCK_K):
        k = start + offs_k
        inputs = tl.load(x + rows[:, None] * INNER + k[None, :], mask=real[:, None] & (k < INNER)[None, :], other=0.0)
        known = inside[None, :] & (k < INNER)[:, None]
        w = tl.load(weight + columns[None, :] * INNER + k[:, None], mask=known, other=0.0)
        product = tl.dot(inputs, w, product, input_precision="ieee")
        if RANK > 0:
            a = tl.load(adapter_a + ranks[None, :] * INNER + k[:, None], mask=(k < INNER)[:, None], other=0.0)
            inner = tl.dot(inputs, a, inner, input_precision="ieee")
    if RANK > 0:
        product = add_low_rank(product, inner, b)
    if HAS_BIAS:
        product += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    place = rows[:, None] * SIZE + columns[None, :]
    mask = real[:, None] & inside[None, :]
    product += tl.load(hidden + place, mask=mask, other=0.0).to(tl.float32)
    stored = product.to(hidden.dtype.element_ty)
    tl.store(hidden + place, stored, mask=mask)
    wide = stored.to(tl.float32)
    factor = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled + place, (wide * factor[None, :]).to(scaled.dtype.element_ty), mask=mask)
    tl.store(squares + tl.program_id(0) * num_rows + rows, tl.sum(wide * wide, 1), mask=real)


def _block_k(size: int, dtype: torch.dtype) -> int:
    """Return the columns of one step of a product: the widest divisor of the size, so that masks are free."""
    most = 32 if dtype.itemsize == 4 else 128 if size >= 1024 else 64
    return min(most, max(16, size & -size))


def block_rows_for(dtype: torch.dtype) -> int:
    """Return the rows of one program: as many as the matrix units process at once."""
    return 32 if dtype.itemsize == 4 else 64


def _stages(x: torch.Tensor, rows: int, columns: int, block_k: int, most: int = 4, held: int = 0) -> int:
    """Return how many steps of a product are prefetched: as many as fit beside `held` numbers of B."""
    available = shared_memory(x.device) - held * x.dtype.itemsize
    return min(most, max(1, available // ((rows + columns) * block_k * x.dtype.itemsize)))


def _low_rank(adapter: JointAdapter | None, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return A, B and the rank; for no adapter 0 and tensors that no kernel reads."""
    return (weight, weight, 0) if adapter is None else (adapter.a, adapter.b, adapter.rank)


def embed(tokens: torch.Tensor, table: torch.Tensor, norm_weight: torch.Tensor) -> Residual:
    """Return the embedding rows as the start of a residual stream."""
    num_rows, size = len(tokens), table.shape[1]
    parts = triton.cdiv(size, PARTS_BLOCK)
    hidden, scaled = (torch.empty((num_rows, size), dtype=table.dtype, device=table.device) for _ in range(2))
    squares = torch.empty((parts, num_rows), dtype=torch.float32, device=table.device)
    embed_kernel[(num_rows,)](
        tokens,
        table,
        norm_weight,
        hidden,
        scaled,
        squares,
        num_rows,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        PARTS=parts,
        num_warps=4,
        **CHAINED,
    )
    return Residual(hidden, scaled, squares)


def qkv(
    stream: Residual,
    eps: float,
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
    adapter: JointAdapter | None = None,
) -> torch.Tensor:
    """Return rotated queries [B, H * D] of the normalized rows. Keys and values go into the cache [slots, K, L, D];
    those of finished rows go to its spare position."""
    x = stream.scaled
    num_rows, size = x.shape
    _, num_kv, length, head_dim = keys.shape
    heads = weight.shape[0] // head_dim
    num_heads = heads - 2 * num_kv
    query = torch.empty((num_rows, num_heads * head_dim), dtype=x.dtype, device=x.device)
    q_norm, k_norm, norm_eps = norms if norms is not None else (cos, cos, 0.0)
    block_rows, block_k = block_rows_for(x.dtype), _block_k(size, x.dtype)
    a, b, rank = _low_rank(adapter, weight)
    qkv_kernel[(heads, triton.cdiv(num_rows, block_rows))](
        x,
        stream.squares,
        weight,
        weight if bias is None else bias,
        a,
        b,
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
        eps,
        norm_eps,
        SIZE=size,
        PARTS=len(stream.squares),
        HEADS=num_heads,
        KV_HEADS=num_kv,
        HEAD_DIM=head_dim,
        RANK=rank,
        HAS_BIAS=bias is not None,
        HAS_NORM=norms is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=_stages(x, block_rows, head_dim + rank, block_k, 4 if head_dim < 256 else 2, rank * head_dim),
        **CHAINED,
    )
    return query


def gate_up(stream: Residual, eps: float, weight: torch.Tensor, adapter: JointAdapter | None = None) -> torch.Tensor:
    """Return silu(gate) * up of the normalized rows: [B, I]. The weight is [2 I, C]."""
    num_rows, size = stream.scaled.shape
    inner = weight.shape[0] // 2
    dtype = stream.scaled.dtype
    out = torch.empty((num_rows, inner), dtype=dtype, device=weight.device)
    block_columns = 32 if dtype.itemsize == 4 else 64
    block_rows, block_k = block_rows_for(dtype), _block_k(size, dtype)
    a, b, rank = _low_rank(adapter, weight)
    gate_up_kernel[(triton.cdiv(inner, block_columns), triton.cdiv(num_rows, block_rows))](
        stream.scaled,
        stream.squares,
        weight,
        a,
        b,
        out,
        num_rows,
        eps,
        SIZE=size,
        PARTS=len(stream.squares),
        INNER=inner,
        RANK=rank,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=_stages(
            stream.scaled, block_rows, 2 * (block_columns + rank), block_k, held=2 * rank * block_columns
        ),
        **CHAINED,
    )
    return out


def add_product(
    stream: Residual,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor,
    adapter: JointAdapter | None = None,
) -> None:
    """Add x @ weight.T + bias to stream.hidden, and prepare the norm with `norm_weight`."""
    num_rows, inner = x.shape
    size = weight.shape[0]
    block_rows, block_k = block_rows_for(x.dtype), _block_k(inner, x.dtype)
    a, b, rank = _low_rank(adapter, weight)
    add_product_kernel[(triton.cdiv(size, PARTS_BLOCK), triton.cdiv(num_rows, block_rows))](
        x,
        weight,
        weight if bias is None else bias,
        a,
        b,
        stream.hidden,
        norm_weight,
        stream.scaled,
        stream.squares,
        num_rows,
        INNER=inner,
        SIZE=size,
        RANK=rank,
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=PARTS_BLOCK,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=_stages(x, block_rows, PARTS_BLOCK + rank, block_k, held=rank * PARTS_BLOCK),
        **CHAINED,
    )
