"""Advantage estimators: rewards of a group in, one advantage per turn out. Pure functions in a plain dict.

A per-turn advantage is given to every sampled token of that turn (see batch.to_samples), so a reward on the last turn
reaches every action token of the trajectory.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, pstdev

from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Trajectory

Estimator = Callable[[list[Trajectory], bool], list[list[float]]]
"""(trajectories of one task, normalize_std) -> per trajectory, per turn."""

EPSILON = 1e-6


def zero_variance(trajectories: list[Trajectory]) -> bool:
    """True when no trajectory did better than another, so that the group says nothing about what to do."""
    rewards = [t.reward for t in trajectories]
    return max(rewards) - min(rewards) < EPSILON


def grpo(trajectories: list[Trajectory], normalize_std: bool) -> list[list[float]]:
    """A_i = (R_i - mean R) / (std R + eps), the same for every turn; without the division it is Dr. GRPO.

    R_i is the sum of the trajectory's rewards; std is that of the population. Shao et al. 2024 (arXiv 2402.03300),
    Liu et al. 2025 (arXiv 2503.20783).
    """
    rewards = [t.reward for t in trajectories]
    scale = pstdev(rewards) + EPSILON if normalize_std else 1.0
    if zero_variance(trajectories):
        return [[0.0] * t.num_turns for t in trajectories]
    return [[(r - fmean(rewards)) / scale] * t.num_turns for r, t in zip(rewards, trajectories, strict=True)]


def rloo(trajectories: list[Trajectory], normalize_std: bool) -> list[list[float]]:
    """A_i = R_i - mean of the others' R, the same for every turn. Ahmadian et al. 2024 (arXiv 2402.14740)."""
    count = len(trajectories)
    if count < 2:
        raise ConfigError(f"RLOO needs groups of at least 2 trajectories, got {count}: set group_size")
    centred = grpo(trajectories, normalize_std=False)
    return [[a * count / (count - 1) for a in turns] for turns in centred]


ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "rloo": rloo}
