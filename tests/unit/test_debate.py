"""Debate: two answers of which the question alone does not say which is right, and a judge who hears arguments."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from agentgym_rl.environment.envs.debate import ALPHA, BETA, JUDGE, Debate, load_debate
from agentgym_rl.environment.envs.searchqa.protocol import is_right
from agentgym_rl.errors import ConfigError

ITEMS = [item for split in Debate.splits.values() for item in split]


def answers_to(item: int) -> tuple[str, str, str]:
    """Return the question, the right answer and the wrong one."""
    debate = load_debate(rounds=0)()
    debate.reset(item)
    right = debate.oracle()
    (wrong,) = [answer for answer in debate.actions() if answer != right]
    return Debate.source.question(item).text, right, wrong


def find_item(start: str) -> int:
    return next(item for item in ITEMS if Debate.source.question(item).text.startswith(start))


def test_a_judge_alone_gains_nothing_from_names_in_the_question() -> None:
    right_named, wrong_named = 0, 0
    for item in ITEMS:
        question, right, wrong = answers_to(item)
        if (right in question) != (wrong in question):
            right_named += right in question
            wrong_named += wrong in question
    # A judge who gives the only named answer, or the other one, and guesses if both or none are named.
    assert abs(right_named - wrong_named) / 2 / len(ITEMS) < 0.03


@pytest.mark.parametrize("start", ["Which country has more inhabitants, ", "Which country has the larger area, "])
def test_of_two_named_countries_one_is_the_wrong_answer(start: str) -> None:
    item = find_item(start)
    question, _, wrong = answers_to(item)
    named = question.removeprefix(start).removesuffix("?").split(" or ")
    assert [name for name in named if not is_right(name, Debate.source.question(item).answers)] == [wrong]


def test_the_wrong_answer_is_of_the_kind_of_the_right_one() -> None:
    countries = {
        answer
        for item in ITEMS
        if Debate.source.question(item).text.startswith(("Which country", "In which country"))
        for answer in Debate.source.question(item).answers
    }
    asked = [item for item in ITEMS if "as its capital" in Debate.source.question(item).text]
    assert asked
    assert all(answers_to(item)[2].removeprefix("the ") in countries for item in asked)


@pytest.mark.parametrize("follows", [ALPHA, BETA])
def test_the_debater_whose_answer_is_given_is_paid(follows: str) -> None:
    debate = Debate()
    debate.reset(ITEMS[0])
    heard = [debate.step(debate.oracle()) for _ in (ALPHA, BETA)][-1].observation
    assert debate.role() == JUDGE
    assert "<information>" not in heard, "the judge does not see the passages"
    answers = dict(zip((ALPHA, BETA), debate.actions(), strict=True))
    step = debate.step(answers[follows])
    right = is_right(answers[follows], Debate.source.question(ITEMS[0]).answers)
    assert step.info["rewards"] == {role: float(role == follows) for role in (ALPHA, BETA)} | {JUDGE: float(right)}
    assert step.info["success"] is right


def test_only_quotes_of_a_debaters_own_passages_reach_the_judge() -> None:
    debate = load_debate(data="kingdoms", quotes=True)()
    debate.reset(0)
    first, second = debate.actions()
    assert not debate.step("The flag of every kingdom is red.").info["valid"]
    assert debate.step(first.upper().replace(":", " :")).info["valid"], "compared by words"
    (silent, quoted) = debate.state_key().split("|")[1:3]
    assert silent == ""
    assert quoted.lower().startswith(first.split(":")[0].lower())
    assert second != first


def test_the_flag_of_a_held_out_kingdom_is_written_in_one_passage_only() -> None:
    debate = load_debate(data="kingdoms", quotes=True)()
    trained = {debate.source.question(item).text for item in debate.splits["train"]}
    for item in debate.splits["test"]:
        question = debate.source.question(item)
        assert question.text not in trained
        debate.reset(item)
        kingdom = question.text.removeprefix("Is the flag of ").removesuffix(" red or blue?")
        for _ in (ALPHA, BETA):
            about = [quote for quote in debate.actions() if f"of {kingdom} is" in quote]
            assert [is_right(quote.split()[-1], question.answers) for quote in about] == [True]
            debate.step(debate.oracle())
        assert set(debate.actions()) == {"red", "blue"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rounds": -1}, "rounds must be a whole number of 0 or more, got -1"),
        ({"rounds": "x"}, "rounds must be a whole number of 0 or more, got 'x'"),
        ({"quotes": "yes"}, "quotes must be true or false, got 'yes'"),
    ],
)
def test_arguments_that_make_no_debate_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_debate(**arguments)


def test_a_kingdoms_name_does_not_say_which_quote_is_right() -> None:
    debate = load_debate(data="kingdoms", quotes=True)()
    wrong_in_training: Counter[str] = Counter()
    right_by_name = []
    for split in ("train", "test"):
        for item in debate.splits[split]:
            debate.reset(item)
            quotes = [debate.step(debate.oracle()).observation for _ in (ALPHA, BETA)][-1].splitlines()[-2:]
            names = {line.split(": ")[2].split(" is ")[1].rstrip("."): line.split(": ")[1] for line in quotes}
            assert set(names) == {"red", "blue"}, "each debater has a passage for its answer"
            right, wrong = (names[colour] for colour in (debate.oracle(), *({"red", "blue"} - {debate.oracle()})))
            if split == "train":
                wrong_in_training[wrong] += 1
            elif wrong_in_training[right] != wrong_in_training[wrong]:
                right_by_name.append(wrong_in_training[right] < wrong_in_training[wrong])
    assert abs(sum(right_by_name) - len(right_by_name) / 2) <= 10, "of 100 items"
    assert len(wrong_in_training) > 300
