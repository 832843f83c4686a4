"""Triton token sampling on the device, with the same arithmetic as native/sampling.py, and the update of the rows.

The draw inverts the cumulative distribution in two steps: sums over blocks of the vocabulary find the block, a scan
inside it finds the token. So the logits are read once.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from agentgym_rl.agent.engines.native.runner import MAX_STOPS
from agentgym_rl.agent.engines.native.sampling import UNIFORM_BITS

VOCABULARY_BLOCK = 2048

WEYL: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
MULTIPLY_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
MULTIPLY_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)
UNIFORM_SHIFT: tl.constexpr = tl.constexpr(64 - UNIFORM_BITS)
UNIFORM_SCALE: tl.constexpr = tl.constexpr(2.0**-UNIFORM_BITS)


@dataclass(slots=True)
class RowState:
    """State of each row on the device, [B] each. The kernels below advance it."""

    token: torch.Tensor
    """The next token to compute."""
    position: torch.Tensor
    """Position of that token in its sequence."""
    slot: torch.Tensor
    remaining: torch.Tensor
    """Tokens that may still be sampled."""
    seed: torch.Tensor
    done: torch.Tensor
    temperature: torch.Tensor
    """float64; 0 means greedy."""
    top_p: torch.Tensor
    """float64."""
    stops: torch.Tensor
    """[MAX_STOPS, B]; -1 for none."""


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * MULTIPLY_1
    x = (x ^ (x >> 27)) * MULTIPLY_2
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """Return a float64 in [0, 1) from a row's seed and a position, as sampling.uniforms does."""
    weyl = tl.full([], WEYL, tl.uint64)
    bits = _mix(_mix(seed.to(tl.uint64, bitcast=True) + weyl) + (position + 1).to(tl.uint64, bitcast=True) * weyl)
    return (bits >> UNIFORM_SHIFT).to(tl.float64) * UNIFORM_SCALE


@triton.jit
def _scaled(logits, temperature):
    return logits / tl.where(temperature == 0, 1.0, temperature).to(tl.float32)


@triton.jit
def _ordered(x):
    """Map float32 to int64, keeping the order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def top_p_kernel(logits, cut, temperature, top_p, done, SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Return the lowest scaled logit that is kept, by bisection over the numbers. Ties are all kept."""
    row = tl.program_id(0)
    heat = tl.load(temperature + row // WIDTH)
    share = tl.load(top_p + row // WIDTH)
    threshold = float("-inf")
    if (share < 1) & (heat > 0) & (tl.load(done + row) == 0):
        source = logits + row.to(tl.int64) * SIZE
        offs = tl.arange(0, BLOCK)
        highest = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, SIZE, BLOCK):
            x = tl.load(source + start + offs, mask=start + offs < SIZE, other=float("-inf"))
            highest = tl.maximum(highest, _scaled(x, heat))
        top = tl.max(highest, 0)
        mass = tl.zeros([BLOCK], tl.float64)
        for start in range(0, SIZE, BLOCK):
            x = tl.load(source + start + offs, mask=start + offs < SIZE, other=float("-inf"))
            mass += tl.exp(_scaled(x, heat) - top)
        wanted = tl.sum(mass, 0) * share
        low = tl.full([], -2147483648, tl.int64)
        high = _ordered(top) + 1
        for _ in range(32):
            middle = (low + high) >> 1
            mass = tl.zeros([BLOCK], tl.float64)
            for start in range(0, SIZE, BLOCK):
                x = tl.load(source + start + offs, mask=start + offs < SIZE, other=float("-inf"))
                x = _scaled(x, heat)
                mass += tl.where(_ordered(x) >= middle, tl.exp(x - top), 0.0)
            enough = tl.sum(mass, 0) >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        bits = low.to(tl.int32)
        threshold = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(cut + row, threshold)


@triton.jit
def block_sums_kernel(
    logits,
    cut,
    temperature,
    done,
    block_max,
    block_place,
    block_sum,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CUT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0)
    block = tl.program_id(1)
    if tl.load(done + row) == 0:
        offs = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * SIZE + offs, mask=offs < SIZE, other=float("-inf"))
        x = _scaled(x, tl.load(temperature + row // WIDTH))
        if HAS_CUT:
            x = tl.where(x < tl.load(cut + row), float("-inf"), x)
        top = tl.max(x, 0)
        place = row * tl.num_programs(1) + block
        tl.store(block_max + place, top)
        tl.store(block_place + place, block * BLOCK + tl.argmax(x, 0))
        # A block without a possible token has sum 0; one that is not finite has sum NaN.
        tl.store(block_sum + place, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0))


@triton.jit
def pick_kernel(
    logits,
    cut,
    block_max,
    block_place,
    block_sum,
    token,
    position,
    remaining,
    seed,
    done,
    temperature,
    stops,
    stops_stride,
    out_tokens,
    out_logprobs,
    out_counts,
    out_stride,
    history,
    history_stride,
    slots,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STOPS: tl.constexpr,
    HAS_CUT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sample a token. With WIDTH 1 also advance the row; otherwise `accept_kernel` does."""
    row = tl.program_id(0)
    if tl.load(done + row) == 0:
        heat = tl.load(temperature + row // WIDTH)
        offs_b = tl.arange(0, BLOCKS)
        place = row * NUM_BLOCKS + offs_b
        known = offs_b < NUM_BLOCKS
        tops = tl.load(block_max + place, mask=known, other=float("-inf"))
        top = tl.max(tops, 0)
        sums = tl.load(block_sum + place, mask=known, other=0.0)
        # A non-finite sum must not be lost if its block's maximum is -inf.
        mass = tl.where(sums == 0, 0.0, sums * tl.exp(tops - top)).to(tl.float64)
        total = tl.sum(mass, 0)
        cumulative = tl.cumsum(mass, 0)
        now = tl.load(position + row)
        threshold = _uniform(tl.load(seed + row // WIDTH), now + 1) * total
        last_block = tl.max(tl.where(mass > 0, offs_b, 0), 0)
        block = tl.min(tl.where((cumulative > threshold) & (mass > 0), offs_b, last_block), 0)
        left = threshold - tl.sum(tl.where(offs_b < block, mass, 0.0), 0)
        offs = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * SIZE + offs, mask=offs < SIZE, other=float("-inf"))
        x = _scaled(x, heat)
        if HAS_CUT:
            x = tl.where(x < tl.load(cut + row), float("-inf"), x)
        share = tl.exp(x - top).to(tl.float64)
        last = tl.max(tl.where(share > 0, offs, 0), 0)
        drawn = tl.min(tl.where((tl.cumsum(share, 0) > left) & (share > 0), offs, last), 0)
        drawn_x = tl.max(tl.where(offs == drawn, x, float("-inf")), 0)
        best = tl.load(block_place + row * NUM_BLOCKS + tl.argmax(tops, 0))
        greedy = heat == 0
        picked = tl.where(greedy, best, drawn).to(tl.int64)
        logprob = tl.where(greedy, top, drawn_x) - top - tl.log(total).to(tl.float32)
        finite = (total > 0) & (total < float("inf"))
        logprob = tl.where(finite, logprob, float("nan"))
        picked = tl.where(finite, picked, 0)
        if WIDTH > 1:
            tl.store(out_tokens + row, picked.to(tl.int32))
            tl.store(out_logprobs + row, logprob)
        else:
            count = tl.load(out_counts + row)
            tl.store(out_tokens + count * out_stride + row, picked.to(tl.int32))
            tl.store(out_logprobs + count * out_stride + row, logprob)
            tl.store(out_counts + row, count + 1)
            left_over = tl.load(remaining + row) - 1
            offs_s = tl.arange(0, STOPS)
            hits = tl.sum((tl.load(stops + offs_s * stops_stride + row) == picked).to(tl.int32), 0)
            tl.store(token + row, picked)
            tl.store(position + row, now + 1)
            tl.store(history + tl.load(slots + row) * history_stride + now + 1, picked.to(tl.int32))
            tl.store(remaining + row, left_over)
            tl.store(done + row, ((hits > 0) | (left_over <= 0) | (finite == 0)).to(tl.int64))


@dataclass(slots=True)
class Picks:
    """Tokens sampled in a launch, [steps, B], and the number of valid entries per row, [B]."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    counts: torch.Tensor


def pick(
    logits: torch.Tensor, state: RowState, picks: Picks, history: torch.Tensor, *, with_top_p: bool, width: int = 1
) -> None:
    """Sample a token for every unfinished row from float32 logits [B, V].

    With `width` 1 also advance the row's state and its history [slots, L]. Otherwise `state` has `width` rows for each
    sequence, and tokens and log-probabilities are written to the first B entries of `picks`.
    """
    num_rows, size = logits.shape
    num_blocks = triton.cdiv(size, VOCABULARY_BLOCK)
    floats = torch.empty((2, num_rows * num_blocks), dtype=torch.float32, device=logits.device)
    block_place = torch.empty((num_rows * num_blocks,), dtype=torch.int32, device=logits.device)
    block_max, block_sum = floats[0], floats[1]
    cut = block_max
    if with_top_p:
        cut = torch.empty((num_rows,), dtype=torch.float32, device=logits.device)
        top_p_kernel[(num_rows,)](
            logits, cut, state.temperature, state.top_p, state.done, SIZE=size, BLOCK=4096, WIDTH=width, num_warps=16
        )
    block_sums_kernel[(num_rows, num_blocks)](
        logits,
        cut,
        state.temperature,
        state.done,
        block_max,
        block_place,
        block_sum,
        SIZE=size,
        BLOCK=VOCABULARY_BLOCK,
        HAS_CUT=with_top_p,
        WIDTH=width,
        num_warps=4,
    )
    pick_kernel[(num_rows,)](
        logits,
        cut,
        block_max,
        block_place,
        block_sum,
        state.token,
        state.position,
        state.remaining,
        state.seed,
        state.done,
        state.temperature,
        state.stops,
        state.stops.stride(0),
        picks.tokens,
        picks.logprobs,
        picks.counts,
        picks.tokens.stride(0),
        history,
        history.stride(0),
        state.slot,
        SIZE=size,
        BLOCK=VOCABULARY_BLOCK,
        NUM_BLOCKS=num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks),
        STOPS=MAX_STOPS,
        HAS_CUT=with_top_p,
        WIDTH=width,
        num_warps=4,
    )
