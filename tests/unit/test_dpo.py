"""DPO: pairs and losses against slow versions, which tokens the loss sees, and independence of micro-batches."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_for_tests import groups, slow_logprobs, tiny_model, trajectory

from agentgym_rl.errors import ConfigError
from agentgym_rl.training.device import packed
from agentgym_rl.training.dpo import (
    DPO,
    Preference,
    build_pairs,
    dpo_loss,
    make_preferences,
    pair_batches,
    sequence_logprobs,
)
from agentgym_rl.training.offline_settings import DPOSettings
from agentgym_rl.training.settings import OptimizerSettings
from agentgym_rl.types import Group, Sample, StopReason, Task, Trajectory

STILL = DPOSettings(beta=0.3, optimizer=OptimizerSettings(lr=0.0, max_grad_norm=0.0), sample_groups=1)
torch.set_num_threads(1)


def sample(seed: int) -> Sample:
    """Return an episode of 1 to 4 turns of different lengths."""
    episode = trajectory(seed)
    return Sample(episode.token_ids, episode.loss_mask, trajectory_id=episode.id)


def preferences(seed: int, count: int) -> list[Preference]:
    """Return pairs whose reference is another model than the learner."""
    return make_preferences(
        tiny_model(7), [(sample(100 * seed + 2 * i), sample(100 * seed + 2 * i + 1)) for i in range(count)], 64
    )


def gradients(model: Any, pairs: list[Preference], changed: DPOSettings = STILL) -> tuple[dict[str, float], list[Any]]:
    """Return metrics and gradients of one update, read before the optimizer clears them."""
    caught: list[Any] = []
    trainer = DPO(model, pairs, changed, 0)
    hook = trainer._optimizer.register_step_pre_hook(
        lambda *_: caught.extend(p.grad.clone() for p in model.parameters())
    )
    metrics = trainer.update_on(pairs)
    hook.remove()
    return metrics, caught


# --- the loss --------------------------------------------------------------------------------------------------------


def slow_loss(model: Any, pair: Preference, s: DPOSettings) -> tuple[float, float, float]:
    """Return (loss, chosen reward, rejected reward), computed token by token in numpy."""
    rewards = []
    for half, reference in ((pair.chosen, pair.chosen_reference), (pair.rejected, pair.rejected_reference)):
        total, count = 0.0, 0
        for place, logprob in enumerate(slow_logprobs(model, half.token_ids), 1):
            if half.loss_mask[place]:
                total += logprob.item()
                count += 1
        divisor = count if s.normalize_length else 1
        rewards.append(s.beta * (total - reference) / divisor)
    sigmoid = 1.0 / (1.0 + numpy.exp(-(rewards[0] - rewards[1])))
    loss = -(1 - s.label_smoothing) * numpy.log(sigmoid) - s.label_smoothing * numpy.log(1.0 - sigmoid)
    return float(loss), rewards[0], rewards[1]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    count=st.integers(1, 5),
    smoothing=st.sampled_from([0.0, 0.1]),
    normalize=st.booleans(),
    beta=st.sampled_from([0.1, 0.5]),
)
def test_an_update_is_the_mean_of_the_slow_loss(
    seed: int, count: int, smoothing: float, normalize: bool, beta: float
) -> None:
    chosen = replace(STILL, label_smoothing=smoothing, normalize_length=normalize, beta=beta)
    pairs = preferences(seed, count)
    metrics, _ = gradients(tiny_model(), pairs, chosen)
    expected = [slow_loss(tiny_model(), pair, chosen) for pair in pairs]
    assert metrics["loss"] == pytest.approx(numpy.mean([e[0] for e in expected]), rel=1e-4, abs=1e-6)
    assert metrics["dpo/chosen_reward"] == pytest.approx(numpy.mean([e[1] for e in expected]), rel=1e-4, abs=1e-5)
    assert metrics["dpo/rejected_reward"] == pytest.approx(numpy.mean([e[2] for e in expected]), rel=1e-4, abs=1e-5)
    assert metrics["dpo/margin"] == pytest.approx(numpy.mean([e[1] - e[2] for e in expected]), rel=1e-3, abs=1e-5)
    assert metrics["dpo/accuracy"] == pytest.approx(numpy.mean([e[1] > e[2] for e in expected]))


def test_a_model_that_is_its_own_reference_has_the_loss_log_two() -> None:
    model = tiny_model()
    pairs = make_preferences(model, [(sample(1), sample(2)), (sample(3), sample(4))], 64)
    metrics, _ = gradients(model, pairs)
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert metrics["dpo/margin"] == pytest.approx(0, abs=1e-4)


def test_gradients_are_those_of_the_formula_by_finite_differences() -> None:
    policy = torch.tensor([[-3.0, -2.0], [-1.0, -4.0]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-2.5, -2.5], [-2.0, -2.0]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda p: dpo_loss(p, reference, 0.5, 0.1)[0], policy)


def test_every_turn_counts_and_observations_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """By autograd through the last hidden states: only those that predict a sampled token have a gradient."""
    monkeypatch.setattr(packed, "MAX_READ_SHARE", 0.0)  # the last layer computes the states of all tokens
    pair = preferences(3, 1)[0]
    model = tiny_model()
    seen: list[torch.Tensor] = []

    def keep(module: object, arguments: object, output: torch.Tensor) -> None:
        output.retain_grad()
        seen.append(output)

    trainer = DPO(model, [pair], STILL, 0)
    hook = model.model.norm.register_forward_hook(keep)
    trainer.update_on([pair])
    hook.remove()
    (hidden,) = seen
    assert hidden.grad is not None
    lengths = sorted((len(half.token_ids) for half in (pair.chosen, pair.rejected)), reverse=True)
    rows = [part.abs().sum(-1) > 0 for part in hidden.grad.split(lengths)]
    expected = []
    for half in (pair.chosen, pair.rejected):
        expected.append([*half.loss_mask[1:], False])
        turns = sum(a and not b for a, b in zip(half.loss_mask, [*half.loss_mask[1:], False], strict=True))
        assert turns >= 1
    assert sorted(row.tolist() for row in rows) == sorted(expected)
    assert max(sum(a != b for a, b in pairwise(row)) for row in expected) > 2  # several turns


@pytest.mark.parametrize("max_tokens", [1, 40, 100_000])
def test_results_do_not_depend_on_micro_batches_or_order(max_tokens: int) -> None:
    pairs = preferences(5, 6)
    whole, whole_gradients = gradients(tiny_model(), pairs)
    split = replace(STILL, optimizer=replace(STILL.optimizer, micro_batch_tokens=max_tokens))
    shuffled = random.Random(1).sample(pairs, len(pairs))
    metrics, split_gradients = gradients(tiny_model(), shuffled, split)
    assert metrics == pytest.approx(whole, rel=1e-4, abs=1e-6)
    for actual, expected in zip(split_gradients, whole_gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_a_micro_batch_holds_whole_pairs_and_as_many_as_fit() -> None:
    pairs = preferences(6, 7)
    longest = max(len(half.token_ids) for p in pairs for half in (p.chosen, p.rejected))
    batches = pair_batches(pairs, 4 * longest, "cpu")
    assert 1 < len(batches) < len(pairs)
    for micro, chunk in batches:
        assert sorted(micro.indices) == list(range(2 * len(chunk)))
        assert len(micro.token_ids_T) <= 4 * longest
    assert sum(len(chunk) for _, chunk in batches) == len(pairs)
    assert len(pair_batches(pairs, 1, "cpu")) == len(pairs)


def test_the_reference_is_computed_once_and_is_right() -> None:
    model, samples = tiny_model(7), [sample(i) for i in range(5)]
    logprobs = sequence_logprobs(model, samples, 30)
    for value, example in zip(logprobs, samples, strict=True):
        slow = slow_logprobs(model, example.token_ids)
        assert value == pytest.approx(
            sum(p.item() for p, on in zip(slow, example.loss_mask[1:], strict=True) if on), abs=1e-4
        )


# --- training --------------------------------------------------------------------------------------------------------


def test_it_learns_to_prefer_the_chosen_half() -> None:
    model = tiny_model()
    pairs = make_preferences(model, [(sample(2 * i), sample(2 * i + 1)) for i in range(6)], 1000)
    chosen = DPOSettings(beta=0.5, epochs=15, batch_size=3, optimizer=OptimizerSettings(lr=3e-3), sample_groups=1)
    trainer = DPO(model, pairs, chosen, 0)
    rows = [trainer.step() for _ in range(trainer.total)]
    assert trainer.total == 30
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert rows[-1]["loss"] < 0.1
    assert rows[-1]["dpo/accuracy"] == 1.0


def test_a_restored_trainer_continues_exactly() -> None:
    pairs = preferences(8, 5)
    chosen = replace(STILL, epochs=3, batch_size=2, optimizer=OptimizerSettings(lr=1e-2))
    alone_model = tiny_model()
    alone = DPO(alone_model, pairs, chosen, "s")
    expected = [alone.step() for _ in range(alone.total)]
    first_model = tiny_model()
    first = DPO(first_model, pairs, chosen, "s")
    resumed = [first.step() for _ in range(4)]
    second = DPO(first_model, pairs, chosen, "s")
    second.restore(copy.deepcopy(first.state()))
    resumed += [second.step() for _ in range(second.total - second.updates)]
    assert resumed == expected


def test_no_pairs_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one pair"):
        DPO(tiny_model(), [], STILL, 0)


# --- pairs -----------------------------------------------------------------------------------------------------------


def slow_pairs(played_groups: list[Group], min_gap: float) -> set[tuple[str, str]]:
    """Return all pairs, from every two episodes of every two groups."""
    pairs = set()
    for first in played_groups:
        for other in played_groups:
            for a in first.trajectories:
                for b in other.trajectories:
                    usable = a.stop is not StopReason.ERROR and b.stop is not StopReason.ERROR
                    if usable and a.task == b.task and a.reward - b.reward >= min_gap - 1e-9:
                        pairs.add((a.id, b.id))
    return pairs


def same_item(played_groups: list[Group]) -> list[Group]:
    """Give every other group the item of the first group."""
    for group in played_groups[::2]:
        group.task = played_groups[0].task
        for episode in group.trajectories:
            episode.task = group.task
    for group in played_groups[1::2]:
        for episode in group.trajectories:
            episode.task = group.task
    return played_groups


@settings(max_examples=60, deadline=None)
@given(played_groups=groups().map(same_item), min_gap=st.sampled_from([0.25, 0.5, 1.0]), seed=st.integers(0, 5))
def test_pairs_are_complete_or_a_limited_subset(played_groups: list[Group], min_gap: float, seed: int) -> None:
    everything = slow_pairs(played_groups, min_gap)
    pairs = build_pairs(played_groups, replace(STILL, min_gap=min_gap, pairs_per_item=1000), seed)
    assert {(a.id, b.id) for a, b in pairs} == everything
    assert len(pairs) == len(everything)
    few = build_pairs(played_groups, replace(STILL, min_gap=min_gap, pairs_per_item=2), seed)
    by_item: dict[Task, list[tuple[str, str]]] = {}
    for a, b in few:
        by_item.setdefault(a.task, []).append((a.id, b.id))
    whole = {task: sum(a.task == task for a, _ in pairs) for task in {a.task for a, _ in pairs}}
    assert {task: len(pairs) for task, pairs in by_item.items()} == {task: min(2, n) for task, n in whole.items()}
    assert {pair for pairs in by_item.values() for pair in pairs} <= everything
    assert len({pair for pairs in by_item.values() for pair in pairs}) == len(few)


def test_pairs_depend_on_the_seed_and_not_on_the_order() -> None:
    def episodes() -> list[Trajectory]:
        episodes = [trajectory(i, reward=float(i % 2)) for i in range(12)]
        for episode in episodes:
            episode.task = Task("toy", 0)
        return episodes

    def ids(seed: int, trajectories: list[Trajectory]) -> list[tuple[str, str]]:
        return [(a.id, b.id) for a, b in build_pairs([Group(Task("toy", 0), trajectories)], STILL, seed)]

    assert ids(0, episodes()) == ids(0, episodes()[::-1])
    assert ids(0, episodes()) == [
        (a.id, b.id) for a, b in build_pairs([Group(Task("toy", 0), [t]) for t in episodes()], STILL, 0)
    ]
    assert len({tuple(ids(seed, episodes())) for seed in range(5)}) > 1


def test_the_endings_of_worse_episodes_take_turns() -> None:
    """Without turns a common ending displaces the others."""
    endings = [StopReason.MAX_TURNS] * 30 + [StopReason.DONE, StopReason.LENGTH]
    episodes = [trajectory(i, reward=0.0, stop=stop) for i, stop in enumerate(endings)]
    group = Group(Task("toy", 0), [*episodes, trajectory(99, reward=1.0)])
    for count, expected in ((1, {"done"}), (3, {"done", "length", "max_turns"}), (5, {"done", "length", "max_turns"})):
        for seed in range(5):
            pairs = build_pairs([group], replace(STILL, pairs_per_item=count), seed, spread_endings=True)
            assert len({worse.id for _, worse in pairs}) == len(pairs) == count
            assert {str(worse.stop) for _, worse in pairs} == expected
            reverse = Group(group.task, group.trajectories[::-1])
            assert build_pairs([reverse], replace(STILL, pairs_per_item=count), seed, spread_endings=True) == pairs
