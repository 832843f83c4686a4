"""The new tokens of many rows as passes of packed tokens: numpy in, one array a pass out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch

from agentgym_rl.agent.engines.native.runner import Row

TOKEN_FIELDS, BLOCK_FIELDS = 3, 4


@dataclass(slots=True)
class Blocks:
    """Runs of queries that one prefill program takes, [N] each; a count of 0 is padding."""

    first: torch.Tensor
    """Place of the first query among the packed tokens."""
    position: torch.Tensor
    """Its position in its sequence."""
    count: torch.Tensor
    slot: torch.Tensor


@dataclass(slots=True)
class Packed:
    """Tokens of several sequences, end to end, [T] each; padding writes to the spare position of slot 0."""

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


def pack(rows: list[Row], tokens_most: int, block_tokens: int) -> list[Pass]:
    """Tokens [start, length - 1) of every row, the last one being left to the decode step that follows.

    Passes are full; a row may be cut in two, since later tokens find the earlier ones in the cache.
    """
    passes, pieces, room = [], [], tokens_most
    for row in rows:
        start, end = row.start, len(row.token_ids) - 1
        while start < end:
            taken = min(room, end - start)
            pieces.append((row.slot, start, row.token_ids[start : start + taken]))
            start += taken
            room -= taken
            if room == 0:
                passes.append(_pass(pieces, block_tokens))
                pieces, room = [], tokens_most
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
    left = lengths[piece] - within
    blocks = numpy.stack([firsts[piece] + within, starts[piece] + within, left.clip(max=block_tokens), slots[piece]])
    # The longest first: the last programs to finish are then short ones.
    return Pass(tokens, blocks[:, numpy.argsort(-blocks[1], kind="stable")])


def as_packed(tokens: torch.Tensor, blocks: torch.Tensor) -> Packed:
    """Views of [3, T] and [4, N]."""
    return Packed(tokens[0], tokens[1], tokens[2], Blocks(blocks[0], blocks[1], blocks[2], blocks[3]))
