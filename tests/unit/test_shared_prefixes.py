"""Passes that compute shared prefixes once: the same log-probabilities, loss and gradients as without."""

from __future__ import annotations

import pytest
import torch
from shared_prefixes_for_tests import sample_of, tree_samples, values_and_gradients
from training_for_tests import tiny_model

from agentgym_rl.training.device.packed import can_share_prefixes
from agentgym_rl.training.learner import Updater
from agentgym_rl.training.microbatch import micro_batches, own_lengths
from agentgym_rl.training.settings import OptimizerSettings


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
    repeated = len(samples) - len({tuple(s.token_ids) for s in samples})
    assert repeated > 0, "the last token of an episode that equals another is its own"
    assert len(micro.shared.places_U) == len(prefixes) + repeated == sum(micro.shared.own_counts)
    assert min(micro.shared.own_counts) == 1
    assert torch.equal(micro.token_ids_T[micro.shared.places_U][micro.shared.unique_T], micro.token_ids_T)


@pytest.mark.parametrize("common", [0, 1, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("rest", [1, 64, 100])
def test_own_tokens_follow_the_longest_common_prefix(common: int, rest: int) -> None:
    first, second = ([7] * common + [own] * rest for own in (1, 2))
    samples = [sample_of(ids, [False] * len(ids)) for ids in (first, second, [*second, 3], second)]
    assert own_lengths(samples) == [common + rest, rest, 1, 1]


def test_samples_that_share_little_are_packed_as_always() -> None:
    samples = [sample_of([i, *range(20)], [False] * 20 + [True]) for i in range(8)]
    batches = micro_batches(samples, [1.0] * 8, 64, share_prefixes=True)
    expected = micro_batches(samples, [1.0] * 8, 64)
    assert [micro.indices for micro in batches] == [micro.indices for micro in expected]
    assert all(micro.shared is None for micro in batches)


@pytest.mark.parametrize(("dtype", "shares"), [(torch.float32, False), (torch.bfloat16, True)])
def test_only_half_precision_shares_prefixes_on_cuda_wherever_parameters_are(dtype: torch.dtype, shares: bool) -> None:
    decoder = tiny_model(1).to(dtype).get_decoder()
    assert can_share_prefixes(decoder, torch.device("cuda")) == shares
    assert can_share_prefixes(decoder, torch.device("cpu"))


def test_the_learner_shares_prefixes_on_a_cpu() -> None:
    samples, updater = tree_samples(), Updater(tiny_model(1), OptimizerSettings(), 1)
    assert all(micro.shared is not None for micro in updater.micro_batches(samples, [1.0] * len(samples)))
