"""TextCraft: the recipe tree, the game's answers, the oracle, determinism, hostile actions, the picture."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest
from envs_for_tests import refuse
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym_rl.environment.base import HasActions, HasOracle, HasRender, HasStateKey, HasThought
from agentgym_rl.environment.envs.textcraft import TextCraft, problems
from agentgym_rl.environment.envs.textcraft.planner import best_plan, fill, next_action
from agentgym_rl.environment.envs.textcraft.recipe_book import (
    GENERICS,
    Recipe,
    craft_command,
    load_book,
    parse_recipes,
    rank_recipes,
    read_package,
)
from agentgym_rl.environment.envs.textcraft.renaming import new_names, rename
from agentgym_rl.errors import ConfigError, EnvError

ALL_ITEMS = [item for split in problems.SPLITS.values() for item in split]
SOME_RENAMED = problems.RENAMED[::97]


def item_of(goal: str) -> int:
    return problems.goals().index(goal)


def start(goal: str) -> TextCraft:
    env = TextCraft()
    env.reset(item_of(goal))
    return env


def play(env: TextCraft, *actions: str) -> list[str]:
    """Play valid actions; return the answers."""
    steps = [env.step(action) for action in actions]
    assert all(step.info["valid"] for step in steps), steps
    return [step.observation for step in steps]


def finish(env: TextCraft, limit: int = 60) -> list[str]:
    """Let the oracle play to the end; return its actions."""
    actions = []
    for _ in range(limit):
        actions.append(env.oracle())
        step = env.step(actions[-1])
        assert step.info["valid"], (actions, step)
        if step.done:
            assert step.reward == 1.0
            assert step.info["success"] is True
            return actions
        assert step.reward == 0.0
    raise AssertionError(f"the oracle did not finish item {env.state_key()} in {limit} turns")


# --- the recipe tree -------------------------------------------------------------------------------------------------


def test_the_tree_has_the_known_size() -> None:
    book = load_book()
    assert len(book.recipes) == 544
    assert Counter(book.depth[goal] for goal in book.recipes) == {1: 123, 2: 291, 3: 119, 4: 11}


def test_generic_ingredients_are_recovered() -> None:
    book = load_book()
    commands = {recipe.command for known in book.recipes.values() for recipe in known}
    assert "craft 4 stick using 2 planks" in commands
    assert "craft 4 oak planks using 1 oak logs" in commands
    assert "craft 4 crimson planks using 1 crimson stems" in commands
    assert "craft 1 campfire using 3 stick, 1 coals, 3 logs" in commands
    assert "craft 1 barrel using 6 planks, 2 wooden slabs" in commands
    assert "craft 1 painting using 8 stick, 1 wool" in commands
    assert {name: len(members) for name, members in GENERICS.items() if len(members) != 4} == {
        "logs": 32,
        "planks": 8,
        "wooden slabs": 8,
        "wool": 16,
        "coals": 2,
        "stone crafting materials": 2,
        "soul fire base blocks": 2,
    }
    used = {name for known in book.recipes.values() for recipe in known for name, _ in recipe.needs}
    assert set(GENERICS) <= used
    # A red sand TNT or a bamboo stick is not merged into a generic ingredient that does not exist.
    assert [r.command for r in book.recipes["stick"]] == [
        "craft 1 stick using 2 bamboo",
        "craft 4 stick using 2 planks",
    ]
    assert len(book.recipes["red dye"]) == 4


def test_no_ingredient_fits_two_slots_of_a_recipe() -> None:
    """Matching an action to a recipe relies on this."""
    book = load_book()
    for recipe in itertools.chain.from_iterable(book.recipes.values()):
        fitting = [member for name, _ in recipe.needs for member in book.generics.get(name, (name,))]
        assert len(fitting) == len(set(fitting)), recipe


def test_ranks_order_every_recipe_and_block_cycles_are_gone() -> None:
    book = load_book()
    for recipe in itertools.chain.from_iterable(book.recipes.values()):
        assert all(book.rank[name] < book.rank[recipe.output] for name, _ in recipe.needs)
    for gathered in (
        "coal",
        "diamond",
        "redstone",
        "iron nugget",
        "gold nugget",
        "wheat",
        "slime ball",
        "honey bottle",
    ):
        assert book.depth[gathered] == 0
        assert gathered not in book.recipes


def test_the_order_of_the_packages_tables_does_not_matter() -> None:
    rows, names = read_package()
    backwards = dict(reversed(rows.items())), dict(reversed(names.items()))
    forward, backward = parse_recipes(rows, names), parse_recipes(*backwards)
    assert list(forward.items()) == list(backward.items())


def test_a_cycle_in_the_recipes_is_refused() -> None:
    cycle = {"block": [Recipe("block", 1, (("ingot", 9),))], "ingot": [Recipe("ingot", 9, (("block", 1),))]}
    with pytest.raises(ConfigError, match="without cycles"):
        rank_recipes(cycle)


# --- items -----------------------------------------------------------------------------------------------------------


def test_splits_are_disjoint_and_have_the_published_sizes() -> None:
    assert {name: len(split) for name, split in TextCraft.splits.items()} == {
        "train": 374,
        "test": 100,
        "validation": 70,
        "renamed": 32 * 374,
    }
    assert sorted(ALL_ITEMS) == list(range(544))
    assert len(set(problems.goals())) == 544
    depths = {
        name: Counter(subset for item in split for subset in TextCraft.subsets_of(item))
        for name, split in TextCraft.splits.items()
    }
    assert depths["test"] == {"depth1": 31, "depth2": 41, "depth3": 25, "depth4": 3}
    assert all(set(counts) == set(TextCraft.subsets) for counts in depths.values())


@pytest.mark.parametrize("item", [-1, 544 + 32 * 374, 10**9])
def test_unknown_items_raise(item: int) -> None:
    with pytest.raises(IndexError, match="0 to 12511"):
        TextCraft().reset(item)
    with pytest.raises(IndexError):
        TextCraft.subsets_of(item)


def test_the_first_observation_lists_needed_recipes_and_distractors() -> None:
    env = TextCraft()
    for item in ALL_ITEMS:
        observation = env.reset(item)
        head, _, goal = observation.partition("\n\n")
        first, *commands = head.split("\n")
        assert first == "Crafting commands:"
        assert goal == f"Goal: craft {problems.goals()[item]}."
        assert len(commands) == len(set(commands)) <= 40
        listed = problems.problem(item)
        plan = best_plan(load_book(), listed.goal, {}, listed.favourites)
        needed = {recipe.command for recipe, _ in plan.crafts.values()}
        assert needed <= set(commands)
        assert len(observation) < 2000
    sizes = [len(problems.problem(item).commands) for item in ALL_ITEMS]
    assert sum(sizes) / len(sizes) > 10


DIGEST = """
import hashlib
from agentgym_rl.environment.envs.textcraft import TextCraft
env = TextCraft()
digest = hashlib.sha256()
for name, split in env.splits.items():
    for item in split[::97] if name == "renamed" else split:
        digest.update(env.reset(item).encode())
        while True:
            digest.update(repr((env.actions(), env.state_key())).encode())
            step = env.step(env.oracle())
            digest.update(step.observation.encode())
            if step.done:
                break
        digest.update(env.render().encode())
print(digest.hexdigest())
"""


def test_everything_is_the_same_in_every_process() -> None:
    """Observations, actions, oracle and pictures of all items, under different hash seeds."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", DIGEST],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "77")
    ]
    outputs = [process.communicate(timeout=120) for process in running]
    assert all(process.returncode == 0 for process in running), outputs
    assert len(outputs[0][0].strip()) == 64
    assert outputs[0][0] == outputs[1][0]


def test_item_numbers_are_pinned() -> None:
    """A change here renumbers the items, which invalidates old results and demonstrations."""
    pinned = ["magenta bed", "glass pane", "warped button", "iron trapdoor", "leather chestplate", "detector rail"]
    assert [problems.goals()[item] for item in (0, 373, 374, 473, 474, 543)] == pinned


def test_renamed_goals_are_the_training_goals_under_other_names() -> None:
    env, held_out = TextCraft(), set(problems.goals()[374:])
    same = same_goal = 0
    for item in SOME_RENAMED:
        before = env.reset(problems.original(item))
        solution = finish(env)
        observation = env.reset(item)
        goal = observation.partition("Goal: craft ")[2].rstrip(".")
        same += observation == before
        assert goal not in held_out
        assert env.subsets_of(item) == env.subsets_of(problems.original(item))
        same_goal += goal == problems.goals()[problems.original(item)]
        renamed = finish(env)
        assert len(renamed) == len(solution)
        assert f" {goal} using " in renamed[-1]
    assert same < len(SOME_RENAMED) / 20  # only kinds and their members, which keep their names
    assert same_goal < len(SOME_RENAMED) / 3


def test_variations_permute_names_and_keep_the_recipes() -> None:
    kept = problems.goals()[374:]
    book, names = load_book(), new_names(load_book(), 5, kept)
    assert sorted(names) == sorted(names.values())
    assert not set(names) & {*kept, *GENERICS, *(member for members in GENERICS.values() for member in members)}
    assert sum(old != new for old, new in names.items()) > 0.95 * len(names) > 300
    assert names != new_names(book, 6, kept)
    restored = rename(rename(book, names), {new: old for old, new in names.items()})
    assert restored == book


# --- the game --------------------------------------------------------------------------------------------------------


def test_a_game_from_start_to_end() -> None:
    env = start("oak fence")
    assert play(
        env,
        "inventory",
        "get 2 oak log",
        "craft 4 oak planks using 1 oak log",
        "craft 4 oak planks using 1 oak log",
        "craft 4 stick using 2 oak planks",
        "inventory",
    ) == [
        "Inventory: You are not carrying anything.",
        "Got 2 oak log",
        "Crafted 4 oak planks",
        "Crafted 4 oak planks",
        "Crafted 4 stick",
        "Inventory: [oak planks] (6) [stick] (4)",
    ]
    last = env.step("craft 3 oak fence using 2 stick, 4 oak planks")
    assert (last.observation, last.reward, last.done) == ("Crafted 3 oak fence", 1.0, True)
    assert last.info == {"valid": True, "success": True}
    assert env.state_key().endswith("|3 oak fence,2 oak planks,2 stick")
    assert env.actions() == []
    with pytest.raises(EnvError, match="reset"):
        env.step("inventory")
    env.reset(3)
    assert env.state_key() == "3|"


def test_any_member_can_replace_a_generic_ingredient() -> None:
    env = start("chest")
    play(env, "get 1 birch log", "get 1 stripped warped stem")
    play(env, "craft 4 birch planks using 1 birch log", "craft 4 warped planks using 1 stripped warped stem")
    assert env.step("craft 1 chest using 4 birch planks, 4 warped planks").done


def test_generic_names_are_accepted() -> None:
    env = start("campfire")
    assert play(env, "get 1 coals", "get 3 oak logs", "get 1 logs") == ["Got 1 coal", "Got 3 oak log", "Got 1 oak log"]
    assert refuse(env, "get 2 planks") == "Could not find planks"
    assert refuse(env, "get 1 wool") == "Could not find wool"
    play(env, "craft 4 oak planks using 1 oak logs", "craft 4 stick using 2 planks")
    assert refuse(env, "craft 4 stick using 1 planks, 1 birch planks") == "Could not find enough items to craft stick"
    assert env.step("craft 1 campfire using 3 stick, 1 coals, 3 oak logs").done


def test_agentgyms_names_of_generic_ingredients_are_accepted() -> None:
    env = start("stone axe")
    play(env, "get 2 bamboo", "craft 1 stick using 2 bamboo", "get 2 bamboo", "craft 1 stick using 2 bamboo")
    assert play(env, "get 3 stone tool materials") == ["Got 3 cobblestone"]
    assert env.step("craft 1 stone axe using 3 stone tool materials, 2 stick").done
    env = start("composter")
    offered = env.actions()
    assert play(env, "get 7 wooden slabs") == ["Got 7 oak slab"]
    assert refuse(env, "get 7 oak slab") == "Could not find oak slab"
    assert not [action for action in offered if "slab" in action and action.startswith("get")]
    assert env.step("craft 1 composter using 7 wooden slabs").done


def test_crafting_needs_exact_amounts_and_uses_them_up() -> None:
    env = start("oak fence")
    play(env, "get 5 oak log")
    assert "valid recipe" in refuse(env, "craft 8 oak planks using 2 oak log")
    assert "valid recipe" in refuse(env, "craft 4 oak planks using 1 birch log")
    assert "valid recipe" in refuse(env, "craft 4 oak planks using 1 oak log, 1 dirt")
    assert refuse(env, "craft 6 oak slab using 3 oak planks") == "Could not find enough items to craft oak slab"
    assert refuse(env, "craft 1 moon using 1 oak log") == "Could not find a recipe for moon"
    assert refuse(env, "craft 4 oak planks using oak log").startswith("Wrong item format: oak log")
    # The recipe decides the crafted amount, not the request.
    assert play(env, "craft 1 oak planks using 1 oak log", "craft oak planks using 1 oak log") == [
        "Crafted 4 oak planks",
        "Crafted 4 oak planks",
    ]
    assert env.state_key().endswith("|3 oak log,8 oak planks")


def test_an_item_with_a_recipe_cannot_be_gathered() -> None:
    env = start("oak fence")
    for item in ("stick", "oak planks", "iron ingot", "oak fence", "philosophers stone"):
        assert refuse(env, f"get 1 {item}") == f"Could not find {item}"


def test_case_spaces_and_item_ids_are_normalised() -> None:
    env = start("oak fence")
    assert play(env, "  GET 2 minecraft:oak_log.  ") == ["Got 2 oak log"]
    assert play(env, "craft 4 minecraft:oak_planks  using 1 oak_log") == ["Crafted 4 oak planks"]


@pytest.mark.parametrize(
    "action",
    [
        "",
        " \t\n ",
        "get",
        "get oak log",
        "get 0 oak log",
        "get -1 oak log",
        "get 1.5 oak log",
        "get ٣ oak log",
        "get 1001 oak log",
        "get 999999999999 oak log",
        f"get {'9' * 400} oak log",
        "get 1 oak log\nget 1 oak log",
        "get 1 oak\x00log",
        "inventory please",
        "craft 4 oak planks using",
        "craft 4 oak planks using 1 oak log,",
        "craft 4 oak planks using 999999999999 oak log",
        "craft 4 oak planks using 0 oak log, 1 oak log",
        "craft using using using",
        "<script>alert(1)</script>",
        "\ud800\udfff \x1b[31m 🪓",
        "x" * 10_000,
        "craft " * 2_000,
        "1 oak log, " * 1_000,
    ],
)
def test_hostile_actions_are_refused_in_plain_words(action: str) -> None:
    env = start("oak fence")
    env.step("get 3 oak log")
    answer = refuse(env, action)
    assert answer.isprintable()
    assert answer.isascii()
    assert 0 < len(answer) < 250


WORDS = st.sampled_from(
    [
        "get",
        "craft",
        "using",
        "inventory",
        "1",
        "2",
        "4",
        "007",
        ",",
        "oak log",
        "oak planks",
        "stick",
        "planks",
        "\n",
        "_",
    ]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.one_of(WORDS, st.text(max_size=8)), max_size=14).map(" ".join) | st.text(max_size=700))
def test_no_action_breaks_the_game(action: str) -> None:
    env = start("oak fence")
    env.step("get 3 oak log")
    step = env.step(action)
    assert isinstance(step.info["valid"], bool)
    assert step.observation.isprintable()
    assert len(step.observation) < 250
    if not step.info["valid"]:
        assert env.state_key().endswith("|3 oak log")
    assert finish(env)


def test_playing_before_reset_is_an_error() -> None:
    env = TextCraft()
    for call in (env.oracle, env.render, lambda: env.step("inventory")):
        with pytest.raises(EnvError, match="reset"):
            call()


# --- oracle, actions, state ------------------------------------------------------------------------------------------


def test_the_oracle_solves_every_item() -> None:
    env = TextCraft()
    lengths = {}
    for item in ALL_ITEMS:
        env.reset(item)
        lengths[problems.goals()[item]] = len(finish(env))
    # Gather each raw item once, then craft, exactly as in the first plan.
    for goal, length in lengths.items():
        listed = problems.problem(item_of(goal))
        assert length == best_plan(load_book(), goal, {}, listed.favourites).num_actions
    assert {goal for goal, length in lengths.items() if length > 30} == {"anvil", "netherite block"}
    train = TextCraft.splits["train"]
    assert item_of("anvil") in train
    assert item_of("netherite block") in train


def test_the_oracle_solves_from_any_state() -> None:
    """Random actions come first: useful ones, any raw item, and any possible craft of the whole book."""
    book = load_book()
    raw = sorted(name for name, depth in book.depth.items() if depth == 0 and name not in book.generics)
    every_recipe = list(itertools.chain.from_iterable(book.recipes.values()))
    rng = random.Random(5)
    env = TextCraft()
    solved = 0
    while solved < 250:
        env.reset(rng.choice(ALL_ITEMS))
        for _ in range(rng.randrange(1, 30)):
            action = rng.choice(env.actions())
            if rng.random() < 0.3:
                action = f"get {rng.randrange(1, 12)} {rng.choice(raw)}"
            elif rng.random() < 0.3:
                recipe = rng.choice(every_recipe)
                parts = fill(book, recipe, env._held)
                action = craft_command(recipe, parts) if parts else action
            step = env.step(action)
            assert step.info["valid"], action
            if step.done:
                break
        else:
            finish(env)
            solved += 1


def test_the_oracle_uses_held_items() -> None:
    env = start("light blue dye")
    play(env, "get 1 lapis lazuli", "craft 1 blue dye using 1 lapis lazuli", "get 1 bone")
    play(env, "craft 3 bone meal using 1 bone", "craft 1 white dye using 1 bone meal")
    assert finish(env) == ["craft 2 light blue dye using 1 blue dye, 1 white dye"]
    env = start("chest")
    play(env, "get 2 spruce log")
    assert finish(env) == ["craft 4 spruce planks using 1 spruce log"] * 2 + ["craft 1 chest using 8 spruce planks"]


def test_the_oracle_is_a_function_of_the_state() -> None:
    book = load_book()
    env = start("lectern")
    for _ in range(8):
        listed = problems.problem(item_of("lectern"))
        action = env.oracle()
        assert action == env.oracle() == next_action(book, "lectern", dict(env._held), listed.favourites)
        env.step(action)


def parts_of(text: str) -> dict[str, int]:
    parts = [] if text == "nothing" else [part.split(" ", 1) for part in text.split(", ")]
    return {name: int(count) for count, name in parts}


RECIPE = re.compile(r"(.+?) using (.+?)(?: makes (\d+), for (\d+) craft (?:once|(\d+) times))?")


def check_thought(env: TextCraft, listed: dict[tuple[str, str], int]) -> None:
    """Check every claim of a thought: following it in a copy of the game wins without leftovers."""
    first, *recipes, last = env.thought().removesuffix(".").split(". ")
    assert parts_of(first.removeprefix("Have ")) == env._held
    missing = parts_of(last.removeprefix("Missing "))
    copy = TextCraft()
    copy.reset(env._item)
    copy._held = dict(env._held)
    for name, count in missing.items():
        assert copy.step(f"get {count} {name}").observation == f"Got {count} {name}"
    made: dict[str, tuple[int, int]] = {}
    for recipe in reversed(recipes):
        match = RECIPE.fullmatch(recipe)
        assert match is not None
        name, needs, makes, wanted, times = match.groups()
        assert makes in (None, str(listed[name, needs]))
        for _ in range(int(times or 1)):
            step = copy.step(f"craft 1 {name} using {needs}")
            assert step.info["valid"], (recipe, step)
        made[name] = (int(wanted or 1), listed[name, needs] * int(times or 1))
    assert step.done
    assert not missing.keys() & copy._held.keys()
    goal = problems.goals()[env._item]
    assert made.pop(goal)[0] == 1
    for name, (lacking, count) in made.items():
        assert count - copy._held.get(name, 0) == lacking, name
    expected = next((f"get {count} {name}" for name, count in missing.items()), f" {next(iter(made), goal)} using ")
    assert expected in env.oracle()


def test_thoughts_are_true_and_lead_to_the_oracles_action() -> None:
    env = TextCraft()
    for item in TextCraft.splits["train"]:
        env.reset(item)
        listed = {}
        for recipe in problems.problem(item).commands:
            needs = ", ".join(f"{count} {name}" for name, count in recipe.needs)
            listed[recipe.output, needs] = recipe.count
        while env._playing:
            check_thought(env, listed)
            env.step(env.oracle())


def test_actions_are_all_valid_and_lead_to_the_goal() -> None:
    rng = random.Random(2)
    env = TextCraft()
    for item in rng.sample(ALL_ITEMS, 40):
        env.reset(item)
        for _ in range(6):
            offered = env.actions()
            assert offered == sorted(set(offered))
            assert "inventory" in offered
            held = dict(env._held)
            for action in offered:
                assert env.step(action).info["valid"], action
                env.reset(item)
                env._held = dict(held)
            gets = [action for action in offered if action.startswith("get")]
            assert env.oracle() in gets or env.oracle().startswith("craft")
            if env.step(env.oracle()).done:
                break


def test_random_play_over_the_actions_sometimes_wins() -> None:
    rng = random.Random(0)
    env = TextCraft()
    wins = 0
    easy = [item for item in TextCraft.splits["train"] if "depth1" in TextCraft.subsets_of(item)]
    for item in easy:
        env.reset(item)
        wins += any(env.step(rng.choice(env.actions())).done for _ in range(10) if env.actions())
    assert 0.02 < wins / len(easy) < 0.9


def test_state_keys_depend_on_the_inventory_only() -> None:
    first, other = start("oak fence"), start("oak fence")
    play(first, "get 1 coal", "get 2 oak log", "inventory")
    play(other, "get 1 oak log", "get 1 oak log", "get 1 coal")
    assert first.state_key() == other.state_key() == f"{item_of('oak fence')}|1 coal,2 oak log"
    assert play(first, "inventory") == play(other, "inventory")
    play(first, "get 1 coal")
    assert first.state_key() != other.state_key()


def test_it_has_all_optional_methods() -> None:
    env = TextCraft()
    for capability in (HasActions, HasOracle, HasThought, HasStateKey, HasRender):
        assert isinstance(env, capability)


# --- picture and speed -----------------------------------------------------------------------------------------------


def test_the_picture_is_well_formed_and_follows_the_game() -> None:
    env = start("activator rail")
    texts = []
    while True:
        picture = env.render()
        root = ElementTree.fromstring(picture)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "href" not in picture
        texts.append([element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")])
        if not env.actions():
            break
        env.step(env.oracle())
    assert {"activator rail", "iron ingot", "redstone torch", "nothing yet", "0 of 6", "to do"} <= set(texts[0])
    assert {"crafted", "1 of 1 ✓"} <= set(texts[-1])
    done = [sum(text.endswith("✓") for text in words) for words in texts]
    assert done[0] == 0 < done[-1]


def test_every_picture_parses() -> None:
    env = TextCraft()
    for item in ALL_ITEMS[::7]:
        env.reset(item)
        env.step(env.oracle())
        ElementTree.fromstring(env.render())


def test_a_step_takes_well_under_a_millisecond() -> None:
    env = start("oak fence")
    actions = ["get 3 oak log", "craft 4 oak planks using 1 oak log", "inventory", "craft 1 chest using 8 planks", "hm"]
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for action in actions * 20:
            env.step(action)
        best = min(best, (time.perf_counter() - started) / (20 * len(actions)))
        env.reset(0)
    assert best < 0.0002
