"""Losses over the action tokens of a batch: pure functions of flat tensors.

Shapes: A action tokens; rows_A is the trajectory of each. There are no masks, because micro-batches hold action tokens
only (see microbatch.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from agentgym_rl.training.settings import RLSettings

PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]
"""(logprobs_A, old_logprobs_A, advantages_A, rows_A, clip_low, clip_high) -> (loss_A, whether each was clipped)."""


def clip(
    logprobs_A: Tensor, old_A: Tensor, advantages_A: Tensor, rows_A: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return -min(r A, clip(r, 1 - low, 1 + high) A) with r = pi / pi_old of each token.

    Schulman et al. 2017 (arXiv 1707.06347); high > low is DAPO's clip-higher, Yu et al. 2025 (arXiv 2503.14476).
    """
    return _clipped(torch.exp(logprobs_A - old_A), advantages_A, clip_low, clip_high)


def gspo(
    logprobs_A: Tensor, old_A: Tensor, advantages_A: Tensor, rows_A: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return `clip`'s loss with one ratio for all tokens of a trajectory: s = exp(mean log r), over all its turns.

    The token form, s * pi / sg(pi), takes an advantage per token. If they are equal it has the gradient of the
    sequence form. The published clip range is about 3e-4. Zheng et al. 2025 (arXiv 2507.18071).
    """
    ratio_A = sequence_means(logprobs_A - old_A, rows_A).detach().exp() * torch.exp(logprobs_A - logprobs_A.detach())
    return _clipped(ratio_A, advantages_A, clip_low, clip_high)


def cispo(
    logprobs_A: Tensor, old_A: Tensor, advantages_A: Tensor, rows_A: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return -sg(clip(r, 1 - low, 1 + high)) A log pi, which bounds a token's weight but keeps its gradient.

    MiniMax 2025 (arXiv 2506.13585), which sets no lower bound (clip_low = 1).
    """
    ratio_A = torch.exp(logprobs_A - old_A).detach()
    weight_A = ratio_A.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight_A * advantages_A * logprobs_A, weight_A != ratio_A


POLICY_LOSSES: dict[str, PolicyLoss] = {"clip": clip, "gspo": gspo, "cispo": cispo}


def value_loss(values_A: Tensor, old_values_A: Tensor, returns_A: Tensor, bound: float) -> Tensor:
    """Return max((V - G)^2, (clip(V, V_old +- bound) - G)^2) / 2, as in PPO's code. A bound of 0 means none."""
    error_A = (values_A - returns_A) ** 2
    if bound:
        clipped_A = old_values_A + (values_A - old_values_A).clamp(-bound, bound)
        error_A = torch.maximum(error_A, (clipped_A - returns_A) ** 2)
    return 0.5 * error_A


def k1(logprobs_A: Tensor, reference_A: Tensor) -> Tensor:
    """Return log(pi / ref): unbiased for KL(pi || ref), may be negative.

    Its own gradient is zero in expectation, so it uses the gradient of k2.
    """
    k2_A = k2(logprobs_A, reference_A)
    return k2_A + (logprobs_A - reference_A - k2_A).detach()


def k2(logprobs_A: Tensor, reference_A: Tensor) -> Tensor:
    """Return log(pi / ref)^2 / 2: biased, with the gradient of KL(pi || ref) on samples from pi."""
    return 0.5 * (logprobs_A - reference_A) ** 2


def k3(logprobs_A: Tensor, reference_A: Tensor) -> Tensor:
    """Return ref / pi - 1 - log(ref / pi): unbiased, never negative. Schulman 2020, 'Approximating KL divergence'."""
    difference_A = (reference_A - logprobs_A).clamp(-20.0, 20.0)
    return torch.exp(difference_A) - 1.0 - difference_A


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}

Correction = Callable[[Tensor, Tensor, Tensor, RLSettings], Tensor]
"""(learner's logprobs_A, sampler's logprobs_A, rows_A, settings) -> weights_A without gradient; 1 if both agree."""


def token_truncated(learner_A: Tensor, sampler_A: Tensor, rows_A: Tensor, settings: RLSettings) -> Tensor:
    """Return min(pi_learner / pi_sampler, importance_cap): truncated importance sampling, Yao et al. 2025."""
    return torch.exp((learner_A - sampler_A).detach().clamp(max=20.0)).clamp(max=settings.importance_cap)


def sequence_mask(learner_A: Tensor, sampler_A: Tensor, rows_A: Tensor, settings: RLSettings) -> Tensor:
    """Return `token_truncated`, but 0 if a trajectory's exp(mean log ratio) is outside its bounds.

    Geometric rejection, Liu et al. 2025, 'When Speed Kills Stability'.
    """
    mean_A = sequence_means((learner_A - sampler_A).detach(), rows_A).exp()
    kept_A = (mean_A >= settings.sequence_mask_low) & (mean_A <= settings.sequence_mask_high)
    return token_truncated(learner_A, sampler_A, rows_A, settings) * kept_A


CORRECTIONS: dict[str, Correction] = {"token": token_truncated, "sequence_mask": sequence_mask}


def sequence_means(values_A: Tensor, rows_A: Tensor) -> Tensor:
    """Return at every token the mean over its trajectory's tokens, A."""
    if not len(values_A):
        return values_A
    size = int(rows_A.max()) + 1
    sums = values_A.new_zeros(size).index_add(0, rows_A, values_A)
    counts = values_A.new_zeros(size).index_add(0, rows_A, torch.ones_like(values_A))
    return (sums / counts)[rows_A]


def _clipped(ratio_A: Tensor, advantages_A: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    bounded_A = ratio_A.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_A = -torch.minimum(ratio_A * advantages_A, bounded_A * advantages_A)
    return loss_A, (bounded_A * advantages_A < ratio_A * advantages_A).detach()
