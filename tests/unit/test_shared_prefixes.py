"""Passes that compute shared prefixes once: the same log-probabilities, loss and gradients as without."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from training_for_tests import VOCABULARY, tiny_model

from agentgym_rl.training.learner import Updater
from agentgym_rl.training.microbatch import MicroBatch, micro_batches
from agentgym_rl.training.model import action_logprobs
from agentgym_rl.training.settings import OptimizerSettings
from agentgym_rl.types import Sample


def tree_samples(groups: int = 3, members: int = 6) -> list[Sample]:
    """Return groups of episodes that share a prompt and some of their turns, one pair of them equal, and a stranger."""
    rng, samples = random.Random(0), []
    for group in range(groups):
        prompt = [group, *(rng.randrange(VOCABULARY) for _ in range(20))]
        for _ in range(members):
            ids, mask = list(prompt), [False] * len(prompt)
            for _ in range(rng.randrange(1, 4)):
                action = rng.randrange(2)
                ids += [action, 3, 10 + action, 11, 12]
                mask += [True, True, False, False, False]
            samples.append(sample_of(ids, mask))
        samples.append(sample_of(samples[-1].token_ids, samples[-1].loss_mask))
    samples.append(sample_of([9, 8, 7, 6], [False, False, True, True]))
    rng.shuffle(samples)
    return samples


def sample_of(ids: list[int], mask: list[bool]) -> Sample:
    count = sum(mask)
    return Sample(list(ids), list(mask), logprobs=[0.0] * count, advantages=[(len(ids) % 5) - 1.5] * count)


def values_and_gradients(model: Any, batches: list[MicroBatch], num: int) -> tuple[list[list[float]], list[Any]]:
    """Return the log-probabilities of each sample's actions, and the gradients of a weighted sum of all."""
    model.zero_grad()
    logprobs: list[list[float]] = [[] for _ in range(num)]
    for micro in batches:
        logprobs_A, entropy_A = action_logprobs(model, micro, 1.0)
        ((logprobs_A * micro.advantages_A).sum() + 0.1 * entropy_A.sum()).backward()
        for index, values in zip(micro.indices, micro.by_row(logprobs_A), strict=True):
            logprobs[index] = values
    return logprobs, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("max_tokens", [120, 100_000])
@pytest.mark.parametrize("recomputed", [False, True])
def test_sharing_changes_neither_logprobs_nor_gradients(max_tokens: int, recomputed: bool) -> None:
    samples, model = tree_samples(), tiny_model(1).train()
    if recomputed:
        model.get_decoder().gradient_checkpointing_enable({"use_reentrant": False})
    weights = [1.0] * len(samples)
    plain = micro_batches(samples, weights, max_tokens)
    shared = micro_batches(samples, weights, max_tokens, share_prefixes=True)
    assert all(micro.shared is not None for micro in shared)
    assert sorted(i for micro in shared for i in micro.indices) == list(range(len(samples)))
    assert all(sum(micro.lengths) <= max_tokens for micro in shared)
    logprobs, gradients = values_and_gradients(model, plain, len(samples))
    shared_logprobs, shared_gradients = values_and_gradients(model, shared, len(samples))
    for expected, got in zip(logprobs, shared_logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), atol=1e-5, rtol=1e-5)
    for expected, got in zip(gradients, shared_gradients, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_every_prefix_is_computed_once() -> None:
    samples = tree_samples()
    [micro] = micro_batches(samples, [1.0] * len(samples), 100_000, share_prefixes=True)
    prefixes = {tuple(s.token_ids[:n]) for s in samples for n in range(1, len(s.token_ids) + 1)}
    assert micro.shared is not None
    assert len(micro.shared.places_U) == len(prefixes) == sum(micro.shared.own_counts)
    assert 0 in micro.shared.own_counts, "an equal episode has no token of its own"
    assert torch.equal(micro.token_ids_T[micro.shared.places_U][micro.shared.unique_T], micro.token_ids_T)


def test_samples_that_share_little_are_packed_as_always() -> None:
    samples = [sample_of([i, *range(20)], [False] * 20 + [True]) for i in range(8)]
    batches = micro_batches(samples, [1.0] * 8, 64, share_prefixes=True)
    expected = micro_batches(samples, [1.0] * 8, 64)
    assert [micro.indices for micro in batches] == [micro.indices for micro in expected]
    assert all(micro.shared is None for micro in batches)


def test_the_learner_shares_prefixes_on_a_cpu() -> None:
    samples, updater = tree_samples(), Updater(tiny_model(1), OptimizerSettings(), 1)
    assert all(micro.shared is not None for micro in updater.micro_batches(samples, [1.0] * len(samples)))
