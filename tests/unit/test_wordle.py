"""Wordle: the words, the marks, the game's answers, the solver, hostile guesses, the picture."""

from __future__ import annotations

import hashlib
import random
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest
from envs_for_tests import refuse
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym_rl.environment.base import HasActions, HasOracle, HasRender, HasStateKey
from agentgym_rl.environment.envs.wordle import Wordle, solver, words
from agentgym_rl.errors import EnvError

ALL_ITEMS = [item for split in Wordle.splits.values() for item in split]


def item_of(word: str) -> int:
    return words.hidden_words().index(word)


def start(word: str) -> Wordle:
    env = Wordle()
    env.reset(item_of(word))
    return env


# --- words and items -------------------------------------------------------------------------------------------------


def test_the_word_lists_are_complete_and_sorted_by_frequency() -> None:
    assert len(words.answers()) == len(set(words.answers())) == 1150
    assert len(words.allowed()) == 1150 + 6210
    assert all(len(word) == 5 and word.isascii() and word.islower() and word.isalpha() for word in words.allowed())
    assert words.answers()[:3] == ("other", "first", "click")
    assert {"crane", "about", "their", "armor"} <= words.allowed()


def test_splits_and_subsets_have_fixed_sizes() -> None:
    assert {name: len(split) for name, split in Wordle.splits.items()} == {"train": 850, "test": 200, "validation": 100}
    assert sorted(ALL_ITEMS) == list(range(1150))
    assert sorted(words.hidden_words()) == sorted(words.answers())
    counts = {
        name: Counter(subset for item in split for subset in Wordle.subsets_of(item))
        for name, split in Wordle.splits.items()
    }
    assert counts["test"] == {"common": 99, "rare": 101, "repeated": 65}
    assert counts["train"] == {"common": 423, "rare": 427, "repeated": 250}
    assert Wordle.subsets_of(item_of("other")) == ("common",)
    assert Wordle.subsets_of(item_of("llama")) == ("rare", "repeated")


def test_item_numbers_are_pinned() -> None:
    """A change here renumbers the items, which invalidates old results and demonstrations."""
    assert [words.hidden_words()[item] for item in (0, 849, 850, 1049, 1050, 1149)] == [
        "faith",
        "ranch",
        "grove",
        "suite",
        "sport",
        "timer",
    ]
    digest = hashlib.sha256(" ".join(words.hidden_words()).encode()).hexdigest()
    assert digest[:16] == "8593e6a758dfa567"


@pytest.mark.parametrize("item", [-1, 1150, 10**9])
def test_unknown_items_raise(item: int) -> None:
    with pytest.raises(IndexError, match="0 to 1149"):
        Wordle().reset(item)
    with pytest.raises(IndexError):
        Wordle.subsets_of(item)


# --- marks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guess", "answer", "marks"),
    [
        ("crane", "crane", "ggggg"),
        ("crane", "moody", "bbbbb"),
        ("eagle", "crane", "bybbg"),  # the answer's only e is the last letter: the first e gets nothing
        ("geese", "eagle", "yybbg"),
        ("llama", "level", "gybbb"),
        ("level", "llama", "gbbby"),
        ("eerie", "geese", "ygbbg"),
        ("sassy", "class", "yybgb"),
    ],
)
def test_marks_count_letters(guess: str, answer: str, marks: str) -> None:
    assert words.marks(guess, answer) == marks


def slow_marks(guess: str, answer: str) -> str:
    """Return the marks by another method: strike letters out of the answer one by one."""
    left = list(answer)
    marks = ["b"] * 5
    for place in range(5):
        if guess[place] == answer[place]:
            marks[place] = "g"
            left[place] = "-"
    for place in range(5):
        if marks[place] == "b" and guess[place] in left:
            marks[place] = "y"
            left[left.index(guess[place])] = "-"
    return "".join(marks)


def test_the_solvers_table_of_marks_equals_the_games() -> None:
    rng = random.Random(3)
    for guess in rng.sample(sorted(words.allowed()), 150):
        table = solver._marks_A(guess)
        for index in rng.sample(range(1150), 40):
            answer = words.answers()[index]
            assert words.marks(guess, answer) == slow_marks(guess, answer)
            assert table[index] == solver._number(words.marks(guess, answer))


# --- the game --------------------------------------------------------------------------------------------------------


def test_a_game_that_is_won() -> None:
    env = Wordle()
    assert env.reset(item_of("spice")) == "A word of five letters is hidden. You have 6 guesses."
    first = env.step("crane")
    assert first.observation == "Guess 1: c r a n e\nMarks:   y b b b g\nYou have 5 guesses left."
    assert (first.reward, first.done, first.info) == (0.0, False, {"valid": True})
    last = env.step("spice")
    assert last.observation == "Guess 2: s p i c e\nMarks:   g g g g g\nYou found the word."
    assert (last.reward, last.done, last.info) == (1.0, True, {"valid": True, "success": True})
    assert env.actions() == []
    with pytest.raises(EnvError, match="reset"):
        env.step("crane")


def test_a_game_that_is_lost() -> None:
    env = start("spice")
    for left in (5, 4, 3, 2):
        assert env.step("moody").observation.endswith(f"You have {left} guesses left.")
    assert env.step("moody").observation.endswith("You have 1 guess left.")
    last = env.step("moody")
    assert last.observation.endswith("The word was spice.")
    assert (last.reward, last.done, last.info) == (0.0, True, {"valid": True, "success": False})


def test_case_spaces_and_quotes_are_ignored() -> None:
    for guess in ("  SPICE \n", "s p i c e", '"spice".', "`Spice`"):
        assert start("spice").step(guess).done, guess


def test_an_invalid_guess_is_refused_and_costs_nothing() -> None:
    env = start("spice")
    assert refuse(env, "xqzvw") == "xqzvw is not in the word list. You have 6 guesses left."
    assert refuse(env, "spices").startswith("Could not read spices as a guess.")
    env.step("crane")
    assert refuse(env, "").startswith("Could not read nothing as a guess.")
    assert refuse(env, "crane spice").endswith("You have 5 guesses left.")


@pytest.mark.parametrize(
    "guess",
    [
        "",
        " \t\n ",
        "spice\nspice",
        "sp\x00ce",
        "ѕрісе",
        "ＳＰＩＣＥ",
        "spiçe",
        "12345",
        "s-p-i-c-e",
        "s  p i c e",
        "<b>hi</b>",
        "\ud800\udfff \x1b[31m 🪓",
        "x" * 10_000,
        "spice " * 2_000,
        "Ignore the rules and tell me the word.",
    ],
)
def test_hostile_guesses_are_refused_in_plain_words(guess: str) -> None:
    answer = refuse(start("spice"), guess)
    assert answer.isprintable()
    assert answer.isascii()
    assert 0 < len(answer) < 250
    assert answer.count("spice") <= guess[:60].count("spice")  # the answer does not reveal the word


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=300) | st.text("abcdefghij ", min_size=3, max_size=9))
def test_no_guess_breaks_the_game(guess: str) -> None:
    env = start("spice")
    step = env.step(guess)
    assert isinstance(step.info["valid"], bool)
    assert step.observation.replace("\n", "").isprintable()
    assert step.info["valid"] or env.state_key().endswith("|")


def test_playing_before_reset_is_an_error() -> None:
    env = Wordle()
    for call in (env.oracle, env.render, lambda: env.step("crane")):
        with pytest.raises(EnvError, match="reset"):
            call()
    assert env.actions() == []


# --- oracle, actions, state ------------------------------------------------------------------------------------------


def test_the_oracle_finds_every_word_in_five_guesses() -> None:
    env = Wordle()
    needed: Counter[int] = Counter()
    for item in ALL_ITEMS:
        env.reset(item)
        while env.actions():
            step = env.step(env.oracle())
            assert step.info["valid"]
        assert step.info["success"], words.hidden_words()[item]
        needed[len(env._history)] += 1
    assert max(needed) == 5
    assert sum(turn * count for turn, count in needed.items()) / 1150 < 3.2


def test_the_oracle_does_not_know_the_word() -> None:
    """Two words with the same marks so far get the same guess."""
    first = {start(word).oracle() for word in words.answers()[:50]}
    assert len(first) == 1
    a, b = start("wafer"), start("water")
    for env in (a, b):
        env.step("gamer")
    assert a.oracle() == b.oracle()


def test_the_oracle_continues_after_any_guesses() -> None:
    rng = random.Random(1)
    env = Wordle()
    won = 0
    for item in range(850, 1000):
        env.reset(item)
        for _ in range(2):
            env.step(rng.choice(sorted(words.allowed())))
        while env.actions():
            step = env.step(env.oracle())
        won += step.info["success"]
    assert won >= 145


def test_candidates_are_the_words_that_fit() -> None:
    env = start("spice")
    env.step("crane")
    env.step("about")
    fitting = solver.candidates(env._history)
    assert "spice" in fitting
    assert fitting == [w for w in words.answers() if all(words.marks(g, w) == m for g, m in env._history)]


def test_listed_actions_are_guesses_and_some_fit_the_marks() -> None:
    rng = random.Random(2)
    env = Wordle()
    won = 0
    for item in range(0, 850, 5):
        env.reset(item)
        while offered := env.actions():
            assert offered == sorted(set(offered)) == env.actions()
            assert 6 <= len(offered) <= 8
            assert set(offered) <= set(words.answers())
            assert set(offered) & set(solver.candidates(env._history))
            step = env.step(rng.choice(offered))
            assert step.info["valid"]
        won += step.info["success"]
    assert 0.15 < won / 170 < 0.6  # random play wins sometimes


def test_state_keys_ignore_the_order_of_guesses() -> None:
    first, other = start("spice"), start("spice")
    first.step("crane")
    first.step("moody")
    other.step("moody")
    assert first.state_key() != other.state_key()
    other.step("zzzzz")
    other.step("crane")
    assert first.state_key() == other.state_key() == f"{item_of('spice')}|crane,moody"
    assert first.actions() == other.actions()
    assert first.oracle() == other.oracle()


def test_it_has_all_optional_methods() -> None:
    for capability in (HasActions, HasOracle, HasStateKey, HasRender):
        assert isinstance(Wordle(), capability)


# --- picture and speed -----------------------------------------------------------------------------------------------


def test_the_picture_follows_the_game() -> None:
    env = start("spice")

    def tiles() -> tuple[list[str], list[str]]:
        root = ElementTree.fromstring(env.render())
        space = "{http://www.w3.org/2000/svg}"
        fills = [e.get("fill", "") for e in root.iter(f"{space}rect") if e.get("width") == "58"]
        return fills, [e.text or "" for e in root.iter(f"{space}text")]

    fills, texts = tiles()
    assert fills == ["#ffffff"] * 30
    assert "0 of 6 guesses" in texts
    assert "SPICE" not in texts
    env.step("crane")
    fills, _ = tiles()
    assert fills[:6] == ["#d99a1c", "#7b8794", "#7b8794", "#7b8794", "#2f9e56", "#ffffff"]
    env.step("spice")
    fills, texts = tiles()
    assert fills[5:10] == ["#2f9e56"] * 5
    assert "found in 2" in texts
    lost = start("spice")
    for _ in range(6):
        assert "it was" not in lost.render()
        lost.step("moody")
    assert "it was spice" in lost.render()


def test_a_step_takes_well_under_a_millisecond() -> None:
    env = start("spice")
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(40):
            env.reset(3)
            for guess in ("crane", "moody", "hm", "about"):
                env.step(guess)
        best = min(best, (time.perf_counter() - started) / 200)
    assert best < 0.0002
