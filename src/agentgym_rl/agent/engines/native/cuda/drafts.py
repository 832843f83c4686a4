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
LONGEST_MATCH = 6
"""Tokens that are compared. With 3 to 1 instead of 6 to 1, a step of sixteen tokens yields 0.7% (BabyAI) and 4%
(TextCraft) fewer in replies of Qwen2.5-Coder-1.5B-Instruct; with 3 to 2, 10% and 13%."""


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
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a row's token and the tokens that followed the last place with the longest match, of up to LONGEST tokens
    that end there as the row ends."""
    row = tl.program_id(0)
    now = tl.load(position + row).to(tl.int32)
    last = tl.load(token + row).to(tl.int32)
    place = tl.load(slot + row)
    is_done = tl.load(done + row)
    left = tl.load(remaining + row)
    source = history + place * history_stride
    best = tl.full([], -1, tl.int32)
    ONE_MORE: tl.constexpr = 1 << 24  # more than any position, so that length counts first
    for start in range(0, now, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        inside = offs < now
        same = inside & (tl.load(source + offs, mask=inside, other=-1) == last)
        length = same.to(tl.int32)
        for back in tl.static_range(1, LONGEST):
            earlier = tl.load(source + now - back, mask=now >= back, other=-1)
            inside = inside & (offs >= back)
            same = same & inside & (tl.load(source + offs - back, mask=inside, other=-2) == earlier)
            length += same.to(tl.int32)
        best = tl.maximum(best, tl.max(tl.where(length > 0, length * ONE_MORE + offs, -1), 0))
    index = tl.arange(0, WIDTH)
    match = best % ONE_MORE
    num_known = tl.minimum(tl.where(best >= 0, now - match, 0), left - 1)
    is_guess = index > 0
    known = is_guess & (index <= num_known)
    guess = tl.load(source + match + index, mask=known, other=0)
    target = row * WIDTH + index
    tl.store(out_token + target, tl.where(is_guess, guess, last).to(tl.int64))
    tl.store(out_position + target, tl.where(known, now + index, now).to(tl.int64))
    tl.store(out_slot + target, place)
    tl.store(out_done + target, tl.where(is_guess & (known == 0), 1, is_done).to(tl.int64))


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
        index = tl.arange(0, WIDTH)
        place = row * WIDTH + index
        new = tl.load(picked + place)
        logprob = tl.load(picked_logprobs + place)
        stop_ids = tl.load(stops + tl.arange(0, STOPS) * stops_stride + row)
        stops_here = tl.sum((stop_ids[:, None] == new[None, :]).to(tl.int32), 0) > 0
        ends = stops_here | (left <= index + 1) | (logprob != logprob)
        first_end = tl.min(tl.where(ends, index, WIDTH), 0)
        before = tl.load(picked + place - 1, mask=index > 0, other=0)
        guessed = (tl.load(drafted_done + place) == 0) & (tl.load(drafted + place) == before)
        first_miss = tl.min(tl.where((index > 0) & (guessed == 0), index, WIDTH), 0)
        num_new = tl.minimum(first_end + 1, first_miss)
        kept = index < num_new
        target = (count + index) * out_stride + row
        tl.store(out_tokens + target, new, mask=kept)
        tl.store(out_logprobs + target, logprob, mask=kept)
        tl.store(history + tl.load(slot + row) * history_stride + now + 1 + index, new, mask=kept)
        tl.store(out_counts + row, count + num_new)
        tl.store(token + row, tl.sum(tl.where(index == num_new - 1, new, 0), 0).to(tl.int64))
        tl.store(position + row, now + num_new)
        tl.store(remaining + row, left - num_new)
        tl.store(done + row, (first_end < num_new).to(tl.int64))


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
        LONGEST=LONGEST_MATCH,
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
