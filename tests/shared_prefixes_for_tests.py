"""Samples that share prefixes, and what a model computes for them."""

from __future__ import annotations

import random
from typing import Any

from agentgym_rl.training.microbatch import MicroBatch
from agentgym_rl.training.model import action_logprobs
from agentgym_rl.types import Sample

VOCABULARY = 23
"""Token ids of the samples are smaller."""


def tree_samples(groups: int = 3, members: int = 6) -> list[Sample]:
    """Return groups of episodes that share a prompt and some turns, one pair of them equal, and an unrelated one."""
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
    return logprobs, [p.grad.clone() for p in model.parameters() if p.grad is not None]
