"""The built-in household: rooms, commands, tasks, oracle."""

from __future__ import annotations

import hashlib
import random
from collections import Counter

import pytest

from agentgym_rl.environment.envs.alfworld import AlfWorld, commands, house, oracle

ALL_ITEMS = [item for split in AlfWorld.splits.values() for item in split]


def item_of(task: str, room_place: str = "") -> int:
    """Return a test item of a task in a house that has `room_place`."""
    for item in AlfWorld.splits["test"]:
        if house.task_of(item) == task and (not room_place or room_place in house.build(item).places):
            return item
    raise AssertionError(task)


def solve(state: house.House) -> list[str]:
    played = []
    while not state.is_solved:
        played.append(oracle.next_command(state))
        assert commands.run(state, played[-1]) != commands.NOTHING
        assert len(played) < 40
    return played


def test_houses_are_the_same_on_every_machine() -> None:
    text = "\n".join(AlfWorld().reset(item) for item in ALL_ITEMS[::11])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "f7bfaeea107905c5"


def test_every_task_type_is_in_every_split_and_starts_unsolved() -> None:
    for items in AlfWorld.splits.values():
        assert set(Counter(house.task_of(item) for item in items)) == set(house.TASKS)
    for item in ALL_ITEMS[::5]:
        assert not house.build(item).is_solved


def test_goals_of_the_test_split_are_not_asked_in_training() -> None:
    asked = {
        split: {(built.task, built.thing, built.goal_place, built.places[0]) for built in map(house.build, items)}
        for split, items in AlfWorld.splits.items()
    }
    assert not asked["train"] & (asked["test"] | asked["validation"])


def test_the_oracle_solves_items_in_possible_commands() -> None:
    env, lengths = AlfWorld(), Counter()
    for item in ALL_ITEMS[::9]:
        env.reset(item)
        turns, step = 0, None
        while step is None or not step.done:
            action = env.oracle()
            assert action in env.actions()
            step = env.step(action)
            turns += 1
        assert (step.reward, step.info) == (1.0, {"valid": True, "success": True})
        lengths[turns] += 1
    assert min(lengths) >= 3
    assert max(lengths) <= 12


def test_the_oracle_recovers_after_random_commands() -> None:
    env, rng = AlfWorld(), random.Random(3)
    for item in AlfWorld.splits["test"][:60]:
        env.reset(item)
        step = None
        for _ in range(25):
            step = env.step(rng.choice(env.actions()))
            if step.done:
                break
        for _ in range(40):
            if step.done:
                break
            step = env.step(env.oracle())
        assert step.info["success"]


def test_every_listed_command_does_something_and_no_other_does() -> None:
    rng = random.Random(4)
    for item in AlfWorld.splits["test"][:20]:
        state = house.build(item)
        for _ in range(15):
            listed = commands.possible(state)
            assert len(listed) == len(set(listed))
            assert commands.run(state, rng.choice(listed)) != commands.NOTHING
            if state.is_solved:
                break


@pytest.mark.parametrize(("verb", "state"), [("clean", "clean"), ("heat", "hot"), ("cool", "cool")])
def test_a_treatment_needs_its_place_and_changes_the_thing(verb: str, state: str) -> None:
    built = house.build(item_of(f"pick_{verb}_then_place"))
    played = solve(built)
    tool = house.TOOLS[verb]
    treated = next(command for command in played if command.startswith(f"{verb} "))
    assert f"with {tool} " in treated
    thing = built.placed()[0]
    assert built.states[thing] == {state}
    assert house.kind_of(built.location[thing]) == built.goal_place


def test_a_cooled_thing_is_no_longer_hot() -> None:
    built = house.build(item_of("pick_heat_then_place"))
    built.treat("apple 1", "heat")
    built.treat("apple 1", "clean")
    built.treat("apple 1", "cool")
    assert built.states["apple 1"] == {"cool", "clean"}


def test_two_things_are_needed_for_the_task_with_two() -> None:
    built = house.build(item_of("pick_two_obj_and_place"))
    played = solve(built)
    assert sum(command.startswith("put ") for command in played) == 2


def test_a_thing_is_looked_at_under_the_lamp() -> None:
    built = house.build(item_of("look_at_obj_in_light"))
    assert solve(built)[-1] == "use desklamp 1"
    assert built.here == built.lamp_place


def test_closed_places_hide_their_things() -> None:
    built = house.build(item_of("pick_and_place", "cabinet 1"))
    built.location = {"mug 1": "cabinet 1"}
    assert commands.run(built, "go to cabinet 1") == "The cabinet 1 is closed."
    assert commands.run(built, "take mug 1 from cabinet 1") == commands.NOTHING
    assert commands.run(built, "open cabinet 1") == (
        "You open the cabinet 1. The cabinet 1 is open. In it, you see a mug 1."
    )
    assert commands.run(built, "take mug 1 from cabinet 1") == "You pick up the mug 1 from the cabinet 1."
    assert commands.run(built, "inventory") == "You are carrying: a mug 1."
    assert commands.run(built, "close cabinet 1") == "You close the cabinet 1."
    assert commands.run(built, "put mug 1 in/on cabinet 1") == commands.NOTHING


@pytest.mark.parametrize("text", ["go to mars 1", "open fridge 99", "take mug 1", "dance", "go to", "", "look at me"])
def test_impossible_commands_change_nothing(text: str) -> None:
    env = AlfWorld()
    env.reset(3000)
    before = env.state_key()
    step = env.step(text)
    assert step.observation.startswith("Nothing happens.\nAVAILABLE ACTIONS: go to ")
    assert (step.info, step.reward) == ({"valid": False}, 0.0)
    assert env.state_key() == before


def test_case_spaces_and_a_full_stop_do_not_matter() -> None:
    env = AlfWorld()
    env.reset(3001)
    assert env.step("  Go  to Garbagecan 1. ").info["valid"] is True
