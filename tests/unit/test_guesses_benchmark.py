"""benchmarks/guesses.py counts the steps that prompt look-up needs."""

from __future__ import annotations

import random

import pytest
from scripts_for_tests import load_script


def test_the_steps_of_a_reply_that_repeats_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    step_sizes = load_script("benchmarks/guesses.py", monkeypatch).step_sizes
    ids, replies = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 9, 6], [range(8, 13)]
    # After 1 the tokens 2, 3, 4 are guessed and 9 is sampled; nothing followed 9 before.
    assert list(step_sizes(ids, replies, (1,), 8)) == [4, 1]
    assert list(step_sizes(ids, replies, (1,), 2)) == [2, 2, 1]
    # One token more must match: 1 after 7 is new, 1 and 2 are not.
    assert list(step_sizes(ids, replies, (2,), 8)) == [1, 3, 1]


def test_the_place_with_the_longest_match_counts_then_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    step_sizes = load_script("benchmarks/guesses.py", monkeypatch).step_sizes
    rng = random.Random(0)
    matches = (3, 2, 1)
    for _ in range(200):
        ids = rng.choices(range(3), k=24)
        known, sizes = 12, []
        while known < 24:
            guesses: list[int] = []
            for length in matches:
                ends = [e for e in range(length, known) if ids[e - length : e] == ids[known - length : known]]
                if ends:
                    guesses = ids[ends[-1] : min(ends[-1] + 3, known)]
                    break
            size = 1
            while size <= len(guesses) and known + size < 24 and guesses[size - 1] == ids[known + size - 1]:
                size += 1
            sizes.append(size)
            known += size
        assert list(step_sizes(ids, [range(12, 24)], matches, 4)) == sizes
