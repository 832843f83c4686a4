"""Learned self-correction: attempts that are always repeated, rewards of their own, two stages, and metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from runs_for_tests import counting_config
from test_rollout import TASK, Corridor

from agentgym_rl.agent.policy import ScriptedPolicy
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.agent.styles import ReflectSession
from agentgym_rl.training.advantages import ESTIMATORS, Episode
from agentgym_rl.training.batch import estimate, gather
from agentgym_rl.training.metrics import attempt_metrics, attempts_of
from agentgym_rl.training.rl import settings_at
from agentgym_rl.training.settings import CorrectionSettings, RLSettings, TreeSettings
from agentgym_rl.types import Group, Limits, Message, StopReason, Task, Trajectory

SETTINGS = RLSettings(correction=CorrectionSettings(first_stage_steps=3, hold=0.5, bonus=2.0), normalize_std=False)
SECOND_STAGE = settings_at(SETTINGS, 3)


@pytest.mark.parametrize(
    ("replies", "outcomes"),
    [
        (["go", "go", "go", "I was right.", "wait", "wait", "wait"], [True, False]),
        (["wait", "go", "go", "I waited.", "go", "go", "go"], [False, True]),
    ],
)
async def test_every_attempt_is_followed_by_another(replies: list[str], outcomes: list[bool]) -> None:
    env = ReflectSession(Corridor(), attempts=2, turns_per_attempt=3, retry="always")
    limits = Limits(max_turns=20, max_new_tokens=8, max_context=4000)
    trajectory = await rollout(TASK, env, ScriptedPolicy(replies), limits, id="t")
    assert (trajectory.num_turns, trajectory.stop) == (7, StopReason.DONE)
    assert [info["attempt_success"] for info in trajectory.infos if "attempt_success" in info] == outcomes
    assert (trajectory.success, trajectory.reward) == (outcomes[1], float(outcomes[1]))
    assert attempts_of(trajectory) == [1, 1, 1, 2, 2, 2, 2], "the reflection prepares the second attempt"
    asked = next(m.content for m in trajectory.messages if "reflection" in m.content)
    assert "Attempt 1 of 2 is over" in asked
    assert "failed" not in asked, "the question does not say whether the attempt was right"


def episode(first: float, second: float) -> Episode:
    return Episode(0, [first, 0.0, second], [1, 1, 1], attempts=[1, 2, 2])


def test_the_first_stage_trains_the_second_attempt_only() -> None:
    (a, b) = ESTIMATORS["grpo"]([episode(1, 0), episode(0, 1)], SETTINGS).advantages
    assert (a, b) == ([0.0, -0.5, -0.5], [0.0, 0.5, 0.5])


def test_the_second_stage_trains_both_and_rewards_the_gain() -> None:
    (a, b) = ESTIMATORS["grpo"]([episode(1, 0), episode(0, 1)], SECOND_STAGE).advantages
    # Second attempts: 0 + 2 * (0 - 1) = -2 and 1 + 2 * (1 - 0) = 3. First attempts: their own reward, without the gain.
    assert (a, b) == ([0.5, -2.5, -2.5], [-0.5, 2.5, 2.5])


def test_a_first_stage_without_a_pull_still_trains_later_attempts_only() -> None:
    free = RLSettings(correction=CorrectionSettings(first_stage_steps=3, hold=0.0, bonus=2.0), normalize_std=False)
    episodes = [episode(1, 0), episode(0, 1)]
    (a, b) = ESTIMATORS["grpo"](episodes, settings_at(free, 2)).advantages
    assert (a, b) == ([0.0, -0.5, -0.5], [0.0, 0.5, 0.5])
    assert ESTIMATORS["grpo"](episodes, settings_at(free, 3)) == ESTIMATORS["grpo"](episodes, SECOND_STAGE)


def played(first: bool, second: bool, name: str = "a") -> Trajectory:
    messages = [
        m for p in (-1.0, -2.0, -3.0) for m in (Message("user", "", [5]), Message("assistant", "", [6], [p], 0))
    ]
    infos: list[dict[str, Any]] = [
        {"attempt": 1, "env_reward": float(first), "attempt_success": first},
        {"attempt": 1, "reflection": True},
        {"attempt": 2, "env_reward": float(second), "attempt_success": second, "success": second},
    ]
    return Trajectory(name, Task("lock", 1), messages, [0.0, 0.0, float(second)], infos, StopReason.DONE)


def test_the_first_attempt_is_held_near_the_reference() -> None:
    groups = [Group(Task("lock", 1), [played(True, False), played(False, True, "b")])]
    for settings, pull in ((SETTINGS, 0.5 * (-1.5 - -1.0)), (SECOND_STAGE, 0.0)):
        batch = gather(groups, settings)
        for sample in batch.samples:
            sample.reference_logprobs = [-1.5, -2.5, -3.5]
        own = [row[0] for row in ESTIMATORS["grpo"](batch.episodes, settings).advantages]
        first, second = (sample.advantages for sample in estimate(batch, settings).samples)
        assert [first[0], second[0]] == pytest.approx([own[0] + pull, own[1] + pull])
        assert first[1:] == [-second[1], -second[2]], "later tokens are not pulled"


def test_metrics_say_what_the_second_attempt_is_worth() -> None:
    outcomes = [(True, True), (True, False), (False, True), (False, False)]
    group = Group(Task("lock", 1), [played(*outcome) for outcome in outcomes])
    assert attempt_metrics([group]) == {
        "attempts/success_1": 0.5,
        "attempts/success_2": 0.5,
        "attempts/wrong_to_right": 0.25,
        "attempts/right_to_wrong": 0.25,
        "attempts/sampled_twice": pytest.approx(1 - math.comb(2, 2) / math.comb(4, 2)),
    }
    assert (
        attempt_metrics([Group(TASK, [Trajectory("c", TASK, rewards=[1.0], infos=[{}], stop=StopReason.DONE)])]) == {}
    )


def cut_after(turns: int) -> Trajectory:
    """Return an episode whose first attempt was right and whose reply after `turns` turns was cut."""
    episode = played(True, True)
    episode.infos = [*episode.infos[:turns], {}]
    episode.messages, episode.rewards = episode.messages[: 2 * turns + 2], [0.0] * (turns + 1)
    episode.stop = StopReason.LENGTH
    return episode


def test_a_reply_that_was_cut_belongs_to_the_attempt_it_was_given_in() -> None:
    assert [attempts_of(cut_after(turns)) for turns in (0, 1, 2)] == [[1], [1, 2], [1, 2, 2]]
    groups = [Group(Task("lock", 1), [cut_after(1), played(True, True, "b")])]
    cut, whole = ESTIMATORS["grpo"](gather(groups, SECOND_STAGE).episodes, SECOND_STAGE).advantages
    assert cut[0] == whole[0] == 0.0, "both first attempts were right"
    assert cut[1] < 0.0 < whole[1], "a reflection that is cut loses the second attempt"


def test_an_attempt_that_was_cut_off_counts_as_failed() -> None:
    group = Group(Task("lock", 1), [cut_after(0), cut_after(1), cut_after(2), played(True, True)])
    metrics = attempt_metrics([group])
    assert metrics["attempts/success_1"] == 0.75
    assert metrics["attempts/success_2"] == 0.25, "the success of the episodes"
    assert metrics["attempts/right_to_wrong"] == 0.5


def test_settings_that_correction_cannot_use_are_refused() -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"algorithm": "ppo"},
        {"credit": "turns"},
        {"kl_coef": 0.0},
        {"overlong": "penalty", "kl_coef": 0.1},
        {"kl_in": "reward", "kl_coef": 0.1},
        {"tree": TreeSettings()},
    )
    for changes in wrong:
        with pytest.raises(ValueError, match="correction"):
            RLSettings(correction=CorrectionSettings(), **changes)
    with pytest.raises(ValueError, match=r"set agent.style = 'reflect' and agent.retry = 'always'"):
        counting_config(rl__kl_coef=0.1, rl__correction={})
    judged: dict[str, Any] = {
        "agent__style": "reflect",
        "agent__retry": "always",
        "rewards": [{"kind": "length", "tokens": 9}],
    }
    with pytest.raises(ValueError, match=r"pays each attempt the environment's reward: remove \[\[rewards\]\]"):
        counting_config(rl__kl_coef=0.1, rl__correction={}, agent__turns_per_attempt=1, **judged)
    too_short: dict[str, Any] = {"horizon__turns": [2], "agent__style": "reflect", "agent__retry": "always"}
    with pytest.raises(ValueError, match=r"compares 3 attempts .* needs a horizon of at least 5 turns, got 2"):
        counting_config(rl__kl_coef=0.1, rl__correction={}, agent__turns_per_attempt=1, **too_short)


def test_a_second_stage_that_is_not_reached_is_named() -> None:
    assert not replace(SETTINGS, steps=4).stage_problem()
    assert not replace(SETTINGS, steps=0).stage_problem()
    assert not RLSettings(steps=1).stage_problem()
    problem = replace(SETTINGS, steps=3).stage_problem()
    assert "first_stage_steps = 3 leaves none of rl.steps = 3" in problem
