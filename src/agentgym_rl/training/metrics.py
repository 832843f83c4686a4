"""What is said of a step's episodes. docs/runs.md defines every name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import fmean

from agentgym_rl.types import Group, StopReason, Trajectory


def episode_metrics(groups: list[Group]) -> dict[str, float]:
    """Means over the usable episodes of a step, for all environments together and, if several, for each."""
    trajectories = [t for g in groups for t in g.trajectories]
    usable = [t for g in groups for t in g.usable]
    metrics = {"episodes/usable": float(len(usable)), "episodes/error": float(len(trajectories) - len(usable))}
    if not usable:
        return metrics
    metrics |= _means(usable)
    environments = sorted({t.task.env for t in usable})
    if len(environments) > 1:
        for env in environments:
            of_env = _means([t for t in usable if t.task.env == env])
            metrics |= {f"{env}/{name}": value for name, value in of_env.items()}
    return metrics


def _means(trajectories: list[Trajectory]) -> dict[str, float]:
    turns = [info for t in trajectories for info in t.infos]
    replies = [m for t in trajectories for m in t.messages if m.logprobs is not None]
    return {
        "reward/mean": _mean(t.reward for t in trajectories),
        "success/mean": _mean(t.success for t in trajectories),
        "turns/mean": _mean(t.num_turns for t in trajectories),
        "truncated/rate": _share(trajectories, lambda t: t.stop is not None and t.stop.truncated),
        "truncated/horizon_rate": _share(trajectories, lambda t: t.stop is StopReason.MAX_TURNS),
        "truncated/length_rate": _share(trajectories, lambda t: t.stop is StopReason.LENGTH),
        "actions/invalid_rate": _mean(not info.get("valid", True) for info in turns),
        "actions/repeated_rate": _repeated(trajectories),
        "tokens/per_reply": _mean(len(m.token_ids) for m in replies),
        "tokens/per_episode": _mean(len(t.token_ids) for t in trajectories),
        "tokens/sampled": float(sum(len(m.token_ids) for m in replies)),
    }


def _repeated(trajectories: list[Trajectory]) -> float:
    """Share of replies, from the second on, that say the same as the reply before."""
    pairs = 0
    same = 0
    for trajectory in trajectories:
        replies = [m.content for m in trajectory.messages if m.role == "assistant"]
        pairs += max(0, len(replies) - 1)
        same += sum(a == b for a, b in pairwise(replies))
    return same / pairs if pairs else 0.0


def _mean(values: Iterable[float]) -> float:
    listed = [float(v) for v in values]
    return fmean(listed) if listed else 0.0


def _share(trajectories: list[Trajectory], holds: Callable[[Trajectory], bool]) -> float:
    return _mean(holds(t) for t in trajectories)
