"""Losses against loops over plain floats, values and gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from training_for_tests import few

from agentgym_rl.training.losses import (
    CORRECTIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    clip,
    k3,
    sequence_mask,
    token_truncated,
    value_loss,
)
from agentgym_rl.training.settings import RLSettings


@dataclass
class Tokens:
    """Action tokens of several trajectories, in any order."""

    new: list[float]
    old: list[float]
    advantage: list[float]
    row: list[int]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        new, old, advantage = (torch.tensor(x, dtype=torch.float64) for x in (self.new, self.old, self.advantage))
        return new.requires_grad_(), old, advantage, torch.tensor(self.row)

    def of(self, row: int) -> list[int]:
        return [i for i, r in enumerate(self.row) if r == row]

    def mean_log_ratio(self, row: int) -> float:
        return float(numpy.mean([self.new[i] - self.old[i] for i in self.of(row)]))


@st.composite
def tokens(draw: st.DrawFn) -> Tokens:
    rows = draw(st.permutations([r for r in range(draw(st.integers(1, 4))) for _ in range(draw(st.integers(1, 5)))]))
    number = st.floats(-3, 3).map(lambda x: round(x, 3))

    def draw_list(strategy: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(strategy, min_size=len(rows), max_size=len(rows)))

    old = draw_list(st.floats(-6, -0.5))
    drift = draw_list(st.one_of(st.floats(-0.4, 0.4), st.floats(-3, 3)))
    return Tokens([o + d for o, d in zip(old, drift, strict=True)], old, draw_list(number), list(rows))


LOW, HIGH = st.sampled_from([0.0, 0.2, 0.6, 1.0]), st.sampled_from([0.0, 0.2, 0.28, 4.0])


def clipped_by_hand(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float, bool]:
    """Return (loss, its derivative with respect to the ratio, whether it was clipped)."""
    if (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low):
        return -min(max(ratio, 1 - low), 1 + high) * advantage, 0.0, True
    return -ratio * advantage, -advantage, False


@few(60)
@given(drawn=tokens(), low=LOW, high=HIGH)
def test_clip_agrees_with_a_loop_in_value_and_gradient(drawn: Tokens, low: float, high: float) -> None:
    new, old, advantages, rows = drawn.tensors()
    loss, clipped = clip(new, old, advantages, rows, low, high)
    loss.sum().backward()
    assert new.grad is not None
    for i in range(len(drawn.row)):
        ratio = math.exp(drawn.new[i] - drawn.old[i])
        value, slope, bound = clipped_by_hand(ratio, drawn.advantage[i], low, high)
        assert loss[i].item() == pytest.approx(value, rel=1e-9, abs=1e-12)
        if min(abs(ratio - 1 - high), abs(ratio - 1 + low)) > 1e-9:  # at the very edge either is right
            assert bool(clipped[i]) is bound
            assert float(new.grad[i]) == pytest.approx(slope * ratio, rel=1e-9, abs=1e-12)


@few(60)
@given(drawn=tokens(), low=LOW, high=HIGH)
def test_gspo_has_one_ratio_per_trajectory_and_the_sequence_gradient(drawn: Tokens, low: float, high: float) -> None:
    """Sequence form: mean over trajectories of -min(s A, clip(s) A), s = exp(mean log ratio), one A per trajectory."""
    count = max(drawn.row) + 1
    drawn.advantage = [drawn.advantage[drawn.of(r)[0]] for r in drawn.row]
    new, old, advantages, rows = drawn.tensors()
    loss, clipped = POLICY_LOSSES["gspo"](new, old, advantages, rows, low, high)
    weights = torch.tensor([1 / (count * len(drawn.of(r))) for r in drawn.row], dtype=torch.float64)
    (weights * loss).sum().backward()
    assert new.grad is not None
    total = 0.0
    for row in range(count):
        members = drawn.of(row)
        s = math.exp(drawn.mean_log_ratio(row))
        value, slope, bound = clipped_by_hand(s, drawn.advantage[members[0]], low, high)
        total += value / count
        if min(abs(s - 1 - high), abs(s - 1 + low)) < 1e-9:
            continue
        for i in members:  # ds / d log pi = s / length
            assert float(new.grad[i]) == pytest.approx(slope * s / len(members) / count, rel=1e-9, abs=1e-12)
            assert bool(clipped[i]) is bound
    assert (weights * loss).sum().item() == pytest.approx(total, rel=1e-9, abs=1e-12)


@few(60)
@given(drawn=tokens(), low=LOW, high=HIGH)
def test_cispo_bounds_the_weight_and_loses_no_gradient(drawn: Tokens, low: float, high: float) -> None:
    new, old, advantages, rows = drawn.tensors()
    loss, clipped = POLICY_LOSSES["cispo"](new, old, advantages, rows, low, high)
    loss.sum().backward()
    assert new.grad is not None
    for i, advantage in enumerate(drawn.advantage):
        ratio = math.exp(drawn.new[i] - drawn.old[i])
        weight = min(max(ratio, 1 - low), 1 + high)
        assert loss[i].item() == pytest.approx(-weight * advantage * drawn.new[i], rel=1e-9, abs=1e-12)
        assert float(new.grad[i]) == pytest.approx(-weight * advantage, rel=1e-9, abs=1e-12)
        if abs(ratio - weight) > 1e-9:
            assert bool(clipped[i])


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([0.5, -2.0, 1.0])
    rows = torch.tensor([0, 0, 1])
    loss, clipped = POLICY_LOSSES[name](logprobs, logprobs.detach(), advantages, rows, 0.2, 0.2)
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, 2.0, -1.0]
    assert not clipped.any()


def test_the_bounds_are_separate() -> None:
    new, old = torch.tensor([math.log(1.3), math.log(0.7)]), torch.zeros(2)
    advantages, rows = torch.tensor([1.0, -1.0]), torch.tensor([0, 0])
    assert clip(new, old, advantages, rows, 0.4, 0.2)[1].tolist() == [True, False]
    assert clip(new, old, advantages, rows, 0.2, 0.4)[1].tolist() == [False, True]


@few(60)
@given(
    values=st.lists(st.tuples(*[st.floats(-3, 3).map(lambda x: round(x, 2))] * 3), min_size=1, max_size=6),
    bound=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_value_loss_agrees_with_a_loop_in_value_and_gradient(
    values: list[tuple[float, float, float]], bound: float
) -> None:
    value, old, target = (torch.tensor(column, dtype=torch.float64) for column in zip(*values, strict=True))
    value.requires_grad_()
    loss = value_loss(value, old, target, bound)
    loss.sum().backward()
    assert value.grad is not None
    for i, (v, o, g) in enumerate(values):
        near = min(max(v, o - bound), o + bound) if bound else v
        far_error, near_error = (v - g) ** 2, (near - g) ** 2
        assert loss[i].item() == pytest.approx(0.5 * max(far_error, near_error), abs=1e-9)
        if abs(far_error - near_error) > 1e-9:
            # If the clipped value has the larger error, the gradient is 0: the value has moved far enough.
            assert float(value.grad[i]) == pytest.approx(v - g if far_error > near_error else 0.0, abs=1e-9)
        elif not bound or abs(v - o) < bound * (1 - 1e-6):  # at the bound itself rounding decides
            assert float(value.grad[i]) == pytest.approx(v - g, abs=1e-9)


@few(60)
@given(drawn=tokens())
def test_kl_estimators_agree_with_their_formulas_in_value_and_gradient(drawn: Tokens) -> None:
    formulas = {
        "k1": lambda p, q: (p - q, p - q),
        "k2": lambda p, q: ((p - q) ** 2 / 2, p - q),
        "k3": lambda p, q: (math.exp(q - p) - 1 - (q - p), 1 - math.exp(q - p)),
    }
    for name, formula in formulas.items():
        new, reference, _, _ = drawn.tensors()
        estimated = KL_ESTIMATORS[name](new, reference)
        estimated.sum().backward()
        assert new.grad is not None
        for i, (p, q) in enumerate(zip(drawn.new, drawn.old, strict=True)):
            value, slope = formula(p, q)
            assert estimated[i].item() == pytest.approx(value, abs=1e-9)
            assert float(new.grad[i]) == pytest.approx(slope, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_estimators_in_expectation(name: str) -> None:
    """k1 and k3 estimate KL(pi || ref) without bias; a sum over the vocabulary replaces sampling."""
    torch.manual_seed(1)
    logits = torch.randn(12, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(12, dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    probabilities = logprobs.detach().exp()
    true_kl = (logprobs.exp() * (logprobs - reference)).sum()
    estimate = (probabilities * KL_ESTIMATORS[name](logprobs, reference)).sum()
    (true_gradient,) = torch.autograd.grad(true_kl, logits, retain_graph=True)
    (gradient,) = torch.autograd.grad(estimate, logits)
    if name != "k2":
        assert estimate.item() == pytest.approx(true_kl.item())
    if name in ("k1", "k2"):
        torch.testing.assert_close(gradient, true_gradient)


def test_kl_of_equal_policies_is_zero_and_k3_stays_finite_far_away() -> None:
    same = torch.tensor([-0.5, -3.0])
    assert all((estimate(same, same) == 0).all() for estimate in KL_ESTIMATORS.values())
    assert k3(torch.tensor([-200.0]), torch.tensor([0.0])).isfinite().all()


@few(60)
@given(
    drawn=tokens(),
    cap=st.sampled_from([1.0, 1.5, 2.0, 10.0]),
    bounds=st.sampled_from([(0.98, 1.02), (0.5, 1.5), (1.0, 3.0)]),
)
def test_corrections_agree_with_a_loop_without_gradient(drawn: Tokens, cap: float, bounds: tuple[float, float]) -> None:
    learner, sampler, _, rows = drawn.tensors()
    low, high = bounds
    settings = RLSettings(importance_cap=cap, sequence_mask_low=low, sequence_mask_high=high)
    by_token, by_sequence = (CORRECTIONS[name](learner, sampler, rows, settings) for name in ("token", "sequence_mask"))
    assert not by_token.requires_grad
    assert not by_sequence.requires_grad
    for i, row in enumerate(drawn.row):
        assert float(by_token[i]) == pytest.approx(min(math.exp(drawn.new[i] - drawn.old[i]), cap), rel=1e-9)
        mean = math.exp(drawn.mean_log_ratio(row))
        if min(abs(mean - low), abs(mean - high)) > 1e-9:
            assert float(by_sequence[i]) == (float(by_token[i]) if low <= mean <= high else 0.0)


def test_a_sequence_far_off_in_either_direction_is_masked_by_default() -> None:
    """2,000 tokens, 1,380 nats apart: less than a factor of two per token."""
    rows = torch.arange(4).repeat_interleave(2000)
    nats = torch.tensor([1380.0, -1380.0, 20.0, 0.0])[rows] / 2000
    sampler = torch.full((8000,), -1.0)
    weights = sequence_mask(sampler + nats, sampler, rows, RLSettings()).view(4, 2000)
    assert weights[:2].eq(0).all()
    torch.testing.assert_close(weights[2:], nats.exp().view(4, 2000)[2:])


def test_equal_policies_need_no_correction_and_a_vanishing_sampler_is_capped() -> None:
    sampler, rows = torch.log(torch.tensor([0.5, 0.1, 1e-30])), torch.tensor([0, 0, 1])
    for correction in CORRECTIONS.values():
        assert (correction(sampler, sampler, rows, RLSettings(importance_cap=1.0)) == 1.0).all()
    wide = RLSettings(sequence_mask_low=0.2, sequence_mask_high=5.0)
    assert token_truncated(torch.zeros(3), sampler, rows, wide).tolist() == [2.0, 2.0, 2.0]
    assert sequence_mask(torch.zeros(3), sampler, rows, wide).tolist() == [2.0, 2.0, 0.0]
