"""An episode weighs as one episode, however many segments it has."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from training_for_tests import Catching, group, tiny_model, varied_groups

from agentgym_rl.agent.segments import Call, segment_tokens, stitch
from agentgym_rl.training.batch import Batch, estimate, gather, sample_parts, split_batch, to_samples
from agentgym_rl.training.metrics import episode_metrics
from agentgym_rl.training.settings import OptimizerSettings, RLSettings
from agentgym_rl.types import Group, Limits, Message, StopReason, Task, Trajectory, in_order

torch.set_num_threads(1)
LIMITS = {"toy": Limits(max_turns=8, max_new_tokens=4, max_context=500)}


def split(trajectory: Trajectory) -> Trajectory:
    """Return the episode with a segment per turn, each of which has the same tokens before its reply as before."""
    messages: list[Message] = []
    for message in trajectory.messages:
        started = bool(messages) and messages[-1].role == "assistant" and bool(message.token_ids)
        last = messages[-1].segment if messages else 0
        prefix = (last, len(segment_tokens(messages, last))) if started else None
        messages.append(replace(message, segment=last + started, prefix=prefix))
    return replace(trajectory, messages=messages)


def split_groups(groups: list[Group]) -> list[Group]:
    return [replace(g, trajectories=[split(t) for t in g.trajectories]) for g in groups]


def fill(batch: Batch) -> None:
    """Give tokens the values of a critic and of models, which depend on their place in the episode alone."""
    positions: Counter[str] = Counter()
    for sample in batch.samples:
        count = len(sample.logprobs)
        order = sample.order or range(count)
        sample.values = [0.1 * (k % 7) for k in order]
        sample.old_logprobs = [-0.2 - 0.01 * k for k in order]
        sample.reference_logprobs = [-0.3 - 0.02 * k for k in order]
        positions[sample.trajectory_id] += count
        sample.last_value = 0.4


SETTINGS = {
    "grpo": {},
    "grpo-turns": {"credit": "turns"},
    "gigpo": {"credit": "anchor"},
    "rloo": {"algorithm": "rloo"},
    "reinforce++": {"algorithm": "reinforce++", "kl_in": "reward", "kl_coef": 0.1},
    "ppo": {"algorithm": "ppo", "credit": "turns"},
    "ppo-two-level": {"algorithm": "ppo", "credit": "two_level"},
    "constant": {"aggregate": "constant", "aggregate_length": 9},
    "token": {"aggregate": "token"},
    "trajectory": {"aggregate": "trajectory"},
    "penalty": {"overlong": "penalty", "overlong_buffer": 2},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_advantages_and_weights_are_those_of_the_linear_episode(name: str) -> None:
    settings = replace(RLSettings(zero_variance="keep"), **SETTINGS[name])  # type: ignore[arg-type]
    linear = gather(varied_groups(), settings, LIMITS)
    branched = gather(split_groups(varied_groups()), settings, LIMITS)
    assert len(branched.samples) > len(linear.samples)
    for batch in (linear, branched):
        fill(batch)
    if settings.algorithm == "ppo":
        missing = [True] * len(linear.episodes)  # the tails differ: they are segments here
        branched.last_observation_missing = linear.last_observation_missing = missing
    linear, branched = (estimate(b, settings, settings.kl_coef) for b in (linear, branched))
    assert [e.lengths for e in linear.episodes] == [e.lengths for e in branched.episodes]
    for episode, sample in enumerate(linear.samples):
        own = [i for i, o in enumerate(branched.episode_of_sample) if o == episode]
        parts = [branched.samples[i] for i in own]
        assert in_order(parts, "advantages") == pytest.approx(sample.advantages)
        assert in_order(parts, "returns") == pytest.approx(sample.returns)
        assert in_order(parts, "logprobs") == sample.logprobs
        assert [branched.weights[i] for i in own] == pytest.approx([linear.weights[episode]] * len(own))
        assert sum(sum(p.loss_mask) for p in parts) == sum(sample.loss_mask)


def test_episodes_weigh_the_same_however_many_segments_they_have() -> None:
    settings = RLSettings(zero_variance="keep", aggregate="trajectory")
    linear, branched = group(1, [0.0, 1.0], turns=4).trajectories
    batch = estimate(gather([Group(linear.task, [linear, split(branched)])], settings), settings)
    assert batch.episode_of_sample == [0, 1, 1, 1, 1]
    weights = [0.0, 0.0]
    for episode, sample, weight in zip(batch.episode_of_sample, batch.samples, batch.weights, strict=True):
        weights[episode] += weight * sum(sample.loss_mask)
    assert weights == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_gradient_of_segments_with_the_whole_history_is_the_linear_one(minibatches: int) -> None:
    settings = RLSettings(kl_coef=0.0, minibatches=minibatches, optimizer=OptimizerSettings(lr=1e-3))
    played = [group(seed, [0.0, 1.0, 0.5]) for seed in range(3)]
    model = tiny_model()
    gradients = []
    for groups in (played, split_groups(played)):
        learner = Catching(copy.deepcopy(model), settings, 1.0)
        learner.learn(estimate(gather(groups, settings), settings), seed=1)
        gradients.append(learner.gradients)
    for expected, found in zip(*gradients, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-3)


def test_updates_and_ranks_get_every_segment_once() -> None:
    settings = RLSettings(zero_variance="keep", minibatches=3)
    batch = estimate(gather(split_groups(varied_groups()), settings), settings)
    parts = sample_parts(batch, 3, 5)
    assert sorted(i for part in parts for i in part) == list(range(len(batch.samples)))
    episodes = [{batch.episode_of_sample[i] for i in part} for part in parts]
    assert not episodes[0] & episodes[1]
    assert not episodes[1] & episodes[2]
    _, indices = split_batch(batch, 2, 3, 5)
    assert sorted(i for share in indices for i in share) == list(range(len(batch.samples)))


def test_a_segment_without_a_reply_is_no_sample_and_its_state_is_missing() -> None:
    settings = RLSettings(algorithm="ppo", credit="turns")
    [linear] = group(1, [1.0]).trajectories
    linear.messages[-1].token_ids = [1, 2, 3]
    branched = split(linear)
    assert branched.num_segments == 1 + linear.num_turns
    assert len(to_samples(branched, keep_tail=True)) == linear.num_turns
    missing = [gather([Group(linear.task, [t])], settings).last_observation_missing for t in (linear, branched)]
    assert missing == [[False], [True]]


@pytest.mark.parametrize(("prompts", "last"), [(([1], [9], [1, 2, 3]), 0), (([1], [1, 2, 3], [9]), 1)])
def test_a_truncated_episode_is_valued_in_the_segment_that_it_ended_in(
    prompts: tuple[list[int], ...], last: int
) -> None:
    settings = RLSettings(algorithm="ppo", credit="turns")
    messages = stitch([Call(prompt_ids, [2], [-0.5]) for prompt_ids in prompts])
    played = Trajectory("t", Task("toy", 0), messages, [0.0] * 3, [{}] * 3, StopReason.MAX_TURNS, horizon=3)
    batch = gather([Group(played.task, [played])], settings)
    assert len(batch.samples) == 2
    fill(batch)
    for k, sample in enumerate(batch.samples):
        sample.last_value = 10.0 + k
    assert estimate(batch, settings).episodes[0].last_value == 10.0 + last


def test_metrics_count_segments_only_if_there_are_several() -> None:
    played = [group(1, [0.0, 1.0])]
    assert "segments/per_episode" not in episode_metrics(played)
    metrics: dict[str, Any] = episode_metrics(split_groups(played))
    turns = [t.num_turns for t in played[0].trajectories]
    assert metrics["segments/per_episode"] == sum(turns) / 2
    assert metrics["tokens/sampled"] == episode_metrics(played)["tokens/sampled"]
