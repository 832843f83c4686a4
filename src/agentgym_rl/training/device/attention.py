"""Causal attention over packed samples: a token sees only the earlier tokens of its own sample.

Shapes: B samples of T tokens in a micro-batch, R of them with queries, at most Q in a sample; N query heads, K
key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentgym_rl.training.microbatch import MicroBatch, SharedPrefixes

_CAUSAL = 1
"""`custom_mask_type` of torch's memory-efficient kernel: causal from the top left of each sample."""


def flash_supports(query: Tensor) -> bool:
    """Return whether torch's variable-length flash kernel supports these queries."""
    return query.is_cuda and flash_takes(query.dtype, query.shape[-1])


def flash_takes(dtype: torch.dtype, width: int) -> bool:
    """Return whether the flash kernel supports this type and width of heads."""
    return dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256


@dataclass(slots=True)
class Queries:
    """Tokens of a layer whose outputs are needed, in ascending order."""

    rows_R: Tensor
    """Index of each among the tokens that the layer gets: T, or the unique ones of shared prefixes."""
    places_R: Tensor
    """Index of each in T."""


def attend(
    query_TND: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    micro: MicroBatch,
    scale: float,
    queries: Queries | None = None,
) -> Tensor:
    """Return the attention output, T(ND), differentiable. With `queries` (on a CPU), there are R of them.

    On CUDA it uses the flash kernel for half precision and the memory-efficient one for float32. Elsewhere it makes one
    exact call for every run of equally long samples, which is the fastest way on a CPU. With shared prefixes, the
    tokens are the unique ones.
    """
    if queries is not None:
        mixed = _by_queries(query_TND, key_TKD, value_TKD, micro, queries, scale)
    elif flash_supports(query_TND):
        if micro.shared is not None:
            key_TKD, value_TKD = _copy_shared(key_TKD, value_TKD, micro.shared).split(key_TKD.shape[1], 1)
        mixed = _flash(query_TND, key_TKD, value_TKD, micro, scale)[0]
    elif micro.shared is not None:
        mixed = _by_own_tokens(query_TND, key_TKD, value_TKD, micro, micro.shared, scale)
    elif query_TND.is_cuda and query_TND.dtype is torch.float32 and query_TND.shape[-1] % 4 == 0:
        mixed = _memory_efficient(query_TND, key_TKD, value_TKD, micro, scale)
    else:
        mixed = _by_runs(query_TND, key_TKD, value_TKD, micro, scale)
    return mixed.reshape(len(query_TND), -1)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows of x at an index. Gradients of a row that is taken several times add up in float32."""
    rows: Tensor = _TakeRows.apply(x, index)
    return rows


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.index, ctx.count = index, len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum_rows(gradient, ctx.index, ctx.count), None


def _sum_rows(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """Return `count` rows: the sum, in float32, of the rows with the same index."""
    total = torch.zeros(count, *rows.shape[1:], dtype=torch.float32, device=rows.device)
    return total.index_add_(0, index, rows.float()).to(rows.dtype)


def flash_forward(query: Tensor, key: Tensor, value: Tensor, micro: MicroBatch, scale: float) -> tuple[Any, ...]:
    """Return (output TND, log of the softmax's sums, two tensors for the backward pass).

    With shared prefixes, queries, keys, values and the output are of the unique tokens.
    """
    if micro.shared is not None:
        key, value = (x.index_select(0, micro.shared.unique_T) for x in (key, value))
    return _flash(query, key, value, micro, scale)


def flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    forward: tuple[Any, ...],
    micro: MicroBatch,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value. `forward` is the result of flash_forward."""
    mixed, sums, seed, offset = forward
    shared, count = micro.shared, len(key)
    if shared is not None:
        key, value = (x.index_select(0, shared.unique_T) for x in (key, value))
    grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
        gradient, query, key, value, mixed, sums, *_bounds(micro), 0.0, True, seed, offset, scale=scale
    )
    if shared is not None:
        grad_key, grad_value = (_sum_rows(x, shared.unique_T, count) for x in (grad_key, grad_value))
    return grad_query, grad_key, grad_value


def _flash(query: Tensor, key: Tensor, value: Tensor, micro: MicroBatch, scale: float) -> tuple[Any, ...]:
    # If a sample has fewer queries than keys, causal means from the bottom right: the last query sees every key.
    out: tuple[Any, ...] = torch.ops.aten._flash_attention_forward(
        query, key, value, *_bounds(micro), 0.0, True, False, scale=scale
    )
    return out[:4]


def _bounds(micro: MicroBatch) -> tuple[Tensor, Tensor, int, int]:
    """Return the bounds of each sample's queries and keys, and the largest number of both."""
    bounds, longest, shared = micro.bounds_B1, micro.lengths[0], micro.shared
    if shared is None:
        return bounds, bounds, longest, longest
    return shared.own_bounds_B1, bounds, max(shared.own_counts), longest


def _memory_efficient(query: Tensor, key: Tensor, value: Tensor, micro: MicroBatch, scale: float) -> Tensor:
    bounds, longest = micro.bounds_B1, micro.lengths[0]
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (key, value))
    one_row = (x.unsqueeze(0) for x in (query, key, value))
    out: tuple[Tensor, ...] = torch.ops.aten._efficient_attention_forward(
        *one_row, None, bounds, bounds, longest, longest, 0.0, _CAUSAL, torch.is_grad_enabled(), scale=scale
    )
    return out[0]


def _by_runs(query: Tensor, key: Tensor, value: Tensor, micro: MicroBatch, scale: float) -> Tensor:
    runs = micro.runs()
    sizes = [count * length for count, length in runs]
    grouped = query.shape[1] != key.shape[1]
    mixed = []
    # The gradient of split is one concatenation; that of a slice would be as long as the whole row, for every run.
    for (count, length), *parts in zip(runs, *(x.split(sizes) for x in (query, key, value)), strict=True):
        q, k, v = (part.unflatten(0, (count, length)).transpose(1, 2) for part in parts)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        mixed.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(mixed)


def _by_own_tokens(
    query_UND: Tensor, key_UKD: Tensor, value_UKD: Tensor, micro: MicroBatch, shared: SharedPrefixes, scale: float
) -> Tensor:
    """Return the attention output of unique tokens, UND: keys and values of shared tokens are copied, not computed."""
    runs = micro.own_runs(shared)
    heads = key_UKD.shape[1]
    both_T2KD = _copy_shared(key_UKD, value_UKD, shared)
    queries = query_UND.split([count * own for count, _, own in runs])
    both = both_T2KD.split([count * length for count, length, _ in runs])
    mixed = []
    for (count, length, own), query, part in zip(runs, queries, both, strict=True):
        q = query.unflatten(0, (count, own)).transpose(1, 2)
        k, v = part.unflatten(0, (count, length)).transpose(1, 2).split(heads, 1)
        # The bias is causal from the bottom right: the last query sees every key. SDPA would convert a boolean mask.
        mask = None if own == length else q.new_full((own, length), -torch.inf).triu_(length - own + 1)
        out = scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=query_UND.shape[1] != heads
        )
        mixed.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(mixed)


def _copy_shared(key_UKD: Tensor, value_UKD: Tensor, shared: SharedPrefixes) -> Tensor:
    """Return keys and values of every token, T(2K)D, in one copy: its gradient costs the same for any width."""
    return take_rows(torch.cat((key_UKD, value_UKD), 1), shared.unique_T)


def _by_queries(
    query_RND: Tensor, key: Tensor, value: Tensor, micro: MicroBatch, queries: Queries, scale: float
) -> Tensor:
    """Return the attention output of the queries, RND: one call for every run of equally long samples."""
    heads = key.shape[1]
    both = torch.cat((key, value), 1) if micro.shared is None else _copy_shared(key, value, micro.shared)
    samples_R = torch.searchsorted(micro.bounds_B1, queries.places_R, right=True) - 1
    counts = torch.bincount(samples_R, minlength=len(micro.lengths))
    runs = micro.runs()
    # Samples of a run are padded to the most queries that one of them has.
    widths = [int(part.max()) for part in counts.split([count for count, _ in runs])]
    widths_B = torch.tensor([width for (count, _), width in zip(runs, widths, strict=True) for _ in range(count)])
    offsets = (widths_B.cumsum(0) - widths_B) - (counts.cumsum(0) - counts)
    slots_R = torch.arange(len(samples_R)) + offsets[samples_R]
    padded = query_RND.new_zeros(int(widths_B.sum()), *query_RND.shape[1:]).index_copy(0, slots_R, query_RND)
    columns = slots_R.new_zeros(len(padded)).index_copy(0, slots_R, micro.positions_T[queries.places_R])
    sizes = [count * width for (count, _), width in zip(runs, widths, strict=True)]
    parts = (padded.split(sizes), columns.split(sizes), both.split([count * length for count, length in runs]))
    mixed = []
    for (count, length), width, query, column, part in zip(runs, widths, *parts, strict=True):
        if not width:
            continue
        q = query.unflatten(0, (count, width)).transpose(1, 2)
        k, v = part.unflatten(0, (count, length)).transpose(1, 2).split(heads, 1)
        hidden = column.view(count, 1, width, 1) < torch.arange(length)
        bias = q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        out = scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=query_RND.shape[1] != heads)
        mixed.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(mixed).index_select(0, slots_R)
