"""KeyDoor: layouts, rules, oracle and random play."""

from __future__ import annotations

import random

import pytest

from agentgym_rl.environment.envs.keydoor import LAYOUTS, SUBSETS, KeyDoor
from agentgym_rl.environment.envs.keydoor_duo import KeyDoorDuo
from agentgym_rl.errors import EnvError


def start(item: int = 2) -> KeyDoor:
    env = KeyDoor()
    env.reset(item)
    return env


def solve(env: KeyDoor) -> int:
    """Let the oracle play to the end; return its number of turns."""
    for turn in range(1, 10):
        step = env.step(env.oracle())
        assert step.info["valid"]
        if step.done:
            assert step.info["success"]
            assert step.reward == 1.0
            return turn
    raise AssertionError("the oracle did not find the treasure")


def test_items_have_different_layouts_and_the_splits_cover_them() -> None:
    assert len(set(LAYOUTS)) == len(LAYOUTS) == 1152
    assert sum(map(len, KeyDoor.splits.values())) == len(LAYOUTS)


@pytest.mark.parametrize("item", range(0, len(LAYOUTS), 7))
def test_the_subset_gives_the_number_of_turns_of_the_solution(item: int) -> None:
    assert solve(start(item)) == 3 + SUBSETS.index(KeyDoor.subsets_of(item)[0])


def test_the_oracle_wins_after_random_play() -> None:
    rng = random.Random(1)
    for item in range(0, len(LAYOUTS), 5):
        env = start(item)
        for _ in range(rng.randrange(6)):
            safe = [a for a in env.actions() if not a.startswith("open") or a == env.oracle()]
            if env.step(rng.choice(safe)).done:
                env.reset(item)
        solve(env)


def test_the_texts_of_a_whole_game() -> None:
    env = start(2)
    assert env.actions() == ["take red key", "go to attic"]
    assert env.step('"Go to attic."').observation == (
        "The treasure is behind the yellow door. You are in the attic beside the hall. "
        "You see a blue key and a yellow key. You carry nothing."
    )
    env.step("take blue key")
    assert env.step("take yellow key").observation.endswith("You see a blue key. You carry the yellow key.")
    assert env.state_key() == "2|attic|yellow|closed|blue=attic,red=hall"
    env.step("go to hall")
    assert env.step("open yellow door").observation.startswith(
        "The treasure is behind the yellow door. The yellow door is open. You are in the hall"
    )
    assert "take treasure" in env.actions()


def test_the_wrong_door_is_a_trap() -> None:
    env = start(2)
    env.step("take red key")
    step = env.step("open red door")
    assert (step.reward, step.done, step.info) == (0.0, True, {"valid": True, "success": False})
    assert env.actions() == []
    with pytest.raises(EnvError, match="call reset first"):
        env.step("take red key")


@pytest.mark.parametrize("action", ["open yellow door", "take yellow key", "go to hall", "take treasure", "take", ""])
def test_an_impossible_action_changes_nothing(action: str) -> None:
    env = start(2)
    before = env.state_key()
    step = env.step(action)
    assert step.info == {"valid": False}
    assert env.state_key() == before


def test_random_play_wins_sometimes_and_the_vocabulary_is_small() -> None:
    rng, won, words, games = random.Random(0), 0, set(), 3 * len(LAYOUTS)
    for game in range(games):
        env = KeyDoor()
        observation = env.reset(game % len(LAYOUTS))
        for _ in range(6):
            assert len(observation.split()) < 40
            words |= set(observation.lower().replace(".", "").split())
            step = env.step(rng.choice(env.actions()))
            observation = step.observation
            won += step.info.get("success", False)
            if step.done:
                break
    assert 0.05 < won / games < 0.2
    assert len(words) < 32


def test_the_state_of_two_roles_has_the_refusal_that_the_walker_will_read() -> None:
    refused, moved = KeyDoorDuo(), KeyDoorDuo()
    for env in (refused, moved):
        env.reset(2)
        env.step("red")
    refused.step("dance")
    for turn in range(2):  # to the other room and back
        if turn:
            moved.step("red")
        moved.step(next(action for action in moved.actions() if action.startswith("go to")))
    assert refused.state_key() != moved.state_key()
    assert refused.step("red").observation == f"That was not possible. {moved.step('red').observation}"
