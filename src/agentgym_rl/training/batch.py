"""From the groups of a step to the samples to learn from, with their advantages and weights."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from agentgym_rl.training.advantages import EPSILON, ESTIMATORS, Episode
from agentgym_rl.training.losses import KL_ESTIMATORS
from agentgym_rl.training.ranks import balanced
from agentgym_rl.training.settings import RLSettings
from agentgym_rl.types import Group, Limits, Sample, StopReason, Trajectory

_OVERLONG = (StopReason.LENGTH, StopReason.MAX_CONTEXT)


@dataclass(slots=True)
class Batch:
    """The samples of one step and how they came about."""

    samples: list[Sample] = field(default_factory=list)
    """Those to run through the model."""
    episodes: list[Episode] = field(default_factory=list)
    """What the estimator is told of each sample."""
    truncated: list[bool] = field(default_factory=list)
    """By sample: the episode did not truly end, so that there is something to bootstrap from."""
    unread: list[bool] = field(default_factory=list)
    """By sample: the state it was truncated in has no tokens, so that a critic cannot look at it."""
    masked: list[bool] = field(default_factory=list)
    """By sample: compared with, but not trained on."""
    weights: list[float] = field(default_factory=list)
    """Loss weight of every action token of each sample; set by `estimate`."""
    zero_variance_groups: int = 0
    groups: int = 0
    """Groups with at least one usable trajectory."""
    parts: list[list[int]] = field(default_factory=list)
    """Samples of each update of a pass, where that was decided for several ranks together; else `learn` decides."""


def equal_rewards(group: Group) -> bool:
    """True when no episode of the group did better than another, so that a comparison says nothing."""
    rewards = [t.reward for t in group.usable]
    return not rewards or max(rewards) - min(rewards) < EPSILON


def to_sample(trajectory: Trajectory, *, keep_tail: bool = False) -> Sample:
    """What was sampled, token for token. `keep_tail` keeps what came after the last reply, for a critic to look at."""
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
    """Usable trajectories as samples; failed ones and those in which nothing was sampled are left out.

    `limits` by environment is needed for the penalty on overlong replies only.
    """
    batch = Batch()
    for number, group in enumerate(groups):
        trajectories = [t for t in group.usable if any(t.loss_mask)]
        batch.groups += bool(trajectories)
        for trajectory in trajectories:
            sample = to_sample(trajectory, keep_tail=settings.algorithm == "ppo")
            counts = [0] * trajectory.num_turns
            for turn in sample.turn_index:
                counts[turn] += 1
            rewards = list(trajectory.rewards)
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
    """Whether the last observation did not fit into the context, or did not come in time. The sample then ends with a
    whole reply, after which no token is ever sampled, so that the critic never learns the value of that position."""
    last = trajectory.messages[-1]
    return trajectory.stop is StopReason.TIMEOUT or (last.role != "assistant" and not last.token_ids)


def _value_after(episode: Episode, settings: RLSettings) -> float:
    """Return the value V' after the last reply by the one that the critic learns, before its last token: V = r + d V'.

    With credit by outcome rewards are paid at the end of an episode only, and V' is V.
    """
    value, discount = episode.values[-1], settings.turn_discount
    if settings.credit == "outcome":
        return value
    return (value - episode.rewards[-1]) / discount if discount else 0.0


def overlong_penalty(tokens: int, max_new_tokens: int, settings: RLSettings) -> float:
    """0 up to max_new_tokens - buffer, then rising to 1 at max_new_tokens. Yu et al. 2025, DAPO (arXiv 2503.14476)."""
    buffer = min(settings.overlong_buffer, max_new_tokens)
    return min(1.0, max(0.0, (tokens - (max_new_tokens - buffer)) / buffer))


def estimate(batch: Batch, settings: RLSettings, kl_coef: float = 0.0) -> Batch:
    """The batch with advantages and weights, less what there is nothing to learn from.

    For ppo the samples hold values; for KL in the reward they hold old and reference log-probabilities, and `kl_coef`
    is its weight now.
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
    found = ESTIMATORS[settings.algorithm](batch.episodes, settings)
    for sample, advantages in zip(batch.samples, found.advantages, strict=True):
        sample.advantages = advantages
    for sample, returns in zip(batch.samples, found.returns, strict=False):
        sample.returns = returns
    flat = _flat_groups(batch)
    trained = [i for i, masked in enumerate(batch.masked) if not masked]
    dropped = flat if settings.zero_variance == "drop" and settings.algorithm in ("grpo", "rloo") else set()
    if settings.resample_rounds and settings.zero_variance == "drop":
        # Groups that were made up for do not count: else the loss would shrink with every round (DAPO).
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
    """Groups in which no token has an advantage: nothing of theirs is better or worse than expected."""
    largest: dict[int, float] = {}
    for episode, sample in zip(batch.episodes, batch.samples, strict=True):
        found = max(abs(a) for a in sample.advantages)
        largest[episode.group] = max(largest.get(episode.group, 0.0), found)
    return {group for group, advantage in largest.items() if advantage < EPSILON}


def token_weights(samples: list[Sample], aggregate: str, aggregate_length: int = 1) -> list[float]:
    """Weight of each action token, by sample.

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
    """Which samples each update of a pass learns from: equal shares in a seeded order."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    parts = min(minibatches, count)
    return [order[i::parts] for i in range(parts)]


def split_batch(batch: Batch, size: int, minibatches: int, seed: int) -> tuple[list[Batch], list[list[int]]]:
    """(a share of every mini-batch for each of `size` ranks, of about equal length; which samples each share has).

    Weights stay those of the whole batch, so that what the shares give adds up to what the whole would.
    """
    shares = [Batch(groups=batch.groups, zero_variance_groups=batch.zero_variance_groups) for _ in range(size)]
    indices: list[list[int]] = [[] for _ in range(size)]
    for part in shuffled_parts(len(batch.samples), minibatches, seed):
        split = balanced([len(batch.samples[i].token_ids) for i in part], size)
        for share, known, chosen in zip(shares, indices, split, strict=True):
            share.parts.append(list(range(len(known), len(known) + len(chosen))))
            known += [part[i] for i in chosen]
    for share, known in zip(shares, indices, strict=True):
        share.samples = [batch.samples[i] for i in known]
        share.weights = [batch.weights[i] for i in known]
    return shares, indices
