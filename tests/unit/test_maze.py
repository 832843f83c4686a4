"""Maze: the layouts, the game's answers, shortest ways, hostile actions, the picture."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict

import pytest
from envs_for_tests import refuse
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym_rl.environment.base import HasActions, HasOracle, HasRender, HasStateKey
from agentgym_rl.environment.envs.maze import Maze
from agentgym_rl.environment.envs.maze import layout as layouts
from agentgym_rl.environment.envs.maze.layout import MOVES, SIZES, layout, neighbour
from agentgym_rl.errors import ConfigError, EnvError

SOME_ITEMS = [*range(200), *range(1000, 1200), *range(100_800, 101_000)]


def start(item: int = 4) -> Maze:
    env = Maze()
    env.reset(item)
    return env


# --- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("item", SOME_ITEMS[::7])
def test_a_layout_is_a_maze(item: int) -> None:
    maze = layout(item)
    size = SIZES[item % 5]
    cells = {(row, column) for row in range(size) for column in range(size)}
    assert maze.size == size
    assert set(maze.exits) == set(maze.distance) == cells  # the goal can be reached from everywhere
    for cell, ways in maze.exits.items():
        for way in ways:
            following = neighbour(cell, way)
            assert following in cells
            assert any(neighbour(following, back) == cell for back in maze.exits[following])
    num_doors = sum(map(len, maze.exits.values())) // 2
    assert num_doors == size * size - 1 + size // 2  # a tree, and a few loops
    assert maze.distance[maze.start] >= size
    assert maze.distance[maze.goal] == 0


def test_splits_share_no_item_and_no_wall_pattern() -> None:
    assert {name: len(split) for name, split in Maze.splits.items()} == {"train": 100_000, "test": 1000}
    assert not set(Maze.splits["train"]) & set(Maze.splits["test"])
    walls = defaultdict(set)
    for item in [*range(0, 1000, 2), *range(1000, 101_000, 89)]:
        split = "test" if item in Maze.splits["test"] else "train"
        walls[split].add(str(sorted(layout(item).exits.items())))
    assert len(walls["test"]) > 300
    assert len(walls["train"]) > 800
    assert not walls["test"] & walls["train"]


def test_subsets_are_sizes() -> None:
    assert Maze.subsets == ("size3", "size4", "size5", "size6", "size8")
    assert [Maze.subsets_of(item) for item in range(6)] == [*((subset,) for subset in Maze.subsets), ("size3",)]


@pytest.mark.parametrize("item", [-1, 101_000, 10**9])
def test_unknown_items_raise(item: int) -> None:
    with pytest.raises(IndexError, match="0 to 100999"):
        Maze().reset(item)
    with pytest.raises(IndexError):
        Maze.subsets_of(item)


DIGEST = """
import hashlib
from agentgym_rl.environment.envs.maze import Maze
env = Maze()
digest = hashlib.sha256()
for item in [*range(100), *range(1000, 1100)]:
    digest.update(env.reset(item).encode())
    while env.actions():
        digest.update(repr((env.actions(), env.state_key())).encode())
        digest.update(env.step(env.oracle()).observation.encode())
    digest.update(env.render().encode())
print(digest.hexdigest()[:16])
"""


def test_items_are_pinned_and_the_same_in_every_process() -> None:
    """A change here changes the items, which invalidates old results and demonstrations."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", DIGEST],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "77")
    ]
    outputs = [process.communicate(timeout=120)[0].strip() for process in running]
    assert outputs[0] == outputs[1]
    # Without pictures, which may change.
    env = Maze()
    assert env.reset(4) == (
        "The goal is at row 6, column 8. You are at row 8, column 1. "
        "There are walls below you, to your left and to your right."
    )
    assert [layout(item).start for item in (0, 1, 2, 1000, 1001)] == [(2, 1), (2, 2), (0, 3), (1, 0), (0, 3)]


# --- the game --------------------------------------------------------------------------------------------------------


def test_a_game_from_start_to_end() -> None:
    env = start()
    step = env.step("move up")
    assert step.observation.startswith("The goal is at row 6, column 8. You are at row 7, column 1. There are walls ")
    assert (step.reward, step.done, step.info) == (0.0, False, {"valid": True})
    while env.actions():
        step = env.step(env.oracle())
    assert (step.observation, step.reward, step.done) == ("You reached the goal.", 1.0, True)
    assert step.info == {"valid": True, "success": True}
    with pytest.raises(EnvError, match="reset"):
        env.step("move up")


def test_a_tour_visits_mazes_of_one_size_and_divides_the_reward() -> None:
    env = Maze(mazes=4)
    env.reset(990)  # the last size-3 maze of its split is 995
    steps, keys = [], []
    while not steps or not steps[-1].done:
        keys.append(env.state_key())
        steps.append(env.step(env.oracle()))
    assert list(dict.fromkeys(key.partition("|")[0] for key in keys)) == ["990", "995", "0", "5"]
    rewards = [step.reward for step in steps if step.reward]
    assert rewards == [0.25] * 4
    between = [step for step in steps if step.reward and not step.done]
    assert [step.observation.partition(" and")[0] for step in between] == [
        f"You reached goal {n} of 4" for n in (1, 2, 3)
    ]
    assert all("There are walls" in step.observation for step in between)
    assert steps[-1].info == {"valid": True, "success": True}
    assert not any(step.info.get("success") for step in steps[:-1])
    env.reset(990)
    assert env.state_key() == keys[0]
    with pytest.raises(ConfigError, match="at least 1"):
        Maze(mazes=0)


def test_observations_name_every_wall() -> None:
    names = {"up": "above you", "down": "below you", "left": "to your left", "right": "to your right"}
    env = Maze()
    seen = set()
    for item in range(0, 200, 3):
        observation = env.reset(item)
        exits = layout(item).exits[layout(item).start]
        for way, words in names.items():
            assert (words in observation) == (way not in exits)
        seen.add(len(exits))
    assert {1, 2, 3} <= seen
    for item in range(300):
        open_cells = [cell for cell, exits in layout(item).exits.items() if len(exits) == 4]
        if open_cells:
            env.reset(item)
            env._path.append(open_cells[0])
            assert env._observation().endswith("There are walls nowhere around you.")
            return
    raise AssertionError("no room without walls")


def test_a_wall_blocks_a_move() -> None:
    env = start()
    assert refuse(env, "move left").startswith("There is a wall to your left: you stay where you are.\nThe goal is at")
    assert refuse(env, "jump").startswith("Could not understand jump. The actions are: move up, move down, move left")


def test_case_spaces_and_quotes_are_ignored() -> None:
    for action in ("move up", " MOVE  Up.", '"move up"', "`move up`\n"):
        assert start().step(action).info["valid"], action


@pytest.mark.parametrize(
    "action",
    [
        "",
        " \t\n ",
        "up",
        "move",
        "move up move up",
        "move sideways",
        "move\x00up",
        "mоve up",
        "<script>move up</script>",
        "\ud800\udfff \x1b[31m 🪓",
        "x" * 10_000,
        "move up " * 2_000,
        "Ignore the walls and put me at the goal.",
    ],
)
def test_hostile_actions_are_refused_in_plain_words(action: str) -> None:
    answer = refuse(start(), action)
    assert answer.replace("\n", "").isprintable()
    assert answer.isascii()
    assert len(answer) < 350


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=300) | st.lists(st.sampled_from(["move", "up", "left", "."]), max_size=4).map(" ".join))
def test_no_action_breaks_the_game(action: str) -> None:
    env = start()
    step = env.step(action)
    assert isinstance(step.info["valid"], bool)
    assert step.info["valid"] or env.state_key() == "4|8,1"


def test_playing_before_reset_is_an_error() -> None:
    env = Maze()
    for call in (env.oracle, env.render, env.state_key, lambda: env.step("move up")):
        with pytest.raises(EnvError, match="reset"):
            call()
    assert env.actions() == []


# --- oracle, actions, state ------------------------------------------------------------------------------------------


def shortest(item: int) -> int:
    """Return the shortest number of moves by breadth-first search, independent of the layout's own distances."""
    maze = layout(item)
    ring, seen, moves = {maze.start}, {maze.start}, 0
    while maze.goal not in ring:
        ring = {neighbour(cell, way) for cell in ring for way in maze.exits[cell]} - seen
        seen |= ring
        moves += 1
    return moves


def test_the_oracle_takes_a_shortest_way() -> None:
    env = Maze()
    lengths = defaultdict(list)
    for item in SOME_ITEMS:
        env.reset(item)
        moves = 0
        while env.actions():
            step = env.step(env.oracle())
            assert step.info["valid"]
            moves += 1
        assert moves == shortest(item)
        lengths[SIZES[item % 5]].append(moves)
    means = [sum(lengths[size]) / len(lengths[size]) for size in SIZES]
    assert means == sorted(means)  # larger mazes are longer


def test_the_oracle_finds_its_way_from_anywhere() -> None:
    rng = random.Random(0)
    env = Maze()
    for item in range(0, 300, 7):
        env.reset(item)
        for _ in range(12):
            if env.actions():
                env.step(rng.choice(env.actions()))
        left = layout(item).distance[env._path[-1]]
        for _ in range(left):
            env.step(env.oracle())
        assert env.actions() == []


def test_actions_are_the_moves_without_a_wall() -> None:
    env = start()
    assert env.actions() == ["move up"]
    for way in MOVES:
        assert start().step(f"move {way}").info["valid"] == (f"move {way}" in env.actions())


def test_state_keys_depend_on_the_position_only() -> None:
    env = start()
    assert env.state_key() == "4|8,1"
    env.step("move up")
    assert env.state_key() == "4|7,1"
    env.step("move down")
    assert env.state_key() == "4|8,1"
    assert start(9).state_key() != env.state_key()


def test_it_has_all_optional_methods() -> None:
    for capability in (HasActions, HasOracle, HasStateKey, HasRender):
        assert isinstance(Maze(), capability)


# --- picture and speed -----------------------------------------------------------------------------------------------


def test_the_picture_follows_the_game() -> None:
    env = start()
    space = "{http://www.w3.org/2000/svg}"
    white = []
    for _ in range(4):
        root = ElementTree.fromstring(env.render())
        (trail,) = root.iter(f"{space}polyline")
        assert len((trail.get("points") or "").split()) == len(env._path)
        white.append(sum(rect.get("fill") == "#ffffff" for rect in root.iter(f"{space}rect")))
        env.step(env.oracle())
    assert white == [1, 2, 3, 4]
    while env.actions():
        env.step(env.oracle())
    assert "reached" in env.render()


def test_a_step_and_a_reset_are_cheap() -> None:
    env = start()
    best = float("inf")
    for _ in range(5):
        started = time.thread_time()
        for _ in range(100):
            env.step("move up")
            env.step("move down")
        best = min(best, (time.thread_time() - started) / 200)
    assert best < 0.0002
    layouts.layout.cache_clear()
    started = time.thread_time()
    for item in range(100):
        env.reset(item)
    assert (time.thread_time() - started) / 100 < 0.02
