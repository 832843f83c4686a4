"""Horizon schedules: boundaries of stages, and resumed schedules that neither skip nor repeat a step."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_for_tests import few

from agentgym_rl.training.horizon import Horizon, make_horizon
from agentgym_rl.training.settings import HorizonSettings

SCHEDULES = {
    "fixed": HorizonSettings(kind="fixed", turns=(7,)),
    "stepwise": HorizonSettings(kind="stepwise", turns=(2, 4, 8), steps_per_stage=5),
    "linear": HorizonSettings(kind="linear", turns=(2, 9), steps_per_stage=11),
    "adaptive": HorizonSettings(kind="adaptive", turns=(2, 4, 8), steps_per_stage=9, window=2),
}


def outcomes(count: int, seed: int = 0) -> list[tuple[float, float]]:
    rng = random.Random(seed)
    return [(rng.random(), rng.random()) for _ in range(count)]


def play(horizon: Horizon, steps: list[tuple[float, float]]) -> list[int]:
    """Return the number of turns of each step."""
    turns = []
    for success, truncated in steps:
        turns.append(horizon.turns)
        horizon.advance(success, truncated)
    return turns


def test_fixed_never_changes() -> None:
    assert play(make_horizon(SCHEDULES["fixed"]), outcomes(30)) == [7] * 30


def test_stepwise_boundaries_are_exact() -> None:
    assert play(make_horizon(SCHEDULES["stepwise"]), outcomes(25)) == [2] * 5 + [4] * 5 + [8] * 15


def test_stepwise_with_one_step_per_stage() -> None:
    settings = HorizonSettings(kind="stepwise", turns=(1, 2, 3), steps_per_stage=1)
    assert play(make_horizon(settings), outcomes(5)) == [1, 2, 3, 3, 3]


def test_linear_starts_at_first_and_reaches_last_at_the_given_step() -> None:
    turns = play(make_horizon(SCHEDULES["linear"]), outcomes(15))
    assert turns == [2 + 7 * min(step, 11) // 11 for step in range(15)]
    assert (turns[0], turns[10], turns[11], turns[14]) == (2, 8, 9, 9)


def adaptive(**changes: float) -> Horizon:
    settings = {"turns": (2, 4, 8), "steps_per_stage": 0, "window": 3, "min_gain": 0.1, "min_truncated": 0.5} | changes
    return make_horizon(HorizonSettings(kind="adaptive", **settings))  # type: ignore[arg-type]


def test_adaptive_expands_after_two_windows_of_stalled_success() -> None:
    assert play(adaptive(), [(0.3, 0.9)] * 15) == [2] * 6 + [4] * 6 + [8] * 3


def test_adaptive_waits_while_success_rises() -> None:
    rising = [(step / 20, 0.9) for step in range(12)]  # 0.15 from window to window
    assert play(adaptive(), rising) == [2] * 12


def test_adaptive_gain_of_exactly_min_gain_is_no_stall() -> None:
    horizon = adaptive(window=1, min_gain=0.25)
    assert play(horizon, [(0.25, 1.0), (0.5, 1.0), (0.5, 1.0)]) == [2, 2, 2]
    assert horizon.turns == 4  # the last step had no gain


def test_adaptive_waits_while_few_episodes_reach_the_horizon() -> None:
    assert play(adaptive(), [(0.3, 0.49)] * 12) == [2] * 12
    assert play(adaptive(), [(0.3, 0.5)] * 7) == [2] * 6 + [4]  # at the threshold counts


def test_adaptive_stage_ends_at_its_limit_in_any_case() -> None:
    rising = [(step / 100, 0.0) for step in range(13)]
    assert play(adaptive(steps_per_stage=4), rising) == [2] * 4 + [4] * 4 + [8] * 5


def test_adaptive_history_starts_anew_with_each_stage() -> None:
    horizon = adaptive(window=1)
    turns = play(horizon, [(0.9, 1.0), (0.9, 1.0), (0.1, 1.0), (0.5, 1.0), (0.5, 1.0)])
    assert turns == [2, 2, 4, 4, 4]  # the fall from 0.9 to 0.1 at the new horizon does not count
    assert horizon.turns == 8


def test_adaptive_step_without_an_episode_of_its_environment_does_not_count() -> None:
    horizon = adaptive(window=1, steps_per_stage=3)
    horizon.advance(0.3, 1.0)
    for _ in range(10):
        horizon.advance(None, None)
    assert horizon.turns == 2
    horizon.advance(0.3, 1.0)
    assert horizon.turns == 4


def test_counted_schedules_count_a_step_without_an_episode() -> None:
    horizon = make_horizon(SCHEDULES["stepwise"])
    for _ in range(5):
        horizon.advance(None, None)
    assert horizon.turns == 4


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_resume_at_every_step_changes_nothing(kind: str, seed: int) -> None:
    steps = outcomes(30, seed)
    whole_turns = play(make_horizon(SCHEDULES[kind]), steps)
    for killed_after in range(len(steps) + 1):
        before = make_horizon(SCHEDULES[kind])
        play(before, steps[:killed_after])
        after = make_horizon(SCHEDULES[kind])
        after.restore(json.loads(json.dumps(before.state())))
        assert (after.turns, after.stage) == (before.turns, before.stage)
        assert play(after, steps[killed_after:]) == whole_turns[killed_after:], f"killed after {killed_after}"


def test_restoring_copies_the_history() -> None:
    first, second = adaptive(window=1), adaptive(window=1)
    first.advance(0.3, 1.0)
    second.restore(first.state())
    first.advance(0.3, 1.0)
    assert (first.turns, second.turns) == (4, 2)


@few(100)
@given(
    turns=st.sets(st.integers(1, 40), min_size=1, max_size=5),
    steps_per_stage=st.integers(1, 7),
    outcomes=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=40),
    kind=st.sampled_from(["stepwise", "adaptive"]),
)
def test_turns_never_shrink_and_stages_go_up_by_one(
    turns: set[int], steps_per_stage: int, outcomes: list[tuple[float, float]], kind: str
) -> None:
    ordered = tuple(sorted(turns))
    horizon = make_horizon(HorizonSettings(kind=kind, turns=ordered, steps_per_stage=steps_per_stage, window=1))  # type: ignore[arg-type]
    stages = []
    for success, truncated in outcomes:
        assert horizon.turns == ordered[horizon.stage]
        stages.append(horizon.stage)
        horizon.advance(success, truncated)
    assert all(b - a in (0, 1) for a, b in pairwise(stages))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "fixed", "turns": (2, 4)}, "one number"),
        ({"kind": "fixed", "turns": ()}, "one number"),
        ({"kind": "linear", "turns": (2,)}, "two numbers"),
        ({"kind": "stepwise", "turns": ()}, "one number per stage"),
        ({"kind": "stepwise", "turns": (4, 2)}, "ascending"),
        ({"kind": "adaptive", "turns": (2, 2)}, "ascending"),
        ({"kind": "stepwise", "turns": (0, 2)}, "at least 1"),
        ({"kind": "stepwise", "turns": (1, 2), "steps_per_stage": 0}, "steps_per_stage"),
        ({"kind": "linear", "turns": (1, 2), "steps_per_stage": 0}, "steps_per_stage"),
        ({"kind": "adaptive", "turns": (1, 2), "window": 0}, "window"),
    ],
)
def test_an_invalid_schedule_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HorizonSettings(**settings)
