"""A solver with the player's knowledge: the words that fit all marks, and the guess that separates them best.

Legend: A answers, C candidates, G possible guesses (all answers). Marks are numbers in base 3: b 0, y 1, g 2.
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from agentgym_rl.environment.envs.wordle.words import LENGTH, MAX_GUESSES, answers

NUM_MARKS = 3**LENGTH
_VALUE = {"b": 0, "y": 1, "g": 2}

History = tuple[tuple[str, str], ...]
"""Guesses and their marks so far."""


@cache
def _letters_A5() -> NDArray[np.uint8]:
    return np.array([list(word.encode()) for word in answers()], dtype=np.uint8)


@lru_cache(maxsize=8192)
def _marks_A(guess: str) -> NDArray[np.uint8]:
    """Return the marks of `guess` for every answer."""
    letters_A5 = _letters_A5()
    guess_5 = np.frombuffer(guess.encode(), dtype=np.uint8)
    green_A5 = letters_A5 == guess_5
    total_A = np.zeros(len(letters_A5), dtype=np.uint8)
    used: dict[int, NDArray[np.int64]] = {}
    for place, letter in enumerate(guess_5.tolist()):
        if letter not in used:
            used[letter] = ((letters_A5 == letter) & ~green_A5).sum(axis=1)
        yellow_A = ~green_A5[:, place] & (used[letter] > 0)
        used[letter] = used[letter] - yellow_A
        total_A += (3**place * (2 * green_A5[:, place] + yellow_A)).astype(np.uint8)
    return total_A


@cache
def _marks_GA() -> NDArray[np.uint8]:
    return np.stack([_marks_A(word) for word in answers()])


def _number(marks: str) -> int:
    return sum(_VALUE[mark] * 3**place for place, mark in enumerate(marks))


def _fitting(history: History) -> NDArray[np.intp]:
    fits_A = np.ones(len(answers()), dtype=bool)
    for guess, marks in history:
        fits_A &= _marks_A(guess) == _number(marks)
    return np.flatnonzero(fits_A)


def candidates(history: History) -> list[str]:
    """Return the answers that fit every mark, most frequent first."""
    return [answers()[index] for index in _fitting(history)]


@lru_cache(maxsize=4096)
def best_guess(history: History) -> str:
    """Return the answer that splits the candidates into the most parts. Ties prefer candidates, then frequent words."""
    fitting_C = _fitting(history)
    if len(fitting_C) <= 2 or len(history) == MAX_GUESSES - 1:
        return answers()[fitting_C[0]]
    marks_GC = _marks_GA()[:, fitting_C].astype(np.int64)
    num_guesses = len(marks_GC)
    keys = marks_GC + NUM_MARKS * np.arange(num_guesses)[:, None]
    sizes_GM = np.bincount(keys.ravel(), minlength=num_guesses * NUM_MARKS).reshape(num_guesses, NUM_MARKS)
    score_G = 2 * np.count_nonzero(sizes_GM, axis=1)
    score_G[fitting_C] += 1
    return answers()[int(score_G.argmax())]
