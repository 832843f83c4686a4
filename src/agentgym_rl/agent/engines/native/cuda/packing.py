"""Packs the new tokens of many rows into prefill passes, as numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch

from agentgym_rl.agent.engines.native.runner import Row

TOKEN_FIELDS, BLOCK_FIELDS = 3, 4


@dataclass(slots=True)
class Blocks:
    """Runs of queries for one prefill program each, [N]; a count of 0 is padding."""

    first: torch.Tensor
    """Index of the first query among the packed tokens."""
    position: torch.Tensor
    """Position of the first query in its sequence."""
    count: torch.Tensor
    slot: torch.Tensor


@dataclass(slots=True)
class Packed:
    """Tokens of several sequences, end to end, [T]. Padding writes to the spare position of slot 0."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    blocks: Blocks


@dataclass(slots=True)
class Pass:
    """One prefill pass as arrays."""

    tokens: numpy.ndarray
    """[3, T]: token ids, positions, slots."""
    blocks: numpy.ndarray
    """[4, N]: first, position, count, slot."""


def pack(rows: list[Row], max_tokens: int, block_tokens: int) -> list[Pass]:
    """Pack tokens [start, length - 1) of every row. The next decode step computes the last one.

    Passes are full. A row may be split over two, because later tokens find the earlier ones in the cache.
    """
    passes, pieces, free = [], [], max_tokens
    for row in rows:
        start, end = row.start, len(row.token_ids) - 1
        while start < end:
            count = min(free, end - start)
            pieces.append((row.slot, start, row.token_ids[start : start + count]))
            start += count
            free -= count
            if free == 0:
                passes.append(_pass(pieces, block_tokens))
                pieces, free = [], max_tokens
    if pieces:
        passes.append(_pass(pieces, block_tokens))
    return passes


def _pass(pieces: list[tuple[int, int, list[int]]], block_tokens: int) -> Pass:
    slots = numpy.array([slot for slot, _, _ in pieces], dtype=numpy.int64)
    starts = numpy.array([start for _, start, _ in pieces], dtype=numpy.int64)
    lengths = numpy.array([len(ids) for _, _, ids in pieces], dtype=numpy.int64)
    firsts = numpy.cumsum(lengths) - lengths
    token_ids: list[int] = []
    for _, _, ids in pieces:
        token_ids += ids
    total = len(token_ids)
    tokens = numpy.empty((TOKEN_FIELDS, total), dtype=numpy.int64)
    tokens[0] = token_ids
    tokens[1] = numpy.arange(total) + numpy.repeat(starts - firsts, lengths)
    tokens[2] = numpy.repeat(slots, lengths)
    counts = -(-lengths // block_tokens)
    piece = numpy.repeat(numpy.arange(len(pieces)), counts)
    within = (numpy.arange(len(piece)) - numpy.repeat(numpy.cumsum(counts) - counts, counts)) * block_tokens
    rest = lengths[piece] - within
    blocks = numpy.stack([firsts[piece] + within, starts[piece] + within, rest.clip(max=block_tokens), slots[piece]])
    # Longest first, so that the last programs to finish are short.
    return Pass(tokens, blocks[:, numpy.argsort(-blocks[1], kind="stable")])


def as_packed(tokens: torch.Tensor, blocks: torch.Tensor) -> Packed:
    """Return views of [3, T] and [4, N] arrays."""
    return Packed(tokens[0], tokens[1], tokens[2], Blocks(blocks[0], blocks[1], blocks[2], blocks[3]))
