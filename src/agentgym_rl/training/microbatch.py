"""From samples to the tensors of one forward pass.

Shapes: B samples of a micro-batch laid end to end in one row of T tokens, A action tokens among them. There is no
padding. Everything a loss sees is flat over action tokens, gathered by place, so an observation cannot leak into it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy
import torch
from torch import Tensor

from agentgym_rl.types import Sample

KNOWN = ("logprobs", "advantages", "old_logprobs", "reference_logprobs", "values", "returns")
"""What a sample may hold of its action tokens."""


@dataclass(slots=True)
class MicroBatch:
    """Samples one after the other; each sees itself alone (see packed.py)."""

    indices: list[int]
    """B: which sample each is, in the list that was split."""
    lengths: list[int]
    """B: tokens of each; never rising, so that equal ones are neighbours."""
    action_counts: list[int]
    """B: action tokens of each."""
    token_ids_T: Tensor
    positions_T: Tensor
    """Position of each token in its own sample."""
    bounds_B1: Tensor
    """Where each sample begins, and T; int32, as attention kernels want it."""
    rows_A: Tensor
    """Which of the B samples each action token belongs to."""
    places_A: Tensor
    """Place of each action token in T; its prediction is made one place before."""
    targets_A: Tensor
    """The action tokens."""
    weights_A: Tensor
    logprobs_A: Tensor
    """The sampler's. This and what follows is empty where the samples do not have it."""
    advantages_A: Tensor
    old_logprobs_A: Tensor
    reference_logprobs_A: Tensor
    values_A: Tensor
    returns_A: Tensor

    @property
    def num_actions(self) -> int:
        return len(self.targets_A)

    @property
    def columns_A(self) -> Tensor:
        """Position of each action token in its own sample."""
        return self.positions_T[self.places_A]

    def by_row(self, values_A: Tensor) -> list[list[float]]:
        """One list per sample of what is known of its action tokens."""
        return [part.tolist() for part in values_A.detach().float().cpu().split(self.action_counts)]

    def runs(self) -> list[tuple[int, int]]:
        """(samples, length) of neighbours that are equally long, in order."""
        return [(len(list(same)), length) for length, same in groupby(self.lengths)]

    def padded(self) -> tuple[Tensor, Tensor]:
        """(ids_BL padded on the right with 0, places_T of every token in it, flattened)."""
        rows_T = torch.repeat_interleave(
            torch.arange(len(self.lengths), device=self.token_ids_T.device),
            torch.tensor(self.lengths, device=self.token_ids_T.device),
        )
        places_T = rows_T * self.lengths[0] + self.positions_T
        ids = self.token_ids_T.new_zeros(len(self.lengths) * self.lengths[0])
        return ids.index_copy(0, places_T, self.token_ids_T).view(len(self.lengths), -1), places_T


def micro_batches(
    samples: list[Sample], weights: list[float], max_tokens: int, device: torch.device | str = "cpu"
) -> list[MicroBatch]:
    """Longest samples first, at most `max_tokens` tokens each (or one sample, if it is longer)."""
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].token_ids), reverse=True)
    chunks: list[list[int]] = []
    room = 0
    for i in order:
        length = len(samples[i].token_ids)
        if chunks and length <= room:
            chunks[-1].append(i)
            room -= length
        else:
            chunks.append([i])
            room = max_tokens - length
    return [_pack(chunk, [samples[i] for i in chunk], [weights[i] for i in chunk], device) for chunk in chunks]


def _pack(indices: list[int], samples: list[Sample], weights: list[float], device: torch.device | str) -> MicroBatch:
    lengths = [len(s.token_ids) for s in samples]
    bounds = numpy.concatenate([[0], numpy.cumsum(lengths)])
    token_ids = _flat("q", (s.token_ids for s in samples))
    places, rows, counts = _actions(samples, bounds)
    for sample, count in zip(samples, counts, strict=True):
        _check(sample, count)

    def put(numbers: numpy.ndarray, dtype: type[numpy.generic]) -> Tensor:
        return torch.from_numpy(numbers.astype(dtype, copy=False)).to(device)

    known = {f"{name}_A": _flat("d", (getattr(s, name) for s in samples)) for name in KNOWN}
    if numpy.isnan(known["logprobs_A"]).any():
        bad = next(s for s in samples if any(map(math.isnan, s.logprobs)))
        raise ValueError(f"{bad.trajectory_id}: a trained token has no log-probability of its sampling")
    return MicroBatch(
        indices=indices,
        lengths=lengths,
        action_counts=counts,
        token_ids_T=put(token_ids, numpy.int64),
        positions_T=put(numpy.arange(bounds[-1]) - numpy.repeat(bounds[:-1], lengths), numpy.int64),
        bounds_B1=put(bounds, numpy.int32),
        rows_A=put(rows, numpy.int64),
        places_A=put(places, numpy.int64),
        targets_A=put(token_ids[places], numpy.int64),
        weights_A=put(numpy.repeat(numpy.array(weights, dtype=numpy.float64), counts), numpy.float32),
        **{name: put(numbers, numpy.float32) for name, numbers in known.items()},
    )


def _flat(code: str, lists: Iterable[list[int] | list[float]]) -> numpy.ndarray:
    """All numbers in one array; a C array eats lists faster than numpy does."""
    numbers: Any = array(code)
    for some in lists:
        numbers.fromlist(some)
    return numpy.array(numbers, dtype=numpy.int64 if code == "q" else numpy.float64)


def _actions(samples: list[Sample], bounds: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray, list[int]]:
    """(places of all action tokens, the sample of each, how many each sample has)."""
    for sample in samples:
        if len(sample.loss_mask) != len(sample.token_ids):
            tokens, mask = len(sample.token_ids), len(sample.loss_mask)
            raise ValueError(f"{sample.trajectory_id}: {tokens} tokens need a mask of as many, got {mask}")
    # A list of booleans becomes bytes at half the price of any other way.
    trained = numpy.frombuffer(b"".join(bytes(s.loss_mask) for s in samples), dtype=bool)
    places = numpy.flatnonzero(trained)
    rows = numpy.searchsorted(bounds, places, side="right") - 1
    return places, rows, numpy.bincount(rows, minlength=len(samples)).tolist()


def _check(sample: Sample, count: int) -> None:
    """Stop what would be trained on wrongly: a first token has no prediction, and a list of another length would shift
    onto other tokens."""
    if sample.loss_mask[:1] == [True]:
        raise ValueError(f"{sample.trajectory_id}: the first token of a sample cannot be trained on")
    for name in KNOWN:
        found = len(getattr(sample, name))
        if found not in (0, count):
            raise ValueError(f"{sample.trajectory_id}: {count} trained tokens need as many {name}, got {found}")
