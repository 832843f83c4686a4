"""The words, their marks, and the hidden word of each item."""

from __future__ import annotations

import random
from functools import cache
from importlib.resources import files

LENGTH = 5
MAX_GUESSES = 6
SPLITS = {"train": range(850), "test": range(850, 1050), "validation": range(1050, 1150)}
SUBSETS = ("common", "rare", "repeated")
"""The more and the less frequent half of the words, and the words with a repeated letter."""


def _read(name: str) -> tuple[str, ...]:
    return tuple(files(__package__).joinpath(name).read_text(encoding="ascii").split())


@cache
def answers() -> tuple[str, ...]:
    """Return the words that can be hidden, most frequent first."""
    return _read("answers.txt")


@cache
def allowed() -> frozenset[str]:
    """Return the words that can be guessed."""
    return frozenset((*answers(), *_read("guesses.txt")))


@cache
def hidden_words() -> tuple[str, ...]:
    """Return the hidden words by item number. The shuffle is seeded."""
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
    """Return marks such as `gybbb`: g right place, y another place, b not in the word (or not once more).

    A letter is marked g or y as often as the answer has it: right places first, then from the left.
    """
    result = ["b"] * LENGTH
    unmatched: dict[str, int] = {}
    for place, (guessed, hidden) in enumerate(zip(guess, answer, strict=True)):
        if guessed == hidden:
            result[place] = "g"
        else:
            unmatched[hidden] = unmatched.get(hidden, 0) + 1
    for place, guessed in enumerate(guess):
        if result[place] == "b" and unmatched.get(guessed):
            result[place] = "y"
            unmatched[guessed] -= 1
    return "".join(result)
