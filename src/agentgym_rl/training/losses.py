"""Losses over the action tokens of a batch: pure functions of flat tensors.

Shapes: A action tokens. There are no masks here: what was not sampled never gets this far (see batch.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def clipped_policy_loss(
    logprobs_A: Tensor, old_logprobs_A: Tensor, advantages_A: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = pi / pi_old, and where the clip took the gradient away.

    Schulman et al. 2017 (arXiv 1707.06347).
    """
    ratio_A = torch.exp(logprobs_A - old_logprobs_A)
    clipped_A = ratio_A.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_A = -torch.minimum(ratio_A * advantages_A, clipped_A * advantages_A)
    return loss_A, (clipped_A * advantages_A < ratio_A * advantages_A).detach()


def k1(logprobs_A: Tensor, reference_A: Tensor) -> Tensor:
    """log(pi / ref): unbiased for KL(pi || ref), may be negative.

    Its own gradient is zero in expectation and would hold nothing, so as a loss it has the gradient of k2.
    """
    pull_A = k2(logprobs_A, reference_A)
    return pull_A + (logprobs_A - reference_A - pull_A).detach()


def k2(logprobs_A: Tensor, reference_A: Tensor) -> Tensor:
    """log(pi / ref)^2 / 2: biased, its gradient is that of KL(pi || ref) on samples from pi."""
    return 0.5 * (logprobs_A - reference_A) ** 2


def k3(logprobs_A: Tensor, reference_A: Tensor) -> Tensor:
    """ref / pi - 1 - log(ref / pi): unbiased, never negative. Schulman 2020, 'Approximating KL divergence'."""
    difference_A = (reference_A - logprobs_A).clamp(-20.0, 20.0)
    return torch.exp(difference_A) - 1.0 - difference_A


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def importance_weights(learner_A: Tensor, sampler_A: Tensor, cap: float) -> Tensor:
    """min(pi_learner / pi_sampler, cap), a constant: corrects for tokens drawn by a slightly different policy.

    Truncated importance sampling (Yao et al. 2025). Equal policies give exactly 1.
    """
    return torch.exp((learner_A - sampler_A).detach().clamp(max=20.0)).clamp(max=cap)
