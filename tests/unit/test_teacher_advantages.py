"""Advantages from a teacher."""

from __future__ import annotations

from typing import Any

import pytest

from agentgym_rl.training.distill import teacher_metrics, with_teacher
from agentgym_rl.training.settings import DistillSettings, RLSettings
from agentgym_rl.types import Sample

SAMPLE = Sample(
    [1, 2, 3], [False, True, True], logprobs=[-1.0, -2.0], advantages=[0.5, 0.5], teacher_logprobs=[-3.0, -0.5]
)


@pytest.mark.parametrize("changes", [{"kl_in": "reward", "kl_coef": 0.1}, {"resample_rounds": 2}, {"keep_groups": 0.5}])
def test_settings_about_rewards_are_refused_for_a_teacher_alone(changes: dict[str, Any]) -> None:
    RLSettings(distill=DistillSettings(teacher="x", reward_weight=0.5), **changes)
    with pytest.raises(ValueError, match="distill without reward_weight ignores"):
        RLSettings(distill=DistillSettings(teacher="x"), **changes)


def test_the_teacher_scores_every_token() -> None:
    assert with_teacher(SAMPLE, DistillSettings(teacher="x")) == [-2.0, 1.5]
    mixed = DistillSettings(teacher="x", coef=0.1, reward_weight=2.0)
    assert with_teacher(SAMPLE, mixed) == pytest.approx([0.8, 1.15])


def test_the_metric_is_the_reverse_kl_of_what_was_sampled() -> None:
    assert teacher_metrics([SAMPLE, Sample([1], [False])]) == {"kl/teacher": pytest.approx(0.25)}
    assert teacher_metrics([Sample([1], [False])]) == {}


def test_settings_that_distillation_cannot_use_are_refused() -> None:
    with pytest.raises(ValueError, match="coef must be at least 0"):
        DistillSettings(teacher="x", coef=-1.0)
    with pytest.raises(ValueError, match="both 0, which leaves nothing to learn from"):
        DistillSettings(teacher="x", coef=0.0)
    with pytest.raises(ValueError, match="teacher is empty"):
        DistillSettings(teacher=" ")
    with pytest.raises(ValueError, match="loss = 'gspo' cannot be used with distill"):
        RLSettings(loss="gspo", distill=DistillSettings(teacher="x"))
