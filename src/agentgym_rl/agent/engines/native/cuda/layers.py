"""Triton kernels between the matrix products of a decoder layer: norm, rotary embedding with the cache write, SiLU
times up. Used for prefill, and for wide models, for which the library's products are fastest.

Shapes: T tokens (rows of a decode step, or packed prompts), C hidden size, H and K query and key/value heads, D head
width, I intermediate size. Weights are as in torch.nn.Linear: [out, in].
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from agentgym_rl.agent.engines.native.cuda.chaining import CHAINED, follow


@triton.jit
def rms_norm_kernel(x, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr):
    follow(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    inside = offs < SIZE
    values = tl.load(x + row * SIZE + offs, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    # Rounded between the two products, as the modules do.
    normal = (values * scale).to(out.dtype.element_ty)
    tl.store(out + row * SIZE + offs, normal * tl.load(weight + offs, mask=inside), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm of [T, C]."""
    out = torch.empty_like(x)
    size = x.shape[1]
    block = triton.next_power_of_2(size)
    num_warps = 4 if block <= 2048 else 8
    rms_norm_kernel[(len(x),)](x, weight, out, eps, SIZE=size, BLOCK=block, num_warps=num_warps, **CHAINED)
    return out


@triton.jit
def rope_and_store_kernel(
    qkv,
    query,
    keys,
    values,
    q_norm,
    k_norm,
    cos,
    sin,
    slots,
    positions,
    done,
    spare,
    slot_stride,
    head_stride,
    norm_eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_DONE: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Process all heads of one token, [heads, D] in two halves, because rotation pairs them."""
    follow(CHAIN)
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    slot = tl.load(slots + token)
    offs_h = tl.arange(0, BLOCK_HEADS)
    offs_d = tl.arange(0, HALF)
    inside = (offs_h < HEADS + 2 * KV_HEADS)[:, None]
    place = offs_h[:, None] * HEAD_DIM + offs_d[None, :]
    source = qkv + token * (HEADS + 2 * KV_HEADS) * HEAD_DIM + place
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    is_query = (offs_h < HEADS)[:, None]
    is_key = ((offs_h >= HEADS) & (offs_h < HEADS + KV_HEADS))[:, None]
    turned = is_query | is_key
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + norm_eps)[:, None]
        w_low = tl.where(is_query, tl.load(q_norm + offs_d)[None, :], tl.load(k_norm + offs_d)[None, :])
        w_high = tl.where(is_query, tl.load(q_norm + HALF + offs_d)[None, :], tl.load(k_norm + HALF + offs_d)[None, :])
        low = tl.where(turned, low * scale * w_low.to(tl.float32), low)
        high = tl.where(turned, high * scale * w_high.to(tl.float32), high)
    c = tl.load(cos + position * HALF + offs_d)[None, :].to(tl.float32)
    s = tl.load(sin + position * HALF + offs_d)[None, :].to(tl.float32)
    new_low = tl.where(turned, low * c - high * s, low).to(query.dtype.element_ty)
    new_high = tl.where(turned, high * c + low * s, high).to(query.dtype.element_ty)
    target = query + token * HEADS * HEAD_DIM + place
    tl.store(target, new_low, mask=is_query)
    tl.store(target + HALF, new_high, mask=is_query)
    if HAS_DONE:
        position = tl.where(tl.load(done + token) != 0, spare, position)
    base = slot * slot_stride + position * HEAD_DIM
    kept = base + (offs_h - HEADS)[:, None] * head_stride + offs_d[None, :]
    tl.store(keys + kept, new_low, mask=is_key)
    tl.store(keys + kept + HALF, new_high, mask=is_key)
    kept = base + (offs_h - HEADS - KV_HEADS)[:, None] * head_stride + offs_d[None, :]
    is_value = inside & (offs_h >= HEADS + KV_HEADS)[:, None]
    tl.store(values + kept, new_low, mask=is_value)
    tl.store(values + kept + HALF, new_high, mask=is_value)


def rope_and_store(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    done: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return rotated queries [T, H * D]. Keys and values go into the cache [slots, K, L, D]; those of finished rows go
    to its spare position."""
    _, num_kv, length, head_dim = keys.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv
    query = torch.empty((len(qkv), num_heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm, eps = norms if norms is not None else (cos, cos, 0.0)
    rope_and_store_kernel[(len(qkv),)](
        qkv,
        query,
        keys,
        values,
        q_norm,
        k_norm,
        cos,
        sin,
        slots,
        positions,
        positions if done is None else done,
        length - 1,
        keys.stride(0),
        keys.stride(1),
        eps,
        HEADS=num_heads,
        KV_HEADS=num_kv,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=triton.next_power_of_2(num_heads + 2 * num_kv),
        HAS_NORM=norms is not None,
        HAS_DONE=done is not None,
        num_warps=4,
        **CHAINED,
    )
    return query


@triton.jit
def silu_times_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr):
    follow(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + offs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + offs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + offs, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def silu_times(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half: [T, 2 I] to [T, I]."""
    size = gate_up.shape[1] // 2
    out = torch.empty((len(gate_up), size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(2048, triton.next_power_of_2(size))
    grid = (len(gate_up), triton.cdiv(size, block))
    silu_times_kernel[grid](gate_up, out, SIZE=size, BLOCK=block, num_warps=4, **CHAINED)
    return out
