"""Turn the groups of a step into samples with advantages and weights."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from agentgym_rl.training.advantages import EPSILON, ESTIMATORS, Episode
from agentgym_rl.training.distill import with_teacher
from agentgym_rl.training.losses import KL_ESTIMATORS
from agentgym_rl.training.ranks import balanced
from agentgym_rl.training.settings import RLSettings
from agentgym_rl.types import Group, Limits, Sample, StopReason, Trajectory

_OVERLONG = (StopReason.LENGTH, StopReason.MAX_CONTEXT)


@dataclass(slots=True)
class Batch:
    """The samples of one step, with one entry per sample in each list."""

    samples: list[Sample] = field(default_factory=list)
    """Samples to run through the model."""
    episodes: list[Episode] = field(default_factory=list)
    """Input of the estimator for each sample."""
    truncated: list[bool] = field(default_factory=list)
    """True if the episode was truncated, so that PPO can bootstrap."""
    unread: list[bool] = field(default_factory=list)
    """True if the state it was truncated in has no tokens, so that the critic cannot read it."""
    masked: list[bool] = field(default_factory=list)
    """True if the sample counts in the comparison but is not trained on."""
    weights: list[float] = field(default_factory=list)
    """Loss weight of every action token of each sample; set by `estimate`."""
    zero_variance_groups: int = 0
    groups: int = 0
    """Groups with at least one usable trajectory."""
    parts: list[list[int]] = field(default_factory=list)
    """Indices of the samples of each update, if chosen for several ranks together; else `learn` chooses."""


def equal_rewards(group: Group) -> bool:
    """Return whether all trainable episodes of the group have the same reward, so that comparing them says nothing."""
    rewards = [t.training_reward for t in group.trainable]
    return not rewards or max(rewards) - min(rewards) < EPSILON


def to_sample(trajectory: Trajectory, *, keep_tail: bool = False) -> Sample:
    """Return the sampled tokens of a trajectory. `keep_tail` keeps the tokens after the last reply, for a critic."""
    mask = trajectory.loss_mask
    end = len(mask) if keep_tail else len(mask) - (mask[::-1].index(True) if True in mask else 0)
    replies = [m for m in trajectory.messages if m.logprobs is not None]
    return Sample(
        token_ids=trajectory.token_ids[:end],
        loss_mask=mask[:end],
        logprobs=[p for m in replies for p in m.logprobs or ()],
        turn_index=[k for k in trajectory.turn_index if k >= 0],
        versions=[m.version or 0 for m in replies for _ in m.token_ids],
        trajectory_id=trajectory.id,
    )


def gather(groups: list[Group], settings: RLSettings, limits: Mapping[str, Limits] | None = None) -> Batch:
    """Return trainable trajectories as samples. Failed episodes and those without a sampled token are skipped.

    Only the penalty on overlong replies needs `limits`, by environment.
    """
    batch = Batch()
    for number, group in enumerate(groups):
        trajectories = [t for t in group.trainable if any(t.loss_mask)]
        batch.groups += bool(trajectories)
        for trajectory in trajectories:
            sample = to_sample(trajectory, keep_tail=settings.algorithm == "ppo")
            counts = [0] * trajectory.num_turns
            for turn in sample.turn_index:
                counts[turn] += 1
            rewards = trajectory.training_rewards
            if settings.overlong == "penalty":
                assert limits is not None
                longest = limits[trajectory.task.env].max_new_tokens
                rewards = [r - overlong_penalty(n, longest, settings) for r, n in zip(rewards, counts, strict=True)]
            batch.samples.append(sample)
            batch.episodes.append(
                Episode(number, rewards, counts, states=[info.get("state_key") for info in trajectory.infos])
            )
            batch.truncated.append(trajectory.stop is not None and trajectory.stop.truncated)
            batch.unread.append(_ends_unread(trajectory))
            batch.masked.append(settings.overlong == "mask" and trajectory.stop in _OVERLONG)
    return batch


def _ends_unread(trajectory: Trajectory) -> bool:
    """Return whether the last observation did not fit into the context or did not arrive before the deadline.

    The sample then ends with a whole reply. No token is ever sampled there, so the critic learns no value for it."""
    last = trajectory.messages[-1]
    return trajectory.stop is StopReason.TIMEOUT or (last.role != "assistant" and not last.token_ids)


def _value_after(episode: Episode, settings: RLSettings) -> float:
    """Return the value V' after the last reply, from the critic's value V before its last token: V = r + d V'.

    With credit "outcome" rewards are paid at the end of an episode only, and V' is V.
    """
    value, discount = episode.values[-1], settings.turn_discount
    if settings.credit == "outcome":
        return value
    return (value - episode.rewards[-1]) / discount if discount else 0.0


def overlong_penalty(tokens: int, max_new_tokens: int, settings: RLSettings) -> float:
    """Return 0 up to max_new_tokens - buffer tokens, rising to 1 at max_new_tokens. DAPO (arXiv 2503.14476)."""
    buffer = min(settings.overlong_buffer, max_new_tokens)
    return min(1.0, max(0.0, (tokens - (max_new_tokens - buffer)) / buffer))


def estimate(batch: Batch, settings: RLSettings, kl_coef: float = 0.0) -> Batch:
    """Return the batch with advantages and weights, without the samples that teach nothing.

    For ppo the samples must hold values, for distillation the teacher's log-probabilities. For KL in the reward,
    weighted by `kl_coef`, they must hold old and reference log-probabilities.
    """
    ends = zip(batch.samples, batch.episodes, batch.truncated, batch.unread, strict=True)
    for sample, episode, truncated, unread in ends:
        if settings.kl_in == "reward" and kl_coef:
            old, reference = torch.tensor(sample.old_logprobs), torch.tensor(sample.reference_logprobs)
            episode.penalties = (kl_coef * KL_ESTIMATORS[settings.kl_estimator](old, reference)).tolist()
        episode.values = sample.values
        episode.last_value = 0.0
        if truncated and settings.bootstrap and sample.values:
            episode.last_value = _value_after(episode, settings) if unread else sample.last_value
    estimated = ESTIMATORS[settings.algorithm](batch.episodes, settings)
    for sample, advantages in zip(batch.samples, estimated.advantages, strict=True):
        sample.advantages = advantages
        if settings.distill is not None:
            sample.advantages = with_teacher(sample, settings.distill)
    for sample, returns in zip(batch.samples, estimated.returns, strict=False):
        sample.returns = returns
    flat = _flat_groups(batch)
    trained = [i for i, masked in enumerate(batch.masked) if not masked]
    dropped = flat if settings.zero_variance == "drop" and settings.algorithm in ("grpo", "rloo") else set()
    if settings.resample_rounds and settings.zero_variance == "drop":
        # Replaced groups do not count, or the loss would shrink with every round (DAPO).
        trained = [i for i in trained if batch.episodes[i].group not in dropped]
    weights = token_weights([batch.samples[i] for i in trained], settings.aggregate, settings.aggregate_length)
    kept = [(i, w) for i, w in zip(trained, weights, strict=True) if batch.episodes[i].group not in dropped]
    return Batch(
        samples=[batch.samples[i] for i, _ in kept],
        episodes=[batch.episodes[i] for i, _ in kept],
        truncated=[batch.truncated[i] for i, _ in kept],
        unread=[batch.unread[i] for i, _ in kept],
        masked=[False] * len(kept),
        weights=[w for _, w in kept],
        zero_variance_groups=len(flat),
        groups=batch.groups,
    )


def _flat_groups(batch: Batch) -> set[int]:
    """Return the groups in which every advantage is 0."""
    largest: dict[int, float] = {}
    for episode, sample in zip(batch.episodes, batch.samples, strict=True):
        largest[episode.group] = max(largest.get(episode.group, 0.0), *map(abs, sample.advantages))
    return {group for group, advantage in largest.items() if advantage < EPSILON}


def token_weights(samples: list[Sample], aggregate: str, aggregate_length: int = 1) -> list[float]:
    """Return the weight of an action token of each sample.

    token: 1 / all action tokens. trajectory: 1 / (samples * own tokens). constant: 1 / (samples * aggregate_length).
    """
    counts = [sum(s.loss_mask) for s in samples]
    if not counts:
        return []
    if aggregate == "token":
        return [1.0 / sum(counts)] * len(counts)
    if aggregate == "constant":
        return [1.0 / (len(counts) * aggregate_length)] * len(counts)
    return [1.0 / (len(counts) * count) for count in counts]


def shuffled_parts(count: int, minibatches: int, seed: int) -> list[list[int]]:
    """Return the sample indices of each update of a pass: equal shares in a seeded order."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    parts = min(minibatches, count)
    return [order[i::parts] for i in range(parts)]


def split_batch(batch: Batch, size: int, minibatches: int, seed: int) -> tuple[list[Batch], list[list[int]]]:
    """Return (one share of the batch per rank, the sample indices of each share).

    Every rank gets a share of about equal length of every mini-batch. Weights remain those of the whole batch, so that
    losses and gradients add up over ranks.
    """
    shares = [Batch(groups=batch.groups, zero_variance_groups=batch.zero_variance_groups) for _ in range(size)]
    indices: list[list[int]] = [[] for _ in range(size)]
    for part in shuffled_parts(len(batch.samples), minibatches, seed):
        split = balanced([len(batch.samples[i].token_ids) for i in part], size)
        for share, share_indices, chosen in zip(shares, indices, split, strict=True):
            share.parts.append(list(range(len(share_indices), len(share_indices) + len(chosen))))
            share_indices += [part[i] for i in chosen]
    for share, share_indices in zip(shares, indices, strict=True):
        share.samples = [batch.samples[i] for i in share_indices]
        share.weights = [batch.weights[i] for i in share_indices]
    return shares, indices
