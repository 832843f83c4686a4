"""Prompt look-up: guesses the next tokens of a sequence from an earlier place in it, and keeps the guesses that come
true.

Replies copy names and commands from observations and from earlier replies. A step computes a row's token and the
guesses that follow it in one pass, and samples after each. A guess is accepted if it is the token that was sampled in
its place. The number drawn for a position depends on the seed and the position alone, so the tokens are those of steps
without guesses.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from agentgym_rl.agent.engines.native.cuda.sample_kernels import Picks, RowState
from agentgym_rl.agent.engines.native.runner import MAX_STOPS

HISTORY_BLOCK = 1024


@triton.jit
def draft_kernel(
    token,
    position,
    slot,
    remaining,
    done,
    history,
    history_stride,
    out_token,
    out_position,
    out_slot,
    out_done,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a row's token and the tokens that followed the last place with the same two or three tokens."""
    row = tl.program_id(0)
    now = tl.load(position + row).to(tl.int32)
    last = tl.load(token + row).to(tl.int32)
    place = tl.load(slot + row)
    is_done = tl.load(done + row)
    left = tl.load(remaining + row)
    source = history + place * history_stride
    before = tl.load(source + now - 1, mask=now >= 1, other=-1)
    before_that = tl.load(source + now - 2, mask=now >= 2, other=-1)
    # The best place has three equal tokens, and is the latest of those.
    best = tl.full([], -1, tl.int32)
    LONGER: tl.constexpr = 1 << 28
    for start in range(1, now, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        inside = offs < now
        same = inside & (tl.load(source + offs, mask=inside, other=-1) == last)
        same = same & (tl.load(source + offs - 1, mask=inside, other=-1) == before)
        third = same & (offs >= 2) & (tl.load(source + offs - 2, mask=inside & (offs >= 2), other=-2) == before_that)
        best = tl.maximum(best, tl.max(tl.where(third, offs + LONGER, tl.where(same, offs, -1)), 0))
    match = best % LONGER
    target = row * WIDTH
    tl.store(out_token + target, last.to(tl.int64))
    tl.store(out_position + target, now.to(tl.int64))
    tl.store(out_slot + target, place)
    tl.store(out_done + target, is_done)
    for index in tl.static_range(1, WIDTH):
        known = (best >= 0) & (match + index <= now) & (left > index)
        guess = tl.load(source + match + index, mask=known, other=0)
        tl.store(out_token + target + index, guess.to(tl.int64))
        tl.store(out_position + target + index, tl.where(known, now + index, now).to(tl.int64))
        tl.store(out_slot + target + index, place)
        tl.store(out_done + target + index, tl.where(known, is_done, 1).to(tl.int64))


@triton.jit
def accept_kernel(
    drafted,
    drafted_done,
    picked,
    picked_logprobs,
    token,
    position,
    slot,
    remaining,
    done,
    stops,
    stops_stride,
    out_tokens,
    out_logprobs,
    out_counts,
    out_stride,
    history,
    history_stride,
    WIDTH: tl.constexpr,
    STOPS: tl.constexpr,
):
    """Append the sampled tokens of a row up to the first that was not guessed, and advance the row."""
    row = tl.program_id(0)
    if tl.load(done + row) == 0:
        now = tl.load(position + row)
        left = tl.load(remaining + row)
        count = tl.load(out_counts + row)
        last = tl.load(token + row)
        target = history + tl.load(slot + row) * history_stride
        offs_s = tl.arange(0, STOPS)
        stop_ids = tl.load(stops + offs_s * stops_stride + row)
        going = last == last  # true; a scalar of the loop's type
        ended = last != last
        for index in tl.static_range(WIDTH):
            place = row * WIDTH + index
            if index > 0:
                going = going & (tl.load(drafted_done + place) == 0) & (tl.load(drafted + place) == last)
            new = tl.load(picked + place, mask=going, other=0).to(tl.int64)
            logprob = tl.load(picked_logprobs + place, mask=going, other=0.0)
            tl.store(out_tokens + count * out_stride + row, new.to(tl.int32), mask=going)
            tl.store(out_logprobs + count * out_stride + row, logprob, mask=going)
            tl.store(target + now + 1, new.to(tl.int32), mask=going)
            step = going.to(tl.int64)
            count += step.to(tl.int32)
            now += step
            left -= step
            last = tl.where(going, new, last)
            hits = tl.sum((stop_ids == new).to(tl.int32), 0)
            stopped = going & ((hits > 0) | (left <= 0) | (logprob != logprob))
            ended = ended | stopped
            going = going & (stopped == 0)
        tl.store(out_counts + row, count)
        tl.store(token + row, last)
        tl.store(position + row, now)
        tl.store(remaining + row, left)
        tl.store(done + row, ended.to(tl.int64))


def draft(state: RowState, history: torch.Tensor, width: int) -> RowState:
    """Return a state with `width` rows for each row: its token and the guesses after it. Guesses that there are not,
    and those beyond what the row may sample, are done."""
    num_rows = len(state.token)
    token, position, slot, done = torch.empty((4, num_rows * width), dtype=torch.int64, device=history.device)
    draft_kernel[(num_rows,)](
        state.token,
        state.position,
        state.slot,
        state.remaining,
        state.done,
        history,
        history.stride(0),
        token,
        position,
        slot,
        done,
        WIDTH=width,
        BLOCK=HISTORY_BLOCK,
        num_warps=4,
    )
    return replace(state, token=token, position=position, slot=slot, done=done)


def drafted_picks(num_rows: int, device: torch.device) -> Picks:
    """Return space for a token and a log-probability of every drafted row."""
    tokens = torch.empty((1, num_rows), dtype=torch.int32, device=device)
    return Picks(tokens, torch.empty((1, num_rows), dtype=torch.float32, device=device), tokens)


def accept(drafts: RowState, sampled: Picks, state: RowState, picks: Picks, history: torch.Tensor, width: int) -> None:
    """Append what `sampled` has after each row's own token and its accepted guesses, and advance the rows."""
    accept_kernel[(len(state.token),)](
        drafts.token,
        drafts.done,
        sampled.tokens,
        sampled.logprobs,
        state.token,
        state.position,
        state.slot,
        state.remaining,
        state.done,
        state.stops,
        state.stops.stride(0),
        picks.tokens,
        picks.logprobs,
        picks.counts,
        picks.tokens.stride(0),
        history,
        history.stride(0),
        WIDTH=width,
        STOPS=MAX_STOPS,
        num_warps=1,
    )
