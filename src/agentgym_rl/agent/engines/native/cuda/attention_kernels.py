"""Triton attention over the slot cache: one query per row for decoding, packed queries for prefill.

All query heads of a key/value head are rows of one product, so every key and value is read once for all of them.
Shapes: B rows, T packed tokens, H query heads, K key/value heads, D head width, L positions of a slot.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from agentgym_rl.agent.engines.native.cuda.chaining import CHAINED, follow
from agentgym_rl.agent.engines.native.cuda.packing import Blocks

LOG2_E = 1.0 / math.log(2.0)
PREFILL_ROWS = 128
"""Query rows (tokens x heads of a group) of one prefill program."""
DECODE_SPLITS = {16: 1, 8: 1, 4: 8}
"""Parts of the keys, and the most programs per processor with them, as measured on an H200."""
PREFILL_SPLITS = {8: 2, 4: 2, 2: 2}
"""The same for prefill; not measured yet."""


@triton.jit
def softmax_step(scores, top, MAY_SEE_NONE: tl.constexpr):
    """Return each query's maximum so far, the weights of these scores, and the factor of its earlier sums.

    MAY_SEE_NONE: some queries may see no key up to here.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    base_top = new_top
    if MAY_SEE_NONE:
        base_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, tl.exp2(scores - base_top[:, None]), tl.exp2(top - base_top)


@triton.jit
def decode_attention_kernel(
    query,
    keys,
    values,
    out,
    partial_out,
    partial_stats,
    slots,
    positions,
    done,
    slot_stride,
    head_stride,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Attend with the WIDTH queries of one sequence, each up to its own position."""
    follow(CHAIN)
    row = tl.program_id(0) * WIDTH
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_heads = tl.num_programs(1) * GROUP
    offs_g = tl.arange(0, BLOCK_GROUP)
    in_group = offs_g < GROUP * WIDTH
    query_row = row + offs_g // GROUP
    if WIDTH == 1:
        is_done = tl.load(done + row) != 0
        length = tl.where(is_done, 0, tl.load(positions + row) + 1).to(tl.int32)
        lengths = length
    else:
        is_done = tl.load(done + query_row, mask=in_group, other=1) != 0
        lengths = tl.where(is_done, 0, tl.load(positions + query_row, mask=in_group, other=0) + 1).to(tl.int32)
        length = tl.max(lengths, 0)
    part = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_LENGTH) * BLOCK_LENGTH
    low = split * part
    high = tl.minimum(low + part, length)
    offs_d = tl.arange(0, HEAD_DIM)
    offs_n = tl.arange(0, BLOCK_LENGTH)
    heads = query_row * num_heads + kv_head * GROUP + offs_g % GROUP
    q = tl.load(query + heads[:, None] * HEAD_DIM + offs_d[None, :], mask=in_group[:, None], other=0.0)
    base = tl.load(slots + row).to(tl.int64) * slot_stride + kv_head * head_stride
    tile = offs_n[:, None] * HEAD_DIM + offs_d[None, :]
    top = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    mixed = tl.zeros([BLOCK_GROUP, HEAD_DIM], tl.float32)
    for start in range(low, high, BLOCK_LENGTH):
        inside = start + offs_n < high
        k = tl.load(keys + base + start * HEAD_DIM + tile, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if WIDTH == 1:
            scores = tl.where(inside[None, :], scores, float("-inf"))
        else:
            seen = inside[None, :] & ((start + offs_n)[None, :] < lengths[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        top, weights, fade = softmax_step(scores, top, WIDTH > 1)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(values + base + start * HEAD_DIM + tile, mask=inside[:, None], other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    if SPLITS == 1:
        mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
        target = out + heads[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(target, mixed.to(out.dtype.element_ty), mask=in_group[:, None])
    else:
        place = heads * SPLITS + split
        tl.store(partial_out + place[:, None] * HEAD_DIM + offs_d[None, :], mixed, mask=in_group[:, None])
        tl.store(partial_stats + place * 2, top, mask=in_group)
        tl.store(partial_stats + place * 2 + 1, total, mask=in_group)


@triton.jit
def merge_splits_kernel(
    partial_out, partial_stats, out, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, CHAIN: tl.constexpr
):
    follow(CHAIN)
    head = tl.program_id(0)
    offs_s = tl.arange(0, SPLITS)
    offs_d = tl.arange(0, HEAD_DIM)
    place = head * SPLITS + offs_s
    top = tl.load(partial_stats + place * 2)
    total = tl.load(partial_stats + place * 2 + 1)
    highest = tl.max(top, 0)
    share = tl.where(total > 0, tl.exp2(top - highest), 0.0)
    parts = tl.load(partial_out + place[:, None] * HEAD_DIM + offs_d[None, :])
    weight = tl.sum(total * share, 0)
    mixed = tl.sum(parts * share[:, None], 0) / tl.where(weight > 0, weight, 1.0)
    tl.store(out + head * HEAD_DIM + offs_d, mixed.to(out.dtype.element_ty))


@triton.jit
def prefill_attention_kernel(
    query,
    keys,
    values,
    out,
    partial_out,
    partial_stats,
    block_first,
    block_position,
    block_count,
    block_slot,
    query_stride,
    out_stride,
    slot_stride,
    head_stride,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Attend with one block's queries over one part of the keys."""
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    count = tl.load(block_count + block).to(tl.int32)
    if count > 0:
        first = tl.load(block_first + block)
        start = tl.load(block_position + block).to(tl.int32)
        offs_m = tl.arange(0, BLOCK_ROWS)
        offs_d = tl.arange(0, HEAD_DIM)
        offs_n = tl.arange(0, BLOCK_LENGTH)
        token = offs_m // GROUP
        used = (token < count)[:, None]
        head = kv_head * GROUP + offs_m % GROUP
        column = head[:, None] * HEAD_DIM + offs_d[None, :]
        q = tl.load(query + (first + token)[:, None] * query_stride + column, mask=used, other=0.0)
        base = tl.load(block_slot + block).to(tl.int64) * slot_stride + kv_head * head_stride
        tile = offs_n[:, None] * HEAD_DIM + offs_d[None, :]
        top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        mixed = tl.zeros([BLOCK_ROWS, HEAD_DIM], tl.float32)
        part = tl.cdiv(tl.cdiv(start + count, SPLITS), BLOCK_LENGTH) * BLOCK_LENGTH
        first_key = split * part
        end = tl.minimum(first_key + part, start + count)
        # Keys that every query of the block sees need no mask.
        seen_by_all = (start + 1) // BLOCK_LENGTH * BLOCK_LENGTH
        for low in range(first_key, tl.minimum(seen_by_all, end), BLOCK_LENGTH):
            k = tl.load(keys + base + low * HEAD_DIM + tile)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            top, weights, fade = softmax_step(scores, top, False)
            total = total * fade + tl.sum(weights, 1)
            v = tl.load(values + base + low * HEAD_DIM + tile)
            mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        for low in range(tl.maximum(seen_by_all, first_key), end, BLOCK_LENGTH):
            inside = low + offs_n < end
            k = tl.load(keys + base + low * HEAD_DIM + tile, mask=inside[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            seen = inside[None, :] & ((low + offs_n)[None, :] <= (start + token)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            # With one part, position 0 is seen by all, so the first block of keys makes every maximum finite.
            top, weights, fade = softmax_step(scores, top, SPLITS > 1)
            total = total * fade + tl.sum(weights, 1)
            v = tl.load(values + base + low * HEAD_DIM + tile, mask=inside[:, None], other=0.0)
            mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        if SPLITS == 1:
            mixed = mixed / total[:, None]
            tl.store(out + (first + token)[:, None] * out_stride + column, mixed.to(out.dtype.element_ty), mask=used)
        else:
            place = ((first + token) * (tl.num_programs(1) * GROUP) + head) * SPLITS + split
            in_block = token < count
            tl.store(partial_out + place[:, None] * HEAD_DIM + offs_d[None, :], mixed, mask=used)
            tl.store(partial_stats + place * 2, top, mask=in_block)
            tl.store(partial_stats + place * 2 + 1, total, mask=in_block)


@triton.jit
def copy_slots_kernel(
    keys,
    values,
    sources,
    targets,
    lengths,
    slot_stride,
    head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
):
    pair = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    low = tl.program_id(2) * BLOCK_LENGTH
    length = tl.load(lengths + pair).to(tl.int32)
    if low < length:
        offs_n = low + tl.arange(0, BLOCK_LENGTH)
        offs_d = tl.arange(0, HEAD_DIM)
        base = kv_head * head_stride
        source = base + tl.load(sources + pair) * slot_stride
        target = base + tl.load(targets + pair) * slot_stride
        tile = offs_n[:, None] * HEAD_DIM + offs_d[None, :]
        inside = (offs_n < length)[:, None]
        tl.store(keys + target + tile, tl.load(keys + source + tile, mask=inside), mask=inside)
        tl.store(values + target + tile, tl.load(values + source + tile, mask=inside), mask=inside)


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    done: torch.Tensor,
    scaling: float,
    num_processors: int,
    width: int = 1,
) -> torch.Tensor:
    """Attend with queries [B, H * D] over keys and values [slots, K, L, D]. Finished rows give 0. Each `width` rows in
    order are queries of one slot."""
    num_rows, size = query.shape
    _, num_kv, _, head_dim = keys.shape
    num_heads = size // head_dim
    group = num_heads // num_kv
    splits = num_splits(num_rows // width * num_kv, num_processors, DECODE_SPLITS)
    out, partial_out, partial_stats = _outputs(query, num_heads, head_dim, splits)
    wide = keys.dtype.itemsize == 4
    block_group = max(16, triton.next_power_of_2(group * width))
    decode_attention_kernel[(num_rows // width, num_kv, splits)](
        query,
        keys,
        values,
        out,
        partial_out,
        partial_stats,
        slots,
        positions,
        done,
        keys.stride(0),
        keys.stride(1),
        scaling * LOG2_E,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_GROUP=block_group,
        BLOCK_LENGTH=32 if wide else 64,
        SPLITS=splits,
        WIDTH=width,
        **decode_launch(block_group, head_dim, keys.dtype),
        **CHAINED,
    )
    if splits > 1:
        merge_splits_kernel[(num_rows * num_heads,)](
            partial_out, partial_stats, out, HEAD_DIM=head_dim, SPLITS=splits, num_warps=1, **CHAINED
        )
    return out


def decode_launch(block_group: int, head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the warps and stages of a decode program with so many query rows.

    Three stages are faster, but keep one more block of keys and values in shared memory.
    """
    needs_space = dtype.itemsize == 4 or head_dim > 128 or block_group > 128
    return {"num_warps": 8 if block_group >= 128 else 4, "num_stages": 2 if needs_space else 3}


def num_splits(num_programs: int, num_processors: int, limits: dict[int, int]) -> int:
    """Return into how many parts the keys are split, so that few or short sequences still use every processor."""
    return next((s for s, limit in limits.items() if num_programs * s <= limit * num_processors), 1)


def prefill_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: Blocks,
    scaling: float,
    num_processors: int,
) -> torch.Tensor:
    """Attend with packed queries [T, H * D] over keys and values [slots, K, L, D], causally per sequence.

    The new tokens' own keys and values are in the cache already.
    """
    num_tokens, size = query.shape
    _, num_kv, _, head_dim = keys.shape
    num_heads = size // head_dim
    wide = keys.dtype.itemsize == 4
    num_blocks = num_tokens // queries_per_block(num_heads // num_kv, keys.dtype)
    splits = num_splits(num_blocks * num_kv, num_processors, PREFILL_SPLITS)
    out, partial_out, partial_stats = _outputs(query, num_heads, head_dim, splits)
    prefill_attention_kernel[(len(blocks.count), num_kv, splits)](
        query,
        keys,
        values,
        out,
        partial_out,
        partial_stats,
        blocks.first,
        blocks.position,
        blocks.count,
        blocks.slot,
        query.stride(0),
        out.stride(0),
        keys.stride(0),
        keys.stride(1),
        scaling * LOG2_E,
        GROUP=num_heads // num_kv,
        HEAD_DIM=head_dim,
        BLOCK_ROWS=32 if wide else PREFILL_ROWS,
        BLOCK_LENGTH=32 if wide else 64,
        SPLITS=splits,
        num_warps=4 if wide or head_dim < 128 else 8,
        num_stages=2,
    )
    if splits > 1:
        merge_splits_kernel[(num_tokens * num_heads,)](
            partial_out, partial_stats, out, HEAD_DIM=head_dim, SPLITS=splits, CHAIN=False, num_warps=1
        )
    return out


def _outputs(
    query: torch.Tensor, num_heads: int, head_dim: int, splits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty tensors for the result, and for the sums and the statistics of its parts."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if splits == 1:
        return out, out, out
    parts = len(query) * num_heads * splits
    partial_out = torch.empty((parts * head_dim,), dtype=torch.float32, device=query.device)
    return out, partial_out, torch.empty((parts * 2,), dtype=torch.float32, device=query.device)


def queries_per_block(group: int, dtype: torch.dtype) -> int:
    """Return the tokens of one prefill program."""
    rows = 32 if dtype.itemsize == 4 else PREFILL_ROWS
    return max(1, rows // group)


def copy_slots(keys: torch.Tensor, values: torch.Tensor, pairs: torch.Tensor, longest: int) -> None:
    """Copy the first pairs[2] positions of slots pairs[0] to slots pairs[1], in one layer's [slots, K, L, D]."""
    _, num_kv, _, head_dim = keys.shape
    block = 64
    copy_slots_kernel[(pairs.shape[1], num_kv, triton.cdiv(longest, block))](
        keys,
        values,
        pairs[0],
        pairs[1],
        pairs[2],
        keys.stride(0),
        keys.stride(1),
        HEAD_DIM=head_dim,
        BLOCK_LENGTH=block,
    )
