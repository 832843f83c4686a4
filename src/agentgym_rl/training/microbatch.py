"""Pack samples into the tensors of one forward pass.

Shapes: B samples of a micro-batch packed into one row of T tokens, A action tokens among them. There is no padding. A
loss sees only tensors over action tokens, gathered by index, so observations cannot leak into it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy
import torch
from torch import Tensor

from agentgym_rl.types import Sample

MAX_UNIQUE_SHARE = 0.9
"""Samples share their prefixes in a pass if at most this share of their tokens is left to compute."""
PER_ACTION = ("logprobs", "advantages", "old_logprobs", "reference_logprobs", "values", "returns")
"""Fields of a sample with one number per action token; empty if absent."""


@dataclass(slots=True)
class SharedPrefixes:
    """Tokens of a micro-batch without those that continue the same prefix in an earlier sample: U unique tokens.

    A sample's own tokens follow those that it shares, so they are its last ones.
    """

    own_counts: list[int]
    """B: tokens of each sample that are its own, at least one. They are neighbours in U, in order of the samples."""
    own_bounds_B1: Tensor
    """Start of each sample's own tokens in U, and U; int32 for the attention kernels."""
    unique_T: Tensor
    """Index in U of each token of T."""
    places_U: Tensor
    """Index in T of each unique token."""


@dataclass(slots=True)
class MicroBatch:
    """Packed samples, which do not see each other (see device/packed.py)."""

    indices: list[int]
    """B: index of each sample in the list that was split."""
    lengths: list[int]
    """B: tokens of each sample, descending, so that equal lengths are neighbours."""
    action_counts: list[int]
    """B: action tokens of each sample."""
    token_ids_T: Tensor
    positions_T: Tensor
    """Position of each token in its own sample."""
    bounds_B1: Tensor
    """Start of each sample, and T; int32 for the attention kernels."""
    rows_A: Tensor
    """Sample of each action token, from 0 to B - 1."""
    places_A: Tensor
    """Index of each action token in T; it is predicted one index before."""
    targets_A: Tensor
    """Ids of the action tokens."""
    weights_A: Tensor
    logprobs_A: Tensor
    """Log-probabilities of the sampler. This field and those below are empty if the samples lack them."""
    advantages_A: Tensor
    old_logprobs_A: Tensor
    reference_logprobs_A: Tensor
    values_A: Tensor
    returns_A: Tensor
    shared: SharedPrefixes | None = field(default=None, init=False)
    """Prefixes that samples share, if a pass may compute them once."""

    @property
    def num_actions(self) -> int:
        return len(self.targets_A)

    @property
    def columns_A(self) -> Tensor:
        """Position of each action token in its own sample."""
        return self.positions_T[self.places_A]

    def by_row(self, values_A: Tensor) -> list[list[float]]:
        """Return the values of each sample's action tokens as a list."""
        return [part.tolist() for part in values_A.detach().float().cpu().split(self.action_counts)]

    def runs(self) -> list[tuple[int, int]]:
        """Return (samples, length) of neighbours of equal length, in order."""
        return [(len(list(same)), length) for length, same in groupby(self.lengths)]

    def own_runs(self, shared: SharedPrefixes) -> list[tuple[int, int, int]]:
        """Return (samples, length, own tokens) of neighbours that are equal in both, in order."""
        pairs = zip(self.lengths, shared.own_counts, strict=True)
        return [(len(list(same)), length, own) for (length, own), same in groupby(pairs)]

    def padded(self) -> tuple[Tensor, Tensor]:
        """Return (ids_BL padded on the right with 0, the flat index of every token in it, T)."""
        rows_T = torch.repeat_interleave(
            torch.arange(len(self.lengths), device=self.token_ids_T.device),
            torch.tensor(self.lengths, device=self.token_ids_T.device),
        )
        places_T = rows_T * self.lengths[0] + self.positions_T
        ids = self.token_ids_T.new_zeros(len(self.lengths) * self.lengths[0])
        return ids.index_copy(0, places_T, self.token_ids_T).view(len(self.lengths), -1), places_T


def micro_batches(
    samples: list[Sample],
    weights: list[float],
    max_tokens: int,
    device: torch.device | str = "cpu",
    *,
    share_prefixes: bool = False,
) -> list[MicroBatch]:
    """Return micro-batches of at most `max_tokens` tokens (or one longer sample), longest samples first.

    With `share_prefixes`, samples that begin alike go into the same one, if that saves enough.
    """
    if share_prefixes:
        order = sorted(range(len(samples)), key=lambda i: samples[i].token_ids)
        own = own_lengths([samples[i] for i in order])
        if sum(own) <= MAX_UNIQUE_SHARE * sum(len(s.token_ids) for s in samples):
            chunks = _chunks(order, samples, max_tokens)
            return [_pack_shared(chunk, samples, weights, device) for chunk in chunks]
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].token_ids), reverse=True)
    chunks = _chunks(order, samples, max_tokens)
    return [_pack(chunk, [samples[i] for i in chunk], [weights[i] for i in chunk], device) for chunk in chunks]


def own_lengths(samples: list[Sample]) -> list[int]:
    """Return how many tokens of each sample do not continue a prefix of its predecessor, at least one.

    If samples are sorted by their tokens, no other earlier one has a longer common prefix than the predecessor. The
    last token of a sample is its own, because attention kernels need a query of every sample.
    """
    before: list[int] = []
    counts = []
    for sample in samples:
        ids = sample.token_ids
        counts.append(max(1, len(ids) - _common_prefix(ids, before)))
        before = ids
    return counts


def _common_prefix(ids: list[int], others: list[int], block: int = 64) -> int:
    """Return how many tokens two lists have in common at their start. Blocks are compared as a whole, which is fast."""
    length, start = min(len(ids), len(others)), 0
    while start < length and ids[start : start + block] == others[start : start + block]:
        start += block
    return next((i for i in range(start, min(start + block, length)) if ids[i] != others[i]), length)


def _pack_shared(
    chunk: list[int], samples: list[Sample], weights: list[float], device: torch.device | str
) -> MicroBatch:
    """Pack samples that are sorted by their tokens, with the prefixes that they share."""
    own = own_lengths([samples[i] for i in chunk])
    # By length as always, and neighbours that are equal in both numbers, so that attention takes them together.
    order = sorted(range(len(chunk)), key=lambda k: (len(samples[chunk[k]].token_ids), own[k]), reverse=True)
    starts = numpy.zeros(len(chunk), dtype=numpy.int64)
    starts[order] = numpy.cumsum([0, *(own[k] for k in order)])[:-1]
    unique: list[numpy.ndarray] = []
    for k, i in enumerate(chunk):
        common = len(samples[i].token_ids) - own[k]
        before = unique[-1][:common] if common else numpy.empty(0, dtype=numpy.int64)
        unique.append(numpy.concatenate([before, starts[k] + numpy.arange(own[k])]))
    indices = [chunk[k] for k in order]
    micro = _pack(indices, [samples[i] for i in indices], [weights[i] for i in indices], device)
    own_counts = [own[k] for k in order]
    ends = numpy.cumsum(micro.lengths)
    places = [end - count + numpy.arange(count) for end, count in zip(ends, own_counts, strict=True)]
    own_bounds = numpy.cumsum([0, *own_counts], dtype=numpy.int32)
    arrays = own_bounds, numpy.concatenate([unique[k] for k in order]), numpy.concatenate(places)
    micro.shared = SharedPrefixes(own_counts, *(torch.from_numpy(array).to(device) for array in arrays))
    return micro


def _chunks(order: list[int], samples: list[Sample], max_tokens: int) -> list[list[int]]:
    """Return the samples in order, cut into parts of at most `max_tokens` tokens."""
    chunks: list[list[int]] = []
    free_tokens = 0
    for i in order:
        length = len(samples[i].token_ids)
        if chunks and length <= free_tokens:
            chunks[-1].append(i)
            free_tokens -= length
        else:
            chunks.append([i])
            free_tokens = max_tokens - length
    return chunks


def _pack(indices: list[int], samples: list[Sample], weights: list[float], device: torch.device | str) -> MicroBatch:
    lengths = [len(s.token_ids) for s in samples]
    bounds = numpy.concatenate([[0], numpy.cumsum(lengths)])
    token_ids = _flat("q", (s.token_ids for s in samples))
    places, rows, counts = _actions(samples, bounds)
    for sample, count in zip(samples, counts, strict=True):
        _check(sample, count)

    def to_device(numbers: numpy.ndarray, dtype: type[numpy.generic]) -> Tensor:
        return torch.from_numpy(numbers.astype(dtype, copy=False)).to(device)

    per_action = {f"{name}_A": _flat("d", (getattr(s, name) for s in samples)) for name in PER_ACTION}
    if numpy.isnan(per_action["logprobs_A"]).any():
        bad = next(s for s in samples if any(map(math.isnan, s.logprobs)))
        raise ValueError(f"{bad.trajectory_id}: a trained token needs the sampler's log-probability, got NaN")
    return MicroBatch(
        indices=indices,
        lengths=lengths,
        action_counts=counts,
        token_ids_T=to_device(token_ids, numpy.int64),
        positions_T=to_device(numpy.arange(bounds[-1]) - numpy.repeat(bounds[:-1], lengths), numpy.int64),
        bounds_B1=to_device(bounds, numpy.int32),
        rows_A=to_device(rows, numpy.int64),
        places_A=to_device(places, numpy.int64),
        targets_A=to_device(token_ids[places], numpy.int64),
        weights_A=to_device(numpy.repeat(numpy.array(weights, dtype=numpy.float64), counts), numpy.float32),
        **{name: to_device(numbers, numpy.float32) for name, numbers in per_action.items()},
    )


def _flat(code: str, lists: Iterable[list[int] | list[float]]) -> numpy.ndarray:
    """Return all numbers in one array. An array.array reads lists faster than numpy does."""
    numbers: Any = array(code)
    for values in lists:
        numbers.fromlist(values)
    return numpy.array(numbers, dtype=numpy.int64 if code == "q" else numpy.float64)


def _actions(samples: list[Sample], bounds: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray, list[int]]:
    """Return (indices of all action tokens, the sample of each, the number in each sample)."""
    for sample in samples:
        if len(sample.loss_mask) != len(sample.token_ids):
            tokens, mask = len(sample.token_ids), len(sample.loss_mask)
            raise ValueError(f"{sample.trajectory_id}: {tokens} tokens need a mask of equal length, got {mask}")
    # bytes() of a list of booleans is twice as fast as the alternatives.
    trained = numpy.frombuffer(b"".join(bytes(s.loss_mask) for s in samples), dtype=bool)
    places = numpy.flatnonzero(trained)
    rows = numpy.searchsorted(bounds, places, side="right") - 1
    return places, rows, numpy.bincount(rows, minlength=len(samples)).tolist()


def _check(sample: Sample, count: int) -> None:
    """Raise ValueError if the first token is trained on, which has no prediction, or if a list has a wrong length."""
    if sample.loss_mask[:1] == [True]:
        raise ValueError(f"{sample.trajectory_id}: the first token of a sample cannot be trained on")
    for name in PER_ACTION:
        length = len(getattr(sample, name))
        if length not in (0, count):
            raise ValueError(f"{sample.trajectory_id}: {count} trained tokens need as many {name}, got {length}")
