"""On-policy distillation: the agent plays, and a teacher scores every token that it sampled.

With advantages log(teacher / agent) the policy gradient is that of the reverse KL from the agent to the teacher, on
states that the agent itself reaches. Agarwal et al. 2024 (arXiv 2306.13649), Gu et al. 2024 (arXiv 2306.08543).
"""

from __future__ import annotations

from agentgym_rl.training.settings import DistillSettings
from agentgym_rl.types import Sample


def with_teacher(sample: Sample, settings: DistillSettings) -> list[float]:
    """Return A: the weighted advantages of the rewards plus coef * log(teacher / agent) of every token."""
    scores = zip(sample.advantages, sample.teacher_logprobs, sample.logprobs, strict=True)
    return [settings.reward_weight * a + settings.coef * (teacher - own) for a, teacher, own in scores]


def teacher_metrics(samples: list[Sample]) -> dict[str, float]:
    """Return the mean reverse KL per token that the agent's samples estimate."""
    gaps = [p - t for s in samples if s.teacher_logprobs for p, t in zip(s.logprobs, s.teacher_logprobs, strict=True)]
    return {"kl/teacher": sum(gaps) / len(gaps)} if gaps else {}
