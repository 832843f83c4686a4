"""BabyAI: deterministic items, a correct menu of actions, an oracle that wins, and robustness to any text."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agentgym_rl.environment.base import HasActions, HasOracle, HasRender, HasStateKey
from agentgym_rl.environment.envs.babyai import BabyAI
from agentgym_rl.environment.envs.babyai.field_of_view import (
    AGENT_CELL,
    AHEAD,
    FACING,
    HALF,
    NUM_CELLS,
    SIZE,
    START,
    Move,
    Paths,
    look,
)
from agentgym_rl.environment.envs.babyai.instructions import GoToInstr
from agentgym_rl.environment.envs.babyai.levels import LEVELS, _generate, fresh_level, minigrid_levels
from agentgym_rl.environment.envs.babyai.moves import make_move
from agentgym_rl.environment.envs.babyai.state import StateKeys
from agentgym_rl.errors import EnvError

NUMBERS = {name: number for number, (name, _, _) in enumerate(LEVELS)}


def item_of(level: str, seed: int) -> int:
    return seed * len(LEVELS) + NUMBERS[level]


@pytest.fixture
def env() -> BabyAI:
    return BabyAI()


def play_at_random(env: BabyAI, item: int, num_turns: int) -> list[str]:
    """Play uniformly random listed actions; return the observations and state keys."""
    choose = random.Random(item)
    seen = [env.reset(item), env.state_key()]
    for _ in range(num_turns):
        step = env.step(choose.choice(env.actions()))
        assert step.info["valid"]
        seen += [step.observation, env.state_key()]
        if step.done:
            break
    return seen


def test_implements_every_optional_protocol(env: BabyAI) -> None:
    for protocol in (HasActions, HasOracle, HasStateKey, HasRender):
        assert isinstance(env, protocol)


def test_levels_equal_those_that_minigrid_registers() -> None:
    import gymnasium

    minigrid_levels()
    for name, class_name, arguments in LEVELS:
        registered = [spec for key, spec in gymnasium.registry.items() if key.startswith(f"BabyAI-{name}-v")]
        assert len(registered) == 1, name
        assert registered[0].entry_point == f"minigrid.envs.babyai:{class_name}"
        assert {key: value for key, value in registered[0].kwargs.items() if key not in arguments} == {}, name
        assert registered[0].kwargs == arguments


def test_splits_are_disjoint_and_subsets_cover_the_published_ones() -> None:
    train, test = BabyAI.splits["train"], BabyAI.splits["test"]
    assert not set(train) & set(test)
    assert test == range(4000)
    counted = dict.fromkeys(BabyAI.subsets, 0)
    for item in range(40):
        for name in BabyAI.subsets_of(item):
            counted[name] += 1
    assert counted.pop("GoTo") == 11
    assert counted.pop("Pickup") == 3
    assert set(counted.values()) == {1}
    assert len(counted) == 40
    assert BabyAI.subsets_of(item_of("Pickup", 5)) == ("Pickup", "PickupLevel17")
    assert BabyAI.subsets_of(item_of("GoToDoor", 9)) == ("GoTo", "GoToDoor")
    assert BabyAI.subsets_of(item_of("SynthLoc", 1)) == ("SynthLoc",)


@pytest.mark.parametrize("item", [-1, 400_000])
def test_items_outside_every_split_are_refused(env: BabyAI, item: int) -> None:
    with pytest.raises(IndexError, match="399999"):
        env.reset(item)


def test_every_level_plays_and_every_listed_action_is_valid(env: BabyAI) -> None:
    for number in range(len(LEVELS)):
        for seed in (0, 1, 150):
            play_at_random(env, seed * len(LEVELS) + number, num_turns=12)


def test_each_listed_action_is_valid_from_the_same_state(env: BabyAI) -> None:
    for level in ("GoToLocalS8N7", "ActionObjDoor", "BossLevel", "KeyInBox"):
        item = item_of(level, 2)
        env.reset(item)
        for action in env.actions():
            observation = env.reset(item)
            assert f'"{action}"' in observation
            assert env.step(action).info["valid"], action


def test_the_listed_actions_are_exactly_those_of_the_observation(env: BabyAI) -> None:
    for number in range(len(LEVELS)):
        listed = env.reset(number + 80).split("The available actions are: ")[1]
        assert listed == ", ".join(f'"{action}"' for action in env.actions()) + "."


PROGRAM = """
import hashlib, random
from agentgym_rl.environment.envs.babyai import BabyAI
env, digest = BabyAI(), hashlib.sha256()
for item in range(4000, 4040):
    choose = random.Random(item)
    digest.update(env.reset(item).encode())
    for _ in range(6):
        step = env.step(choose.choice([env.oracle(), *(action for action in env.actions() if action != "toggle")]))
        digest.update((step.observation + env.state_key()).encode())
        if step.done:
            break
print(digest.hexdigest())
"""


def test_items_are_the_same_in_every_process_and_nothing_else_is_printed() -> None:
    outputs = set()
    for hash_seed in ("0", "1", "random"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 1


def test_an_item_is_the_same_after_it_was_played(env: BabyAI) -> None:
    """A level is generated once and unpickled for every episode."""
    for item in range(40):
        first = play_at_random(env, item, 6)
        beside = BabyAI()
        assert play_at_random(beside, item, 6) == first
        assert play_at_random(env, item, 6) == first


def test_sight_agrees_with_minigrid(env: BabyAI) -> None:
    compared = 0
    for number in range(len(LEVELS)):
        play_at_random(env, number + 40, num_turns=5)
        _, mask = env._level.gen_obs_grid()
        view = look(env._level)
        for cell, seen in enumerate(view.visible):
            forward, side = cell // SIZE, cell % SIZE - HALF
            assert bool(mask[side + HALF, SIZE - 1 - forward]) == seen
            compared += 1
    assert compared == 40 * SIZE * SIZE


def shortest_moves(free: list[bool], cell: int) -> tuple[Move, ...] | None:
    """Return the shortest moves to face `cell`, and of equally short ones those to the pose with the lowest number."""
    moves_to: dict[int, tuple[Move, ...]] = {START: ()}
    queue = [START]
    for pose in queue:
        steps = [(pose & ~3 | (pose + 3) & 3, Move.LEFT), (pose & ~3 | (pose + 1) & 3, Move.RIGHT)]
        if AHEAD[pose] >= 0 and free[AHEAD[pose]]:
            steps.insert(0, (AHEAD[pose] * 4 | pose & 3, Move.FORWARD))
        for following, move in steps:
            if following not in moves_to:
                moves_to[following] = (*moves_to[pose], move)
                queue.append(following)
    reached = [(len(moves_to[pose]), pose) for pose in FACING[cell] if pose in moves_to]
    return moves_to[min(reached)[1]] if reached else None


def test_paths_are_the_shortest_whatever_was_asked_before() -> None:
    choose = random.Random(0)
    found = 0
    for _ in range(60):
        free = [cell == AGENT_CELL or choose.random() < 0.6 for cell in range(NUM_CELLS)]
        paths = Paths(sum(1 << cell for cell in range(NUM_CELLS) if free[cell]))
        for cell in choose.choices(range(NUM_CELLS), k=12):
            expected = shortest_moves(free, cell)
            assert paths.to_face(cell) == expected
            found += expected is not None
    assert 100 < found < 700


def go_to_instructions(instruction: Any) -> list[Any]:
    if hasattr(instruction, "instr_a"):
        return go_to_instructions(instruction.instr_a) + go_to_instructions(instruction.instr_b)
    return [instruction] if type(instruction).__name__ == "GoToInstr" else []


def test_threads_that_share_paths_find_the_same() -> None:
    rng, interval = random.Random(0), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(60):
            free = rng.getrandbits(NUM_CELLS) | rng.getrandbits(NUM_CELLS) | 1 << AGENT_CELL
            shared, alone = Paths(free), Paths(free)
            orders = [rng.sample(range(NUM_CELLS), NUM_CELLS) for _ in range(4)]
            with ThreadPoolExecutor(4) as threads:
                found = list(threads.map(lambda cells, p=shared: {c: p.to_face(c) for c in cells}, orders))  # type: ignore[misc]
            assert found == [{cell: alone.to_face(cell) for cell in range(NUM_CELLS)}] * 4
    finally:
        sys.setswitchinterval(interval)


def test_minigrid_keeps_its_own_instructions(env: BabyAI) -> None:
    from minigrid.envs.babyai.core import verifier

    env.reset(item_of("GoToObjS6", 0))
    assert verifier.GoToInstr.verify_action.__module__ == verifier.__name__
    theirs = _generate(minigrid_levels(), item_of("BossLevel", 1))
    assert {type(instruction) for instruction in go_to_instructions(theirs.instrs)} <= {verifier.GoToInstr}


def test_every_episode_and_its_copies_have_the_fast_instructions() -> None:
    seen = 0
    for item in range(2 * len(LEVELS)):
        level = fresh_level(item)
        for same in (level, copy.deepcopy(level)):
            for instruction in go_to_instructions(same.instrs):
                assert type(instruction) is GoToInstr
                assert instruction.env is same
                seen += 1
    assert seen > 40


def test_moves_agree_with_minigrid() -> None:
    endings = {True: 0, False: 0}
    for item in range(4 * len(LEVELS)):
        ours, theirs = fresh_level(item), _generate(minigrid_levels(), item)
        choose = random.Random(item)
        if choose.random() < 0.3:
            ours.max_steps = theirs.max_steps = 30
        for _ in range(120):
            move = choose.choices(list(Move), [2, 2, 6, 2, 1, 2])[0]
            outcome = make_move(ours, move)
            _, reward, terminated, truncated, _ = theirs.step(move)
            assert outcome == (bool(reward > 0) if terminated or truncated else None)
            assert StateKeys(ours).key() == StateKeys(theirs).key()
            assert ours.step_count == theirs.step_count
            if outcome is not None:
                endings[outcome] += 1
                break
    assert min(endings.values()) >= 10


def test_the_oracle_wins_every_level(env: BabyAI) -> None:
    for number, (name, _, _) in enumerate(LEVELS):
        for seed in (0, 3, 14, 200):
            env.reset(seed * len(LEVELS) + number)
            while not (step := env.step(env.oracle())).done:
                assert step.info["valid"], name
                assert step.reward == 0.0
            assert step.info == {"valid": True, "success": True}, (name, seed)
            assert step.reward == 1.0


def test_the_oracle_wins_after_random_play(env: BabyAI) -> None:
    """The oracle gives advice from any state: carrying objects, with doors open, with half a mission done."""
    won = played = 0
    for level in (
        "GoToSeqS5R2",
        "Open",
        "Pickup",
        "UnlockLocalDist",
        "MoveTwoAcrossS8N9",
        "SynthLoc",
        "BossLevelNoUnlock",
    ):
        for seed in range(3):
            choose = random.Random(seed)
            env.reset(item_of(level, seed))
            step = None
            for _ in range(5):
                # Opening a box destroys it, and the mission may need it.
                step = env.step(choose.choice([action for action in env.actions() if action != "toggle"]))
                if step.done:
                    break
            assert step is not None
            if step.done:
                continue
            while not (step := env.step(env.oracle())).done:
                pass
            played += 1
            won += step.info["success"]
    assert played >= 12
    assert won == played


def test_the_oracle_opens_a_box_that_the_agent_carries(env: BabyAI) -> None:
    env.reset(item_of("KeyInBox", 102))
    assert env.step("pick up red box 1").info["valid"]
    while not (step := env.step(env.oracle())).done:
        pass
    assert step.info["success"]


def test_the_oracle_raises_if_the_mission_cannot_be_won(env: BabyAI) -> None:
    env.reset(item_of("PutNextLocalS6N4", 0))
    mission = env._level.mission
    assert "put the" in mission
    moved = env._level.instrs.desc_move.obj_set[0]
    env._level.grid.set(*moved.cur_pos, None)
    with pytest.raises(EnvError, match="no way"):
        env.oracle()


def test_asking_the_oracle_changes_nothing(env: BabyAI) -> None:
    env.reset(item_of("BossLevel", 1))
    before = env.state_key()
    assert env.oracle() == env.oracle()
    assert env.state_key() == before


def test_the_second_of_two_strict_doors_can_be_opened_and_a_wrong_one_still_loses(env: BabyAI) -> None:
    goals = {"before": 0, "wrong": 0}
    for seed in range(12):
        observation = env.reset(item_of("OpenDoorsOrderN4Debug", seed))
        if ", then" in observation:
            while not (step := env.step(env.oracle())).done:
                pass
            assert step.info["success"]
            goals["before"] += 1
        elif "after you" not in observation:
            goal = observation.split("open the ")[1].split(" door")[0]
            wrong = [a for a in env.actions() if a.startswith("toggle and") and goal not in a]
            if wrong:
                step = env.step(wrong[0])
                assert step.done
                assert step.reward == 0.0
                assert not step.info["success"]
                assert step.observation == "You failed the goal."
                goals["wrong"] += 1
    assert goals["before"]
    assert goals["wrong"]


def test_a_copy_opens_two_strict_doors_as_its_original_does(env: BabyAI) -> None:
    seeds = (seed for seed in range(12) if ", then" in env.reset(item_of("OpenDoorsOrderN4Debug", seed)))
    env.reset(item_of("OpenDoorsOrderN4Debug", next(seeds)))
    for player in (copy.deepcopy(env), env):
        for _ in range(10):
            if (step := player.step(player.oracle())).done:
                break
        assert step.info["success"]


def test_go_to_ends_facing_the_object_and_counts(env: BabyAI) -> None:
    observation = env.reset(item_of("GoToObjS6", 0))
    assert observation == (
        "Your goal: go to the blue key.\n"
        "There is a blue key 1 2 steps in front of you and 1 steps to your left. "
        "There is a wall 4 steps in front of you. You carry nothing.\n"
        'The available actions are: "turn left", "turn right", "move forward", "go to blue key 1", '
        '"pick up blue key 1".'
    )
    step = env.step("go to blue key 1")
    assert step.done
    assert step.reward == 1.0
    assert step.info["success"]
    assert env.actions() == []


def test_carrying_dropping_and_doors(env: BabyAI) -> None:
    env.reset(item_of("UnlockLocalDist", 0))
    while not (action := env.oracle()).startswith("pick up"):
        env.step(action)
    observation = env.step(action).observation
    assert f"You carry a {action.removeprefix('pick up ').removesuffix(' 1')}." in observation
    assert not any(listed.startswith("pick up") for listed in env.actions())
    refused = env.step("pick up purple ball 1")
    assert not refused.info["valid"]
    while "drop" not in env.actions():
        env.step("turn left")
    assert "You carry nothing." in env.step("drop").observation
    assert env.step("drop").observation.startswith("You carry nothing.\n")


def test_the_step_limit_ends_the_episode_without_success(env: BabyAI) -> None:
    env.reset(item_of("GoToObjS6", 0))
    turns = 0
    step = env.step("turn left")
    while not step.done:
        # Alternate left and right, so that the agent never faces the goal.
        step = env.step("turn right" if turns % 2 == 0 else "turn left")
        turns += 1
    assert step.observation == "You ran out of steps."
    assert step.reward == 0.0
    assert step.info == {"valid": True, "success": False}


HOSTILE = [
    "",
    " ",
    "\x00\x07\x1b[31m",
    "go to " + "a" * 10_000,
    "🐍" * 10_000,
    "go to blue key 999999999999999999999",
    "go to blue key 1\u202e",
    "ＧＯ ＴＯ ｂｌｕｅ ｋｅｙ １",
    "pick up",
    "toggle and go through",
    "__import__('os').system('true')",
    "go to {name}",
    "\ud800",
    "turn left turn left",
    "drop",
    "toggle",
    "go through blue key 1",
    "toggle and go through blue key 1",
    "pick up wall 1",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_an_unlisted_action_is_invalid_and_changes_nothing(env: BabyAI, text: str) -> None:
    observation = env.reset(item_of("GoToObjS6", 0))
    before = env.state_key()
    step = env.step(text)
    assert step.info == {"valid": False}
    assert (step.reward, step.done) == (0.0, False)
    assert step.observation.endswith(observation)
    assert len(step.observation) < len(observation) + 60
    assert env.state_key() == before


def test_random_bytes_are_answered_as_invalid_actions(env: BabyAI) -> None:
    choose = random.Random(0)
    words = ["go", "to", "pick", "up", "toggle", "and", "through", "red", "door", "ball", "1", "2", "\n", "\x00", "é"]
    env.reset(item_of("BossLevel", 4))
    for _ in range(2000):
        step = env.step(" ".join(choose.choices(words, k=choose.randrange(8))))
        assert isinstance(step.observation, str)
        if step.done:
            env.reset(item_of("BossLevel", 4))


def test_case_spaces_quotes_and_a_full_stop_are_ignored(env: BabyAI) -> None:
    env.reset(item_of("GoToObjS6", 0))
    assert env.step('  "Turn   LEFT". \n').info["valid"]


TWO_PURPLE_DOORS = 49
"""An item whose first view has a locked purple door 1 and a closed purple door 2."""


@pytest.mark.parametrize(
    ("item", "words", "listed"),
    [
        (4149, "pickup blue ball 1", "pick up blue ball 1"),
        (TWO_PURPLE_DOORS, "go to locked purple door 1", "go to purple door 1"),
        (TWO_PURPLE_DOORS, "go to closed purple door 2", "go to purple door 2"),
        (TWO_PURPLE_DOORS, "go to purple closed door 1", "go to purple door 2"),
        (TWO_PURPLE_DOORS, "toggle and go through closed purple door 2", "toggle and go through purple door 2"),
    ],
)
def test_other_names_of_objects_equal_the_listed_action(env: BabyAI, item: int, words: str, listed: str) -> None:
    env.reset(item)
    expected = env.step(listed), env.state_key()
    env.reset(item)
    assert (env.step(words), env.state_key()) == expected


@pytest.mark.parametrize(
    "words",
    [
        "go to closed purple door 1",
        "go to purple closed door 2",
        "go to purple open door 1",
        "go to purple closed door 0",
    ],
)
def test_a_door_in_another_state_is_not_seen(env: BabyAI, words: str) -> None:
    env.reset(TWO_PURPLE_DOORS)
    step = env.step(words)
    assert step.info == {"valid": False}
    assert step.observation.startswith("You do not see that.\n")


def test_agentgyms_way_through_a_door_ends_in_the_doorway(env: BabyAI) -> None:
    env.reset(TWO_PURPLE_DOORS)
    env.step("toggle and go through purple door 2")
    behind = env.state_key()
    env.reset(TWO_PURPLE_DOORS)
    env.oracle()
    assert env.step("toggle and go through purple closed door 1").info == {"valid": True}
    assert env.state_key() != behind
    env.step("move forward")
    assert env.state_key() == behind
    turns = 0
    while not env.step(env.oracle()).done:
        turns += 1
        assert turns < 60


def test_checking_the_available_actions_changes_nothing(env: BabyAI) -> None:
    observation = env.reset(4149)
    before = env.state_key(), env.oracle()
    step = env.step("check available actions")
    assert step.info == {"valid": True}
    assert (step.observation, step.reward, step.done) == (observation, 0.0, False)
    assert (env.state_key(), env.oracle()) == before


def test_different_states_have_different_keys(env: BabyAI) -> None:
    item = item_of("ActionObjDoor", 0)
    env.reset(item)
    start = env.state_key()
    env.step("turn left")
    turned = env.state_key()
    assert turned != start
    env.step("turn right")
    assert env.state_key() == start
    env.step("pick up red ball 1")
    held = env.state_key()
    assert held not in (start, turned)
    env.reset(item)
    env.step("pick up red ball 1")
    assert env.state_key() == held
    env.reset(item + 40)
    assert env.state_key() != start


def test_state_keys_never_change_from_version_to_version(env: BabyAI) -> None:
    env.reset(item_of("GoToObjS6", 0))
    assert env.state_key() == "3:ceb7cc0ae5e83eb24193af5b87dd4bc6"
    env.reset(4149)
    env.step("pick up blue ball 1")
    assert env.state_key() == "4149:9c46a6eac1c0ade152c4e5014893e6a5"


def test_a_state_key_follows_every_change_of_the_grid(env: BabyAI) -> None:
    for number in range(len(LEVELS)):
        choose = random.Random(number)
        env.reset(number + 120)
        for _ in range(25):
            done = env.step(choose.choice(env.actions())).done
            assert env.state_key() == f"{number + 120}:{StateKeys(env._level).key()}"
            if done:
                break


def test_state_keys_depend_on_mission_progress(env: BabyAI) -> None:
    """The two states have the same grid and agent, but one has the first half of the mission done."""
    for seed in range(30):
        env.reset(item_of("GoToSeqS5R2", seed))
        if type(env._level.instrs).__name__ == "GoToInstr":
            continue
        before = env.state_key()
        sequence = env._level.instrs
        sequence.a_done = "success"
        assert env.state_key() != before
        return
    pytest.fail("no mission of two parts among 30 seeds")


def test_render_is_an_svg_with_the_mission(env: BabyAI) -> None:
    for level in ("KeyInBox", "BossLevel"):
        env.reset(item_of(level, 1))
        root = ElementTree.fromstring(env.render())
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        caption = " ".join(node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text"))
        assert env._level.mission in caption


def test_a_finished_or_closed_episode_needs_a_reset(env: BabyAI) -> None:
    for call in (lambda: env.step("turn left"), env.oracle, env.state_key, env.render):
        with pytest.raises(EnvError, match="call reset"):
            call()
    env.reset(item_of("GoToObjS6", 0))
    env.step("go to blue key 1")
    assert env.render()
    with pytest.raises(EnvError, match="call reset"):
        env.step("turn left")
    env.close()
    with pytest.raises(EnvError, match="call reset"):
        env.render()
    assert env.reset(0)
