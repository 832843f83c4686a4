"""The words, their marks, and which word an item number stands for."""

from __future__ import annotations

import random
from functools import cache
from importlib.resources import files

LENGTH = 5
MAX_GUESSES = 6
SPLITS = {"train": range(850), "test": range(850, 1050), "validation": range(1050, 1150)}
SUBSETS = ("common", "rare", "repeated")
"""The more and the less frequent half of the words; words with a letter that comes more than once."""


def _read(name: str) -> tuple[str, ...]:
    return tuple(files(__package__).joinpath(name).read_text(encoding="ascii").split())


@cache
def answers() -> tuple[str, ...]:
    """Words that can be hidden, most frequent first."""
    return _read("answers.txt")


@cache
def allowed() -> frozenset[str]:
    """Words that can be guessed."""
    return frozenset((*answers(), *_read("guesses.txt")))


@cache
def hidden_words() -> tuple[str, ...]:
    """Item number -> hidden word. The shuffle is seeded."""
    words = list(answers())
    random.Random("wordle items").shuffle(words)
    return tuple(words)


@cache
def _common() -> frozenset[str]:
    return frozenset(answers()[: len(answers()) // 2])


def subsets_of_word(word: str) -> tuple[str, ...]:
    frequency = "common" if word in _common() else "rare"
    return (frequency, "repeated") if len(set(word)) < LENGTH else (frequency,)


def marks(guess: str, answer: str) -> str:
    """`gybbb`: g for the right place, y for another place, b for a letter that is not there (again).

    A letter is marked y or g as often as the answer has it: right places first, then from the left.
    """
    result = ["b"] * LENGTH
    left: dict[str, int] = {}
    for place, (said, hidden) in enumerate(zip(guess, answer, strict=True)):
        if said == hidden:
            result[place] = "g"
        else:
            left[hidden] = left.get(hidden, 0) + 1
    for place, said in enumerate(guess):
        if result[place] == "b" and left.get(said):
            result[place] = "y"
            left[said] -= 1
    return "".join(result)
