"""Turn the groups of a step into samples with advantages and weights."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from agentgym_rl.training.advantages import EPSILON, ESTIMATORS, Episode, return_spread
from agentgym_rl.training.distill import with_teacher
from agentgym_rl.training.losses import KL_ESTIMATORS
from agentgym_rl.training.metrics import attempts_of, digest_of, last_observation_missing
from agentgym_rl.training.ranks import balanced_shares
from agentgym_rl.training.settings import ZERO_VARIANCE_ALGORITHMS, RLSettings
from agentgym_rl.types import Group, Limits, Sample, StopReason, Trajectory, in_order

_OVERLONG = (StopReason.LENGTH, StopReason.MAX_CONTEXT)


@dataclass(slots=True)
class Batch:
    """The samples of one step, one per segment of an episode. Lists have one entry per sample or per episode."""

    samples: list[Sample] = field(default_factory=list)
    """Samples to run through the model; those of one episode are adjacent."""
    episode_of_sample: list[int] = field(default_factory=list)
    """Index of each sample's episode; empty if every sample is an episode."""
    episodes: list[Episode] = field(default_factory=list)
    """Input of the estimator for each episode."""
    truncated: list[bool] = field(default_factory=list)
    """True if the episode was truncated, so that PPO can bootstrap."""
    last_observation_missing: list[bool] = field(default_factory=list)
    """True if the state it was truncated in has no tokens, so that the critic cannot read it."""
    masked: list[bool] = field(default_factory=list)
    """True if the episode counts in the comparison but is not trained on."""
    weights: list[float] = field(default_factory=list)
    """Loss weight of every action token of each sample; set by `estimate`."""
    zero_variance_groups: int = 0
    """Groups without an advantage, also those that were dropped or left out."""
    groups: int = 0
    """Groups with at least one usable trajectory, also those that were dropped or left out."""
    parts: list[list[int]] = field(default_factory=list)
    """Indices of the samples of each update, if chosen for several ranks together; else `learn` chooses."""


def widest_groups(groups: Sequence[list[Episode]], settings: RLSettings) -> list[int]:
    """Return the indices of the share `keep_groups` of the groups with the largest spread, at least one, in order.

    RAGEN: Wang et al. 2025 (arXiv 2504.20073).
    """
    count = max(1, math.ceil(settings.keep_groups * len(groups)))
    spreads = [return_spread(group, settings) for group in groups]
    by_spread = sorted(range(len(groups)), key=lambda i: -spreads[i])
    return sorted(by_spread[:count])


def keep_widest(batch: Batch, settings: RLSettings) -> Batch:
    """Return the batch with its widest groups only. The others count in `groups` and `zero_variance_groups`."""
    if settings.keep_groups == 1.0:
        return batch
    by_group: dict[int, list[Episode]] = defaultdict(list)
    for episode in batch.episodes:
        by_group[episode.group].append(episode)
    numbers = list(by_group)
    kept = {numbers[i] for i in widest_groups(list(by_group.values()), settings)}
    result = _with_episodes(batch, [i for i, episode in enumerate(batch.episodes) if episode.group in kept])
    if settings.algorithm in ZERO_VARIANCE_ALGORITHMS:
        result.zero_variance_groups = sum(_are_flat(by_group[n], settings) for n in numbers if n not in kept)
    return result


def _with_episodes(batch: Batch, indices: list[int]) -> Batch:
    """Return the batch with these episodes only, without weights."""
    segments = samples_by_episode(batch)
    return Batch(
        samples=[batch.samples[k] for i in indices for k in segments[i]],
        episode_of_sample=[episode for episode, i in enumerate(indices) for _ in segments[i]],
        episodes=[batch.episodes[i] for i in indices],
        truncated=[batch.truncated[i] for i in indices],
        last_observation_missing=[batch.last_observation_missing[i] for i in indices],
        masked=[batch.masked[i] for i in indices],
        zero_variance_groups=batch.zero_variance_groups,
        groups=batch.groups,
    )


def sampled_by(trajectories: Sequence[Trajectory]) -> dict[str, list[str]]:
    """Return, by id, the episode that sampled each turn of the episodes of a group. Parents come before branches."""
    samplers: dict[str, list[str]] = {}
    for t in trajectories:
        shared = samplers.get(t.parent, [t.parent] * t.shared_turns)[: t.shared_turns]
        samplers[t.id] = [*shared, *[t.id] * (t.num_turns - t.shared_turns)]
    return samplers


def to_samples(trajectory: Trajectory, *, keep_tail: bool = False) -> list[Sample]:
    """Return one sample per segment with trained tokens. `keep_tail` keeps the tokens after the last reply, for a
    critic. An episode whose messages are stored elsewhere has its samples already."""
    if trajectory.digest is not None:
        return trajectory.digest.samples
    segments = [segment for segment in trajectory.segments if True in segment.loss_mask]
    samples = []
    for segment in segments:
        mask = segment.loss_mask
        end = len(mask) if keep_tail else len(mask) - mask[::-1].index(True)
        samples.append(
            Sample(
                token_ids=segment.token_ids[:end],
                loss_mask=mask[:end],
                logprobs=[p for p, trained in zip(segment.logprobs, mask, strict=True) if trained],
                turn_index=[turn for turn in segment.turn_index if turn >= 0],
                versions=segment.versions,
                trajectory_id=trajectory.id,
                order=segment.order if len(segments) > 1 else [],
            )
        )
    return samples


def _distribute(samples: Sequence[Sample], name: str, values: list[float]) -> None:
    """Give each sample of an episode its part of the values of the episode's tokens."""
    for sample in samples:
        setattr(sample, name, [values[k] for k in sample.order] if len(samples) > 1 else values)


def turn_counts(sample: Sample) -> Iterable[tuple[int, int]]:
    """Return the action tokens of each turn, as (turn, tokens)."""
    return enumerate(sample.stored.turn_counts) if sample.stored is not None else Counter(sample.turn_index).items()


def version_counts(sample: Sample) -> Mapping[int, int]:
    """Return the action tokens by the version of the weights that sampled them."""
    return sample.stored.version_counts if sample.stored is not None else Counter(sample.versions)


def samples_by_episode(batch: Batch) -> list[list[int]]:
    """Return the indices of each episode's samples."""
    indices: list[list[int]] = []
    for i, episode in enumerate(batch.episode_of_sample or range(len(batch.samples))):
        if episode == len(indices):
            indices.append([])
        indices[episode].append(i)
    return indices


def gather(groups: list[Group], settings: RLSettings, limits: Mapping[str, Limits] | None = None) -> Batch:
    """Return trainable trajectories as samples. Failed episodes and those without a sampled token are skipped.

    Only the penalty on overlong replies needs `limits`, by environment.
    """
    batch = Batch()
    for number, group in enumerate(groups):
        samplers = sampled_by(group.trajectories) if settings.tree is not None else {}
        played = [(t, to_samples(t, keep_tail=settings.algorithm == "ppo")) for t in group.trainable]
        trajectories = [(t, samples) for t, samples in played if samples]
        batch.groups += bool(trajectories)
        for trajectory, samples in trajectories:
            counts = [0] * trajectory.num_turns
            for turn, count in (part for sample in samples for part in turn_counts(sample)):
                counts[turn] += count
            rewards = trajectory.training_rewards
            if settings.overlong == "penalty":
                assert limits is not None
                longest = limits[trajectory.task.env].max_new_tokens
                lengths = digest_of(trajectory).reply_tokens
                rewards = [r - overlong_penalty(n, longest, settings) for r, n in zip(rewards, lengths, strict=True)]
            batch.samples += samples
            batch.episode_of_sample += [len(batch.episodes)] * len(samples)
            states = [info.get("state_key") for info in trajectory.infos]
            episode = Episode(number, rewards, counts, states=states, sampled_by=samplers.get(trajectory.id, []))
            if settings.correction is not None:
                episode.attempts = attempts_of(trajectory)
                episode.rewards = [float(info.get("env_reward", 0.0)) for info in trajectory.infos]
            batch.episodes.append(episode)
            # A role whose reply was cut is paid what the rest of the game brings, so no value stands for that.
            paid_in_full = bool(trajectory.role) and trajectory.stop in _OVERLONG
            batch.truncated.append(trajectory.stop is not None and trajectory.stop.truncated and not paid_in_full)
            batch.last_observation_missing.append(last_observation_missing(trajectory))
            batch.masked.append(settings.overlong == "mask" and trajectory.stop in _OVERLONG)
    return batch


def is_flat(group: Group, settings: RLSettings, limits: Mapping[str, Limits] | None = None) -> bool:
    """Return whether the rewards give every token of the group an advantage of 0, so that comparing them says nothing.

    KL in the reward and a teacher do not count, because they give almost every token an advantage.
    """
    return _are_flat(gather([group], settings, limits).episodes, settings)


def _are_flat(episodes: list[Episode], settings: RLSettings) -> bool:
    advantages = ESTIMATORS[settings.algorithm](episodes, settings).advantages
    return all(abs(a) < EPSILON for row in advantages for a in row)


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
    segments = [[batch.samples[i] for i in indices] for indices in samples_by_episode(batch)]
    for samples, episode, truncated, missing in zip(
        segments, batch.episodes, batch.truncated, batch.last_observation_missing, strict=True
    ):
        if settings.kl_in == "reward" and kl_coef:
            old, reference = (torch.tensor(in_order(samples, f"{name}_logprobs")) for name in ("old", "reference"))
            episode.penalties = (kl_coef * KL_ESTIMATORS[settings.kl_estimator](old, reference)).tolist()
        episode.values = in_order(samples, "values")
        episode.last_value = 0.0
        if truncated and settings.bootstrap and episode.values:
            # The segment whose last token was sampled last is the one that the episode ended in.
            last = max(samples, key=lambda sample: sample.order[-1:])
            episode.last_value = _value_after(episode, settings) if missing else last.last_value
    estimated = ESTIMATORS[settings.algorithm](batch.episodes, settings)
    for samples, advantages in zip(segments, estimated.advantages, strict=True):
        _distribute(samples, "advantages", advantages)
        if settings.distill is not None:
            for sample in samples:
                sample.advantages = with_teacher(sample, settings.distill)
    if settings.correction is not None and settings.correction.first_stage_steps:
        for samples, episode in zip(segments, batch.episodes, strict=True):
            for sample in samples:
                sample.advantages = _held(sample, episode.attempts, settings.correction.hold)
    for samples, returns in zip(segments, estimated.returns, strict=False):
        _distribute(samples, "returns", returns)
    return _trained(batch, segments, settings)


def _held(sample: Sample, attempts: list[int], weight: float) -> list[float]:
    """Return A: the advantages, with weight * log(reference / agent) for the first attempt's tokens.

    The policy gradient of that term is that of the reverse KL to the reference, as in distillation.
    """
    tokens = zip(sample.advantages, sample.turn_index, sample.reference_logprobs, sample.logprobs, strict=True)
    return [a + weight * (reference - own) * (attempts[turn] == 1) for a, turn, reference, own in tokens]


def _trained(batch: Batch, segments: list[list[Sample]], settings: RLSettings) -> Batch:
    """Return the episodes that are trained on, with the weights of their samples' tokens."""
    flat = _flat_groups(batch, segments)
    trained = [i for i, masked in enumerate(batch.masked) if not masked]
    dropped = flat if settings.zero_variance == "drop" and settings.algorithm in ZERO_VARIANCE_ALGORITHMS else set()
    if settings.resample_rounds and settings.zero_variance == "drop":
        # Flat groups that no round was left to replace do not count, or the loss would shrink with them (DAPO).
        trained = [i for i in trained if batch.episodes[i].group not in dropped]
    weights = token_weights(
        [sample for i in trained for sample in segments[i]],
        settings.aggregate,
        settings.aggregate_length,
        [i for i in trained for _ in segments[i]],
    )
    weight_of = dict(zip((i for i in trained for _ in segments[i]), weights, strict=True))
    kept = [i for i in trained if batch.episodes[i].group not in dropped]
    result = _with_episodes(batch, kept)
    result.weights = [weight_of[i] for i in kept for _ in segments[i]]
    result.zero_variance_groups += len(flat)
    return result


def _flat_groups(batch: Batch, segments: list[list[Sample]]) -> set[int]:
    """Return the groups in which every advantage is 0."""
    flat = {episode.group: True for episode in batch.episodes}
    for episode, samples in zip(batch.episodes, segments, strict=True):
        if flat[episode.group]:
            flat[episode.group] = all(abs(a) < EPSILON for sample in samples for a in sample.advantages)
    return {group for group, equal in flat.items() if equal}


def token_weights(
    samples: list[Sample], aggregate: str, aggregate_length: int = 1, episode_of_sample: Sequence[int] = ()
) -> list[float]:
    """Return the weight of an action token of each sample. By default each sample is an episode.

    token: 1 / all action tokens. trajectory: 1 / (episodes * tokens of the episode). constant: 1 / (episodes *
    aggregate_length).
    """
    if not samples:
        return []
    episode_of_sample = episode_of_sample or range(len(samples))
    counts: Counter[int] = Counter()
    for episode, sample in zip(episode_of_sample, samples, strict=True):
        counts[episode] += sample.stored.num_actions if sample.stored is not None else sum(sample.loss_mask)
    if aggregate == "token":
        return [1.0 / counts.total()] * len(samples)
    if aggregate == "constant":
        return [1.0 / (len(counts) * aggregate_length)] * len(samples)
    return [1.0 / (len(counts) * counts[episode]) for episode in episode_of_sample]


def shuffled_parts(count: int, minibatches: int, seed: int) -> list[list[int]]:
    """Return the indices of each update of a pass: equal shares in a seeded order."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    parts = min(minibatches, count)
    return [order[i::parts] for i in range(parts)]


def sample_parts(batch: Batch, minibatches: int, seed: int) -> list[list[int]]:
    """Return the sample indices of each update of a pass: equal shares of episodes, each with all its samples."""
    by_episode = samples_by_episode(batch)
    return [
        [i for episode in part for i in by_episode[episode]]
        for part in shuffled_parts(len(by_episode), minibatches, seed)
    ]


def split_batch(batch: Batch, size: int, minibatches: int, seed: int) -> tuple[list[Batch], list[list[int]]]:
    """Return (one share of the batch per rank, the sample indices of each share).

    Every rank gets a share of about equal length of every mini-batch. Weights remain those of the whole batch, so that
    losses and gradients add up over ranks.
    """
    shares = [Batch(groups=batch.groups, zero_variance_groups=batch.zero_variance_groups) for _ in range(size)]
    indices: list[list[int]] = [[] for _ in range(size)]
    for part in sample_parts(batch, minibatches, seed):
        split = balanced_shares([batch.samples[i].num_tokens for i in part], size)
        for share, share_indices, chosen in zip(shares, indices, split, strict=True):
            share.parts.append(list(range(len(share_indices), len(share_indices) + len(chosen))))
            share_indices += [part[i] for i in chosen]
    for share, share_indices in zip(shares, indices, strict=True):
        share.samples = [batch.samples[i] for i in share_indices]
        share.weights = [batch.weights[i] for i in share_indices]
    return shares, indices
