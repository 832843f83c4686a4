"""Losses over the action tokens of a batch: pure functions of flat tensors.

Shapes: A action tokens; rows_A says which trajectory each belongs to. There are no masks here: what was not sampled
never gets this far (see microbatch.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from agentgym_rl.training.settings import RLSettings

PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]
"""(logprobs_A, old_logprobs_A, advantages_A, rows_A, clip_low, clip_high) -> (loss_A, where the clip bound)."""


def clip(
    logprobs_A: Tensor, old_A: Tensor, advantages_A: Tensor, rows_A: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = pi / pi_old of each token.

    Schulman et al. 2017 (arXiv 1707.06347); high > low is DAPO's clip-higher, Yu et al. 2025 (arXiv 2503.14476).
    """
    return _clipped(torch.exp(logprobs_A - old_A), advantages_A, clip_low, clip_high)


def gspo(
    logprobs_A: Tensor, old_A: Tensor, advantages_A: Tensor, rows_A: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """As `clip` with one ratio for all tokens of a trajectory: s = exp(mean log r), over all its turns.

    The token form, s * pi / sg(pi), takes an advantage per token and has the gradient of the sequence form where they
    are equal. The published clip range is about 3e-4. Zheng et al. 2025 (arXiv 2507.18071).
    """
    ratio_A = sequence_means(logprobs_A - old_A, rows_A).detach().exp() * torch.exp(logprobs_A - logprobs_A.detach())
    return _clipped(ratio_A, advantages_A, clip_low, clip_high)


def cispo(
    logprobs_A: Tensor, old_A: Tensor, advantages_A: Tensor, rows_A: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: a far token's weight is bounded, its gradient never lost.

    MiniMax 2025 (arXiv 2506.13585), which sets no lower bound (clip_low = 1).
    """
    ratio_A = torch.exp(logprobs_A - old_A).detach()
    weight_A = ratio_A.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight_A * advantages_A * logprobs_A, weight_A != ratio_A


POLICY_LOSSES: dict[str, PolicyLoss] = {"clip": clip, "gspo": gspo, "cispo": cispo}


def value_loss(values_A: Tensor, old_values_A: Tensor, returns_A: Tensor, bound: float) -> Tensor:
    """max((V - G)^2, (clip(V, V_old +- bound) - G)^2) / 2; bound 0 means none. As in PPO's own code."""
    error_A = (values_A - returns_A) ** 2
    if bound:
        near_A = old_values_A + (values_A - old_values_A).clamp(-bound, bound)
        error_A = torch.maximum(error_A, (near_A - returns_A) ** 2)
    return 0.5 * error_A


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

Correction = Callable[[Tensor, Tensor, Tensor, RLSettings], Tensor]
"""(learner's logprobs_A, sampler's logprobs_A, rows_A, settings) -> constant weights_A; equal policies give 1."""


def token_truncated(learner_A: Tensor, sampler_A: Tensor, rows_A: Tensor, settings: RLSettings) -> Tensor:
    """min(pi_learner / pi_sampler, importance_cap) of each token. Truncated importance sampling, Yao et al. 2025."""
    return torch.exp((learner_A - sampler_A).detach().clamp(max=20.0)).clamp(max=settings.importance_cap)


def sequence_mask(learner_A: Tensor, sampler_A: Tensor, rows_A: Tensor, settings: RLSettings) -> Tensor:
    """As `token_truncated` in trajectories whose exp(mean log ratio) lies in [sequence_mask_low, sequence_mask_high]; 0
    in the others, which are left out. Liu et al. 2025, 'When Speed Kills Stability' (geometric rejection)."""
    mean_A = sequence_means((learner_A - sampler_A).detach(), rows_A).exp()
    kept_A = (mean_A >= settings.sequence_mask_low) & (mean_A <= settings.sequence_mask_high)
    return token_truncated(learner_A, sampler_A, rows_A, settings) * kept_A


CORRECTIONS: dict[str, Correction] = {"token": token_truncated, "sequence_mask": sequence_mask}


def sequence_means(values_A: Tensor, rows_A: Tensor) -> Tensor:
    """A: at every token the mean over its trajectory's tokens."""
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
