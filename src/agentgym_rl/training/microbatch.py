"""From samples to the tensors of one forward pass.

Shapes: B rows, L columns of a micro-batch; A action tokens in it. Everything a loss sees is flat over action tokens,
gathered by (row, column), so an observation token or a padding token cannot leak into it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from agentgym_rl.types import Sample


@dataclass(slots=True)
class MicroBatch:
    """Rows padded on the right: a causal model needs no mask for that."""

    indices: list[int]
    """B: which sample each row is, in the list that was split."""
    input_ids_BL: Tensor
    lengths_B: Tensor
    """Tokens of each row that are not padding."""
    rows_A: Tensor
    """Row of each action token."""
    columns_A: Tensor
    """Column of each action token; its prediction is made one column to the left."""
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

    def by_row(self, values_A: Tensor) -> list[list[float]]:
        """One list per row of what is known of its action tokens."""
        counts = torch.bincount(self.rows_A, minlength=len(self.indices)).tolist()
        return [part.tolist() for part in values_A.detach().float().cpu().split(counts)]


def micro_batches(
    samples: list[Sample], weights: list[float], max_tokens: int, device: torch.device | str = "cpu"
) -> list[MicroBatch]:
    """Samples of similar length together, at most `max_tokens` padded tokens each (or one sample, if it is longer)."""
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].token_ids), reverse=True)
    chunks: list[list[int]] = []
    for i in order:
        longest = len(samples[chunks[-1][0]].token_ids) if chunks else 0
        if chunks and (len(chunks[-1]) + 1) * longest <= max_tokens:
            chunks[-1].append(i)
        else:
            chunks.append([i])
    return [_pad(chunk, [samples[i] for i in chunk], [weights[i] for i in chunk], device) for chunk in chunks]


def _pad(indices: list[int], samples: list[Sample], weights: list[float], device: torch.device | str) -> MicroBatch:
    longest = max(len(s.token_ids) for s in samples)
    positions = [[c for c, trained in enumerate(s.loss_mask) if trained] for s in samples]
    for sample, columns in zip(samples, positions, strict=True):
        _check(sample, columns)

    def known(name: str) -> Tensor:
        found = [getattr(s, name) for s in samples]
        return torch.tensor([x for some in found for x in some], device=device, dtype=torch.float32)

    def whole(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=device, dtype=torch.long)

    return MicroBatch(
        indices=indices,
        input_ids_BL=torch.tensor([s.token_ids + [0] * (longest - len(s.token_ids)) for s in samples], device=device),
        lengths_B=whole([len(s.token_ids) for s in samples]),
        rows_A=whole([r for r, cs in enumerate(positions) for _ in cs]),
        columns_A=whole([c for cs in positions for c in cs]),
        targets_A=whole([s.token_ids[c] for s, cs in zip(samples, positions, strict=True) for c in cs]),
        weights_A=torch.tensor([w for w, cs in zip(weights, positions, strict=True) for _ in cs], device=device),
        logprobs_A=known("logprobs"),
        advantages_A=known("advantages"),
        old_logprobs_A=known("old_logprobs"),
        reference_logprobs_A=known("reference_logprobs"),
        values_A=known("values"),
        returns_A=known("returns"),
    )


def _check(sample: Sample, columns: list[int]) -> None:
    """Stop what would be trained on wrongly: a first token has no prediction, a token without its log-probability no
    ratio, and a list of another length would shift onto other tokens."""
    if columns and columns[0] == 0:
        raise ValueError(f"{sample.trajectory_id}: the first token of a sample cannot be trained on")
    if any(math.isnan(p) for p in sample.logprobs):
        raise ValueError(f"{sample.trajectory_id}: a trained token has no log-probability of its sampling")
    for name in ("logprobs", "advantages", "old_logprobs", "reference_logprobs", "values", "returns"):
        count = len(getattr(sample, name))
        if count not in (0, len(columns)):
            raise ValueError(f"{sample.trajectory_id}: {len(columns)} trained tokens need as many {name}, got {count}")
