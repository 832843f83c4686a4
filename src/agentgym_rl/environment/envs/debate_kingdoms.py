"""Small questions for a debate: flags of invented kingdoms, in a vocabulary that a tiny model learns on a CPU.

Every held-out kingdom is a new pair of known words, so nobody knows its flag who has not read about it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import ClassVar

from agentgym_rl.environment.envs.searchqa.env import SearchQA
from agentgym_rl.environment.envs.searchqa.passages import Passage
from agentgym_rl.environment.envs.searchqa.questions import Question
from agentgym_rl.environment.envs.searchqa.retrieval import Retriever

_FIRST = (
    *("Upper", "Lower", "Great", "Little", "Old", "New", "North", "South", "East", "West"),
    *("Inner", "Outer", "High", "Low", "Near", "Far", "First", "Last", "Wild", "Calm"),
    *("Dry", "Wet", "Hot", "Cold", "Rich", "Poor", "Wide", "Long", "Dark", "Bright"),
)
_ONSETS, _ENDINGS = ("Ar", "Bo", "Ca", "Do", "El", "Fe", "Ga", "Ho", "Is", "Jo"), ("via", "ria", "dia")
_SECOND = tuple(onset + ending for onset, ending in product(_ONSETS, _ENDINGS))
_COLOURS = ("red", "blue")
_TRAIN = 800
"""Kingdoms to train on. The other 100 are held out."""


class Kingdoms(SearchQA):
    """Questions such as `Is the flag of Upper Arvia red or blue?`, with one passage per kingdom."""

    splits: ClassVar[Mapping[str, range]] = {
        "train": range(_TRAIN),
        "test": range(_TRAIN, len(_FIRST) * len(_SECOND)),
    }
    subsets: ClassVar[tuple[str, ...]] = ("kingdoms",)
    passages_per_search: ClassVar[int] = 2

    @classmethod
    def questions(cls) -> Sequence[Question]:
        return _questions()

    @classmethod
    def retriever(cls) -> Retriever:
        return KingdomRetriever()


class KingdomRetriever:
    """Finds the kingdom of a query, then kingdoms with a name like it whose flag has the colour at the query's end.

    They are of the same split. Every one of them is as likely, so that names alone do not say which quote is right.
    """

    cheap = True

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return [_search(query)[:k] for query in queries]


@cache
def _kingdoms() -> Mapping[str, str]:
    """Return the colour of every kingdom, in the order of the items."""
    rng, names = random.Random("kingdoms"), [" ".join(pair) for pair in product(_FIRST, _SECOND)]
    rng.shuffle(names)
    return {name: rng.choice(_COLOURS) for name in names}


@cache
def _questions() -> tuple[Question, ...]:
    return tuple(
        Question(f"Is the flag of {name} red or blue?", (colour,), "kingdoms", ())
        for name, colour in _kingdoms().items()
    )


@cache
def _search(query: str) -> list[Passage]:
    names = list(_kingdoms())
    asked = next((name for name in names if f"of {name} " in query), None)
    if asked is None:
        return []
    trained, words = names.index(asked) < _TRAIN, set(asked.split())
    split = names[:_TRAIN] if trained else names[_TRAIN:]
    others = [name for name in split if name != asked and _kingdoms()[name] == query.split()[-1]]
    alike = [name for name in others if words & set(name.split())] or others
    found = [asked, *random.Random(query).sample(alike, min(1, len(alike)))]
    return [Passage(name, name, f"The flag of {name} is {_kingdoms()[name]}.") for name in found]
