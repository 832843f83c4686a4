"""From trajectories to samples to padded micro-batches.

Shapes: B rows, L columns of a micro-batch; A action tokens in it. Everything a loss sees is flat over action tokens,
gathered by (row, column), so an observation token or a padding token cannot leak into it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from agentgym_rl.training.advantages import ESTIMATORS, zero_variance
from agentgym_rl.types import Group, Sample, Trajectory


@dataclass(slots=True)
class Batch:
    """The samples of one step and how they came about."""

    samples: list[Sample] = field(default_factory=list)
    """Those to run through the model."""
    weights: list[float] = field(default_factory=list)
    """Loss weight of every action token of each sample; dropped samples included, they add up to 1 over the batch."""
    zero_variance_groups: int = 0
    groups: int = 0
    """Groups with at least one usable trajectory."""


@dataclass(slots=True)
class MicroBatch:
    """Rows padded on the right: a causal model needs no mask for that."""

    input_ids_BL: Tensor
    rows_A: Tensor
    """Row of each action token."""
    columns_A: Tensor
    """Column of each action token; its prediction is made one column to the left."""
    targets_A: Tensor
    """The action tokens."""
    weights_A: Tensor
    logprobs_A: Tensor
    """The sampler's; empty for supervised samples."""
    advantages_A: Tensor
    turns_A: Tensor

    @property
    def num_actions(self) -> int:
        return len(self.targets_A)


def to_sample(trajectory: Trajectory, advantages: list[float]) -> Sample:
    """`advantages` has one entry per turn. Example: ids [o o a a o a] with advantages [.5, -1] -> [0 0 .5 .5 0 -1]."""
    turns = trajectory.turn_index
    return Sample(
        token_ids=trajectory.token_ids,
        loss_mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs,
        advantages=[advantages[k] if k >= 0 else 0.0 for k in turns],
        turn_index=turns,
        trajectory_id=trajectory.id,
    )


def to_batch(
    groups: list[Group],
    algorithm: str,
    *,
    normalize_std: bool,
    drop_zero_variance: bool,
    aggregate: Literal["token", "trajectory"],
) -> Batch:
    """Estimate advantages group by group; failed episodes and those in which nothing was sampled are left out."""
    batch = Batch()
    kept: list[tuple[Sample, bool]] = []
    for group in groups:
        trajectories = [t for t in group.usable if any(t.loss_mask)]
        if not trajectories:
            continue
        flat = zero_variance(trajectories)
        batch.groups += 1
        batch.zero_variance_groups += flat
        # Of a group that lost all but one episode to failures nothing can be estimated: that is no variance, no error.
        nothing = [[0.0] * t.num_turns for t in trajectories]
        advantages = nothing if flat else ESTIMATORS[algorithm](trajectories, normalize_std)
        kept += [(to_sample(t, a), flat) for t, a in zip(trajectories, advantages, strict=True)]
    weights = token_weights([sample for sample, _ in kept], aggregate)
    for (sample, flat), weight in zip(kept, weights, strict=True):
        if not (flat and drop_zero_variance):
            batch.samples.append(sample)
            batch.weights.append(weight)
    return batch


def token_weights(samples: list[Sample], aggregate: Literal["token", "trajectory"]) -> list[float]:
    """Weight of each action token, by sample. token: 1 / all action tokens. trajectory: 1 / (samples * own tokens)."""
    counts = [sum(s.loss_mask) for s in samples]
    if aggregate == "token":
        return [1.0 / sum(counts)] * len(counts) if counts else []
    return [1.0 / (len(counts) * count) for count in counts]


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
    return [_pad([samples[i] for i in chunk], [weights[i] for i in chunk], device) for chunk in chunks]


def _pad(samples: list[Sample], weights: list[float], device: torch.device | str) -> MicroBatch:
    longest = max(len(s.token_ids) for s in samples)
    positions = [[c for c, trained in enumerate(s.loss_mask) if trained] for s in samples]
    for sample, columns in zip(samples, positions, strict=True):
        if columns and columns[0] == 0:
            raise ValueError(f"{sample.trajectory_id}: the first token of a sample cannot be trained on")
        if sample.logprobs and any(math.isnan(sample.logprobs[c]) for c in columns):
            raise ValueError(f"{sample.trajectory_id}: a trained token has no log-probability of its sampling")

    def gather(name: str) -> list[float]:
        return [getattr(s, name)[c] for s, cs in zip(samples, positions, strict=True) if getattr(s, name) for c in cs]

    return MicroBatch(
        input_ids_BL=torch.tensor([s.token_ids + [0] * (longest - len(s.token_ids)) for s in samples], device=device),
        rows_A=torch.tensor([r for r, cs in enumerate(positions) for _ in cs], device=device, dtype=torch.long),
        columns_A=torch.tensor([c for cs in positions for c in cs], device=device, dtype=torch.long),
        targets_A=torch.tensor(gather("token_ids"), device=device, dtype=torch.long),
        weights_A=torch.tensor([w for w, cs in zip(weights, positions, strict=True) for _ in cs], device=device),
        logprobs_A=torch.tensor(gather("logprobs"), device=device, dtype=torch.float32),
        advantages_A=torch.tensor(gather("advantages"), device=device, dtype=torch.float32),
        turns_A=torch.tensor(gather("turn_index"), device=device, dtype=torch.long),
    )
