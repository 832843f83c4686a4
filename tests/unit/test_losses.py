"""Losses against loops over plain floats, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentgym_rl.training.losses import KL_ESTIMATORS, clip, k1, k2, k3, token_truncated

LOGPROB = st.floats(-6, 0)
ROWS = st.lists(st.tuples(LOGPROB, LOGPROB, st.floats(-3, 3)), min_size=1, max_size=20)
ONE_ROW = torch.zeros(20, dtype=torch.long)


def column(rows: list[tuple[float, ...]], index: int) -> torch.Tensor:
    return torch.tensor([row[index] for row in rows], dtype=torch.float64)


@given(rows=ROWS, low=st.floats(0, 0.5), high=st.floats(0, 0.5))
def test_clipped_loss_agrees_with_a_loop(rows: list[tuple[float, ...]], low: float, high: float) -> None:
    loss, clipped = clip(column(rows, 0), column(rows, 1), column(rows, 2), ONE_ROW[: len(rows)], low, high)
    for i, (new, old, advantage) in enumerate(rows):
        ratio = math.exp(new - old)
        bounded = min(max(ratio, 1 - low), 1 + high)
        assert float(loss[i]) == pytest.approx(-min(ratio * advantage, bounded * advantage), rel=1e-9, abs=1e-12)
        # Clipped means exactly: the ratio left the interval in the direction the advantage asks for.
        moved_too_far = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
        if bool(clipped[i]) is not moved_too_far:  # only a rounding error may tell them apart
            assert bounded * advantage == pytest.approx(ratio * advantage, rel=1e-12, abs=1e-300)


def test_a_clipped_token_has_no_gradient_and_the_others_have() -> None:
    old = torch.zeros(4)
    new = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, clipped = clip(new, old, advantages, ONE_ROW[: len(new)], 0.2, 0.2)
    loss.sum().backward()
    assert clipped.tolist() == [True, False, False, True]
    expected = [0.0, math.exp(0.5), -math.exp(-0.5), 0.0]
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx(expected)


def test_the_bounds_are_separate() -> None:
    new, old = torch.tensor([math.log(1.3), math.log(0.7)]), torch.zeros(2)
    advantages = torch.tensor([1.0, -1.0])
    assert clip(new, old, advantages, ONE_ROW[: len(new)], 0.4, 0.2)[1].tolist() == [True, False]
    assert clip(new, old, advantages, ONE_ROW[: len(new)], 0.2, 0.4)[1].tolist() == [False, True]


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, clipped = clip(logprobs, logprobs.detach(), torch.tensor([0.5, -2.0]), ONE_ROW[:2], 0.2, 0.2)
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, 2.0]
    assert not clipped.any()


@given(rows=ROWS)
def test_kl_estimators_agree_with_their_formulas(rows: list[tuple[float, ...]]) -> None:
    new, reference = column(rows, 0), column(rows, 1)
    for i, (p, q, _) in enumerate(rows):
        assert float(k1(new, reference)[i]) == pytest.approx(p - q)
        assert float(k2(new, reference)[i]) == pytest.approx((p - q) ** 2 / 2)
        assert float(k3(new, reference)[i]) == pytest.approx(math.exp(q - p) - 1 - (q - p), abs=1e-9)
    assert (k3(new, reference) >= -1e-12).all()


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_estimators_in_expectation(name: str) -> None:
    """k1 and k3 estimate KL(pi || ref) without bias; summing over a whole vocabulary replaces sampling."""
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


def test_kl_of_equal_policies_is_zero() -> None:
    same = torch.tensor([-0.5, -3.0])
    assert all((estimate(same, same) == 0).all() for estimate in KL_ESTIMATORS.values())


def test_k3_stays_finite_far_from_the_reference() -> None:
    assert k3(torch.tensor([-200.0]), torch.tensor([0.0])).isfinite().all()


def test_importance_weights_are_one_when_equal_and_capped_otherwise() -> None:
    sampler = torch.log(torch.tensor([0.5, 0.5, 0.1, 1e-30]))
    learner = torch.log(torch.tensor([0.5, 0.25, 0.9, 0.9]))
    weights = token_truncated(learner, sampler, ONE_ROW[:4], 2.0)
    assert weights.tolist() == pytest.approx([1.0, 0.5, 2.0, 2.0])
    assert (token_truncated(sampler, sampler, ONE_ROW[:4], 2.0) == 1.0).all()


def test_importance_weights_are_constants() -> None:
    learner = torch.tensor([-1.0], requires_grad=True)
    assert not token_truncated(learner, torch.tensor([-2.0]), ONE_ROW[:1], 2.0).requires_grad
